"""What a process holds from step to step: weights, master weights, gradients, optimizer states, a reference model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .memory_setup import STAGES, Holding, MemoryItem, Stage

AFTER_LOADING: tuple[Stage, ...] = STAGES[1:]
TRAINING: tuple[Stage, ...] = ("update", "step")


@dataclass(frozen=True)
class OptimizerStates:
    """States per trained number: how many, and bytes of each. None: as the trained number itself.

    `block` is the size of the blocks that share a float32 constant; embeddings keep 32 bits (transformers asks
    bitsandbytes to).
    """

    count: int
    each: float | None = None
    block: int = 0
    embeddings_in_32_bits: bool = False
    known: bool = True


_TORCH_ADAM = OptimizerStates(2)
OPTIMIZERS: dict[str, OptimizerStates] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused"), _TORCH_ADAM),
    **dict.fromkeys(("stable_adamw", "schedule_free_adamw", "schedule_free_radam"), _TORCH_ADAM),
    "adamw_torch_8bit": OptimizerStates(2, 1, 256),
    "adamw_torch_4bit": OptimizerStates(2, 0.5, 128),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), OptimizerStates(2, 1, 256, True)),
    "paged_adamw_32bit": OptimizerStates(2, 4),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit", "rmsprop_bnb_8bit"), OptimizerStates(1, 1, 256, True)),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit", "rmsprop_bnb", "rmsprop_bnb_32bit"), OptimizerStates(1, 4)),
    **dict.fromkeys(("ademamix", "paged_ademamix_32bit"), OptimizerStates(3, 4)),
    **dict.fromkeys(("ademamix_8bit", "paged_ademamix_8bit"), OptimizerStates(3, 1, 256, True)),
    "rmsprop": OptimizerStates(1),
    "adagrad": OptimizerStates(1),
    "schedule_free_sgd": OptimizerStates(1),
    "sgd": OptimizerStates(0),
}
"""By `TrainingArguments.optim`. SGD is transformers' default one, without momentum."""


def optimizer_states(name: str) -> OptimizerStates:
    """Return an optimizer's states; one that is not in the table counts as AdamW, and is marked as not known."""
    return OPTIMIZERS.get(name, OptimizerStates(2, known=False))


def optimizer_bytes(holding: Holding) -> int:
    """Bytes of the optimizer's states over all processes together (once, however often they are repeated)."""
    name, trainable, shape = holding.setup.optim, holding.trainable, holding.shape
    own = 4 if holding.deepspeed else holding.trained  # DeepSpeed hands the float32 master weights to the optimizer
    if name == "adafactor":  # a row and a column for each matrix, in float32
        if holding.setup.lora is None:
            return 4 * (sum(m.inputs + m.outputs for m in shape.modules) + shape.hidden * (2 * shape.layers + 1))
        return 4 * trainable  # adapters are so narrow that rows and columns are all of them
    states = optimizer_states(name)
    each = own if states.each is None else states.each
    wide = shape.embedding_parameters if states.embeddings_in_32_bits and holding.setup.lora is None else 0
    narrow = trainable - wide
    constants = states.count * 4 * -(-narrow // states.block) if states.block else 0
    return round(states.count * each * narrow) + constants + states.count * 4 * wide


def state_items(holding: Holding) -> list[MemoryItem]:
    """What one process keeps on its device."""
    items = [_weights(holding), *_adapters(holding), *_masters(holding), *_gradients(holding), *_optimizer(holding)]
    return [item for item in [*items, *_copies(holding), *_reference(holding)] if item.bytes]


def _weights(holding: Holding) -> MemoryItem:
    setup, shape = holding.setup, holding.shape
    each = holding.frozen if setup.lora is not None else holding.trained
    total = holding.model_bytes(each)
    if setup.offload_parameters and setup.engine == "zero3":
        return MemoryItem("weights", 0, STAGES, "offload_parameters keeps them in the machine's memory.")
    shards = holding.weight_shards
    replicated = 0
    if setup.quantisation == "4bit" and holding.fsdp and setup.quant_storage == "uint8":
        # accelerate leaves 4-bit weights of an integer type out of the sharding
        replicated = holding.quantised_bytes
    text = f"{shape.parameters:,} weights at {each} bytes"
    if setup.quantisation != "none":
        text = (
            f"{shape.quantisable_parameters:,} weights of linear layers in {setup.quantisation} with their constants, "
            f"{shape.parameters - shape.quantisable_parameters:,} others at {each} bytes"
        )
    text += f", split over {shards} processes" if shards > 1 else ""
    if replicated:
        text += "; the 4-bit ones whole on each, as bnb_4bit_quant_storage is no floating type"
    return MemoryItem("weights", replicated + -(-(total - replicated) // shards), STAGES, text + ".")


def _adapters(holding: Holding) -> list[MemoryItem]:
    if holding.setup.lora is None:
        return []
    shards, each = holding.weight_shards, holding.trained
    text = f"{holding.trainable:,} adapter weights at {each} bytes" + (f", split over {shards}" if shards > 1 else "")
    return [MemoryItem("LoRA adapters", -(-holding.trainable * each // shards), STAGES, text + ".")]


def _masters(holding: Holding) -> list[MemoryItem]:
    if not holding.deepspeed or holding.setup.offload_optimizer:
        return []
    text = f"DeepSpeed's float32 copy of {holding.trainable:,} trained weights, split over {holding.shards} processes."
    return [MemoryItem("master weights", -(-4 * holding.trainable // holding.shards), AFTER_LOADING, text)]


def _gradients(holding: Holding) -> list[MemoryItem]:
    setup, trainable, each = holding.setup, holding.trainable, holding.trained
    stages: tuple[Stage, ...] = TRAINING
    if setup.engine == "zero3":
        stages = AFTER_LOADING  # DeepSpeed keeps one buffer for them
    elif setup.generation_inside_accumulation:
        stages = ("generation", "scoring", *TRAINING)
    items = []
    split = setup.engine in ("zero2", "zero3") or holding.fsdp
    offloaded = holding.deepspeed and setup.offload_optimizer
    if not (offloaded and split):
        shards = holding.shards if split else 1
        text = f"{trainable:,} gradients at {each} bytes" + (f", split over {shards} processes" if shards > 1 else "")
        items.append(MemoryItem("gradients", -(-trainable * each // shards), stages, text + "."))
    if setup.engine == "ddp":
        text = "DDP's buckets: a second copy of the gradients (gradient_as_bucket_view is off by default)."
        items.append(MemoryItem("gradient buckets", trainable * each, AFTER_LOADING, text))
    if holding.deepspeed:
        # ZeRO-3 allocates its bucket once, the other stages for each backward pass.
        when: tuple[Stage, ...] = AFTER_LOADING if setup.engine == "zero3" else ("update",)
        text = (
            f"A communication bucket of {setup.reduce_bucket_size:,} numbers at {each} bytes, allocated whole however "
            "few weights there are (reduce_bucket_size)."
        )
        items.append(MemoryItem("gradient buckets", each * setup.reduce_bucket_size, when, text))
    if holding.deepspeed and not setup.offload_optimizer:
        shards = holding.shards
        text = f"Gradients in float32 while the optimizer steps: 4 bytes * {trainable:,} / {shards}."
        items.append(MemoryItem("gradients in float32", -(-4 * trainable // shards), ("step",), text))
    return items


def _optimizer(holding: Holding) -> list[MemoryItem]:
    setup = holding.setup
    if holding.deepspeed and setup.offload_optimizer:
        return []
    shards = holding.shards if holding.deepspeed or holding.fsdp else 1
    states = optimizer_states(setup.optim)
    text = f"{setup.optim}: {states.count} state(s) for each of {holding.trainable:,} trained weights"
    if setup.optim == "adafactor":
        text = "adafactor: a row and a column in float32 for each matrix"
    elif not states.known:
        text = f"{setup.optim} is not in the table of optimizers, so AdamW's two states are counted"
    if "paged" in setup.optim:
        text += "; paged: the driver may move them to the machine's memory, which is not counted on"
    if shards > 1:
        text += f"; split over {shards} processes"
    items = [MemoryItem("optimizer states", -(-optimizer_bytes(holding) // shards), AFTER_LOADING, text + ".")]
    if setup.optim == "adamw_torch" and not holding.deepspeed:
        text = (
            "torch's foreach AdamW holds one more copy of the trained weights while it steps (the fused one doesn't)."
        )
        size = -(-holding.trainable * holding.trained // shards)
        items.append(MemoryItem("optimizer's temporary copy", size, ("step",), text))
    return items


def _copies(holding: Holding) -> list[MemoryItem]:
    """16-bit copies of float32 weights that autocast keeps until its context ends."""
    if not holding.autocasts or holding.fsdp or holding.trained != 4:
        return []
    count = holding.trainable if holding.setup.lora is not None else holding.shape.quantisable_parameters
    text = f"autocast keeps 16-bit copies of the trained float32 matrices while it lasts: 2 bytes * {count:,}."
    # With checkpointing they are gone, but for one layer's, when the layers run backward.
    moment: Literal["", "head"] = "head" if holding.setup.gradient_checkpointing else ""
    scoring: tuple[Stage, ...] = ("scoring",) if holding.setup.scores else ()
    return [
        MemoryItem("16-bit copies", 2 * count, scoring, text),
        MemoryItem("16-bit copies", 2 * count, ("update",), text, moment),
        MemoryItem(
            "16-bit copies of a layer",
            2 * count // holding.shape.layers if moment else 0,
            ("update",),
            "Of the layer that checkpointing computes again.",
            "layer",
        ),
    ]


def _reference(holding: Holding) -> list[MemoryItem]:
    if not holding.setup.reference_model:
        return []
    shards = holding.weight_shards
    size = -(-holding.model_bytes(holding.frozen, base_only=True) // shards)
    text = f"A second model, loaded like the first: {holding.shape.parameters:,} weights at {holding.frozen} bytes"
    text += f", split over {shards} processes" if shards > 1 else ""
    return [MemoryItem("reference model", size, STAGES, text + ".")]
