"""How much memory and disk a run will take: every item with its formula, by stage, per process and per machine.

The formulas were read off TRL 1.16, transformers 5.23, accelerate 1.15, DeepSpeed 0.19.8 and bitsandbytes 0.50, and
those that a CPU can tell were compared with real training steps of tiny models: weights, gradients, optimizer states,
saved activations, KV cache, files. Nothing was compared with a GPU, and no run of several processes was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from .memory_disk import disk_items, host_items
from .memory_passes import activation_items, gathered_items, generation_items
from .memory_setup import (
    STAGES,
    Attention,
    DType,
    Engine,
    Holding,
    LoRA,
    MemoryItem,
    MemorySetup,
    Precision,
    Stage,
)
from .memory_states import state_items
from .model_shape import ModelShape

__all__ = [
    "STAGES",
    "Attention",
    "DType",
    "Engine",
    "LoRA",
    "MemoryEstimate",
    "MemoryItem",
    "MemorySetup",
    "Precision",
    "Stage",
    "estimate",
]

CUDA_CONTEXT = 600_000_000
NCCL_BUFFERS = 400_000_000
RESERVE = 0.1
"""Of what is allocated: holes between torch's blocks. A rule of thumb, like the two sizes above; none was measured."""

NOT_MEASURED = (
    "An estimate, never compared with a GPU. Its weights, gradients, optimizer states, activations, KV cache and files "
    "were compared with real steps of tiny models on the CPU, in one process."
)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes, and what they rest on.

    Attributes:
        device_items: Of one process, on its device.
        host_items: Of one machine.
        disk_items: Of one checkpoint.
        device_bytes: By stage: the items of that stage (see `MemoryItem` for moments), and on a GPU the reserve.
        host_bytes: By stage.
        checkpoint_bytes: One checkpoint.
        disk_bytes: `save_total_limit` checkpoints, one more while it is written, and the final model.
        trainable: Trained weights.
        note: How far to believe it.
    """

    device_items: tuple[MemoryItem, ...]
    host_items: tuple[MemoryItem, ...]
    disk_items: tuple[MemoryItem, ...]
    device_bytes: dict[Stage, int]
    host_bytes: dict[Stage, int]
    checkpoint_bytes: int
    disk_bytes: int
    trainable: int
    note: str = NOT_MEASURED

    @property
    def peak_stage(self) -> Stage:
        """The stage that takes most on a device."""
        return max(STAGES, key=lambda stage: self.device_bytes[stage])

    @property
    def peak_bytes(self) -> int:
        """What that stage takes."""
        return self.device_bytes[self.peak_stage]

    @property
    def host_peak_bytes(self) -> int:
        """What a machine needs at most."""
        return max(self.host_bytes.values())

    def of_stage(self, stage: Stage) -> list[MemoryItem]:
        """Return the device's items of one stage, largest first."""
        return sorted((i for i in self.device_items if stage in i.stages), key=lambda item: -item.bytes)


def estimate(shape: ModelShape, setup: MemorySetup) -> MemoryEstimate:
    """Estimate a run's memory and disk.

    Args:
        shape: The model, from `shape_of`.
        setup: The run.
    """
    holding = Holding(setup, shape)
    device = [
        *state_items(holding),
        *gathered_items(holding),
        *generation_items(holding),
        *activation_items(holding),
        *_of_the_device(setup),
    ]
    device = [item for item in device if item.bytes and item.stages]
    if setup.on_gpu:
        device += _reserve(device)
    host, disk = host_items(holding), disk_items(holding)
    checkpoint = sum(item.bytes for item in disk)
    kept = (setup.save_total_limit or 1) + 1
    model = next((item.bytes for item in disk if item.name in ("model", "adapter")), 0)
    return MemoryEstimate(
        device_items=tuple(device),
        host_items=tuple(host),
        disk_items=tuple(disk),
        device_bytes=_by_stage(device),
        host_bytes=_by_stage(host),
        checkpoint_bytes=checkpoint,
        disk_bytes=kept * checkpoint + model,
        trainable=holding.trainable,
    )


def _of_the_device(setup: MemorySetup) -> list[MemoryItem]:
    if not setup.on_gpu:
        return []
    items = [MemoryItem("CUDA context", CUDA_CONTEXT, STAGES, "A rule of thumb: 0.6 GB for driver and kernels.")]
    if setup.processes > 1:
        text = "A rule of thumb: 0.4 GB for communication between devices."
        items.append(MemoryItem("NCCL", NCCL_BUFFERS, STAGES, text))
    return items


def _reserve(items: list[MemoryItem]) -> list[MemoryItem]:
    """One item for each stage: a share of what torch itself allocates in it."""
    torchs = [item for item in items if item.name not in ("CUDA context", "NCCL", "vLLM")]
    text = f"A rule of thumb: {RESERVE:.0%} of what torch allocates, for holes between its blocks."
    totals = _by_stage(torchs)
    return [MemoryItem("reserve", round(RESERVE * totals[stage]), (stage,), text) for stage in STAGES if totals[stage]]


def _by_stage(items: list[MemoryItem]) -> dict[Stage, int]:
    totals = {}
    for stage in STAGES:
        moments = {"": 0, "head": 0, "layer": 0}
        for item in items:
            moments[item.moment] += item.bytes if stage in item.stages else 0
        totals[stage] = moments[""] + max(moments["head"], moments["layer"])
    return totals
