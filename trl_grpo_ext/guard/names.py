"""Unique names for reward functions, since TRL logs two of one name as one metric."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .calls import is_async
from .outcomes import OutcomePolicy


def unique(names: Sequence[str], fixed: Sequence[bool]) -> list[str]:
    """Make names unique: the first of a name keeps it, the next ones get `_2`, `_3` and so on.

    Args:
        names: One per reward.
        fixed: Which of them cannot be changed (reward models, which TRL names itself). They keep theirs.

    Returns:
        The names; only fixed ones can still be equal.
    """
    kept = {name for name, is_fixed in zip(names, fixed, strict=True) if is_fixed}
    taken, new = set(names), []
    for name, is_fixed in zip(names, fixed, strict=True):
        if not is_fixed and name in kept:
            number = 2
            while f"{name}_{number}" in taken:
                number += 1
            name = f"{name}_{number}"
            taken.add(name)
        kept.add(name)
        new.append(name)
    return new


def renamed(reward: Any, name: str, *, in_place: bool) -> Any:
    """A reward with another name: itself where it may be changed and can be, else a wrapper, async where it is."""
    if in_place:
        try:
            reward.__name__ = name
        except AttributeError:  # slots, a frozen dataclass
            pass
        else:
            for value in getattr(reward, "__dict__", {}).values():
                if isinstance(value, OutcomePolicy):  # it counts outcomes under the reward's name
                    value.reward = name
            return reward
    return (RenamedAsync if is_async(reward) else Renamed)(reward, name)


class Renamed:
    """A reward function under another name. Whatever else is asked of it, the function answers.

    Args:
        reward: The reward function, which stays as it is.
        name: Its name in TRL's metrics.
    """

    def __init__(self, reward: Callable[..., Any], name: str) -> None:
        self.reward = reward
        self.__name__ = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.reward!r}, {self.__name__!r})"

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "reward" or attribute.startswith("__"):  # while it is being unpickled, it has none yet
            raise AttributeError(attribute)
        return getattr(self.reward, attribute)

    def __call__(self, **columns: Any) -> Any:
        """Call the reward function."""
        return self.reward(**columns)


class RenamedAsync(Renamed):
    """An async reward function under another name."""

    async def __call__(self, **columns: Any) -> Any:
        """Call the reward function and wait."""
        return await self.reward(**columns)
