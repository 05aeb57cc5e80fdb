"""How much memory and disk a run may take: an estimate from the model's own shapes, each item with its formula.

Parameters, linear layers and adapters are counted on the real classes (`model`). What engines split, keep in 32 bits or
gather comes from the sources of TRL 1.16, transformers 5.23, accelerate 1.15 and DeepSpeed 0.19.8. Weights, gradients,
optimizer states and KV cache were compared with real steps of tiny models on the CPU; nothing was compared with a GPU.
So no figure here is ever reported as an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from packaging.version import Version

from .case import Case
from .model import Adapters, Sizes
from .reading import Problem

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
    """Estimated bytes and their basis.

    Attributes:
        items: Of one process, on its device.
        device_bytes: Their sums by stage.
        checkpoint_bytes: One checkpoint on disk, without tokenizer and small files.
        trainable: Trained weights.
        note: How reliable it is.
    """

    items: tuple[Item, ...]
    device_bytes: dict[Stage, int]
    checkpoint_bytes: int
    trainable: int
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
    lora = case.adapters if case.run["use_peft"] else None
    if case.sizes is None or case.batch is None or (lora is not None and lora.refusal):
        return None
    held = _Storage(case, case.sizes, lora, ASSUMED_PROMPT if prompt_length is None else prompt_length)
    items = [item for item in (*_states(held), *_passes(held)) if item.bytes > 0]
    if not case.on_cpu:
        torchs = [item for item in items if item.name != "vLLM"]
        totals = {stage: sum(item.bytes for item in torchs if stage in item.stages) for stage in STAGES}
        share = f"{RESERVE:.0%} of what torch allocates, for fragmentation: a rule of thumb."
        items += [Item("reserve", round(RESERVE * total), (stage,), share) for stage, total in totals.items()]
        items += _of_the_device(case)
    totals = {stage: sum(item.bytes for item in items if stage in item.stages) for stage in STAGES}
    return MemoryEstimate(tuple(items), totals, _checkpoint(held), held.trainable)


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


@dataclass(frozen=True)
class _Storage:
    """Bytes per number of each kind, and how many processes share it."""

    case: Case
    sizes: Sizes
    lora: Adapters | None
    prompt_length: int
    loaded: int = field(init=False)
    halves: bool = field(init=False)

    def __post_init__(self) -> None:
        # "auto" is what most checkpoints are in
        object.__setattr__(self, "loaded", 4 if self.case.dtype == "float32" else 2)
        object.__setattr__(self, "halves", self.case.precision != "no")

    @property
    def trainable(self) -> int:
        return self.sizes.parameters if self.lora is None else self.lora.trainable

    @property
    def frozen(self) -> int:
        """Bytes of a frozen weight: DeepSpeed casts the whole model to its 16-bit type."""
        return 2 if self.case.is_zero and self.halves else self.loaded

    @property
    def trained(self) -> int:
        """Bytes of a trained weight."""
        if self.case.is_zero and self.halves:
            return 2
        if self.case.is_fsdp and self.halves and self.case.bits != 4:
            return 4  # accelerate upcasts what is trained
        if self.lora is None:
            return self.loaded
        if self.case.bits:
            return 4 if self.case.run.is_recipe else 2  # TRL casts these adapters to bfloat16, the recipes cast back
        return self.loaded if self.case.engine == "zero3" else 4  # PEFT's autocast_adapter_dtype

    @property
    def compute(self) -> int:
        """Bytes of a number in matrix products."""
        return 2 if self.halves else self.loaded

    @property
    def shards(self) -> int:
        """Hybrid FSDP splits within a machine and repeats over machines."""
        launch = self.case.launch
        return launch.processes_per_machine if launch.engine == "fsdp2_hybrid" else launch.processes

    @property
    def weight_shards(self) -> int:
        return self.shards if self.case.is_fsdp or self.case.engine == "zero3" else 1

    @property
    def quantised(self) -> int:
        """Bytes of all quantised matrices with their constants.

        4-bit: half a byte each, and for each block of 64 a float32, or nested a byte and a float32 for 256 blocks.
        8-bit: a byte each, and a float32 for each row.
        """
        entries = self.sizes.linear
        if self.case.bits == 4:
            blocks = -(-entries // 64)
            return entries // 2 + (blocks + blocks // 64 if self.case.run["use_bnb_nested_quant"] else 4 * blocks)
        return entries + 4 * self.sizes.linear_outputs if self.case.bits == 8 else 0

    def model_bytes(self, each: int) -> int:
        """Bytes of the model's own weights, unsharded, without adapters."""
        if not self.case.bits:
            return self.sizes.parameters * each
        return self.quantised + (self.sizes.parameters - self.sizes.linear) * each


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


def _states(held: _Storage) -> Iterator[Item]:
    """What a process holds from step to step."""
    case, sizes, trainable, each = held.case, held.sizes, held.trainable, held.trained
    split = f", split over {held.weight_shards} processes" if held.weight_shards > 1 else ""
    bits = f"{sizes.linear:,} in {case.bits} bits with their constants, the others" if case.bits else "all"
    base = each if held.lora is None else held.frozen
    loaded = whole = held.model_bytes(base)
    stays = held.quantised if case.is_fsdp and case.bits == 4 and not case.run["bnb_4bit_quant_storage"] else 0
    text = f"{sizes.parameters:,} weights, {bits} at {base} bytes{split}."
    if case.engine == "zero3" and case.launch.offloads_parameters:
        whole = 0
    here = stays + (whole - stays) // held.weight_shards
    yield Item("weights", here, STAGES, text)
    if case.bits:
        text = "transformers puts a quantised model whole on every GPU, before it is divided."
        yield Item("weights not divided yet", loaded - here, ("load",), text)
    if held.lora is not None:
        text = f"{trainable:,} weights at {each} bytes{split}."
        yield Item("LoRA adapters", trainable * each // held.weight_shards, TRAINING, text)
    elif case.run["beta"]:
        text = f"beta is above 0: {sizes.parameters:,} weights at {held.frozen} bytes{split}."
        yield Item("reference model", sizes.parameters * held.frozen // held.weight_shards, TRAINING, text)
    offloaded = case.is_zero and case.launch.offloads_optimizer
    if case.is_zero and not offloaded:
        text = f"DeepSpeed's float32 copies of weights and gradients, split over {held.shards} processes."
        yield Item("master weights", 4 * trainable // held.shards, TRAINING, text)
        yield Item("gradients in float32", 4 * trainable // held.shards, ("update",), text)
    splits = case.engine in ("zero2", "zero3") or case.is_fsdp
    if not (offloaded and splits):
        text = f"{trainable:,} at {each} bytes{f', split over {held.shards} processes' if splits else ''}."
        yield Item("gradients", trainable * each // (held.shards if splits else 1), ("update",), text)
    if case.engine == "ddp":
        yield Item("gradient buckets", trainable * each, TRAINING, "DDP's second copy of the gradients.")
    if case.is_zero:
        given = case.launch.zero.get("reduce_bucket_size")
        size = sizes.hidden**2 if given == "auto" else int(given) if isinstance(given, int | float) else BUCKET
        yield Item("gradient buckets", each * size, TRAINING, f"reduce_bucket_size {size:,} at {each} bytes.")
    if not offloaded:
        optim = case.run.value("optim")
        states = optimizer_bytes(optim, 4 if case.is_zero else each)
        shards = held.shards if case.is_zero or case.is_fsdp else 1
        text = f"{optim}: {states:g} bytes for each of {trainable:,} trained weights, split over {shards} process(es)."
        yield Item("optimizer states", int(states * trainable) // shards, TRAINING, text)


def _passes(held: _Storage) -> Iterator[Item]:
    """What forward and backward passes take while they last."""
    case, sizes, run = held.case, held.sizes, held.case.run
    assert case.batch is not None
    length = held.prompt_length + int(run["max_completion_length"])
    stream = held.compute if case.is_zero or case.is_fsdp else held.frozen  # autocast does not cast the residual stream

    # Generation: all rows of a process at once, in the type of the weights.
    if run["use_vllm"]:
        if case.colocated and (device := case.machine.device_memory) is not None:
            share, asleep = float(run["vllm_gpu_memory_utilization"]), bool(run["vllm_enable_sleep_mode"])
            text = f"vllm_gpu_memory_utilization {share} of the device, {'asleep' if asleep else 'held'} in the update."
            yield Item("vLLM", round(share * device), ("generation",) if asleep else TRAINING, text)
    else:
        rows = case.batch.rows_per_process
        text = f"{rows} rows x {length} tokens x {sizes.layers} layers x {sizes.kv_width} numbers at {stream} bytes."
        yield Item("KV cache", rows * length * sizes.layers * sizes.kv_width * stream, ("generation",), text)
        layer = stream * sizes.linear_ends // sizes.layers
        text = f"All prompts go through a layer at once: {rows} rows x {held.prompt_length} tokens x {layer:,} bytes."
        yield Item("prompts in a layer", rows * held.prompt_length * layer, ("generation",), text)
        text = f"{rows} rows x {sizes.vocabulary:,} entries, at {stream} bytes and three times in float32."
        yield Item("next token's logits", rows * sizes.vocabulary * (stream + 12), ("generation",), text)

    # Sharded weights while they are gathered.
    if case.engine == "zero3":
        each = held.frozen if held.lora is not None else held.compute
        whole = held.model_bytes(each)
        live = min(whole, ZERO3_LIVE * each)
        text = f"stage3_max_live_parameters {ZERO3_LIVE:,}, or the whole model for ds3_gather_for_generation."
        yield Item("gathered weights", live, ("update",), text)
        gathers = run["ds3_gather_for_generation"] and not run["use_vllm"]
        yield Item("gathered weights", whole if gathers else live, ("generation",), text)
    elif case.is_fsdp and held.shards > 1:
        layers = (held.quantised or sizes.linear * held.compute) // sizes.layers * 2
        text = "FSDP gathers two layers (the one at work and the next), and keeps the embedding and the head."
        yield Item("gathered weights", layers + sizes.embeddings * held.compute, TRAINING, text)

    # The update: one micro-batch.
    rows = int(run["per_device_train_batch_size"])
    tokens = rows * length
    layer = held.compute * sizes.linear_ends // sizes.layers
    if case.checkpointing:
        text = f"{tokens:,} tokens: each of {sizes.layers} layers keeps its input, {sizes.hidden} numbers."
        yield Item("activations", tokens * sizes.layers * sizes.hidden * stream, ("update",), text)
    else:
        text = f"{tokens:,} tokens x {sizes.layers} layers x {layer:,} bytes: inputs and outputs of its linear layers."
        yield Item("activations", tokens * sizes.layers * layer, ("update",), text)
    positions, version = rows * int(run["max_completion_length"]), case.machine.version("trl")
    if version is not None and version < Version("1.15"):
        logits = positions * sizes.vocabulary * (held.compute + 8)
    else:
        tile = min(positions, TILE_ROWS) * TILE_COLUMNS + min(sizes.vocabulary, TILE_COLUMNS) * sizes.hidden
        logits = tile * held.compute + positions * sizes.hidden * (stream + 4)
    if held.lora is None:
        logits += sizes.vocabulary * sizes.hidden * (4 + held.trained)  # TRL sums the head's gradient in float32
    text = f"The larger of the head ({positions:,} tokens, its logits in tiles from TRL 1.15 on) and one layer at work."
    yield Item("head or layer at work", max(logits, tokens * layer * 2), ("update",), text)
    if case.precision != "no" and held.trained == 4 and not case.is_zero and not case.is_fsdp:
        count = sizes.linear if held.lora is None else held.trainable
        text = f"autocast keeps 16-bit copies of {count:,} trained float32 weights."
        yield Item("16-bit copies", 2 * count, ("update",), text)


def _of_the_device(case: Case) -> Iterator[Item]:
    yield Item("CUDA context", CUDA_CONTEXT, STAGES, "A rule of thumb.")
    if case.launch.processes > 1:
        yield Item("NCCL", NCCL_BUFFERS, TRAINING, "A rule of thumb.")


def _checkpoint(held: _Storage) -> int:
    """Bytes of a checkpoint: model or adapter, optimizer states, and DeepSpeed's and FSDP's own copies."""
    case, weights = held.case, held.trainable * held.trained
    if case.run["save_only_model"]:
        return weights
    states = int(optimizer_bytes(case.run.value("optim"), 4 if case.is_zero else held.trained) * held.trainable)
    if case.is_zero:
        states += 4 * held.trainable
    return weights + states + (weights if case.engine in ("zero1", "zero2") or case.is_fsdp else 0)
