"""How much memory and disk a run may take, by one function of the model's own shapes.

Of TRL 1.16, transformers 5.23, accelerate 1.15, DeepSpeed 0.19. Weights, gradients, optimizer states and the cache of
generation are exact on tiny models on the CPU; activations are exact for Llama and a guess for others, logits are what
TRL's head computes at once, and vLLM's share is what it is given. Ten per cent are added for fragmentation, and 1 GB
for CUDA and NCCL. No figure was compared with a GPU, so none is ever an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from . import Problem

if TYPE_CHECKING:
    from .case import Case

Stage = Literal["load", "generation", "update"]
GB = 1e9
_BARELY = 0.9  # above this share of a device the doctor warns
_TILE_TOKENS = 4_096
_TILE_ENTRIES = 32_768
"""TRL projects logits in tiles of this many tokens and vocabulary entries. Without Triton it holds eight at once."""


@dataclass(frozen=True)
class Memory:
    """Estimated bytes of one process: by what they hold, by stage, and of one checkpoint on the disk."""

    parts: dict[str, int]
    device_bytes: dict[Stage, int]
    checkpoint_bytes: int

    @property
    def peak(self) -> int:
        """Bytes of the stage that takes most."""
        return max(self.device_bytes.values())

    @property
    def described(self) -> str:
        stages = ", ".join(f"{stage} {size / GB:.1f}" for stage, size in self.device_bytes.items())
        most = sorted(self.parts, key=lambda part: -self.parts[part])[:2]
        largest = " and ".join(f"{part} ({self.parts[part] / GB:.1f})" for part in most)
        process = f"about {self.peak / GB:.1f} GB for each process ({stages}), most of it {largest}"
        checkpoint = f"{self.checkpoint_bytes / GB:.2f} GB on disk for a checkpoint"
        return f"{process}; {checkpoint}. An estimate, never compared with a GPU."


def estimate(case: Case, prompt_length: int = 256) -> Memory | None:
    """Estimate a run's memory and disk for prompts of up to so many tokens; None if sizes or settings are unknown."""
    sizes = case.sizes
    launch = case.launch
    is_zero = case.engine.startswith("zero")
    is_fsdp = case.engine.startswith("fsdp")
    lora = case.adapters
    if sizes is None or not case["generation_batch_size"] or (lora and lora.refusal):
        return None
    halves = bool(case["fp16"] or case["bf16"])
    shards = launch.processes_per_machine if case.engine == "fsdp2_hybrid" else launch.processes
    over_weights = shards if is_fsdp or case.engine == "zero3" else 1
    over_gradients = shards if over_weights > 1 or case.engine == "zero2" else 1
    over_states = shards if is_zero or is_fsdp else 1

    # Bytes of one number: as loaded, of a frozen weight (DeepSpeed casts the whole model) and of a trained one.
    loaded = 4 if case.dtype == "float32" else 2
    frozen = 2 if is_zero and halves else loaded
    trainable, each = (sizes.parameters, loaded) if lora is None else (lora.trainable, 4)  # PEFT's autocast
    if is_zero and halves:
        each = 2
    elif lora is not None and case.bits and not case.keeps_adapters_in_float32:
        each = 2  # TRL casts these adapters to bfloat16, the recipes cast back
    elif is_fsdp and halves:
        each = 4  # accelerate upcasts what is trained
    base = frozen if lora is not None else each
    whole = sizes.parameters * base
    if case.bits:
        packed = sizes.linear if case.bits == 8 else sizes.linear // 2 + sizes.linear // 64 * 4
        whole += packed - sizes.linear * base
    # Of an optimizer for one weight; 8 bits: a float32 for each block of 256; an unknown one counts as AdamW.
    optimizer = str(getattr(case["optim"], "value", case["optim"]))
    of_adam = 2 * (1 + 4 / 256) if "8bit" in optimizer else 2 * (4 if is_zero else each)
    states = 0 if optimizer in ("sgd", "adafactor") else int(of_adam * trainable)

    length = prompt_length + int(case["max_completion_length"] or sizes.context)  # None is no limit
    rows = int(case["generation_batch_size"]) // launch.processes
    positions = int(case["per_device_train_batch_size"]) * length
    recomputes = case["activation_checkpointing"]  # the new name
    if recomputes is None:
        recomputes = case["gradient_checkpointing"]
    kept = sizes.hidden if recomputes else 10 * sizes.hidden + 4 * sizes.intermediate  # by a layer, for one token
    held = {
        "weights": 0 if launch.offloads("param") else whole // over_weights,
        "adapters": trainable * each // over_weights if lora is not None else 0,
        "the reference": sizes.parameters * frozen // over_weights if case["beta"] and lora is None else 0,
        "optimizer states": 0 if launch.offloads("optimizer") else states // over_states,
        "float32 copies": 4 * trainable // shards if is_zero and not launch.offloads("optimizer") else 0,
    }
    device = min((size for size in case.devices if size), default=0)
    generation = {"the cache": 0 if case["use_vllm"] else rows * length * sizes.layers * sizes.kv_width * loaded}
    if over_weights > 1 and not case["use_vllm"]:
        generation["the gathered model"] = whole
    colocated = case["use_vllm"] and case["vllm_mode"] == "colocate"
    vllm = int(float(case["vllm_gpu_memory_utilization"]) * device) if colocated else 0
    update = {
        "gradients": trainable * each // over_gradients * (2 if case.engine == "ddp" else 1),  # DDP's buckets
        "activations": positions * sizes.layers * kept * (2 if halves else loaded),
        "logits": min(positions, _TILE_TOKENS) * min(sizes.vocabulary, _TILE_ENTRIES) * (33 if case["use_cpu"] else 8),
    }
    extra = 0 if case["use_cpu"] else 10**9

    def total(*groups: dict[str, int]) -> int:
        return round(sum(sum(group.values()) for group in groups) * 1.1) + extra

    stages: dict[Stage, int] = {
        "load": total({"weights": whole if case.bits else held["weights"]}),
        "generation": total(held, generation) + vllm,
        "update": total(held, update) + (0 if case["vllm_enable_sleep_mode"] else vllm),
    }
    copies = each * (case.engine in ("zero1", "zero2") or is_fsdp) + 4 * is_zero  # DeepSpeed's, FSDP's own
    checkpoint = trainable * each + (0 if case["save_only_model"] else states + copies * trainable)
    parts = {**held, **generation, **update, "vLLM": vllm}
    return Memory({name: size for name, size in parts.items() if size}, stages, checkpoint)


def memory_problems(case: Case, memory: Memory | None) -> list[Problem]:
    """A warning if the run may not fit."""
    least = min((size for size in case.devices if size), default=0)
    if memory is None or not least or case["use_cpu"] or memory.peak <= _BARELY * least:
        return []
    message = f"A GPU has {least / GB:.1f} GB, and the run takes {memory.described}"
    fix = "Smaller per_device_train_batch_size or max_completion_length, LoRA, or more sharding."
    return [Problem("warning", "memory", message, fix)]
