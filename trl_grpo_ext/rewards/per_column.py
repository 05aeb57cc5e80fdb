"""A reward for each kind of row, told apart by a column of the dataset."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from ..errors import ConfigurationError
from ..guard.outcomes import shown
from ..guard.parameters import column as checked_column
from ._nested import SomeRows, checked_child

_VALUES_SHOWN = 10


class PerColumn:
    """Score each completion with the reward that its row's value in a column asks for.

    Mathematics and code in one dataset, for instance, told apart by a column `task`. Each reward is called once per
    batch, with its rows alone, in their order; not at all where it has none. Scores pass through, None and spans too.

    Values are compared as text, `str(value)`, because YAML reads keys as it likes: the key 1 is the value 1 and the
    value "1", and the key `true` is the value True and the value "True". A row whose value has no reward gets that of
    `default`, or None where there is none. The metric `per_column/<column>/unrouted` is the share of such rows, and
    without a default a warning lists their values.

    Each reward logs metrics of its own rows; a column that it logs has None in the rows of the others.

    Args:
        column: The column's name.
        rewards: The reward for each of its values. In a selection, selections.
        default: The reward for all other values; None for none.

    Raises:
        ConfigurationError: `column` is no name, there is no reward or one is not callable, or two keys are one value.
    """

    __name__ = "per_column"
    takes_rewards = ("rewards", "default")
    conformance: ClassVar[Mapping[str, Any]] = {"parameters": {"column": "task", "rewards": {"math": "gsm8k_accuracy"}}}

    def __init__(
        self, column: str, rewards: Mapping[Any, Callable[..., Any]], default: Callable[..., Any] | None = None
    ) -> None:
        if not isinstance(column, str) or not column:
            raise ConfigurationError(f"per_column: column must be the name of a dataset column, got {column!r}")
        if not isinstance(rewards, Mapping) or not rewards:
            raise ConfigurationError(
                f"per_column: rewards must map values of the column to rewards, as in {{math: gsm8k_accuracy}}, got "
                f"{rewards!r}"
            )
        self.column = column
        self.rewards: dict[str, Callable[..., Any]] = {}
        for value, reward in rewards.items():
            if str(value) in self.rewards:
                raise ConfigurationError(f"per_column: two of the keys {list(rewards)!r} are the value {str(value)!r}")
            self.rewards[str(value)] = checked_child("per_column", f"rewards[{value!r}]", reward)
        self.default = None if default is None else checked_child("per_column", "default", default)

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        """Score `B` completions.

        Args:
            completions: `B` completions.
            **kwargs: The other columns, this reward's among them; each reward gets them, cut to its rows.

        Returns:
            `B` scores, or None where no reward was asked or the one that was said None.

        Raises:
            RewardError: The column is missing, or has not one entry per completion.
            PluginOutputError: A reward broke its contract.
        """
        count = len(completions)
        values = [str(value) for value in checked_column("per_column", self.column, kwargs, count)]
        others = [row for row, value in enumerate(values) if value not in self.rewards]
        if kwargs.get("log_metric") is not None and count:
            kwargs["log_metric"](f"per_column/{self.column}/unrouted", len(others) / count)
        if others and self.default is None:
            self._warn(sorted({values[row] for row in others}))

        scores: list[float | None] = [None] * count
        some = SomeRows({"completions": completions, **kwargs}, count)
        routes = [(reward, [row for row in range(count) if values[row] == v]) for v, reward in self.rewards.items()]
        for reward, rows in [*routes, (self.default, others)]:
            for row, score in zip(rows, some.scores(reward, rows), strict=True) if reward is not None else ():
                scores[row] = score
        some.flush()
        return scores

    def _warn(self, values: Sequence[str]) -> None:
        listed = ", ".join(shown(value) for value in values[:_VALUES_SHOWN])
        more = f" and {len(values) - _VALUES_SHOWN} more" if len(values) > _VALUES_SHOWN else ""
        warnings.warn(
            f"per_column: no reward for {listed}{more} in the column {self.column!r}; these completions get None. "
            f"There are rewards for {sorted(self.rewards)}; add one, or a default.",
            stacklevel=3,
        )
