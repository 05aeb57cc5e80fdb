"""Is what a reward function returned one number, or None, per completion?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from ..errors import PluginOutputError


def checked_scores(returned: Any, count: int, reward: str) -> list[float | None]:
    """Read what a reward function returned.

    A list, a tuple, or an array or tensor `(B,)` passes; so does a generator, which is read once, here. Numbers keep
    their type (a `SpanScore` its spans) unless they are of an array's.

    Args:
        returned: What the function returned.
        count: Number of completions, `B`.
        reward: The reward's name, for messages.

    Returns:
        `B` numbers or Nones. NaN passes, because to TRL it means None.

    Raises:
        PluginOutputError: It is not one value per completion, or a value is neither a number nor None, or infinite;
            the message has the row.
    """
    values = _listed(returned, count, reward)
    if len(values) != count:
        raise PluginOutputError(
            f"The reward {reward!r} returned {len(values)} values for {count} completions; it must return one for "
            "each.",
            "length",
        )
    return [_checked(value, row, reward) for row, value in enumerate(values)]


def _listed(returned: Any, count: int, reward: str) -> Sequence[Any]:
    if isinstance(returned, list | tuple):
        return returned
    shape = getattr(returned, "shape", None)
    if shape is not None and hasattr(returned, "tolist"):
        if len(shape) != 1:
            raise PluginOutputError(
                f"The reward {reward!r} returned {type(returned).__name__} of shape {tuple(shape)}; it must be "
                f"({count},), one number per completion.",
                "length",
            )
        listed: list[Any] = returned.tolist()
        return listed
    if isinstance(returned, str | bytes | Mapping | set | frozenset) or not hasattr(returned, "__iter__"):
        what = "None" if returned is None else f"{type(returned).__name__}, {returned!r:.80}"
        hint = " Did the function forget its return?" if returned is None else ""
        raise PluginOutputError(
            f"The reward {reward!r} returned {what}; it must return a list with one number or None for each of the "
            f"{count} completions.{hint}",
            "length",
        )
    return list(returned)


def _checked(value: Any, row: int, reward: str) -> float | None:
    if value is None:
        return None
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a number of an array, or a tensor without axes
    if not isinstance(value, int | float | Fraction | Decimal):
        raise PluginOutputError(
            f"The reward {reward!r} returned {type(value).__name__}, {value!r:.80}, at row {row}; it must be a number "
            "or None.",
            "types",
        )
    try:
        number = value if isinstance(value, float) else float(value)  # a `SpanScore` stays one
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise PluginOutputError(
            f"The reward {reward!r} returned {value!r:.80} at row {row}; it must be finite.", "types"
        )
    return number
