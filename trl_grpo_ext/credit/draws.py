"""What a prompt sampler draws, checked."""

from collections.abc import Iterable
from operator import index
from typing import Any

from ..errors import PluginOutputError


def checked_draw(drawn: Any, count: int, rows: int, label: str) -> list[int] | None:
    """The row numbers that `draw` returned, or None; `rows` is the size of the pool.

    Raises:
        PluginOutputError: They are not `count` different numbers of rows.
    """
    if drawn is None:
        return None
    problem, numbers = "", list[int]()
    try:
        numbers = [index(number) for number in drawn] if isinstance(drawn, Iterable) else []
    except TypeError:
        problem = f"it returned {drawn!r:.200}"
    if not problem and len(numbers) != count:
        problem = f"it returned {len(numbers) if isinstance(drawn, Iterable) else repr(drawn)[:200]}"
    elif outside := [number for number in numbers if not 0 <= number < rows]:
        problem = f"{outside[0]} is none of them"
    elif repeated := [number for place, number in enumerate(numbers) if number in numbers[:place]]:
        problem = f"it returned {repeated[0]} twice"
    if problem:
        raise PluginOutputError(
            f"{label}: draw must return {count} different numbers of rows from 0 to {rows - 1}, or None if there are "
            f"no more; {problem}.",
            "shape",
        )
    return numbers
