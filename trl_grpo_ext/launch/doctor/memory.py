"""How much memory and disk a run may take: an estimate from the model's own shapes, each item with its formula.

Parameters, linear layers and adapters are counted on the real classes (`model`). What engines split, keep in 32 bits or
gather comes from the sources of TRL 1.16, transformers 5.23, accelerate 1.15 and DeepSpeed 0.19.8. Weights, gradients,
optimizer states and KV cache were compared with real steps of tiny models on the CPU; nothing was compared with a GPU.
So no figure here is ever reported as an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from packaging.version import Version

from .case import Case
from .model import Sizes
from .problem import Problem

Stage = Literal["load", "generation", "update"]
STAGES: tuple[Stage, ...] = ("load", "generation", "update")
"""`load` is the model alone, before it is sharded; `update` is forward pass, backward pass and optimizer step. Scoring
and saving take less than one of the last two."""
TRAINING = STAGES[1:]

GB = 1e9
BARELY = 0.9
"""Above this share of a device the doctor warns."""
ASSUMED_PROMPT = 256
"""Tokens in the longest prompt by default: TRL does not truncate prompts, and the data are not read."""
CUDA_CONTEXT, NCCL_BUFFERS, RESERVE = 600_000_000, 400_000_000, 0.1
"""Rules of thumb, not measured: driver and kernels, communication, and fragmentation."""
BUCKET, ZERO3_LIVE = 500_000_000, 1_000_000_000
"""DeepSpeed's defaults of `reduce_bucket_size` and `stage3_max_live_parameters`, in numbers."""
TILE_ROWS, TILE_COLUMNS = 4_096, 32_768
"""From 1.15 on, TRL projects logits in tiles of this many tokens and vocabulary entries."""
NOTE = "An estimate, never compared with a GPU."


@dataclass(frozen=True)
class Item:
    """Bytes that one process holds on its device, when, and the formula."""

    name: str
    bytes: int
    stages: tuple[Stage, ...]
    formula: str


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated bytes of one process, by stage, and their basis."""

    items: tuple[Item, ...]
    device_bytes: dict[Stage, int]
    checkpoint_bytes: int  # without tokenizer and small files
    trainable: int  # weights
    note: str = NOTE

    @property
    def peak_stage(self) -> Stage:
        """The stage that takes most."""
        return max(STAGES, key=lambda stage: self.device_bytes[stage])

    @property
    def peak_bytes(self) -> int:
        """What that stage takes."""
        return self.device_bytes[self.peak_stage]


def estimate(case: Case, prompt_length: int | None = None) -> MemoryEstimate | None:
    """Estimate a run's memory and disk; None if sizes or settings are unknown.

    Args:
        case: The run.
        prompt_length: Tokens of the longest prompt; None: `ASSUMED_PROMPT`.
    """
    run, sizes, launch, batch = case.run, case.sizes, case.launch, case.batch
    lora = case.adapters if run["use_peft"] else None
    if sizes is None or batch is None or (lora is not None and lora.refusal):
        return None
    items: list[Item] = []

    def add(name: str, amount: float, stages: tuple[Stage, ...], formula: str) -> None:
        if amount > 0:
            items.append(Item(name, int(amount), stages, formula))

    prompt = ASSUMED_PROMPT if prompt_length is None else prompt_length
    halves, zero3, trainable = case.precision != "no", case.engine == "zero3", sizes.parameters
    shards = launch.processes_per_machine if case.engine == "fsdp2_hybrid" else launch.processes
    weight_shards = shards if case.is_fsdp or zero3 else 1
    # Bytes of a number: loaded ("auto" is what most checkpoints are in), in matrix products, of a frozen weight
    # (DeepSpeed casts the whole model to its 16-bit type) and of a trained one.
    loaded = 4 if case.dtype == "float32" else 2
    compute = 2 if halves else loaded
    frozen = 2 if case.is_zero and halves else loaded
    stream = compute if case.is_zero or case.is_fsdp else frozen  # autocast does not cast the residual stream
    each = loaded
    if lora is not None:
        trainable = lora.trainable
        each = loaded if zero3 else 4  # PEFT's autocast_adapter_dtype
        if case.bits:
            each = 4 if run.is_recipe else 2  # TRL casts these adapters to bfloat16, the recipes cast back
    if case.is_zero and halves:
        each = 2
    elif case.is_fsdp and halves and case.bits != 4:
        each = 4  # accelerate upcasts what is trained
    states = optimizer_bytes(run.value("optim"), 4 if case.is_zero else each)
    quantised = _quantised_bytes(sizes, case.bits, nested=bool(run["use_bnb_nested_quant"]))

    def model_bytes(one: int) -> int:
        return quantised + (sizes.parameters - (sizes.linear if case.bits else 0)) * one

    # What a process holds from step to step.
    base = each if lora is None else frozen
    split = f", split over {weight_shards} processes" if weight_shards > 1 else ""
    bits = f"{sizes.linear:,} in {case.bits} bits with their constants, the others" if case.bits else "all"
    whole = 0 if zero3 and launch.offloads("param") else model_bytes(base)
    stays = quantised if case.is_fsdp and case.bits == 4 and not run["bnb_4bit_quant_storage"] else 0
    here = stays + (whole - stays) // weight_shards
    add("weights", here, STAGES, f"{sizes.parameters:,} weights, {bits} at {base} bytes{split}.")
    if case.bits:
        text = "transformers puts a quantised model whole on every GPU, before it is divided."
        add("weights not divided yet", model_bytes(base) - here, ("load",), text)
    if lora is not None:
        text = f"{trainable:,} weights at {each} bytes{split}."
        add("LoRA adapters", trainable * each // weight_shards, TRAINING, text)
    elif run["beta"]:
        text = f"beta is above 0: {sizes.parameters:,} weights at {frozen} bytes{split}."
        add("reference model", sizes.parameters * frozen // weight_shards, TRAINING, text)
    offloaded = case.is_zero and launch.offloads("optimizer")
    if case.is_zero and not offloaded:
        text = f"DeepSpeed's float32 copies of weights and gradients, split over {shards} processes."
        add("master weights", 4 * trainable // shards, TRAINING, text)
        add("gradients in float32", 4 * trainable // shards, ("update",), text)
    splits = case.engine in ("zero2", "zero3") or case.is_fsdp
    if not (offloaded and splits):
        text = f"{trainable:,} at {each} bytes{f', split over {shards} processes' if splits else ''}."
        add("gradients", trainable * each // (shards if splits else 1), ("update",), text)
    if case.engine == "ddp":
        add("gradient buckets", trainable * each, TRAINING, "DDP's second copy of the gradients.")
    if case.is_zero:
        given = launch.zero.get("reduce_bucket_size")
        size = sizes.hidden**2 if given == "auto" else int(given) if isinstance(given, int | float) else BUCKET
        add("gradient buckets", each * size, TRAINING, f"reduce_bucket_size {size:,} at {each} bytes.")
    if not offloaded:
        over = shards if case.is_zero or case.is_fsdp else 1
        text = f"{run.value('optim')}: {states:g} bytes for each of {trainable:,} weights, over {over} processes."
        add("optimizer states", int(states * trainable) // over, TRAINING, text)

    # Generation: all rows of a process at once, in the type of the weights.
    length = prompt + int(run["max_completion_length"])
    if run["use_vllm"]:
        if case.colocated and (device := case.machine.device_memory) is not None:
            share, asleep = float(run["vllm_gpu_memory_utilization"]), bool(run["vllm_enable_sleep_mode"])
            text = f"vllm_gpu_memory_utilization {share} of the device, {'asleep' if asleep else 'held'} in the update."
            add("vLLM", round(share * device), ("generation",) if asleep else TRAINING, text)
    else:
        rows, ends = batch.rows_per_process, stream * sizes.linear_ends // sizes.layers
        text = f"{rows} rows x {length} tokens x {sizes.layers} layers x {sizes.kv_width} numbers at {stream} bytes."
        add("KV cache", rows * length * sizes.layers * sizes.kv_width * stream, ("generation",), text)
        text = f"All prompts go through a layer at once: {rows} rows x {prompt} tokens x {ends:,} bytes."
        add("prompts in a layer", rows * prompt * ends, ("generation",), text)
        text = f"{rows} rows x {sizes.vocabulary:,} entries, at {stream} bytes and three times in float32."
        add("next token's logits", rows * sizes.vocabulary * (stream + 12), ("generation",), text)

    # Sharded weights while they are gathered.
    if zero3:
        one = frozen if lora is not None else compute
        live = min(model_bytes(one), ZERO3_LIVE * one)
        gathers = run["ds3_gather_for_generation"] and not run["use_vllm"]
        text = f"stage3_max_live_parameters {ZERO3_LIVE:,}, or the whole model for ds3_gather_for_generation."
        add("gathered weights", live, ("update",), text)
        add("gathered weights", model_bytes(one) if gathers else live, ("generation",), text)
    elif case.is_fsdp and shards > 1:
        layers = (quantised or sizes.linear * compute) // sizes.layers * 2
        text = "FSDP gathers two layers (the one at work and the next), and keeps the embedding and the head."
        add("gathered weights", layers + sizes.embeddings * compute, TRAINING, text)

    # The update: one micro-batch.
    tokens = int(run["per_device_train_batch_size"]) * length
    positions = int(run["per_device_train_batch_size"]) * int(run["max_completion_length"])
    layer = compute * sizes.linear_ends // sizes.layers
    if case.checkpointing:
        text = f"{tokens:,} tokens: each of {sizes.layers} layers keeps its input, {sizes.hidden} numbers."
        add("activations", tokens * sizes.layers * sizes.hidden * stream, ("update",), text)
    else:
        text = f"{tokens:,} tokens x {sizes.layers} layers x {layer:,} bytes: inputs and outputs of its linear layers."
        add("activations", tokens * sizes.layers * layer, ("update",), text)
    version = case.machine.version("trl")
    tile = min(positions, TILE_ROWS) * TILE_COLUMNS + min(sizes.vocabulary, TILE_COLUMNS) * sizes.hidden
    logits = tile * compute + positions * sizes.hidden * (stream + 4)
    if version is not None and version < Version("1.15"):
        logits = positions * sizes.vocabulary * (compute + 8)
    if lora is None:
        logits += sizes.vocabulary * sizes.hidden * (4 + each)  # TRL sums the head's gradient in float32
    text = f"The larger of the head ({positions:,} tokens, its logits in tiles from TRL 1.15 on) and one layer at work."
    add("head or layer at work", max(logits, tokens * layer * 2), ("update",), text)
    if halves and each == 4 and not case.is_zero and not case.is_fsdp:
        count = sizes.linear if lora is None else trainable
        add("16-bit copies", 2 * count, ("update",), f"autocast keeps them of {count:,} trained float32 weights.")

    if not case.on_cpu:
        ours = [item for item in items if item.name != "vLLM"]
        for stage in STAGES:
            total = sum(item.bytes for item in ours if stage in item.stages)
            text = f"{RESERVE:.0%} of what torch allocates, for fragmentation: a rule of thumb."
            add("reserve", round(RESERVE * total), (stage,), text)
        add("CUDA context", CUDA_CONTEXT, STAGES, "A rule of thumb.")
        add("NCCL", NCCL_BUFFERS * (launch.processes > 1), TRAINING, "A rule of thumb.")
    totals = {stage: sum(item.bytes for item in items if stage in item.stages) for stage in STAGES}

    checkpoint = trainable * each  # model or adapter, then states, and DeepSpeed's and FSDP's own copies
    if not run["save_only_model"]:
        copies = each * (case.engine in ("zero1", "zero2") or case.is_fsdp) + 4 * case.is_zero
        checkpoint += int(states * trainable) + copies * trainable
    return MemoryEstimate(tuple(items), totals, checkpoint, trainable)


def memory_problems(case: Case, memory: MemoryEstimate) -> list[Problem]:
    """What may not fit, as warnings."""
    problems, least = [], case.machine.device_memory
    if least is not None and not case.on_cpu and memory.peak_bytes > BARELY * least:
        largest = sorted((i for i in memory.items if memory.peak_stage in i.stages), key=lambda i: -i.bytes)[:2]
        message = (
            f"About {memory.peak_bytes / GB:.1f} GB on each GPU ({memory.peak_stage}), which has {least / GB:.1f} GB; "
            f"most goes to {' and '.join(f'{item.name} ({item.bytes / GB:.1f} GB)' for item in largest)}. {NOTE}"
        )
        fix = "Smaller per_device_train_batch_size or max_completion_length, LoRA, or more sharding."
        problems.append(Problem("warning", "memory", message, fix))
    # One checkpoint is written before one is deleted.
    free, needed = case.machine.disk_free, ((case.run["save_total_limit"] or 1) + 1) * memory.checkpoint_bytes
    saves_here = not case.machine.elsewhere and case.run.value("save_strategy") != "no"
    if free is not None and saves_here and needed > free:
        message = f"Checkpoints take about {needed / GB:.1f} GB, and {free / GB:.1f} GB are free."
        fix = "Lower save_total_limit, set save_only_model: true, or choose another output_dir."
        problems.append(Problem("warning", "disk", message, fix))
    return problems


def optimizer_bytes(name: str, each: int) -> float:
    """Bytes of an optimizer's states per trained weight of `each` bytes; an unknown name counts as AdamW."""
    if name == "sgd" or name == "adafactor":  # adafactor: a row and a column for each matrix
        return 0
    count = 3 if "ademamix" in name else 1 if any(k in name for k in ("lion", "rmsprop", "adagrad", "free_sgd")) else 2
    if "8bit" in name:
        return count * (1 + 4 / 256)  # a float32 for each block of 256
    if "4bit" in name:
        return count * (0.5 + 4 / 128)
    return count * (4 if "32bit" in name else each)


def _quantised_bytes(sizes: Sizes, bits: int, nested: bool) -> int:
    """Bytes of all quantised matrices with their constants.

    4-bit: half a byte each, and for each block of 64 a float32, or nested a byte and a float32 for 256 blocks.
    8-bit: a byte each, and a float32 for each row.
    """
    if bits == 4:
        blocks = -(-sizes.linear // 64)
        return sizes.linear // 2 + (blocks + blocks // 64 if nested else 4 * blocks)
    return sizes.linear + 4 * sizes.linear_outputs if bits == 8 else 0
