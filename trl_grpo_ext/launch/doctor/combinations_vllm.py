"""Rules about generation with vLLM (TRL 1.16)."""

from __future__ import annotations

from .case import Case, Rule, error, note, warning
from .problem import Problem
from .settings_file import shown


def quantised_with_vllm(case: Case) -> Problem | None:
    """Weight sync pushes packed uint8 weights (DDP, ZeRO-2) or dies (ZeRO-3, FSDP2): trl#4973, trl#3466."""
    if case.bits != 4 or not case.run["use_vllm"]:
        return None
    sharded = case.engine == "zero3" or case.engine.startswith("fsdp")
    does = "fails" if sharded else "sends packed 4-bit bytes as if they were weights"
    message = f"QLoRA with vLLM: TRL's weight sync {does} (trl#4973, trl#3466), and nothing guards against it."
    return error("qlora+vllm", message, "Set use_vllm: false, or train plain LoRA (load_in_4bit: false).")


def eight_bit_with_vllm(case: Case) -> Problem | None:
    """vLLM has no in-flight 8-bit quantisation; TRL raises."""
    if case.bits != 8 or not case.run["use_vllm"]:
        return None
    message = "load_in_8bit with vLLM: vLLM does not support in-flight 8-bit quantisation."
    return error("8bit+vllm", message, "Set use_vllm: false or load_in_8bit: false.")


def tensor_parallel_does_not_divide(case: Case) -> Problem | None:
    """In colocate mode the ranks are cut into tensor-parallel groups."""
    size = int(case.run["vllm_tensor_parallel_size"])
    if not _colocated(case) or (size > 0 and case.launch.processes % size == 0):
        return None
    message = f"vllm_tensor_parallel_size {size} does not divide the {case.launch.processes} processes."
    return error("vllm", message, "Choose a divisor of the number of processes.")


def vllm_length_not_set(case: Case) -> Problem | None:
    """Otherwise vLLM reserves its cache for the model's whole context."""
    length = case.run["vllm_max_model_length"]
    if not _colocated(case):
        return None
    completion = int(case.run["max_completion_length"])
    if length is None:
        message = "vllm_max_model_length is not set: vLLM plans for the whole context of the model."
        return warning("vllm", message, f"Set it to the longest prompt plus {completion} (max_completion_length).")
    if int(length) > completion:
        return None
    message = f"vllm_max_model_length {length} leaves no room for a prompt beside max_completion_length {completion}."
    return error("vllm", message, f"Set it to the longest prompt plus {completion}.")


def sampling_that_biases_the_correction(case: Case) -> Problem | None:
    """vLLM's log-probabilities are of the cut distribution, the trainer's of the whole one."""
    run = case.run
    if not run["use_vllm"] or not run["vllm_importance_sampling_correction"]:
        return None
    cuts = [
        *([f"top_p {run['top_p']}"] if run["top_p"] not in (None, 1, 1.0) else []),
        *([f"top_k {run['top_k']}"] if run["top_k"] not in (None, 0, -1) else []),
        *([f"min_p {run['min_p']}"] if run["min_p"] else []),
    ]
    if not cuts:
        return None
    message = f"{', '.join(cuts)} with vLLM's importance sampling correction biases the correction."
    return warning("vllm", message, "Set top_p: 1.0 and top_k: 0, or vllm_importance_sampling_correction: false.")


def server_of_its_own(case: Case) -> Problem | None:
    """The server is another program on other GPUs, and sends the log-probabilities that the correction uses."""
    if not case.run["use_vllm"] or case.run["vllm_mode"] != "server":
        return None
    address = case.run["vllm_server_base_url"] or f"{case.run['vllm_server_host']}:{case.run['vllm_server_port']}"
    message = f"vllm_mode server: a server must be up at {shown(address, 80)}, on GPUs of its own"
    if case.run["vllm_importance_sampling_correction"]:
        message += "; the correction wants its processed log-probabilities"
    return note(
        "vllm",
        f"{message}.",
        "Start it first, with the same model: `vllm serve MODEL` and the options that TRL's page on vLLM names.",
    )


def unknown_vllm_mode(case: Case) -> Problem | None:
    """TRL finds out only after the model is loaded."""
    if not case.run["use_vllm"] or case.run["vllm_mode"] in ("server", "colocate"):
        return None
    return error("vllm", f"vllm_mode is {case.run['vllm_mode']!r}.", "Write server or colocate.")


def vespo_with_another_correction(case: Case) -> Problem | None:
    """VESPO multiplies token-level ratios; TRL refuses the sequence-level modes."""
    run = case.run
    if run["loss_type"] != "vespo" or not run["use_vllm"] or not run["vllm_importance_sampling_correction"]:
        return None
    mode = run["vllm_importance_sampling_mode"]
    if mode in ("token_truncate", "token_mask"):
        return None
    fix = "Set vllm_importance_sampling_mode: token_truncate or token_mask."
    return error("vllm", f"loss_type vespo with vllm_importance_sampling_mode {mode}: TRL refuses it.", fix)


def vllm_is_missing(case: Case) -> Problem | None:
    """TRL supports a range of versions, and only warns outside it."""
    if not case.run["use_vllm"]:
        return None
    package = case.environment.packages.get("vllm")
    if package is None or package.version is None:
        problem = warning if case.environment.elsewhere else error
        return problem("vllm", "use_vllm: true, but vllm is not installed here.", "pip install 'trl-grpo-ext[vllm]'")
    if package.fits:
        return None
    message = f"vllm {package.version} is installed; TRL supports {package.wanted}."
    return warning("vllm", message, f"pip install 'vllm{package.wanted}'")


def _colocated(case: Case) -> bool:
    return bool(case.run["use_vllm"]) and case.run["vllm_mode"] == "colocate"


RULES: tuple[Rule, ...] = (
    quantised_with_vllm,
    eight_bit_with_vllm,
    tensor_parallel_does_not_divide,
    vllm_length_not_set,
    sampling_that_biases_the_correction,
    server_of_its_own,
    unknown_vllm_mode,
    vespo_with_another_correction,
    vllm_is_missing,
)
