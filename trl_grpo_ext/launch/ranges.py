"""Impossible values and pairs of values: TRL accepts them, and fails later or silently trains on them."""

import math
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
_LEAST: dict[str, float] = {
    **dict.fromkeys(_FROM_ONE, 1),
    **dict.fromkeys((*_FROM_ZERO, "delta", "seed", "data_seed", "top_p"), 0),
    "temperature": math.nextafter(0, 1),
    "max_steps": -1,
}
_MOST: dict[str, float] = {"seed": 2**32 - 1, "data_seed": 2**32 - 1, "top_p": 1}


def wrong_values(settings: Mapping[str, Any]) -> list[str]:
    """Half a sentence for each setting of TRL that cannot have its value (as text, too): why not."""
    return [why for name, value in settings.items() if (why := _wrong_value(name, value))]


def _wrong_value(name: str, value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and name not in _LEAST:  # a run may be named "nan"
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):  # a text; an integer beyond all floats, which TRL's parser refuses
        return None
    if not math.isfinite(number):
        return f"{name} is {value}, which is not a finite number"
    low = _LEAST.get(name, -math.inf)
    high = _MOST.get(name, math.inf)
    if low <= number <= high:
        return None
    if high == math.inf:
        return f"{name} is {value}, and must be {'above 0' if 0 < low < 1 else f'{low:g} or more'}"
    return f"{name} is {value}, and must lie between {low:.0f} and {high:.0f}"


def wrong_quantisation(settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why quantised weights cannot be trained with these settings, and what to do."""
    bits = 4 if settings["load_in_4bit"] else 8 if settings["load_in_8bit"] else 0
    if bits and not settings["use_peft"]:
        return f"load_in_{bits}bit without use_peft: quantised weights cannot be trained.", "Add use_peft: true."
    if bits == 4 and settings["dtype"] in (None, "auto"):  # TRL passes `dtype` on as the compute type
        why = "load_in_4bit with dtype auto: its layers compute in dtype, and auto names none."
        return why, "Write dtype: bfloat16."
    return None


def quantised_with_vllm(settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why vLLM cannot sample from quantised weights, and what to do; nothing in TRL guards against it."""
    if not settings["use_vllm"] or not (settings["load_in_4bit"] or settings["load_in_8bit"]):
        return None
    why = "load_in_8bit with vLLM: vLLM does not support in-flight 8-bit quantisation."
    if settings["load_in_4bit"]:
        why = "QLoRA with vLLM: TRL's weight sync sends packed 4-bit bytes as weights, or fails (trl#4973, trl#3466)."
    return why, "Set use_vllm: false, or train plain LoRA (use_peft without load_in_4bit and load_in_8bit)."


def vllm_without_cuda(settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """What vLLM or TRL's connection to it cannot do where the trainer has no CUDA device, and what to do."""
    if settings["use_vllm"] and settings["vllm_mode"] == "server":
        why = "vllm_mode server without a CUDA device: TRL sends the weights to the server over NCCL, which needs one."
        return why, "Train on a GPU, or set vllm_mode: colocate."
    if settings["use_vllm"] and settings["vllm_enable_sleep_mode"]:
        return "vllm_enable_sleep_mode on the CPU: vLLM sleeps on GPUs alone.", "Set vllm_enable_sleep_mode: false."
    return None
