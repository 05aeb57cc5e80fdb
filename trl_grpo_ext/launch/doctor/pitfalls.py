"""The pitfalls that the doctor knows: what changes the engine silently, crashes later, or trains nothing. One row each.

`when` looks at a `Case`; a truthy result is the finding, and `{found}` in the texts, which may also refer to the case:
`{launch.name}`, `{c[learning_rate]}`. What the launcher, TRL's parser or the trainer refuses by itself is none: they
have said it by then. Shares of changed weights were measured on a model of 88,000 parameters.
"""

import difflib
import importlib.util
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import EngineError
from ...guard.untrusted import one_line
from ...trainer.upstream import contract
from ..engine import check_launch
from ..ranges import quantised_with_vllm, vllm_without_cuda, wrong_values
from . import Problem, Severity
from .case import Case

HARDLY_MOVES_BELOW = 1e-5
"""Below this learning rate, bfloat16's 8 bits lose most updates of weights of ordinary size."""
MOVABLE = 0.9
"""Share of an adapter's entries that a step must be able to change."""
HIDDEN = 4_096
"""Assumed width of a model of unknown sizes."""


@dataclass(frozen=True)
class Pitfall:
    """One row. The severity `missing` is an error, or a warning if another machine is described."""

    name: str
    severity: str
    subject: str
    when: Callable[[Case], object]
    message: str
    fix: str

    def __call__(self, case: Case) -> Problem | None:
        """Return the problem, if this case has it."""
        if not (found := self.when(case)):
            return None
        as_missing: Severity = "warning" if case.machine.elsewhere or case.machine.assumed else "error"
        severities: dict[str, Severity] = {"missing": as_missing, "warning": "warning", "note": "note"}
        message, fix = (text.format(c=case, launch=case.launch, found=found) for text in (self.message, self.fix))
        return Problem(severities.get(self.severity, "error"), self.subject, one_line(message, 900), one_line(fix, 600))


# ------------------------------------------------------------------------------------------- the machine and the launch


def _gpus_of_one_process(case: Case) -> int:
    """The number of GPUs, if one process sees several and the script says nothing of the model's place."""
    if case.engine != "one_process" or case.on_cpu or case.launch.settings_alone or case.sizes is None:
        return 0
    return len(case.devices) if len(case.devices) > 1 and "device_map" not in case.model_settings else 0


def _missing_packages(case: Case) -> str:
    asked = {
        "deepspeed": case.is_zero,
        "vllm": case["use_vllm"],
        "liger_kernel": case["use_liger_kernel"],
        "flash_attn": case.model_settings.get("attn_implementation") == "flash_attention_2",
    }
    missing = [name for name, needed in asked.items() if needed and importlib.util.find_spec(name) is None]
    return " ".join(missing).replace("_", "-")


def _other_engine(case: Case) -> str:
    """What `check_launch` says of Accelerate's state, which is the real one of this rank."""
    state = getattr(case.args, "distributed_state", None)
    if state is None:
        return ""
    try:
        check_launch(state, environment={**os.environ, **case.launch.environment}, args=case.args)
    except EngineError as error:
        return str(error)
    return ""


def _accumulation(case: Case) -> str:
    """DeepSpeed's own number of micro-batches, if it is another one than the arguments'."""
    set_there = case.launch.deepspeed().get("gradient_accumulation_steps", "auto") if case.is_zero else "auto"
    return "" if str(set_there) in ("auto", "None", str(case["gradient_accumulation_steps"])) else str(set_there)


_LAUNCH = (
    Pitfall("fewer_gpus_than_processes", "error", "device",
        lambda c: not c.on_cpu and 0 < len(c.devices) < c.launch.processes_per_machine and len(c.devices),
        "{launch.name} starts {launch.processes_per_machine} processes on each machine, which has {found} GPU(s).",
        "Launch fewer processes with --num_processes, or make more GPUs visible."),
    Pitfall("fewer_machines_than_launched", "error", "nodes",
        lambda c: c.machine.machines is not None and c.machine.machines < c.launch.machines and c.machine.machines,
        "{launch.name} waits for {launch.machines} machines, and there are {found}.", "Pass --num_machines {found}."),
    # TRL loads with device_map="auto" there, and then the Trainer takes it for model parallelism.
    Pitfall("several_gpus_for_one_process", "warning", "device", _gpus_of_one_process,
        "One process sees {found} GPUs: TRL spreads the model over them (device_map auto), and only one works at a "
        "time.", "Set CUDA_VISIBLE_DEVICES=0, or launch a process for each GPU."),
    Pitfall("package_that_is_missing", "missing", "packages", _missing_packages,
        "The launch or the run asks for {found}, not installed here.", "pip install {found}"),
    Pitfall("nowhere_to_save", "missing", "output_dir", lambda c: c.disk()[1],
        "output_dir {c.output_dir}: {found}.", "Choose another."),
    Pitfall("other_engine", "error", "engine", _other_engine, "{found}", ""),
    # Without mpirun the launcher starts one process for MULTI_CPU, for "NO" and for use_cpu.
    Pitfall("one_process_in_place_of_several", "error", "launch",
        lambda c: c.launch.processes < c.launch.asked_processes,
        "{launch.name} asks for {launch.asked_processes} processes, and the launcher starts {launch.processes}, "
        "silently.", "For DDP write distributed_type: MULTI_GPU (on CPUs too, with use_cpu: true for the script and "
        "use_cpu: false in the file); else num_processes: 1."),
    # A file says `machine_rank: 0` to every machine that reads it.
    Pitfall("machines_without_ranks", "warning", "nodes",
        lambda c: c.launch.machines > 1 and not c.launch.ranked and c.launch.rendezvous == "static",
        "Every machine that starts with {launch.name} is one and the same of {launch.machines}: no job forms.",
        "Give each launcher its own --machine_rank ($SLURM_NODEID under Slurm) and all of them --main_process_ip; or "
        "pass --rdzv_backend c10d."),
    Pitfall("accumulation_in_two_places", "error", "accumulation", _accumulation,
        "gradient_accumulation_steps is {found} in {launch.name} and {c[gradient_accumulation_steps]} in the run: "
        "DeepSpeed raises.", 'Take it out of the launch file, or write "auto" there.'),
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- the weights


def _storage(case: Case) -> str:
    given = getattr(case.quantisation, "bnb_4bit_quant_storage", None)
    storage = "uint8 (the default)" if given is None else str(given).removeprefix("torch.")
    return storage if case.bits == 4 and case.is_fsdp and storage != case.dtype else ""


def _movable(case: Case) -> float:
    """The share of lora_A's entries that one step of Adam, at most the learning rate, can change in bfloat16.

    They start uniform within 1 / sqrt(width of the layer's input); bfloat16 rounds in steps of 1/256 of the next power
    of two above a number, and half of that is lost.
    """
    reach = 512 * float(case["learning_rate"])
    width = HIDDEN if case.sizes is None else case.sizes.hidden
    return min(1.0, 2.0 ** math.floor(math.log2(reach)) * math.sqrt(width)) if reach > 0 else 0.0


def _missing_targets(case: Case) -> str:
    """Why targets are missing, with near names; PEFT silently drops a missing target if another matches."""
    if case.adapters is None or not (case.adapters.refusal or case.adapters.missing):
        return ""
    targets = getattr(case.peft_config, "target_modules", None) or []
    asked = case.adapters.missing or ([targets] if isinstance(targets, str) else targets)
    names = case.adapters.names
    close = [n for target in asked for n in difflib.get_close_matches(re.split(r"\W+", target)[-1], names)]
    missing = case.adapters.refusal or ", ".join(case.adapters.missing) + ": no such module"
    return f"{missing} (there are {', '.join(dict.fromkeys(close or names))})"


def _one_target(case: Case) -> str:
    """A single module's name: TRL unwraps a list of one, and PEFT reads a text as a pattern of whole names."""
    targets = getattr(case.peft_config, "target_modules", None)
    refused = case.adapters is not None and case.adapters.refusal
    return targets if refused and isinstance(targets, str) and targets.isidentifier() else ""


def _for_ranges(case: Case) -> dict[str, Any]:
    """The settings that `ranges` asks of."""
    quantised = {"load_in_4bit": case.bits == 4, "load_in_8bit": case.bits == 8}
    vllm = ("use_vllm", "vllm_mode", "vllm_enable_sleep_mode")
    return {**quantised, **{name: case[name] for name in vllm}}


_WEIGHTS = (
    Pitfall("quantised_without_adapters", "error", "qlora",
        lambda c: not c.uses_adapters and c.bits,
        "{found}-bit weights without adapters: quantised weights cannot be trained.",
        "Add use_peft: true, or peft_config in Python."),
    Pitfall("quantised_with_vllm", "error", "qlora+vllm", lambda c: quantised_with_vllm(_for_ranges(c)),
        "{found[0]}", "{found[1]}"),
    # Accelerate leaves what is no floating-point storage out of the sharding, with one warning.
    Pitfall("storage_that_fsdp_cannot_divide", "error", "qlora+fsdp", _storage,
        "bnb_4bit_quant_storage is {found} and dtype {c.dtype}: under FSDP the 4-bit weights stay whole on every "
        "GPU, with only a warning.", "Write bnb_4bit_quant_storage: {c.dtype}."),
    Pitfall("low_precision_weights_hardly_move", "warning", "precision",
        lambda c: c.model and not c.uses_adapters and c.engine in ("one_process", "ddp")
        and c.dtype in ("bfloat16", "auto") and c["learning_rate"] < HARDLY_MOVES_BELOW,
        "Weights in {c.dtype} (auto is mostly bfloat16) hardly move at learning_rate {c[learning_rate]:g} without "
        "master weights: 1.9 % of a projection changed in 20 steps at 1e-6, against 100 % in float32.",
        "Write dtype: float32 and bf16: true; or train with ZeRO or FSDP2."),
    # TRL casts QLoRA's adapters to bfloat16, Accelerate leaves them so under FSDP2, and the recipes cast them back.
    Pitfall("adapters_of_quantised_models_hardly_move", "warning", "qlora",
        lambda c: c.bits and c.uses_adapters and not c.is_zero and not c.keeps_adapters_in_float32
        and (share := _movable(c)) < MOVABLE and f"{share:.0%}",
        "TRL casts QLoRA's adapters to bfloat16, where a step of learning_rate {c[learning_rate]:g} is lost on most "
        "weights: it can change {found} of lora_A's entries.",
        "Cast them back to float32 before training, as the recipes do; or raise learning_rate (1e-4 is enough)."),
    Pitfall("one_target_read_as_a_pattern", "error", "lora", _one_target,
        "lora_target_modules with {found!r} alone becomes a text, which PEFT reads as a regular expression and finds "
        "nothing.", r"Write lora_target_modules: '.*\.{found}', or name two."),
    Pitfall("no_lora_target_is_there", "error", "lora",
        lambda c: not _one_target(c) and c.adapters and c.adapters.refusal and _missing_targets(c),
        "PEFT refuses lora_target_modules for {c.model}: {found}", "all-linear takes every linear layer."),
    Pitfall("lora_target_that_the_model_lacks", "warning", "lora",
        lambda c: c.adapters and not c.adapters.refusal and _missing_targets(c),
        "lora_target_modules that {c.model} lacks are silently dropped: {found}.",
        "Write its name as the model has it; all-linear takes every linear layer."),
    Pitfall("completions_longer_than_the_model", "error", "length",
        lambda c: c.sizes and 0 < c.sizes.context <= (c["max_completion_length"] or 0) and c.sizes.context,
        "max_completion_length {c[max_completion_length]} leaves no room for a prompt: the model has {found} "
        "positions.", "Keep it well under {found}."),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ sampling and training


def _cut(case: Case) -> str:
    """vLLM's log-probabilities are of the cut distribution, the trainer's of the whole one."""
    if not case["use_vllm"] or not case["vllm_importance_sampling_correction"]:
        return ""
    usual = {"top_p": (None, 1, 1.0), "top_k": (None, 0, -1), "min_p": (None, 0, 0.0)}
    return ", ".join(f"{name} {case[name]}" for name, values in usual.items() if case[name] not in values)


def _too_few_prompts(case: Case) -> tuple[int, int] | None:
    """The number of prompts, and how many a generation batch takes."""
    batch = case["generation_batch_size"]
    size = case["num_generations"]
    if not batch or not size or case.prompts is None:
        return None
    wanted = int(batch) // int(size)
    return (case.prompts, wanted) if case.prompts < wanted else None


_TRAINING = (
    Pitfall("vllm_without_cuda", "error", "vllm",
        lambda c: vllm_without_cuda(_for_ranges(c)) if c.on_cpu or not c.devices else None,
        "{found[0]}", "{found[1]}"),
    Pitfall("sampling_that_biases_the_correction", "warning", "vllm", _cut,
        "{found} with vLLM's importance sampling correction biases the correction.",
        "Set top_p: 1.0 and top_k: 0, or vllm_importance_sampling_correction: false."),
    Pitfall("no_prompt_fills_a_batch", "error", "batch", _too_few_prompts,
        "{found[0]} training prompt(s) fill no generation batch, which takes {found[1]} different ones: nothing would "
        "be trained on.",
        "Give more prompts, or lower per_device_train_batch_size or the steps per generation."),
    Pitfall("impossible_value", "error", "settings", lambda c: "; ".join(wrong_values(vars(c.args))),
        "{found}.", "Correct it: TRL accepts it, and later fails or trains on it."),
    Pitfall("unknown_loss_type", "error", "loss",
        lambda c: c["loss_type"] is not None and hasattr(c.args, "num_generations")
        and c["loss_type"] not in contract.LOSS_TYPES and ", ".join(sorted(contract.LOSS_TYPES)),
        "loss_type {c[loss_type]!r} is none of {found}.", "Choose one of them."),
)  # fmt: skip


PITFALLS: tuple[Pitfall, ...] = (*_LAUNCH, *_WEIGHTS, *_TRAINING)


def problems_of(case: Case) -> list[Problem]:
    """The problems that the pitfalls amount to."""
    return [problem for pitfall in PITFALLS if (problem := pitfall(case)) is not None]
