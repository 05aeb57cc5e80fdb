"""What the rewards that are made of other rewards share: checking the parts, calling them, and calling some rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..errors import ConfigurationError, PluginOutputError
from ..guard.calls import call, reward_name
from ..guard.validation import checked_scores
from ..types import Span, SpanScore


def checked_child(owner: str, parameter: str, child: Any) -> Callable[..., Any]:
    """A reward that a combinator was given, checked to be one."""
    if callable(child) and not isinstance(child, type):
        return child  # type: ignore[no-any-return]
    raise ConfigurationError(
        f"{owner}: {parameter} must be a reward function, got {child!r}. `load_rewards` also takes its name; in Python "
        "pass the function or the object."
    )


def checked_children(owner: str, parameter: str, children: Any) -> list[Callable[..., Any]]:
    """The rewards that a combinator was given, at least one."""
    if not isinstance(children, list | tuple) or not children:
        raise ConfigurationError(f"{owner}: {parameter} must be a list of at least one reward, got {children!r}")
    return [checked_child(owner, f"{parameter}[{index}]", child) for index, child in enumerate(children)]


def scores_of(child: Callable[..., Any], columns: Mapping[str, Any], count: int) -> list[float | None]:
    """What a child says of a batch: one finite number per completion, or None, which NaN is too.

    Raises:
        PluginOutputError: It returned something else.
    """
    scores = checked_scores(call(child, columns), count, reward_name(child))
    return [None if score is None or math.isnan(score) else score for score in scores]


def in_range(owner: str, value: float, row: int) -> float:
    """A score that was computed from others, checked not to have overflowed."""
    if math.isfinite(value):
        return value
    raise PluginOutputError(f"{owner}: the score at row {row} is {value}; the rewards that it is made of are too large")


def scaled_spans(factor: float, score: float) -> list[Span]:
    """The spans of a score, if it has any, with their values scaled."""
    return [(start, end, factor * value) for start, end, value in score.spans] if isinstance(score, SpanScore) else []


class SomeRows:
    """Calls rewards with some of a batch's rows each, as if those were the batch.

    What such a call logs with `log_extra` is put back in the rows that it belongs to, the others get None, and `flush`
    logs it, each column once. What it logs with `log_metric` is logged as it is: of the rows that it was called with.

    Args:
        columns: What the reward was called with. Lists and tuples with one entry per completion are cut.
        count: Number of completions.
    """

    def __init__(self, columns: Mapping[str, Any], count: int) -> None:
        self.columns, self.count = columns, count
        self._extra: dict[str, list[Any]] = {}

    def scores(self, child: Callable[..., Any], rows: Sequence[int]) -> list[float | None]:
        """What a child says of these rows, in their order; it is not called for none."""
        if not rows:
            return []
        cut = {
            name: [value[row] for row in rows]
            if isinstance(value, list | tuple) and len(value) == self.count and name != "trainer_state"
            else value
            for name, value in self.columns.items()
        }
        if self.columns.get("log_extra") is not None:

            def log_extra(column: str, values: Iterable[Any]) -> None:
                whole = self._extra.setdefault(column, [None] * self.count)
                for row, value in zip(rows, values, strict=True):
                    whole[row] = value

            cut["log_extra"] = log_extra
        return scores_of(child, cut, len(rows))

    def flush(self) -> None:
        """Log the columns that the children logged."""
        for column, values in self._extra.items():
            self.columns["log_extra"](column, values)
