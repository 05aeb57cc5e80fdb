"""What a prompt sampler draws, checked."""

from operator import index
from typing import Any

from ..errors import PluginOutputError


def checked_draw(drawn: Any, count: int, rows: int, label: str) -> list[int] | None:
    """The `count` different numbers that `draw` returned of a pool of `rows`, or None; others are refused."""
    if drawn is None:
        return None
    try:
        numbers = [index(number) for number in drawn]
    except TypeError:
        numbers = []
    if len(numbers) != count or len({*numbers}) != count or not all(0 <= number < rows for number in numbers):
        raise PluginOutputError(
            f"{label}: draw must return {count} different numbers of rows from 0 to {rows - 1}, or None if there are "
            f"no more; got {drawn!r:.200}.",
            "shape",
        )
    return numbers
