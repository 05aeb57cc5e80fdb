"""The table of rules: what changes the engine silently, certainly crashes, or trains nothing. One row each.

`when` looks at a `Case`; a truthy result is the finding, and `{found}` in the texts, which may also refer to the case:
`{launch.name}`, `{run[learning_rate]}`. Facts are of TRL 1.16, transformers 5.23, accelerate 1.15, PEFT 0.21,
bitsandbytes 0.50 and DeepSpeed 0.19, each read in the sources or tried on the CPU. Shares of changed weights were
measured on a model of 88,000 parameters.
"""

from __future__ import annotations

import difflib
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from ...errors import UpstreamError
from ...guard.untrusted import one_line
from ...trainer import upstream
from ...types import implements
from ..engine import ExpectedRun
from ..ranges import quantised_with_vllm, vllm_without_cuda, wrong_quantisation, wrong_values
from .case import Case
from .environment import Device
from .problem import Problem, Severity

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


def _trl_refused(case: Case) -> str:
    version = case.machine.versions.get("trl")
    if version is None:
        return "trl is not installed"
    try:
        with warnings.catch_warnings(action="ignore"):
            upstream.check_version(version)
    except UpstreamError as refusal:
        return str(refusal)
    return ""


def _no_gpu(case: Case) -> str:
    if case.machine.devices or case.on_cpu:
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


def _old_gpu(case: Case) -> Device | None:
    old = (d for d in case.machine.devices if d.capability is not None and d.capability < (8, 0))
    return None if case.on_cpu else next(old, None)


def _flash(case: Case) -> bool:
    return str(case.run["attn_implementation"]).startswith("flash_attention")


def _model_out_of_reach(case: Case) -> str:
    name = case.machine.model
    if name is None or case.machine.model_here:
        return ""
    if name.startswith((".", "/", "~")):
        return "is not there"
    offline = case.machine.is_on("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return f"is not in the cache here, and {offline[0]} is set" if offline and not case.machine.elsewhere else ""


def _saves_over_the_model(case: Case) -> bool:
    model, output = str(case.run["model_name_or_path"] or ""), case.machine.output_dir
    return bool(model and output) and Path(model).is_dir() and Path(model).resolve() == Path(output).resolve()


_MACHINE = (
    Rule("trl_is_not_supported", "error", "versions", _trl_refused,
        "{found}", f"pip install 'trl>={upstream.OLDEST_TESTED},<2'"),
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
    Rule("no_nccl", "error", "device",
        lambda c: c.launch.processes > 1 and c.machine.devices and not c.on_cpu and not c.machine.elsewhere
        and not c.machine.has_nccl,
        "This torch has no NCCL, which several GPUs need.", "Install torch's CUDA build for Linux."),
    # Its Python part imports without its native library, and fails at the first layer.
    Rule("bitsandbytes_does_not_load", "error", "bitsandbytes", lambda c: c.machine.bitsandbytes_error,
        "bitsandbytes' native library does not load: {found}",
        "python -m bitsandbytes says more; install the wheel for this CUDA version."),
    Rule("package_that_is_missing", "missing", "packages", _missing_packages,
        "The launch file or the run asks for {found}, not installed here.",
        "pip install {found} (deepspeed and vllm as 'trl-grpo-ext[deepspeed]', 'trl-grpo-ext[vllm]')."),
    Rule("cpu_adam_cannot_be_built", "missing", "deepspeed",
        lambda c: c.is_zero and c.launch.offloads("optimizer") and " and ".join(c.machine.lacks_to_build),
        "The optimizer is offloaded, and DeepSpeed compiles its CPU Adam at first use: {found} missing.",
        "pip install ninja, and install g++; the first build takes about 100 s."),
    Rule("flash_attention_without_its_gpu", "error", "attention",
        lambda c: _flash(c) and ("the CPU" if c.on_cpu else (old := _old_gpu(c)) and old.name),
        "attn_implementation {run[attn_implementation]} needs a GPU of compute capability 8.0; this is {found}.",
        "Leave attn_implementation out (sdpa)."),
    Rule("flash_attention_in_32_bits", "error", "attention",
        lambda c: _flash(c) and c.dtype == "float32" and c.precision == "no",
        "attn_implementation {run[attn_implementation]} computes in 16 bits; the run is in float32.",
        "Set bf16: true."),
    Rule("shared_prompts_without_sdpa", "warning", "attention",
        lambda c: c.run["share_prompts"] and c.run["attn_implementation"] not in (None, "", "sdpa"),
        "share_prompts does nothing with attn_implementation {run[attn_implementation]}.",
        "Leave attn_implementation out (sdpa), or take share_prompts out."),
    Rule("bfloat16_on_an_old_gpu", "error", "precision",
        lambda c: (c.bf16 or c.dtype == "bfloat16") and (old := _old_gpu(c)) and old.name,
        "bfloat16 needs compute capability 8.0, which {found} lacks.",
        "Write bf16: false, fp16: true, dtype: float32; or use a newer GPU."),
    Rule("model_out_of_reach", "missing", "model", _model_out_of_reach,
        "The model {machine.model} {found}.", "Name a folder with a model, or fetch it where there is a network."),
    Rule("nowhere_to_save", "missing", "output_dir", lambda c: c.machine.output_problem,
        "output_dir {machine.output_dir}: {found}.", "Choose another."),
    # No crash, but the only copy of a model may be lost.
    Rule("output_over_the_model", "error", "output_dir", _saves_over_the_model,
        "{machine.output_dir} is both output_dir and the model to start from, which would be overwritten.",
        "Choose another output_dir."),
    Rule("no_checkpoint_to_resume_from", "missing", "resume", lambda c: c.machine.checkpoint_here is False,
        "resume_from_checkpoint {run[resume_from_checkpoint]}: there is no checkpoint.",
        "Remove it, or name a folder checkpoint-N."),
    Rule("inside_another_launch", "warning", "environment",
        lambda c: c.launch.processes == 1
        and " ".join(n for n in ("WORLD_SIZE", "RANK", "LOCAL_RANK") if n in c.machine.variables),
        "{found} in the environment: one process started here takes itself for part of another job, and waits.",
        "Run: unset {found}"),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------ the launch file

_BESIDE_A_JSON_FILE = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device"),
    *("offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model"),
)
_TRUTH = ("true", "false", "1", "0", "yes", "no")


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


def _beside_the_json_file(case: Case) -> str:
    if case.launch.deepspeed_config_file is None:
        return ""
    found = [key for key in _BESIDE_A_JSON_FILE if key in case.launch.raw.get("deepspeed_config", {})]
    return ", ".join([*found, *(["mixed_precision"] if case.launch.raw.get("mixed_precision") is not None else [])])


def _shards(case: Case) -> tuple[int, int] | None:
    given = case.launch.raw.get("parallelism_config") or {}
    sizes = [given.get(f"parallelism_config_{name}_size", 1) for name in ("dp_replicate", "dp_shard")]
    return (sizes[0], sizes[1]) if given and all(isinstance(size, int) for size in sizes) else None


def _prefetches(case: Case) -> bool:
    config = case.run.get("fsdp_config")
    asked = isinstance(config, dict) and {"forward_prefetch", "fsdp_forward_prefetch"} & config.keys()
    return bool(asked) and str(config.get("version", 2)) == "2"


def _reshards_wrongly(case: Case) -> bool:
    """FSDP1 takes FULL_SHARD and its like, FSDP2 true or false; each raises at the other's."""
    value = case.launch.fsdp.get("reshard_after_forward")
    return value is not None and (str(value).lower() not in _TRUTH if case.is_fsdp2 else isinstance(value, bool))


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
    Rule("deepspeed_on_the_cpu", "warning", "deepspeed+cpu",
        lambda c: c.is_zero and c.on_cpu and c.machine.variables.get("DS_ACCELERATOR") != "cpu",
        "{launch.name} asks for DeepSpeed on the CPU, and DS_ACCELERATOR is not set to cpu.",
        "Set DS_ACCELERATOR=cpu in the shell."),
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
    Rule("reshard_of_the_other_fsdp", "error", "fsdp", _reshards_wrongly,
        "fsdp_reshard_after_forward in {launch.name} is of the other FSDP: {launch.engine} refuses it.",
        "Write true or false for FSDP2 (ZeRO-3's or ZeRO-2's way), FULL_SHARD for FSDP1."),
    Rule("forward_prefetch_in_fsdp2", "error", "fsdp", _prefetches,
        "forward_prefetch in the run's fsdp_config raises: FSDP2 has none.", "Take forward_prefetch out."),
    Rule("fsdp_loading_without_sync", "error", "fsdp",
        lambda c: _fsdp_is_on(c, "cpu_ram_efficient_loading", True) and not _fsdp_is_on(c, "sync_module_states", True),
        "fsdp_sync_module_states: false in {launch.name}, but fsdp_cpu_ram_efficient_loading is on.",
        "Remove fsdp_sync_module_states; accelerate's launcher refuses the two together."),
    Rule("hybrid_shards_without_fsdp2", "error", "fsdp", lambda c: _shards(c) and not c.is_fsdp2,
        "parallelism_config in {launch.name} needs FSDP2; this is {launch.engine}.",
        "Write distributed_type: FSDP and fsdp_version: 2, or take it out."),
    Rule("hybrid_shards_do_not_fit", "error", "fsdp",
        lambda c: c.is_fsdp2 and (s := _shards(c)) and s[0] * s[1] != c.launch.processes and s,
        "{found[0]} replicas of {found[1]} shards are not {launch.processes} processes.",
        "Let dp_replicate_size times dp_shard_size be num_processes."),
    Rule("checkpointing_twice", "error", "fsdp",
        lambda c: _fsdp_is_on(c, "activation_checkpointing", False) and c.checkpointing,
        "Activation checkpointing is on in {launch.name} and in the run (gradient_checkpointing: true).",
        "Set gradient_checkpointing: false; the Trainer refuses both (TRL's default is true)."),
    # `mixed_precision: "no"` included.
    Rule("keys_beside_deepspeeds_file", "error", "deepspeed", _beside_the_json_file,
        "{launch.name} names a deepspeed_config_file and has {found} too: accelerate raises.",
        'Take it out; the JSON file has it, as "auto" where the script decides.'),
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
        lambda c: c.bits and c.is_fsdp2 and _fsdp_is_on(c, "cpu_ram_efficient_loading", True),
        "fsdp_cpu_ram_efficient_loading is on in {launch.name} (the launcher's default), with quantised weights.",
        "Write fsdp_cpu_ram_efficient_loading: false."),
    Rule("reentrant_checkpointing_under_ddp", "error", "lora+ddp",
        lambda c: c.engine == "ddp" and c.reentrant and c.run["use_peft"],
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
    # TRL computes log-probabilities from `lm_head.weight` directly.
    Rule("adapter_on_the_head", "error", "lora",
        lambda c: c.run["use_peft"] and "lm_head" in (c.run["lora_target_modules"] or []),
        "lora_target_modules has lm_head: TRL refuses it, since that adapter would never be trained.",
        "Take lm_head out."),
    Rule("completions_longer_than_the_model", "error", "length",
        lambda c: c.sizes and 0 < c.sizes.context <= c.run["max_completion_length"] and c.sizes.context,
        "max_completion_length {run[max_completion_length]} leaves no room for a prompt: the model has {found} "
        "positions.", "Keep it well under {found}."),
    # bitsandbytes packs 4-bit weights for inference there, which cuts the gradient; the recipes prevent it.
    Rule("quantised_repacks_on_this_cpu", "warning", "qlora+cpu",
        lambda c: c.bits == 4 and c.machine.avx512bf16 and (c.on_cpu or not c.machine.devices) and not c.run.is_recipe,
        "On this CPU (AVX512-BF16) bitsandbytes repacks 4-bit weights at the first generation, and what is below such "
        "a layer gets no gradient, with one warning.",
        "Set support_avx512bf16_for_cpu = False on the layers, as the recipes do."),
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
    Rule("unknown_vllm_mode", "error", "vllm",
        lambda c: c.run["use_vllm"] and c.run["vllm_mode"] not in ("server", "colocate"),
        "vllm_mode is {run[vllm_mode]!r}.", "Write server or colocate."),
    Rule("tensor_parallel_does_not_divide", "error", "vllm",
        lambda c: c.colocated
        and (c.run["vllm_tensor_parallel_size"] < 1 or c.launch.processes % c.run["vllm_tensor_parallel_size"]),
        "vllm_tensor_parallel_size {run[vllm_tensor_parallel_size]} does not divide the {launch.processes} processes.",
        "Choose a divisor of the number of processes."),
    Rule("vllm_length_not_set", "warning", "vllm", lambda c: c.colocated and c.run["vllm_max_model_length"] is None,
        "vllm_max_model_length is not set: vLLM plans for the whole context of the model.",
        "Set it to the longest prompt plus {run[max_completion_length]} (max_completion_length)."),
    Rule("vllm_length_without_a_prompt", "error", "vllm",
        lambda c: c.colocated and 0 < (c.run["vllm_max_model_length"] or 0) <= c.run["max_completion_length"],
        "vllm_max_model_length {run[vllm_max_model_length]} leaves no room for a prompt beside max_completion_length "
        "{run[max_completion_length]}.", "Set it to the longest prompt plus {run[max_completion_length]}."),
    Rule("sampling_that_biases_the_correction", "warning", "vllm", _cut,
        "{found} with vLLM's importance sampling correction biases the correction.",
        "Set top_p: 1.0 and top_k: 0, or vllm_importance_sampling_correction: false."),
    Rule("vllm_server_needed", "note", "vllm", lambda c: c.run["use_vllm"] and c.run["vllm_mode"] == "server",
        "vllm_mode server: a server must be up, on GPUs of its own; vllm_importance_sampling_correction wants its "
        "processed log-probabilities.",
        "Start it first, with the same model: `vllm serve MODEL` and the options that TRL's page on vLLM names."),
    Rule("vespo_with_another_correction", "error", "vllm",
        lambda c: c.run["loss_type"] == "vespo" and c.run["use_vllm"] and c.run["vllm_importance_sampling_correction"]
        and c.run["vllm_importance_sampling_mode"] not in ("token_truncate", "token_mask"),
        "loss_type vespo with vllm_importance_sampling_mode {run[vllm_importance_sampling_mode]}: TRL refuses it.",
        "Set vllm_importance_sampling_mode: token_truncate or token_mask."),
)  # fmt: skip


# ----------------------------------------------------------------------------------------- losses, rewards and the data


def _liger_loss(case: Case) -> bool:
    version, hooks = case.machine.version("trl"), case.plugins.hooks.values()
    acts = case.plugins.aggregation is not None or any(implements(hook, "on_forward") for hook in hooks)
    return bool(case.run["use_liger_kernel"] and acts and version is not None and version < Version("1.16"))


def _straddles(case: Case) -> int:
    config = case.run.config
    if config is None or not getattr(case.plugins.aggregation, "needs_step_totals", False):
        return 0
    return int(config.steps_per_generation or 0) % int(config.gradient_accumulation_steps)


def _references(case: Case) -> dict[str, str]:
    """The columns that the rewards compare with."""
    found = {name: getattr(reward, "reference_column", None) for name, reward in case.plugins.rewards.items()}
    return {name: column for name, column in found.items() if isinstance(column, str)}


def _lacking_columns(case: Case) -> str:
    lacking = {n: c for n, c in _references(case).items() if case.columns is not None and c not in case.columns}
    return ", ".join(f"{name} wants {column!r}" for name, column in lacking.items())


def _compares(case: Case) -> tuple[str, str] | None:
    data, names = case.run.get("dataset_path") or case.run.get("dataset_name"), [*_references(case)]
    return (names[0], one_line(data, 100)) if names and data else None


def _too_few_weights(case: Case) -> bool:
    weights, rewards = case.run["reward_weights"], case.plugins.rewards
    if weights is None or not rewards or case.plugins.problems or case.run.is_recipe:
        return False  # recipes measure one reward more
    return len(weights) != len(rewards)


_TRAINING = (
    Rule("no_prompt_fills_a_batch", "error", "batch",
        lambda c: c.batch and c.batch.prompts is not None and c.batch.prompts < c.batch.prompts_per_generation_batch,
        "{case.batch.prompts} training prompt(s) fill no generation batch, which takes "
        "{case.batch.prompts_per_generation_batch} different ones: nothing would be trained on.",
        "Give more prompts, or lower per_device_train_batch_size or the steps per generation."),
    Rule("impossible_value", "error", "settings", lambda c: "; ".join(wrong_values(c.run.settings)),
        "{found}.", "Correct it: TRL accepts it, and later fails or trains on it."),
    Rule("liger_replaces_the_loss", "error", "liger", _liger_loss,
        "use_liger_kernel computes a loss of its own before TRL 1.16, past the selected aggregation and hooks.",
        "Set use_liger_kernel: false, or install TRL 1.16."),
    Rule("liger_with_compact_updates", "error", "liger",
        lambda c: c.run["use_liger_kernel"] and c.run["compact_updates"] == "exact",
        "compact_updates: exact does not work with use_liger_kernel, whose loss counts the rows of each micro-batch.",
        "Turn one of them off."),
    Rule("liger_replaces_the_head", "error", "liger",
        lambda c: c.run["use_liger_kernel"] and isinstance(config := c.run["liger_kernel_config"], dict)
        and config.get("fused_linear_cross_entropy"),
        "liger_kernel_config with fused_linear_cross_entropy: TRL refuses it, since it replaces the model's head.",
        "Take fused_linear_cross_entropy out."),
    Rule("unknown_loss_type", "error", "loss",
        lambda c: c.run["loss_type"] not in upstream.LOSS_TYPES and ", ".join(sorted(upstream.LOSS_TYPES)),
        "loss_type {run[loss_type]!r} is none of {found}.", "Choose one of them."),
    Rule("aggregation_that_needs_whole_steps", "error", "loss", _straddles,
        "loss_aggregation {run[loss_aggregation]} needs whole optimizer steps, but steps_per_generation is no multiple "
        "of gradient_accumulation_steps {run[gradient_accumulation_steps]}.",
        "Change one of the two, or select another aggregation."),
    Rule("reference_that_is_not_kept", "error", "reference",
        lambda c: c.run["sync_ref_model"] and (not c.run["beta"] or c.run["use_peft"]),
        "sync_ref_model: true, but there is no reference model of its own: that takes beta above 0 and no adapters.",
        "Set sync_ref_model: false, or beta above 0 without use_peft."),
    Rule("column_that_the_data_lack", "error", "data", _lacking_columns,
        "{found}, which the data set does not have.", "Rename the column, or choose another reward."),
    # A reference that cannot be parsed teaches nothing or the wrong thing.
    Rule("references_not_audited", "note", "references", _compares,
        "{found[0]} compares with references of {found[1]}, which may not parse.",
        "Run: trl-grpo-ext audit {found[1]} --reward {found[0]}"),
    Rule("weights_that_do_not_match", "error", "rewards", _too_few_weights,
        "reward_weights {run[reward_weights]} are not one number for each of the selected rewards.",
        "Give one number for each reward, those passed in Python included."),
    # Where every completion is clipped, all rewards are alike.
    Rule("no_chat_template", "warning", "silent", lambda c: c.machine.chat_template is False,
        "The tokenizer of {run[model_name_or_path]} has no chat template: a base model that writes no end of text is "
        "clipped at {run[max_completion_length]} tokens every time, and learns nothing.",
        "Watch completions/clipped_ratio and frac_reward_zero_std in the first steps; both at 1 means no training."),
)  # fmt: skip


RULES: tuple[Rule, ...] = (*_MACHINE, *_LAUNCH, *_WEIGHTS, *_VLLM, *_TRAINING)


def problems_of(case: Case) -> list[Problem]:
    """The problems that all rules find."""
    return [problem for rule in RULES if (problem := rule(case)) is not None]
