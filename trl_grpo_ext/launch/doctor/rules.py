"""The table of rules: what changes the engine silently, certainly crashes, or trains nothing. One row each.

`when` looks at a `Case`; a truthy result is the finding, and `{found}` in the texts, which may also refer to the case:
`{launch.name}`, `{run[learning_rate]}`. Facts are of TRL 1.16, transformers 5.23, accelerate 1.15, PEFT 0.21,
bitsandbytes 0.50 and DeepSpeed 0.19, each read in the sources or tried on the CPU. Shares of changed weights were
measured on a model of 88,000 parameters.
"""

import difflib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from ...guard.untrusted import one_line
from ...trainer.upstream import contract
from ...types import implements
from ..engine import ExpectedRun
from ..ranges import quantised_with_vllm, vllm_without_cuda, wrong_quantisation, wrong_values
from . import Problem, Severity
from .case import Case, prompts_of

HARDLY_MOVES_BELOW = 1e-5
"""Below this learning rate, bfloat16's 8 bits lose most updates of weights of ordinary size."""
MOVABLE = 0.9
"""Share of an adapter's entries that a step must be able to change."""
HIDDEN = 4_096
"""Assumed width of a model of unknown sizes."""


@dataclass(frozen=True)
class Rule:
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
        as_missing: Severity = "warning" if case.machine.elsewhere else "error"
        severities: dict[str, Severity] = {"missing": as_missing, "warning": "warning", "note": "note"}
        names = {"case": case, "launch": case.launch, "run": case.run, "machine": case.machine, "found": found}
        message, fix = (text.format(**names) for text in (self.message, self.fix))
        return Problem(severities.get(self.severity, "error"), self.subject, one_line(message, 900), one_line(fix, 600))


# ---------------------------------------------------------------------------------------------------------- the machine


def _no_gpu(case: Case) -> str:
    if case.machine.devices or case.on_cpu or case.run.is_recipe:  # recipes then choose the CPU
        return ""
    visible = case.machine.variables.get("CUDA_VISIBLE_DEVICES")
    why = f"torch is built for {case.machine.torch_build}"
    return why if visible is None else f"{why}, CUDA_VISIBLE_DEVICES is {visible!r}"


def _gpus_of_one_process(case: Case) -> int:
    """The number of GPUs, if one process sees several; recipes keep to the first."""
    gpus = 0 if case.on_cpu or case.machine.elsewhere or case.run.is_recipe else len(case.machine.devices)
    return gpus if gpus > 1 and case.launch.distributed_type == "NO" else 0


def _missing_packages(case: Case) -> str:
    asked = {
        "deepspeed": case.is_zero,
        "vllm": case.run["use_vllm"],
        "liger-kernel": case.run["use_liger_kernel"],
        "flash-attn": case.run["attn_implementation"] == "flash_attention_2",
    }
    return " ".join(name for name, needed in asked.items() if needed and case.machine.versions.get(name) is None)


def _saves_over_the_model(case: Case) -> bool:
    model, output = str(case.run["model_name_or_path"] or ""), case.machine.output_dir
    return bool(model and output) and Path(model).is_dir() and Path(model).resolve() == Path(output).resolve()


_MACHINE = (
    Rule("trl_that_needs_triton", "error", "versions",
        lambda c: (v := c.machine.version("trl")) and v.release[:2] == (1, 15) and (c.on_cpu or not c.machine.devices),
        "TRL 1.15 trains only where Triton finds a GPU.", "pip install 'trl==1.16.*'"),
    Rule("no_gpu_for_bf16", "error", "device", lambda c: c.bf16 and _no_gpu(c),
        "No GPU is visible here ({found}), and the run has bf16: true (TRL's default) without use_cpu: true: it stops "
        "at once.", "To describe another machine pass --gpu_memory GIB; to run here set use_cpu: true."),
    Rule("no_gpu_here", "warning", "device", lambda c: not c.bf16 and _no_gpu(c),
        "No GPU is visible here ({found}), and the run does not say use_cpu: true.",
        "To describe another machine pass --gpu_memory GIB; to run here set use_cpu: true."),
    Rule("fewer_gpus_than_processes", "error", "device",
        lambda c: not c.on_cpu and 0 < len(c.machine.devices) < c.launch.processes_per_machine,
        "{launch.name} starts {launch.processes_per_machine} processes on each machine, which shows fewer GPUs.",
        "Launch fewer processes with --num_processes, or make more GPUs visible."),
    # TRL loads with device_map="auto" there, and then the Trainer takes it for model parallelism.
    Rule("several_gpus_for_one_process", "error", "device", _gpus_of_one_process,
        "One process sees {found} GPUs: TRL spreads the model over them (device_map auto), and only one works at a "
        "time.", "Set CUDA_VISIBLE_DEVICES=0, or use a launch file with MULTI_GPU."),
    Rule("package_that_is_missing", "missing", "packages", _missing_packages,
        "The launch file or the run asks for {found}, not installed here.",
        "pip install {found} (deepspeed and vllm as 'trl-grpo-ext[deepspeed]', 'trl-grpo-ext[vllm]')."),
    Rule("nowhere_to_save", "missing", "output_dir", lambda c: c.machine.output_problem,
        "output_dir {machine.output_dir}: {found}.", "Choose another."),
    # No crash, but the only copy of a model may be lost.
    Rule("output_over_the_model", "error", "output_dir", _saves_over_the_model,
        "{machine.output_dir} is both output_dir and the model to start from, which would be overwritten.",
        "Choose another output_dir."),
    Rule("inside_another_launch", "warning", "environment",
        lambda c: c.launch.processes == 1
        and " ".join(n for n in ("WORLD_SIZE", "RANK", "LOCAL_RANK") if n in c.machine.variables),
        "{found} in the environment: one process started here takes itself for part of another job, and waits.",
        "Run: unset {found}"),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------ the launch file


def _other_engine(case: Case) -> tuple[str, str] | None:
    on = case.machine.is_on("ACCELERATE_USE_CPU", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP")
    if "ACCELERATE_USE_CPU" in on:
        return "ACCELERATE_USE_CPU", "single runs on the CPU, or DDP in place of DeepSpeed and FSDP,"
    if "ACCELERATE_USE_DEEPSPEED" in on and not case.is_zero:
        return "ACCELERATE_USE_DEEPSPEED", "a DeepSpeed run"
    return ("ACCELERATE_USE_FSDP", "an FSDP run") if "ACCELERATE_USE_FSDP" in on and not case.is_fsdp else None


def _other_than_expected(case: Case) -> tuple[str, str] | None:
    engine, processes = case.run.own.get("engine"), str(case.run.own.get("processes"))
    wanted = ExpectedRun(one_line(engine, 40) if engine else None, int(processes) if processes.isdecimal() else None)
    found = [*wanted.differs_from_launch(case.engine.removesuffix("_hybrid"), case.launch.processes)]
    return (" ".join(what for what, _ in found), " ".join(fix for _, fix in found)) if found else None


def _ignored_rendezvous(case: Case) -> str:
    usual = {"rdzv_backend": "static", "same_network": False}
    found = [key for key, value in usual.items() if case.launch.raw.get(key, value) != value]
    return " and ".join(found) if case.launch.machines > 1 else ""


def _fsdp_is_on(case: Case, key: str, default: bool) -> bool:
    return case.is_fsdp and str(case.launch.fsdp.get(key, default)).lower() in ("true", "1", "yes")


_LAUNCH = (
    # It goes through mpirun; without it the launcher starts one process, and says nothing.
    Rule("multi_cpu_is_one_process", "error", "launch", lambda c: c.launch.distributed_type == "MULTI_CPU",
        "distributed_type MULTI_CPU in {launch.name} starts one process, silently, unless mpirun is there.",
        "Write MULTI_GPU, and give the script use_cpu: true: that is DDP on the CPU."),
    Rule("use_cpu_in_the_launch_file", "error", "launch", lambda c: c.launch.use_cpu and c.launch.processes > 1,
        "use_cpu: true in {launch.name} makes {launch.processes} independent runs of one process each, or DDP in place "
        "of DeepSpeed.", "Write use_cpu: false there, and use_cpu: true in the run's settings."),
    Rule("one_process_file_with_several", "error", "launch",
        lambda c: c.launch.distributed_type == "NO" and c.launch.processes > 1,
        'distributed_type "NO" in {launch.name} starts one process, not {launch.processes}.',
        "Write MULTI_GPU, or num_processes: 1."),
    Rule("fsdp_on_the_cpu", "error", "fsdp+cpu", lambda c: c.is_fsdp and c.on_cpu,
        "{launch.name} asks for FSDP, but the run is on the CPU, where accelerate makes DDP of it silently.",
        "Run on GPUs, or use a launch file with MULTI_GPU or DEEPSPEED."),
    # These reach the script past the launch file.
    Rule("other_engine_in_the_environment", "error", "environment", _other_engine,
        "{found[0]} is set in the environment, which makes {found[1]} of {launch.name}, silently.",
        "Run: unset {found[0]}"),
    Rule("other_launch_than_expected", "error", "engine", _other_than_expected, "{found[0]}", "{found[1]}"),
    Rule("deepspeed_in_the_run_too", "warning", "deepspeed", lambda c: c.run.get("deepspeed") is not None,
        "The run's own `deepspeed` setting decides the engine; {launch.name} says {launch.engine}.",
        "Keep one of them: leave `deepspeed` out and launch with a DEEPSPEED file."),
    # The launcher divides and drops the rest.
    Rule("processes_do_not_divide_into_machines", "error", "nodes", lambda c: c.launch.processes % c.launch.machines,
        "num_processes {launch.processes} is no multiple of num_machines {launch.machines}.",
        "num_processes counts the processes of all machines together."),
    # A file says `machine_rank: 0` to every machine that reads it.
    Rule("machines_without_ranks", "warning", "nodes",
        lambda c: c.launch.machines > 1 and c.launch.machine_rank is None and c.launch.rdzv_backend == "static",
        "Every machine that starts with {launch.name} is one and the same of {launch.machines}: no job forms.",
        "Give each launcher its own --machine_rank ($SLURM_NODEID under Slurm) and all of them --main_process_ip; or "
        "pass --rdzv_backend c10d."),
    # accelerate 1.15 has defaults for these options, which beat the file's.
    Rule("rendezvous_that_is_ignored", "warning", "nodes", _ignored_rendezvous,
        "{found} in {launch.name}: accelerate ignores it in a file.", "Give it on the launcher's command line."),
    Rule("deepspeed_starts_through_ssh", "warning", "nodes",
        lambda c: c.is_zero and c.launch.machines > 1
        and c.launch.raw.get("deepspeed_config", {}).get("deepspeed_multinode_launcher") != "standard",
        "{launch.name} leaves several machines to DeepSpeed's own launcher (pdsh): one machine, a host file, ssh.",
        "Write deepspeed_multinode_launcher: standard, and start a launcher on each machine."),
    Rule("accumulation_in_two_places", "error", "accumulation",
        lambda c: c.launch.accumulation not in (None, c.run["gradient_accumulation_steps"]),
        "gradient_accumulation_steps is {launch.accumulation} in {launch.name} and {run[gradient_accumulation_steps]} "
        "in the run: DeepSpeed raises.", 'Take it out of the launch file, or write "auto" there.'),
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- the weights


def _storage(case: Case) -> str:
    storage = str(case.run["bnb_4bit_quant_storage"] or "uint8 (the default)")
    return storage if case.bits == 4 and case.is_fsdp and storage != case.dtype else ""


def _movable(case: Case) -> float:
    """The share of lora_A's entries that one step of Adam, at most the learning rate, can change in bfloat16.

    They start uniform within 1 / sqrt(width of the layer's input); bfloat16 rounds in steps of 1/256 of the next power
    of two above a number, and half of that is lost.
    """
    reach = 512 * float(case.run["learning_rate"])
    width = HIDDEN if case.sizes is None else case.sizes.hidden
    return min(1.0, 2.0 ** math.floor(math.log2(reach)) * math.sqrt(width)) if reach > 0 else 0.0


def _missing_targets(case: Case) -> str:
    """Why targets are missing, with near names; PEFT silently drops a missing target if another matches."""
    if case.adapters is None or not (case.adapters.refusal or case.adapters.missing):
        return ""
    targets = case.run["lora_target_modules"] or []
    asked = case.adapters.missing or ([targets] if isinstance(targets, str) else targets)
    names = case.adapters.names
    close = [n for target in asked for n in difflib.get_close_matches(re.split(r"\W+", target)[-1], names)]
    missing = case.adapters.refusal or ", ".join(case.adapters.missing) + ": no such module"
    return f"{missing} (there are {', '.join(dict.fromkeys(close or names))})"


def _reenters(case: Case) -> bool:
    """Whether reentrant checkpointing is on, by either name."""
    given = [case.run.get(f"{name}_checkpointing_kwargs") for name in ("activation", "gradient")]
    return case.checkpointing and any(isinstance(v, dict) and v.get("use_reentrant") is True for v in given)


def _one_target(case: Case) -> str:
    targets = case.run["lora_target_modules"]
    if isinstance(targets, list | tuple) and len(targets) == 1:
        targets = targets[0]
    plain = isinstance(targets, str) and targets.isidentifier() and case.run["use_peft"] and not case.run.is_recipe
    return str(targets) if plain else ""


_WEIGHTS = (
    Rule("impossible_quantisation", "error", "qlora", lambda c: wrong_quantisation(c.run.settings),
        "{found[0]}", "{found[1]}"),
    Rule("quantised_with_vllm", "error", "qlora+vllm", lambda c: quantised_with_vllm(c.run.settings),
        "{found[0]}", "{found[1]}"),
    # accelerate 1.15 leaves what is no floating-point storage out of the sharding, with one warning.
    Rule("storage_that_fsdp_cannot_divide", "error", "qlora+fsdp", _storage,
        "bnb_4bit_quant_storage is {found} and dtype {case.dtype}: under FSDP the 4-bit weights stay whole on every "
        "GPU, with only a warning.", "Write bnb_4bit_quant_storage: {case.dtype}."),
    # Only the first process would have weights to quantise.
    Rule("quantised_loading_by_one_process", "warning", "qlora+fsdp",
        lambda c: c.bits and c.engine.startswith("fsdp2") and _fsdp_is_on(c, "cpu_ram_efficient_loading", True),
        "fsdp_cpu_ram_efficient_loading is on in {launch.name} (the launcher's default), with quantised weights.",
        "Write fsdp_cpu_ram_efficient_loading: false."),
    Rule("reentrant_checkpointing_under_ddp", "error", "lora+ddp",
        lambda c: c.engine == "ddp" and _reenters(c) and c.run["use_peft"],
        "use_reentrant: true with adapters under DDP fails: Expected to mark a variable ready only once.",
        "Write gradient_checkpointing_kwargs: {{use_reentrant: false}}."),
    Rule("low_precision_weights_hardly_move", "warning", "precision",
        lambda c: not c.run["use_peft"] and c.keeps_no_master_weights and c.dtype in ("bfloat16", "auto")
        and c.run["learning_rate"] < HARDLY_MOVES_BELOW,
        "Weights in {case.dtype} (auto is mostly bfloat16) hardly move at learning_rate {run[learning_rate]:g} without "
        "master weights: 1.9 % of a projection changed in 20 steps at 1e-6, against 100 % in float32.",
        "Write dtype: float32 and bf16: true; or train with ZeRO or FSDP2."),
    # TRL casts QLoRA's adapters to bfloat16, accelerate leaves them so under FSDP2, and the recipes cast them back.
    Rule("adapters_of_quantised_models_hardly_move", "error", "qlora",
        lambda c: c.bits and c.run["use_peft"] and not c.is_zero and not c.run.is_recipe
        and (share := _movable(c)) < MOVABLE and f"{share:.0%}",
        "TRL casts QLoRA's adapters to bfloat16, where a step of learning_rate {run[learning_rate]:g} is lost on most "
        "weights: it can change {found} of lora_A's entries.",
        "Cast them back to float32 before training, as the recipes do; or raise learning_rate (1e-4 is enough)."),
    Rule("half_precision_weights_with_scaler", "error", "precision",
        lambda c: c.run["fp16"] and c.dtype == "float16" and not c.run["use_peft"] and c.keeps_no_master_weights,
        "fp16: true with dtype float16 stops with: Attempting to unscale FP16 gradients.", "Write dtype: float32."),
    # TRL unwraps a list of one target, and PEFT reads a string as a regular expression of a whole name.
    Rule("one_target_read_as_a_pattern", "error", "lora", _one_target,
        "lora_target_modules with {found!r} alone becomes a text, which PEFT reads as a regular expression and finds "
        "nothing.", r"Write lora_target_modules: '.*\.{found}', or name two."),
    Rule("no_lora_target_is_there", "error", "lora",
        lambda c: not _one_target(c) and c.adapters and c.adapters.refusal and _missing_targets(c),
        "PEFT refuses lora_target_modules for {run[model_name_or_path]}: {found}",
        "all-linear takes every linear layer."),
    Rule("lora_target_that_the_model_lacks", "warning", "lora",
        lambda c: c.adapters and not c.adapters.refusal and _missing_targets(c),
        "lora_target_modules that {run[model_name_or_path]} lacks are silently dropped: {found}.",
        "Write its name as the model has it; all-linear takes every linear layer."),
    Rule("completions_longer_than_the_model", "error", "length",
        lambda c: c.sizes and 0 < c.sizes.context <= (c.run["max_completion_length"] or 0) and c.sizes.context,
        "max_completion_length {run[max_completion_length]} leaves no room for a prompt: the model has {found} "
        "positions.", "Keep it well under {found}."),
)  # fmt: skip


# ----------------------------------------------------------------------------------------------- generation with vLLM


def _cut(case: Case) -> str:
    """vLLM's log-probabilities are of the cut distribution, the trainer's of the whole one."""
    run = case.run
    if not run["use_vllm"] or not run["vllm_importance_sampling_correction"]:
        return ""
    usual = {"top_p": (None, 1, 1.0), "top_k": (None, 0, -1), "min_p": (None, 0, 0.0)}
    return ", ".join(f"{name} {run[name]}" for name, values in usual.items() if run[name] not in values)


_VLLM = (
    Rule("vllm_without_cuda", "error", "vllm",
        lambda c: vllm_without_cuda(c.run.settings) if c.on_cpu or not c.machine.devices else None,
        "{found[0]}", "{found[1]}"),
    Rule("sampling_that_biases_the_correction", "warning", "vllm", _cut,
        "{found} with vLLM's importance sampling correction biases the correction.",
        "Set top_p: 1.0 and top_k: 0, or vllm_importance_sampling_correction: false."),
)  # fmt: skip


# ----------------------------------------------------------------------------------------- losses, rewards and the data


def _liger_loss(case: Case) -> bool:
    version, hooks = case.machine.version("trl"), case.plugins.hooks.values()
    acts = case.plugins.aggregation is not None or any(implements(hook, "on_forward") for hook in hooks)
    return bool(case.run["use_liger_kernel"] and acts and version is not None and version < Version("1.16"))


def _too_few_prompts(case: Case) -> tuple[int, int] | None:
    """The number of prompts, and how many a generation batch takes."""
    config, prompts = case.run.config, prompts_of(case.run)
    if config is None or not config.generation_batch_size or prompts is None:
        return None
    wanted = config.generation_batch_size // config.num_generations
    return (prompts, wanted) if prompts < wanted else None


_TRAINING = (
    Rule("no_prompt_fills_a_batch", "error", "batch",
        _too_few_prompts,
        "{found[0]} training prompt(s) fill no generation batch, which takes {found[1]} different ones: nothing would "
        "be trained on.",
        "Give more prompts, or lower per_device_train_batch_size or the steps per generation."),
    Rule("impossible_value", "error", "settings", lambda c: "; ".join(wrong_values(c.run.settings)),
        "{found}.", "Correct it: TRL accepts it, and later fails or trains on it."),
    Rule("liger_replaces_the_loss", "error", "liger", _liger_loss,
        "use_liger_kernel computes a loss of its own before TRL 1.16, past the selected aggregation and hooks.",
        "Set use_liger_kernel: false, or install TRL 1.16."),
    Rule("unknown_loss_type", "error", "loss",
        lambda c: c.run["loss_type"] not in contract.LOSS_TYPES and ", ".join(sorted(contract.LOSS_TYPES)),
        "loss_type {run[loss_type]!r} is none of {found}.", "Choose one of them."),
)  # fmt: skip


RULES: tuple[Rule, ...] = (*_MACHINE, *_LAUNCH, *_WEIGHTS, *_VLLM, *_TRAINING)


def problems_of(case: Case) -> list[Problem]:
    """The problems that all rules find."""
    return [problem for rule in RULES if (problem := rule(case)) is not None]
