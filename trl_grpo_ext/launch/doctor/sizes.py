"""From a run's settings to its memory estimate, and what does not fit."""

from __future__ import annotations

from typing import Any

from packaging.version import Version

from ...errors import ConfigurationError
from .batch import BatchPlan
from .case import Case, error, note, warning
from .memory import Attention, DType, LoRA, MemoryEstimate, MemorySetup, Precision, estimate
from .problem import Problem
from .run_file import RunPlan

ASSUMED_PROMPT = 256
"""Tokens of the longest prompt where nobody said: TRL does not cut prompts, and the data are not read."""
FITS, BARELY = 1.25, 0.9
"""Estimates are not exact: above the first share of a device they are an error, above the second a warning."""
_TILED_HEAD = Version("1.15")
GB = 1e9


def assumed_prompt_length(run: RunPlan, asked: int | None) -> int:
    """The prompt length to count with."""
    return ASSUMED_PROMPT if asked is None else asked


def memory_setup(case: Case, batch: BatchPlan, prompt_length: int | None) -> MemorySetup:
    """The run as far as memory goes.

    Raises:
        ConfigurationError: The settings cannot be, which other checks tell better.
    """
    run, launch = case.run, case.launch
    deepspeed: Any = launch.deepspeed.get("zero_optimization") or {}
    lora = None
    if run["use_peft"]:
        targets = run["lora_target_modules"]
        if isinstance(targets, str) and targets.isidentifier():
            targets = [targets]
        lora = LoRA(rank=int(run["lora_r"]), targets=targets, dropout=float(run["lora_dropout"]))
    bits = case.bits if lora is not None else 0
    zero_gathers = str(deepspeed.get("stage3_gather_16bit_weights_on_model_save", False)).lower() == "true"
    version = case.environment.version("trl")
    every = batch.micro_batches_per_generation
    return MemorySetup(
        processes=launch.processes,
        processes_per_node=launch.processes_per_machine,
        engine=launch.engine,
        offload_optimizer=launch.offload_optimizer != "none",
        offload_parameters=launch.offload_parameters != "none",
        dtype=_dtype(case),
        precision=_precision(case),
        quantisation="4bit" if bits == 4 else "8bit" if bits == 8 else "none",
        nested_quantisation=bool(run["use_bnb_nested_quant"]),
        quant_storage=str(run["bnb_4bit_quant_storage"] or "uint8"),
        lora=lora,
        optim=str(getattr(run["optim"], "value", run["optim"])),
        per_device_train_batch_size=max(1, int(run["per_device_train_batch_size"])),
        prompt_length=assumed_prompt_length(run, prompt_length),
        completion_length=int(run["max_completion_length"]),
        generation_rows=batch.rows_per_process,
        gradient_checkpointing=case.checkpointing or _on(launch.fsdp.get("activation_checkpointing")),
        use_liger_kernel=bool(run["use_liger_kernel"]),
        reference_model=bool(run["beta"]) and lora is None,
        scores=bool(run["beta"]) or batch.old_log_probabilities or bool(run["use_vllm"]),
        gather_for_generation=bool(run["ds3_gather_for_generation"]),
        generation_inside_accumulation=every % max(1, int(run["gradient_accumulation_steps"])) != 0,
        vllm=("server" if run["vllm_mode"] == "server" else "colocate") if run["use_vllm"] else "no",
        vllm_memory_share=float(run["vllm_gpu_memory_utilization"]),
        vllm_sleeps=bool(run["vllm_enable_sleep_mode"]),
        vllm_tensor_parallel=max(1, int(run["vllm_tensor_parallel_size"])),
        device_memory=min((device.memory for device in case.environment.devices), default=None),
        attention=_attention(run["attn_implementation"]),
        on_gpu=not case.on_cpu,
        full_logits=version is not None and version < _TILED_HEAD,
        reduce_bucket_size=_bucket(deepspeed.get("reduce_bucket_size"), case),
        full_state_dict=str(launch.fsdp.get("state_dict_type", "FULL_STATE_DICT")).upper() == "FULL_STATE_DICT",
        zero3_save_16bit_model=zero_gathers,
        cpu_ram_efficient_loading=_on(launch.fsdp.get("cpu_ram_efficient_loading", True)),
        save_total_limit=run["save_total_limit"],
        save_only_model=bool(run["save_only_model"]),
    )


def memory_estimate(case: Case, batch: BatchPlan, prompt_length: int | None) -> MemoryEstimate | None:
    """The estimate; None where the settings are too wrong for one, which other checks tell."""
    if case.shape is None:
        return None
    try:
        return estimate(case.shape, memory_setup(case, batch, prompt_length))
    except (ConfigurationError, ValueError, TypeError, OverflowError):
        return None


def memory_problems(case: Case, memory: MemoryEstimate) -> list[Problem]:
    """What does not fit into devices, the machine or the disk."""
    facts, problems = case.environment, []
    least = min((device.memory for device in facts.devices), default=None)
    if least is not None and not case.on_cpu:
        share = memory.peak_bytes / least
        message = (
            f"About {memory.peak_bytes / GB:.1f} GB on each GPU ({memory.peak_stage}), which has {least / GB:.1f} GB; "
            "an estimate, never compared with a GPU."
        )
        fix = (
            f"{_largest(memory)} Smaller per_device_train_batch_size or max_completion_length, LoRA, or more sharding."
        )
        if share > FITS:
            problems.append(error("memory", message, fix))
        elif share > BARELY:
            problems.append(warning("memory", message, fix))
    if facts.elsewhere:
        return problems
    if facts.memory and memory.host_peak_bytes > BARELY * facts.memory:
        message = (
            f"About {memory.host_peak_bytes / GB:.1f} GB of the machine's memory, which has {facts.memory / GB:.1f}."
        )
        problems.append(warning("memory", message, "Fewer processes on a machine, less offloading, or more memory."))
    if case.on_cpu and facts.memory and memory.peak_bytes * case.launch.processes_per_machine > facts.memory:
        total = memory.peak_bytes * case.launch.processes_per_machine
        message = f"About {total / GB:.1f} GB for all processes, on a machine of {facts.memory / GB:.1f} GB."
        problems.append(warning("memory", message, "Fewer processes, smaller batches, or a smaller model."))
    saves = str(getattr(case.run["save_strategy"], "value", case.run["save_strategy"])) != "no"
    if facts.disk_free is not None and saves and memory.disk_bytes > facts.disk_free:
        message = f"Checkpoints take about {memory.disk_bytes / GB:.1f} GB, and {facts.disk_free / GB:.1f} GB are free."
        fix = "Lower save_total_limit, set save_only_model: true, or choose another output_dir."
        problems.append(error("disk", message, fix))
    if saves and case.run["save_total_limit"] is None and memory.checkpoint_bytes > 1e9:
        message = (
            f"save_total_limit is not set: all checkpoints stay, about {memory.checkpoint_bytes / GB:.1f} GB each."
        )
        problems.append(note("disk", message, "Set save_total_limit: 2."))
    return problems


def _largest(memory: MemoryEstimate) -> str:
    items = memory.of_stage(memory.peak_stage)[:2]
    return f"Most goes to {' and '.join(f'{item.name} ({item.bytes / GB:.1f} GB)' for item in items)}."


def _dtype(case: Case) -> DType:
    known: dict[str, DType] = {"float32": "float32", "float16": "float16"}
    return known.get(case.dtype, "bfloat16")  # auto: what most checkpoints are in


def _precision(case: Case) -> Precision:
    if case.run["fp16"]:
        return "fp16"
    if case.run["bf16"]:
        return "bf16"
    launched: dict[str, Precision] = {"bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
    return launched.get(case.launch.mixed_precision, "no")


def _attention(asked: object) -> Attention:
    name = str(asked or "sdpa")
    if "flash" in name:
        return "flash_attention_2"
    return "eager" if name == "eager" else "sdpa"


def _bucket(given: object, case: Case) -> int:
    """ZeRO's bucket in elements: DeepSpeed's default, a number, or "auto", which is the hidden size squared."""
    if str(given) == "auto" and case.shape is not None:
        return case.shape.hidden**2
    try:
        return 500_000_000 if given is None else max(0, int(float(str(given))))
    except (ValueError, OverflowError):
        return 500_000_000


def _on(value: object) -> bool:
    return str(value).lower() in ("true", "1", "yes")
