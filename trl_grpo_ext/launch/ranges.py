"""Impossible values and pairs of values: TRL accepts them, and fails later or silently trains on them."""

import math
from collections.abc import Mapping
from typing import Any

_ANY = (-math.inf, math.inf)
_FROM_ZERO = (0.0, math.inf)
_FROM_ONE = (1.0, math.inf)
_SEED = (0, 2**32 - 1)

_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), _FROM_ONE),
    **dict.fromkeys(("gradient_accumulation_steps", "steps_per_generation", "num_iterations"), _FROM_ONE),
    **dict.fromkeys(("num_generations", "num_generations_eval", "generation_batch_size"), _FROM_ONE),
    "max_completion_length": _FROM_ONE,
    **dict.fromkeys(("seed", "data_seed"), _SEED),
    **dict.fromkeys(("learning_rate", "weight_decay", "num_train_epochs", "warmup_steps"), _FROM_ZERO),
    **dict.fromkeys(("beta", "epsilon", "epsilon_high", "delta"), _FROM_ZERO),
    "temperature": (math.nextafter(0, 1), math.inf),
    "top_p": (0.0, 1.0),
    "max_steps": (-1, math.inf),
}


def wrong_values(settings: Mapping[str, Any]) -> list[str]:
    """Half a sentence for each setting of TRL that cannot have its value (as text, too): why not."""
    return [why for name, value in settings.items() if (why := _wrong_value(name, value))]


def _wrong_value(name: str, value: Any) -> str | None:
    number = _number(value)
    if number is None or (isinstance(value, str) and name not in _RANGES):  # a run may be named "nan"
        return None
    if not math.isfinite(number):
        return f"{name} is {value}, which is not a finite number"
    low, high = _RANGES.get(name, _ANY)
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
        return (
            "load_in_4bit with dtype auto: its layers compute in dtype, and auto names none.",
            "Write dtype: bfloat16.",
        )
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


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None
    except OverflowError:  # an integer beyond all floats
        return math.inf if int(value) > 0 else -math.inf
