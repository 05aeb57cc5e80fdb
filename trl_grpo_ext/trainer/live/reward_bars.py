"""A bar for a reward function that takes long: how many completions it has scored, or since when it works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...guard.calls import is_async
from ...guard.printable import printable_name
from ...guard.progress import listening
from .late_bar import late_bar


def with_bar(function: Any, name: str, count: int, before: float | None = None) -> Any:
    """The same reward function with a bar. Reward models pass through; async functions stay async, as TRL needs.

    Args:
        function: As TRL has it.
        name: Shown in front of the bar.
        count: Completions in the batch.
        before: The mean of the reward in the batch before.
    """
    if not callable(function) or hasattr(function, "forward"):  # a `torch.nn.Module`, which TRL calls itself
        return function
    if is_async(function):

        async def shown_async(*arguments: Any, **columns: Any) -> Any:
            with reward_bar(name, count, before):
                return await function(*arguments, **columns)

        return shown_async

    def shown(*arguments: Any, **columns: Any) -> Any:
        with reward_bar(name, count, before):
            return function(*arguments, **columns)

    return shown


@contextmanager
def reward_bar(name: str, count: int, before: float | None = None) -> Iterator[None]:
    """A `late_bar` that hears what the reward says of its progress.

    Args:
        name: Of the reward.
        count: Completions in the batch.
        before: The mean of the reward in the batch before, which is shown.
    """
    label = f"scoring with {printable_name(name)}"
    label += "" if before is None else f" ({before:.3f} before)"
    with late_bar(label, count, "completions") as heard, listening(heard):
        yield
