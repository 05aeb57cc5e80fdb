"""Impossible values and pairs of values: TRL accepts them, and fails later or silently trains on them."""

import sys
from collections.abc import Mapping
from typing import Any

_LARGEST = sys.float_info.max
_BATCHES = ("per_device_train_batch_size", "per_device_eval_batch_size", "generation_batch_size")
_COUNTS = ("gradient_accumulation_steps", "steps_per_generation", "num_iterations", "max_completion_length")
_FROM_ZERO = ("learning_rate", "weight_decay", "num_train_epochs", "warmup_steps", "beta", "epsilon", "epsilon_high")
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys((*_BATCHES, *_COUNTS, "num_generations", "num_generations_eval"), (1, _LARGEST)),
    **dict.fromkeys((*_FROM_ZERO, "delta", "max_grad_norm"), (0, _LARGEST)),
    **dict.fromkeys(("seed", "data_seed"), (0, 2**32 - 1)),
    "temperature": (sys.float_info.min, _LARGEST),
    "max_steps": (-1, _LARGEST),
    "top_p": (0, 1),
}


def wrong_values(settings: Mapping[str, Any]) -> list[str]:
    """Half a sentence for each setting of TRL that cannot have its value (as text, too): why not."""
    found = []
    for name in _RANGES.keys() & settings.keys():
        low, high = _RANGES[name]
        try:
            number = float(settings[name])
        except (TypeError, ValueError):  # None, or no number, which TRL's parser refuses
            continue
        if not low <= number <= high:  # NaN is in no range
            least = "above 0" if 0 < low < 1 else f"{low:g} or more"
            wanted = f"{least}, and finite" if high == _LARGEST else f"between {low:g} and {high:.0f}"
            found.append(f"{name} is {settings[name]}, and must be {wanted}")
    return sorted(found)


def quantised_with_vllm(use_vllm: bool | None, quantised: bool) -> tuple[str, str] | None:
    """Why vLLM cannot sample from quantised weights, and what to do; nothing in TRL guards against it."""
    if not use_vllm or not quantised:
        return None
    why = "Quantised weights with vLLM: TRL's weight sync sends packed bytes as weights, or fails (trl#4973, trl#3466)."
    return why, "Set use_vllm: false, or train plain LoRA (use_peft without load_in_4bit and load_in_8bit)."


def vllm_without_cuda(settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """What vLLM or TRL's connection to it cannot do where the trainer has no CUDA device, and what to do."""
    if not settings.get("use_vllm"):
        return None
    if settings["vllm_mode"] == "server":
        why = "vllm_mode server without a CUDA device: TRL sends the weights to the server over NCCL, which needs one."
        return why, "Train on a GPU, or set vllm_mode: colocate."
    if settings["vllm_enable_sleep_mode"]:
        return "vllm_enable_sleep_mode on the CPU: vLLM sleeps on GPUs alone.", "Set vllm_enable_sleep_mode: false."
    return None
