"""What a run takes besides its devices: memory of the machine, and disk for checkpoints."""

from __future__ import annotations

from .memory_setup import Holding, MemoryItem, Stage
from .memory_states import AFTER_LOADING, optimizer_bytes

PROCESS = 1_000_000_000
"""Python with torch, transformers and TRL took 480 MiB with torch's CPU build; the CUDA build was not measured."""


def host_items(holding: Holding) -> list[MemoryItem]:
    """Memory of one machine, for all its processes."""
    setup, shape = holding.setup, holding.shape
    here = min(setup.processes_per_node, setup.processes)
    everywhere: tuple[Stage, ...] = ("loading", *AFTER_LOADING)
    items = [
        MemoryItem(
            "processes",
            here * PROCESS,
            everywhere,
            f"{here} process(es) at 1 GB: a round figure over 0.5 GB measured with torch's CPU build.",
        )
    ]
    whole = shape.parameters * holding.loaded
    if setup.engine != "one_process" and setup.quantisation == "none":
        readers = 1 if holding.fsdp and setup.cpu_ram_efficient_loading else here
        text = f"{readers} process(es) read the whole model before it is split or moved: {whole:,} bytes each."
        items.append(MemoryItem("weights being loaded", readers * whole, ("loading",), text))
    share = -(-holding.trainable // holding.shards) * here
    if holding.deepspeed and setup.offload_optimizer:
        states = -(-optimizer_bytes(holding) // holding.shards) * here
        text = (
            f"offload_optimizer: float32 master weights and gradients (8 bytes) and the states of {setup.optim} for "
            "this machine's share of the trained weights."
        )
        items.append(MemoryItem("offloaded optimizer", 8 * share + states, AFTER_LOADING, text))
    if setup.engine == "zero3" and setup.offload_parameters:
        size = -(-holding.model_bytes(holding.frozen) // holding.shards) * here
        text = "offload_parameters: this machine's share of the weights."
        items.append(MemoryItem("offloaded weights", size, everywhere, text))
    if setup.engine in ("zero1", "zero2"):
        size = here * (holding.model_bytes(holding.frozen) + _adapter_bytes(holding))
        text = f"DeepSpeed's state dict is cloned into the machine's memory by each of its {here} process(es)."
        items.append(MemoryItem("weights being saved", size, ("saving",), text))
    elif (setup.engine == "zero3" and setup.zero3_save_16bit_model) or (holding.fsdp and setup.full_state_dict):
        each = holding.trained if setup.lora is None else holding.frozen
        # DeepSpeed leaves frozen weights out.
        frozen_too = setup.lora is None or holding.fsdp
        size = (holding.model_bytes(each) if frozen_too else 0) + _adapter_bytes(holding)
        text = "The first process puts the whole weights together to save them."
        items.append(MemoryItem("weights being saved", size, ("saving",), text))
    return [item for item in items if item.bytes]


def _adapter_bytes(holding: Holding) -> int:
    return 0 if holding.setup.lora is None else holding.trainable * holding.trained


def disk_items(holding: Holding) -> list[MemoryItem]:
    """One checkpoint, with the tokenizer and small files left out."""
    return [item for item in _files(holding) if item.bytes]


def _files(holding: Holding) -> list[MemoryItem]:
    setup, trainable = holding.setup, holding.trainable
    stage: tuple[Stage, ...] = ("saving",)
    items = []
    # The saved model: adapters alone where there are adapters.
    if setup.lora is not None:
        text = f"adapter_model.safetensors: {trainable:,} weights at {holding.trained} bytes."
        items.append(MemoryItem("adapter", trainable * holding.trained, stage, text))
    elif not (setup.engine == "zero3" and not setup.zero3_save_16bit_model) and not (
        holding.fsdp and not setup.full_state_dict
    ):
        text = f"model.safetensors: {trainable:,} weights at {holding.trained} bytes; a shared head is saved once."
        items.append(MemoryItem("model", trainable * holding.trained, stage, text))
    if setup.save_only_model:
        return items
    if holding.deepspeed:
        if setup.engine != "zero3":
            text = "DeepSpeed's mp_rank_00_model_states.pt: the trained weights once more."
            items.append(MemoryItem("DeepSpeed's model states", trainable * holding.trained, stage, text))
        states = optimizer_bytes(holding) + 4 * trainable
        text = "DeepSpeed's optimizer shards, of all processes together: float32 master weights and states."
        items.append(MemoryItem("optimizer states", states, stage, text))
        return items
    if holding.fsdp:
        size = holding.trainable * holding.trained
        text = "FSDP's own copy of the weights, to resume from (of adapters, where there are some)."
        items.append(MemoryItem("FSDP's model states", size, stage, text))
    text = f"optimizer.pt: the states of {setup.optim}."
    items.append(MemoryItem("optimizer states", optimizer_bytes(holding), stage, text))
    return items
