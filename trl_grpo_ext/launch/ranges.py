"""Impossible values: TRL and transformers accept them, and fail later or silently train on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_ANY = (-math.inf, math.inf)
_FROM_ZERO = (0.0, math.inf)
_SEED = (0, 2**32 - 1)

SIZES = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "num_generations"),
    *("num_generations_eval", "generation_batch_size", "steps_per_generation", "num_iterations"),
    "max_completion_length",
)
"""Settings that must be at least 1."""

_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("seed", "data_seed"), _SEED),
    **dict.fromkeys(("learning_rate", "weight_decay", "num_train_epochs", "warmup_steps"), _FROM_ZERO),
    **dict.fromkeys(("beta", "epsilon", "epsilon_high", "delta"), _FROM_ZERO),
    "temperature": (math.nextafter(0, 1), math.inf),
    "top_p": (0.0, 1.0),
    "max_steps": (-1, math.inf),
}


def wrong_value(name: str, value: Any) -> str | None:
    """Say in half a sentence why a setting cannot have a value; None if it can.

    Args:
        name: A setting of TRL or transformers; for others only non-finite numbers are reported.
        value: As in a file or on the command line; numeric text is read as a number.
    """
    if isinstance(value, str) and name not in {*SIZES, *_RANGES}:  # a run may be named "nan"
        return None
    number = _number(value)
    if number is None:
        return None
    if not math.isfinite(number):
        return f"{name} is {value}, which is not a finite number"
    if name in SIZES and number < 1:
        return f"{name} is {value}, and must be 1 or more"
    low, high = _RANGES.get(name, _ANY)
    if low <= number <= high:
        return None
    if high == math.inf:
        return f"{name} is {value}, and must be {'above 0' if 0 < low < 1 else f'{low:g} or more'}"
    return f"{name} is {value}, and must lie between {low:.0f} and {high:.0f}"


def wrong_values(settings: Mapping[str, Any]) -> list[str]:
    """The same for several settings."""
    return [why for name, value in settings.items() if (why := wrong_value(name, value))]


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None
    except OverflowError:  # an integer beyond all floats
        return math.inf if int(value) > 0 else -math.inf
