"""Rewards made of other rewards: `weighted`, `gated`, `product` and `per_column`.

Their children are reward functions of any form, including async. A child is checked as by the trainer: it returns one
finite number per completion, or None or NaN; anything else is a `PluginOutputError` that names it, and its exceptions
pass through. In a selection the children are selections themselves (`takes`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..errors import ConfigurationError, PluginOutputError
from ..guard.calls import call, check_scores, reward_name, select_rows, start_scoring, start_workers, unique_names
from ..guard.outcomes import shown
from ..guard.parameters import checked_flag, checked_number, checked_text
from ..guard.parameters import column as checked_column
from ..types import Part, Parts, RewardDeclaration

_VALUES_SHOWN = 10


class _Combined:
    """What rewards made of rewards share: those inside begin early where they can."""

    __name__: str

    def _children(self) -> Sequence[Callable[..., Any]]:
        raise NotImplementedError

    def start_workers(self) -> None:
        """Let the rewards inside start their worker processes."""
        for child in self._children():
            start_workers(child)

    def start_scoring(self, completions: Sequence[Any], **columns: Any) -> None:
        """Let the rewards inside begin early, where all of them get all rows."""
        for child in self._children():
            start_scoring(child, {"completions": completions, **columns})


class Weighted(_Combined):
    """Score the weighted sum of rewards, without those that give None.

    None where all give None. For use inside another reward, such as `gated`. At the top level, TRL's own sum gives the
    same, with a metric for each. If a reward gives `Parts`, so does this: its parts under its name (`<reward>/<part>`),
    their weights times its weight, and the other rewards as parts of the whole completion.

    Args:
        rewards: The rewards. In a selection, selections, whose `weight` counts here.
        weights: One finite number per reward if they are not selections; None means those of the selections, or 1.

    Raises:
        ConfigurationError: A parameter is of the wrong kind, or weights are given both here and in the selections.
    """

    __name__ = "weighted"
    declares = RewardDeclaration(
        takes=("rewards",), conformance={"parameters": {"rewards": ["gsm8k_accuracy", "think_format"]}}
    )

    def __init__(self, rewards: Sequence[Callable[..., Any]], weights: Sequence[float] | None = None) -> None:
        self.rewards = _checked_children("weighted", "rewards", rewards)
        selected = list(getattr(rewards, "weights", [1.0] * len(rewards)))
        if weights is not None and any(weight != 1 for weight in selected):
            raise ConfigurationError(
                f"weighted: the rewards have the weights {selected}, and weights={weights!r} is given too; write them "
                "in one place"
            )
        weights = selected if weights is None else weights
        if not isinstance(weights, list | tuple) or len(weights) != len(self.rewards):
            raise ConfigurationError(
                f"weighted: weights must be one number for each of the {len(self.rewards)} rewards, got {weights!r}"
            )
        self.weights = [checked_number(f"weighted: weights[{i}]", w, "finite") for i, w in enumerate(weights)]
        self._names = unique_names([reward_name(reward) for reward in self.rewards])

    def _children(self) -> Sequence[Callable[..., Any]]:
        return self.rewards

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        """`B` sums, or None where all rewards gave None. All rewards get all columns."""
        said = _all_child_scores(self.__name__, self.rewards, completions, kwargs)
        return [self._sum(scores, row) for row, scores in enumerate(said)]

    def _sum(self, scores: Sequence[float | None], row: int) -> float | None:
        said = [(weight, score) for weight, score in zip(self.weights, scores, strict=True) if score is not None]
        if not said:
            return None
        try:
            total = math.fsum(weight * score for weight, score in said)
        except (OverflowError, ValueError):  # the sum of infinite parts, and of infinite parts of both signs
            total = math.inf
        total = _in_range("weighted", total, row)
        named = [(name, weight, score) for name, weight, score in zip(self._names, self.weights, scores, strict=True)]
        return _weighted_parts(total, [(name, weight, score) for name, weight, score in named if score is not None])


class Product(_Combined):
    """Score the product of rewards: each scales the others, and one zero makes it zero.

    None where any of them gives None, even if another gives 0. The parts of a reward are kept under its name
    (`<reward>/<part>`), their scores times the other rewards.

    Args:
        rewards: The rewards. In a selection, selections; a `weight` is a factor.
    """

    __name__ = "product"
    declares = RewardDeclaration(
        takes=("rewards",), conformance={"parameters": {"rewards": ["gsm8k_accuracy", "think_format"]}}
    )

    def __init__(self, rewards: Sequence[Callable[..., Any]]) -> None:
        self.rewards = _checked_children("product", "rewards", rewards)
        self.factor = math.prod(getattr(rewards, "weights", [1.0]))
        self._names = unique_names([reward_name(reward) for reward in self.rewards])

    def _children(self) -> Sequence[Callable[..., Any]]:
        return self.rewards

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        """`B` products, or None where a reward gave None. All rewards get all columns."""
        said = _all_child_scores(self.__name__, self.rewards, completions, kwargs)
        return [self._product(scores, row) for row, scores in enumerate(said)]

    def _product(self, scores: Sequence[float | None], row: int) -> float | None:
        numbers = [float(score) for score in scores if score is not None]
        if len(numbers) < len(scores):
            return None
        total = 0.0 if 0.0 in numbers else _in_range("product", math.prod(numbers, start=self.factor), row)
        if not any(isinstance(score, Parts) for score in scores):
            return total
        others = [math.prod(numbers[:at] + numbers[at + 1 :], start=self.factor) for at in range(len(numbers))]
        parts: list[Part] = []
        for name, factor, score in zip(self._names, others, scores, strict=True):
            parts += _scaled(name, factor, score) if isinstance(score, Parts) else []
        return Parts(parts, total)


class Gated(_Combined):
    """Score `reward` where `gate` is at least `threshold`, and `otherwise` where it is not.

    For instance, correctness that counts only if the format is right. Where the gate gives None the score is None.
    Where it is open the score is the reward's own, including None and parts. By default both get the whole batch, so
    rewards that compare completions, and their logs, see all of it.

    Args:
        reward: The reward to gate. In a selection, a selection.
        gate: The reward that opens the gate. In a selection, a selection.
        threshold: The least score of `gate` that opens it.
        otherwise: The score where the gate is closed; may be None.
        lazy: Call `reward` only with the rows where the gate is open, and not at all if there are none: saves time.
    """

    __name__ = "gated"
    declares = RewardDeclaration(
        takes=("reward", "gate"), conformance={"parameters": {"reward": "gsm8k_accuracy", "gate": "think_format"}}
    )

    def __init__(
        self,
        reward: Callable[..., Any],
        gate: Callable[..., Any],
        *,
        threshold: float = 1.0,
        otherwise: float | None = 0.0,
        lazy: bool = False,
    ) -> None:
        self.reward = _checked_child("gated", "reward", reward)
        self.gate = _checked_child("gated", "gate", gate)
        self.threshold = checked_number("gated: threshold", threshold, "a finite number")
        self.otherwise = None if otherwise is None else checked_number("gated: otherwise", otherwise, "a finite number")
        self.lazy = checked_flag("gated: lazy", lazy)

    def _children(self) -> Sequence[Callable[..., Any]]:
        return [self.gate, self.reward]

    def start_scoring(self, completions: Sequence[Any], **columns: Any) -> None:
        """Let the gate begin early, and the reward unless its rows depend on the gate."""
        for child in [self.gate] if self.lazy else self._children():
            start_scoring(child, {"completions": completions, **columns})

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        """`B` scores. Both rewards get all columns; with `lazy`, `reward` gets only its rows."""
        columns, count = {"completions": completions, **kwargs}, len(completions)
        gates = _child_scores(self.__name__, self.gate, columns, count)
        scores = [None if gate is None else self.otherwise for gate in gates]
        rows = [row for row, gate in enumerate(gates) if gate is not None and gate >= self.threshold]
        if self.lazy:
            some = _SomeRows(columns, count)
            held = dict(zip(rows, some.scores(self.__name__, self.reward, rows), strict=True))
            some.flush()
        else:
            held = dict(enumerate(_child_scores(self.__name__, self.reward, columns, count)))
        for row in rows:
            scores[row] = held[row]
        return scores


class PerColumn(_Combined):
    """Score each completion with the reward for its row's value in a column.

    For instance, mathematics and code in one dataset, distinguished by a column `task`. Each reward is called once per
    batch with its own rows in order, or not at all if it has none. Scores pass through, including None and parts. What
    it logs is of its own rows; a column that it logs has None in the others.

    Values are compared as text, `str(value)`, because YAML converts keys: the key 1 matches the values 1 and "1", and
    the key `true` the values True and "True". The metric `per_column/<column>/unrouted` is the share of rows without a
    matching key; without a default, a warning lists their values.

    Args:
        column: The column's name.
        rewards: The reward for each of its values. In a selection, selections.
        default: The reward for all other values; without it they get None.

    Raises:
        ConfigurationError: A parameter is of the wrong kind, or two keys are equal as text.
    """

    __name__ = "per_column"
    declares = RewardDeclaration(
        takes=("rewards", "default"),
        conformance={"parameters": {"column": "task", "rewards": {"math": "gsm8k_accuracy"}}},
    )

    def __init__(
        self, column: str, rewards: Mapping[Any, Callable[..., Any]], default: Callable[..., Any] | None = None
    ) -> None:
        if not isinstance(rewards, Mapping) or not rewards:
            raise ConfigurationError(f"per_column: rewards must map values of the column to rewards, got {rewards!r}")
        self.column = checked_text("per_column: column", column)
        self.rewards: dict[str, Callable[..., Any]] = {}
        for value, reward in rewards.items():
            if str(value) in self.rewards:
                raise ConfigurationError(f"per_column: two of the keys {list(rewards)!r} are the value {str(value)!r}")
            self.rewards[str(value)] = _checked_child("per_column", f"rewards[{value!r}]", reward)
        self.default = None if default is None else _checked_child("per_column", "default", default)

    def _children(self) -> Sequence[Callable[..., Any]]:
        return [*self.rewards.values(), *([] if self.default is None else [self.default])]

    def _routes(self, values: Sequence[str]) -> list[tuple[str, Callable[..., Any], list[int]]]:
        """Each reward that has rows, with the name of its route and the rows."""
        rows: dict[str | None, list[int]] = {}
        for row, value in enumerate(values):
            rows.setdefault(value if value in self.rewards else None, []).append(row)
        routes = [(value, reward, rows[value]) for value, reward in self.rewards.items() if value in rows]
        if self.default is not None and None in rows:
            routes.append(("default", self.default, rows[None]))
        return routes

    def _values(self, columns: Mapping[str, Any], count: int) -> list[str]:
        return [str(value) for value in checked_column("per_column", self.column, columns, count)]

    def start_scoring(self, completions: Sequence[Any], **columns: Any) -> None:
        """Let each reward begin early with its rows."""
        count = len(completions)
        for _, reward, rows in self._routes(self._values(columns, count)):
            start_scoring(reward, select_rows({"completions": completions, **columns}, count, rows))

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        """`B` scores, or None where there is no reward or the reward gave None."""
        count = len(completions)
        values = self._values(kwargs, count)
        others = [row for row, value in enumerate(values) if value not in self.rewards]
        if kwargs.get("log_metric") is not None and count:
            kwargs["log_metric"](f"per_column/{self.column}/unrouted", len(others) / count)
        if others and self.default is None:
            unknown = sorted({values[row] for row in others})
            listed = ", ".join(map(shown, unknown[:_VALUES_SHOWN]))
            more = f" and {len(unknown) - _VALUES_SHOWN} more" if len(unknown) > _VALUES_SHOWN else ""
            warnings.warn(
                f"per_column: no reward for {listed}{more} in the column {self.column!r}; these completions get None. "
                f"There are rewards for {sorted(self.rewards)}; add one, or a default.",
                stacklevel=2,
            )
        scores: list[float | None] = [None] * count
        some = _SomeRows({"completions": completions, **kwargs}, count)
        for route, reward, rows in self._routes(values):
            owner = f"{self.__name__}.{route.replace('/', '_')}"
            for row, score in zip(rows, some.scores(owner, reward, rows), strict=True):
                scores[row] = score
        some.flush()
        return scores


def _checked_child(owner: str, parameter: str, child: Any) -> Callable[..., Any]:
    if callable(child) and not isinstance(child, type):
        return child  # type: ignore[no-any-return]
    raise ConfigurationError(
        f"{owner}: {parameter} must be a reward function, got {child!r}. `load_rewards` also takes its name; in Python "
        "pass the function or the object."
    )


def _checked_children(owner: str, parameter: str, children: Any) -> list[Callable[..., Any]]:
    if not isinstance(children, list | tuple) or not children:
        raise ConfigurationError(f"{owner}: {parameter} must be a list of at least one reward, got {children!r}")
    return [_checked_child(owner, f"{parameter}[{index}]", child) for index, child in enumerate(children)]


def _child_scores(owner: str, child: Callable[..., Any], columns: Mapping[str, Any], count: int) -> list[float | None]:
    scores = check_scores(call(child, _logging_apart(owner, child, columns)), count, reward_name(child))
    return [None if score is None or math.isnan(score) else score for score in scores]


def _logging_apart(owner: str, child: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns, with loggers that put the owner's name before the child's: it may be selected elsewhere as well."""
    name, changed = reward_name(child), dict(columns)

    def own(path: str) -> str:  # `outcomes/NAME/right`, `judge/NAME/seconds`; of a column, `NAME_outcome`
        parts = path.split("/")
        for place in reversed(range(len(parts))):
            if parts[place] == name or parts[place].startswith((f"{name}.", f"{name}_")):
                parts[place] = f"{owner}.{parts[place]}"
                break
        return "/".join(parts)

    if (log_metric := columns.get("log_metric")) is not None:
        changed["log_metric"] = lambda path, value: log_metric(own(path), value)
    if (log_extra := columns.get("log_extra")) is not None:
        changed["log_extra"] = lambda column, values: log_extra(own(column), values)
    return changed


def _all_child_scores(
    owner: str, children: Sequence[Callable[..., Any]], completions: Sequence[Any], columns: Mapping[str, Any]
) -> list[tuple[float | None, ...]]:
    """For each completion, each child's score."""
    columns, count = {"completions": completions, **columns}, len(completions)
    return list(zip(*(_child_scores(owner, child, columns, count) for child in children), strict=True))


def _weighted_parts(total: float, said: Sequence[tuple[str, float, float]]) -> float:
    """A weighted sum, with the parts that its rewards consist of if any has some."""
    if not any(isinstance(score, Parts) for *_, score in said):
        return total
    parts: list[Part] = []
    for name, weight, score in said:
        of_reward = score.parts if isinstance(score, Parts) and score.parts else [Part("", float(score))]
        for part in of_reward:
            signed = part.score if part.score is None or weight >= 0 else -part.score
            label = f"{name}/{part.name}" if part.name else name
            parts.append(Part(label, signed, abs(weight) * part.weight, part.places))
    return Parts(parts, total)


def _scaled(name: str, factor: float, score: Parts) -> list[Part]:
    """The parts of one of several rewards, their scores times the others."""
    return [
        part._replace(name=f"{name}/{part.name}", score=None if part.score is None else factor * part.score)
        for part in score.parts
    ]


def _in_range(owner: str, value: float, row: int) -> float:
    """A score computed from others, checked for overflow."""
    if math.isfinite(value):
        return value
    raise PluginOutputError(f"{owner}: the score at row {row} is {value}; the rewards that it is made of are too large")


class _SomeRows:
    """Calls each reward with some of a batch's rows, as if those were the batch. `flush` logs what they logged."""

    def __init__(self, columns: Mapping[str, Any], count: int) -> None:
        self.columns, self.count = columns, count
        self._extra: dict[str, list[Any]] = {}

    def scores(self, owner: str, child: Callable[..., Any], rows: Sequence[int]) -> list[float | None]:
        """A reward's scores of these rows, in order; it is not called without rows."""
        if not rows:
            return []

        def log_extra(column: str, values: Iterable[Any]) -> None:
            whole = self._extra.setdefault(column, [None] * self.count)
            for row, value in zip(rows, values, strict=True):
                whole[row] = value

        cut = select_rows(self.columns, self.count, rows)
        if "log_metric" in self.columns:
            cut["log_metric"] = self.columns["log_metric"]
        if "log_extra" in self.columns:
            cut["log_extra"] = None if self.columns["log_extra"] is None else log_extra
        return _child_scores(owner, child, cut, len(rows))

    def flush(self) -> None:
        """Log the columns that the children logged."""
        for column, values in self._extra.items():
            self.columns["log_extra"](column, values)
