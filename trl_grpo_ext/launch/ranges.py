"""Impossible values and pairs of values: TRL accepts them, and fails later or silently trains on them."""

import sys
from collections.abc import Mapping
from typing import Any

_FROM_ONE = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
    "num_generations",
    "num_generations_eval",
    "generation_batch_size",
    "max_completion_length",
)
_FROM_ZERO = ("learning_rate", "weight_decay", "num_train_epochs", "warmup_steps", "beta", "epsilon", "epsilon_high")
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(_FROM_ONE, (1, sys.float_info.max)),
    **dict.fromkeys((*_FROM_ZERO, "delta", "max_grad_norm"), (0, sys.float_info.max)),
    **dict.fromkeys(("seed", "data_seed"), (0, 2**32 - 1)),
    "temperature": (sys.float_info.min, sys.float_info.max),
    "max_steps": (-1, sys.float_info.max),
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
            wanted = f"{least}, and finite" if high == sys.float_info.max else f"between {low:g} and {high:.0f}"
            found.append(f"{name} is {settings[name]}, and must be {wanted}")
    return sorted(found)


def wrong_quantisation(settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why 4-bit weights cannot be trained with this `dtype`, which TRL passes on as the compute type."""
    if settings["load_in_4bit"] and settings["dtype"] in (None, "auto"):
        why = "load_in_4bit with dtype auto: its layers compute in dtype, and auto names none."
        return why, "Write dtype: bfloat16."
    return None


def quantised_with_vllm(settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why vLLM cannot sample from quantised weights, and what to do; nothing in TRL guards against it."""
    if not settings["use_vllm"] or not (settings["load_in_4bit"] or settings["load_in_8bit"]):
        return None
    why = "Quantised weights with vLLM: TRL's weight sync sends packed bytes as weights, or fails (trl#4973, trl#3466)."
    return why, "Set use_vllm: false, or train plain LoRA (use_peft without load_in_4bit and load_in_8bit)."


def vllm_without_cuda(settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """What vLLM or TRL's connection to it cannot do where the trainer has no CUDA device, and what to do."""
    if settings["use_vllm"] and settings["vllm_mode"] == "server":
        why = "vllm_mode server without a CUDA device: TRL sends the weights to the server over NCCL, which needs one."
        return why, "Train on a GPU, or set vllm_mode: colocate."
    if settings["use_vllm"] and settings["vllm_enable_sleep_mode"]:
        return "vllm_enable_sleep_mode on the CPU: vLLM sleeps on GPUs alone.", "Set vllm_enable_sleep_mode: false."
    return None
