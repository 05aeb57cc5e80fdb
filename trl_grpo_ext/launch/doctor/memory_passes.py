"""What forward and backward passes take while they last: activations, the head, generation's cache, gathered layers."""

from __future__ import annotations

from .memory_setup import Holding, MemoryItem, Stage
from .model_shape import adapted_modules

TILE_ROWS = 4_096
TILE_COLUMNS = 32_768
"""TRL projects logits in tiles of so many tokens and vocabulary entries (`trl.kernels.chunked_logprob`)."""

ZERO3_LIVE = 1_000_000_000
"""DeepSpeed's `stage3_max_live_parameters`: weights that may be gathered at once."""


def saved_for_backward(holding: Holding) -> float:
    """Bytes that one decoder layer saves for its backward pass, per token. See `activation_items` for the parts."""
    setup, shape = holding.setup, holding.shape
    hidden, attention = shape.hidden, shape.heads * shape.head_dim
    feed = shape.intermediate * max(1, shape.experts_per_token)
    compute, residual = holding.compute, holding.residual
    total = 0.0
    # Two norms save their input in float32 and, where they are trained, what it was normalised to.
    norm_input = residual if setup.use_liger_kernel else 4
    total += 2 * norm_input * hidden
    if setup.lora is None and not setup.use_liger_kernel:
        total += 2 * residual * hidden
    # Query, key, value and result; keys and values repeated for every query head; one float32 per head.
    total += 4 * compute * attention + 4 * shape.heads
    length = setup.prompt_length + setup.completion_length
    if setup.attention == "sdpa":
        total += compute * length  # the mask, as a number for each pair of positions
    elif setup.attention == "eager":
        total += shape.heads * length * (4 + (compute if compute != 4 else 0))
    # Gate, its activation and the other branch; Liger computes the activation again.
    total += (2 if setup.use_liger_kernel else 3) * compute * feed
    if setup.lora is None:
        # Query, key and value share one input, gate and up another; autocast makes a copy for each of the five.
        copies = 5 if holding.autocasts and residual != compute else 2
        return total + copies * compute * hidden + compute * feed
    return total + _saved_by_adapters(holding)


def _saved_by_adapters(holding: Holding) -> float:
    setup, shape = holding.setup, holding.shape
    assert setup.lora is not None
    inside = [m for m in adapted_modules(shape, setup.lora.targets) if m.kind == "linear" and m.name != shape.head_name]
    if not inside:
        return 0.0
    each = holding.compute if holding.autocasts else holding.trained
    narrow = setup.lora.rank * each * len(inside)
    casts = holding.trained != holding.residual
    if casts or setup.lora.dropout > 0:  # a copy of the input for every adapter
        inputs = each * sum(m.inputs for m in inside)
        if setup.lora.dropout > 0:  # and a mask, of one byte on a GPU
            inputs += (1 if setup.on_gpu else holding.trained) * sum(m.inputs for m in inside)
    else:  # adapters of one input share it; attention has saved the input of its last projection already
        shared = {(m.name.rpartition(".")[0], m.inputs) for m in inside}
        inputs = each * sum(width for _, width in shared)
    return (narrow + inputs) / shape.layers


def _adapters_work(holding: Holding) -> int:
    """Bytes per token of the gradient of the widest adapter's input, where it has its own tensor. Fitted."""
    setup, shape = holding.setup, holding.shape
    if setup.lora is None:
        return 0
    widths = [m.inputs for m in adapted_modules(shape, setup.lora.targets) if m.kind == "linear"]
    if holding.trained != holding.residual:
        return (holding.trained + holding.compute) * max(widths, default=0)
    return holding.trained * max(widths, default=0) if setup.lora.dropout > 0 else 0


def activation_items(holding: Holding) -> list[MemoryItem]:
    """Of one micro-batch: what backward needs, what it works with, and the same of the head."""
    setup, shape = holding.setup, holding.shape
    rows, length = setup.per_device_train_batch_size, setup.prompt_length + setup.completion_length
    tokens = rows * length
    layer, stream = saved_for_backward(holding), holding.residual * shape.hidden
    last = (4 + (holding.residual if setup.lora is None else 0)) * shape.hidden
    sizes = f"{rows} rows of {setup.prompt_length} + {setup.completion_length} tokens"
    if setup.gradient_checkpointing:
        saved: float = tokens * (shape.layers * stream + last)
        text = f"{sizes}: {shape.layers} layers keep their input alone, {stream:,} bytes a token (checkpointing)."
        again = MemoryItem(
            "one layer again",
            round(tokens * layer),
            ("update",),
            f"Checkpointing computes a layer again in the backward pass: {layer:,.0f} bytes a token.",
            moment="layer",
        )
    else:
        saved = tokens * (shape.layers * layer + last)
        text = f"{sizes}: {shape.layers} layers save {layer:,.0f} bytes a token each."
        again = None
    feed = shape.intermediate * max(1, shape.experts_per_token)
    work = tokens * (2 * holding.compute * feed + 2 * stream + _adapters_work(holding))
    items = [
        MemoryItem("activations", round(saved), ("update",), text),
        MemoryItem(
            "backward's working memory",
            work,
            ("update",),
            "Gradients of one layer's feed-forward part and of the residual stream: 2 * intermediate + 2 * hidden for "
            "each token, and of the widest adapter's input in its own type.",
            moment="layer",
        ),
        MemoryItem(
            "scoring's working memory",
            work + tokens * holding.compute * shape.heads * shape.head_dim * 3,
            ("scoring",) if setup.scores else (),
            "One layer without gradients: its attention and feed-forward part, for one micro-batch.",
            moment="layer",
        ),
    ]
    return [*items, *([again] if again else []), *_head_items(holding)]


def _head_items(holding: Holding) -> list[MemoryItem]:
    setup, shape = holding.setup, holding.shape
    rows = setup.per_device_train_batch_size
    # Without Triton, TRL scores every position and not only those of the completions.
    positions = rows * (setup.completion_length + (0 if setup.on_gpu else setup.prompt_length))
    passes: tuple[Stage, ...] = ("scoring", "update") if setup.scores else ("update",)
    if setup.full_logits:
        size = positions * shape.vocabulary * (holding.compute + 4 + 4)
        text = (
            f"{positions:,} positions * {shape.vocabulary:,} entries, in {holding.compute} bytes and twice in float32."
        )
        return [MemoryItem("logits", size, passes, text, moment="head")]
    # The tile is allocated for TILE_COLUMNS entries however small the vocabulary is.
    tile_rows, entries = min(positions, TILE_ROWS), min(shape.vocabulary, TILE_COLUMNS)
    size = (tile_rows * TILE_COLUMNS + entries * shape.hidden) * holding.compute
    if not setup.on_gpu:  # folded in torch and not by a Triton kernel: several float32 copies
        size += 3 * 4 * tile_rows * entries
    items = [
        MemoryItem(
            "logits (tiles)",
            size,
            passes,
            f"TRL projects {tile_rows:,} tokens on up to {TILE_COLUMNS:,} vocabulary entries at a time, in "
            f"{holding.compute} bytes, and never holds all logits.",
            moment="head",
        ),
        MemoryItem(
            "head's inputs and their gradient",
            positions * shape.hidden * (holding.residual + 4),
            ("update",),
            f"{positions:,} scored positions, their hidden states saved and a float32 gradient.",
            moment="head",
        ),
    ]
    if setup.lora is None:
        matrix = shape.vocabulary * shape.hidden
        text = f"TRL sums the head's gradient in float32 and then casts it: {matrix:,} * (4 + {holding.trained})."
        items.append(
            MemoryItem("head's gradient in float32", matrix * (4 + holding.trained), ("update",), text, "head")
        )
    return items


def generation_items(holding: Holding) -> list[MemoryItem]:
    """While completions are generated."""
    setup, shape = holding.setup, holding.shape
    if setup.vllm == "colocate":
        return [_vllm(holding)]
    if setup.vllm == "server":
        return []
    rows, length = setup.generation_rows, setup.prompt_length + setup.completion_length
    width = shape.kv_heads * shape.head_dim
    # `generate` runs outside autocast (seen in one process on the CPU): all is in the weights' type.
    each_number = holding.residual
    cache = rows * length * shape.layers * width * 2 * each_number
    feed = shape.intermediate * max(1, shape.experts_per_token)
    each = each_number * (2 * shape.hidden + 3 * feed) + 4 * shape.hidden
    stage: tuple[Stage, ...] = ("generation",)
    return [
        MemoryItem(
            "KV cache",
            cache,
            stage,
            f"{rows} rows * {length} tokens * {shape.layers} layers * 2 * {width} numbers at {each_number} bytes, if "
            "every completion had full length. All rows are generated at once.",
        ),
        MemoryItem(
            "prompts' activations",
            rows * setup.prompt_length * each,
            stage,
            f"All prompts go through one layer at once: {each:,} bytes a token.",
            moment="layer",
        ),
        MemoryItem(
            "next token's logits",
            rows * shape.vocabulary * (each_number + 12),
            stage,
            f"{rows} rows * {shape.vocabulary:,} entries, once in {each_number} bytes and three times in float32.",
            moment="head",
        ),
    ]


def _vllm(holding: Holding) -> MemoryItem:
    setup, shape = holding.setup, holding.shape
    stages: tuple[Stage, ...] = ("loading", "generation", "scoring", "update", "step", "saving")
    stages = ("generation",) if setup.vllm_sleeps else stages
    awake = "only while it generates (sleep mode)" if setup.vllm_sleeps else "at all times (no sleep mode)"
    if setup.device_memory is not None:
        size = round(setup.vllm_memory_share * setup.device_memory)
        text = f"vllm_gpu_memory_utilization {setup.vllm_memory_share} of the device, {awake}."
        return MemoryItem("vLLM", size, stages, text)
    length = setup.prompt_length + setup.completion_length
    cache = setup.generation_rows * length * shape.layers * shape.kv_heads * shape.head_dim * 2 * 2
    size = 2 * shape.parameters // setup.vllm_tensor_parallel + cache
    text = f"The device's memory is not known: 16-bit weights and the cache of all rows, {awake}; vLLM takes its share."
    return MemoryItem("vLLM", size, stages, text)


def gathered_items(holding: Holding) -> list[MemoryItem]:
    """Weights that are split between processes, while they are whole."""
    setup, shape = holding.setup, holding.shape
    if holding.weight_shards == 1:
        return []
    each = holding.frozen if setup.lora is not None else holding.compute
    ends = (shape.embedding_parameters + shape.head_parameters) * holding.compute
    if setup.engine == "zero3":
        whole = holding.model_bytes(each) + (holding.trainable * holding.trained if setup.lora is not None else 0)
        live = min(whole, ZERO3_LIVE * each)
        text = f"ZeRO-3 keeps up to {ZERO3_LIVE:,} gathered weights (stage3_max_live_parameters)."
        items = [MemoryItem("gathered weights", live, ("scoring", "update"), text)]
        if setup.vllm == "no" and setup.gather_for_generation:
            text = "ds3_gather_for_generation: every process holds the whole model while it generates."
            return [*items, MemoryItem("gathered weights", whole, ("generation",), text)]
        if setup.vllm == "no":
            text = "Without ds3_gather_for_generation the weights are gathered layer by layer for every token: slow."
            return [*items, MemoryItem("gathered weights", live, ("generation",), text)]
        return items
    quantised = setup.quantisation != "none"
    layer = holding.quantised_bytes // shape.layers if quantised else shape.layer_parameters * holding.compute
    text = "FSDP gathers two layers (the one at work and the next), and keeps the embedding and the head."
    return [MemoryItem("gathered weights", 2 * layer + ends, ("generation", "scoring", "update"), text)]
