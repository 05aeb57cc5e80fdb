"""Checks that hooks make of their parameters and of what they need, with one wording for all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..errors import ConfigurationError

if TYPE_CHECKING:
    import torch


def checked_number(label: str, value: object, wanted: str, accept: Callable[[float], bool]) -> float:
    """Return a parameter that must be a finite number.

    Args:
        label: `<plugin>: <parameter>`.
        value: What the parameter was set to.
        wanted: What it must be, in words.
        accept: Whether a finite number is in range.

    Raises:
        ConfigurationError: It is no number (true and false are none), not finite, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not accept(value):
        raise ConfigurationError(f"{label} must be {wanted}, got {value!r}.")
    return value


def checked_choice(label: str, value: object, choices: Sequence[str]) -> str:
    """Return a parameter that must be one of some words.

    Raises:
        ConfigurationError: It is none of them.
    """
    if not isinstance(value, str) or value not in choices:
        wanted = " or ".join(repr(choice) for choice in choices)
        raise ConfigurationError(f"{label} must be {wanted}, got {value!r}.")
    return value


def needed(label: str, field: str, tensor: torch.Tensor | None) -> torch.Tensor:
    """Return what a hook has among its `needs`; the trainer provides it, a rollout made by hand may lack it.

    Raises:
        ConfigurationError: It is None.
    """
    if tensor is None:
        raise ConfigurationError(f"{label}: rollout.{field} must be given, got None.")
    return tensor
