"""Rewards made of other rewards: `weighted`, `gated`, `product` and `per_column`.

Their children are reward functions of any form, including async, and are checked as by the trainer.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from ..errors import ConfigurationError
from ..guard.calls import call, check_scores, reward_name, select_rows, start_scoring, start_workers, unique_names
from ..guard.outcomes import shown
from ..guard.parameters import checked_number, checked_text, column
from ..types import Part, Parts, RewardDeclaration

_Reward = Callable[..., Any]
_CONFORMANCE = {"parameters": {"rewards": ["gsm8k_accuracy", "think_format"]}}


class _Combined:
    __name__: str
    _children: Sequence[Callable[..., Any]]

    def start_workers(self) -> None:
        for child in self._children:
            start_workers(child)

    def start_scoring(self, completions: Sequence[Any], **columns: Any) -> None:
        for child in self._children:
            start_scoring(child, {"completions": completions, **columns})

    def _checked(self, parameter: str, child: Any) -> Callable[..., Any]:
        if callable(child) and not isinstance(child, type):
            return child  # type: ignore[no-any-return]
        raise ConfigurationError(f"{self.__name__}: {parameter} must be a reward function, got {child!r}.")

    def _scores(self, child: Callable[..., Any], columns: Mapping[str, Any], owner: str = "") -> list[float | None]:
        """The scores of a reward inside, which logs under the owner's name and its own."""
        apart = _logging_apart(owner or self.__name__, child, columns)
        scores = check_scores(call(child, apart), len(columns["completions"]), reward_name(child))
        return [None if score is None or math.isnan(score) else score for score in scores]


class _OfList(_Combined):
    def __init__(self, rewards: Sequence[Callable[..., Any]]) -> None:
        if not isinstance(rewards, list | tuple) or not rewards:
            raise ConfigurationError(f"{self.__name__}: rewards must be a list of rewards, got {rewards!r}")
        self.rewards = [self._checked(f"rewards[{index}]", child) for index, child in enumerate(rewards)]
        self._children = self.rewards
        self._names = unique_names([reward_name(reward) for reward in self.rewards])

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        """`B` scores. All rewards get all columns."""
        said = [self._scores(child, {"completions": completions, **kwargs}) for child in self.rewards]
        return [self._combined(scores) for scores in zip(*said, strict=True)]

    def _combined(self, scores: Sequence[float | None]) -> float | None:
        raise NotImplementedError


class Weighted(_OfList):
    """Score the weighted sum of rewards, without those that give None; None where all do.

    For use inside another reward: at the top level, TRL's own sum gives the same. If a reward gives `Parts`, so does
    this: its parts under its name (`<reward>/<part>`), their weights times its weight, and one for each other reward.

    Args:
        rewards: The rewards. In a selection, selections, whose `weight` counts here.
        weights: One finite number per reward if they are not selections; None means those of the selections, or 1.
    """

    __name__ = "weighted"
    declares = RewardDeclaration(takes=("rewards",), conformance=_CONFORMANCE)

    def __init__(self, rewards: Sequence[Callable[..., Any]], weights: Sequence[float] | None = None) -> None:
        super().__init__(rewards)
        selected = list(getattr(rewards, "weights", [1.0] * len(rewards)))
        if weights is not None and any(weight != 1 for weight in selected):
            raise ConfigurationError(f"weighted: the rewards have weights {selected}, and weights={weights!r} too.")
        weights = selected if weights is None else weights
        if not isinstance(weights, list | tuple) or len(weights) != len(self.rewards):
            raise ConfigurationError(f"weighted: weights must be {len(self.rewards)} numbers, got {weights!r}.")
        self.weights = [checked_number(f"weighted: weights[{i}]", w, "finite") for i, w in enumerate(weights)]

    def _combined(self, scores: Sequence[float | None]) -> float | None:
        rows = zip(self._names, self.weights, scores, strict=True)
        said = [(name, weight, score) for name, weight, score in rows if score is not None]
        if not said:
            return None
        total = math.fsum(weight * score for _, weight, score in said)
        if not any(isinstance(score, Parts) for *_, score in said):
            return total
        parts: list[Part] = []
        for name, weight, score in said:
            for part in getattr(score, "parts", ()) or [Part("", float(score))]:
                signed = part.score if part.score is None or weight >= 0 else -part.score
                label = f"{name}/{part.name}" if part.name else name
                parts.append(Part(label, signed, abs(weight) * part.weight, part.places))
        return Parts(parts, total)


class Product(_OfList):
    """Score the product of rewards: each scales the others, and one zero makes it zero; None where any gives None.

    The parts of a reward are kept under its name (`<reward>/<part>`), their scores times the other rewards.

    Args:
        rewards: The rewards. In a selection, selections; a `weight` is a factor.
    """

    __name__ = "product"
    declares = RewardDeclaration(takes=("rewards",), conformance=_CONFORMANCE)

    def __init__(self, rewards: Sequence[Callable[..., Any]]) -> None:
        super().__init__(rewards)
        self.factor = math.prod(getattr(rewards, "weights", [1.0]))

    def _combined(self, scores: Sequence[float | None]) -> float | None:
        numbers = [float(score) for score in scores if score is not None]
        if len(numbers) < len(scores):
            return None
        total = math.prod(numbers, start=self.factor)
        if not any(isinstance(score, Parts) for score in scores):
            return total
        parts: list[Part] = []
        for at, (name, score) in enumerate(zip(self._names, scores, strict=True)):
            others = math.prod(numbers[:at] + numbers[at + 1 :], start=self.factor)
            for part in getattr(score, "parts", ()):
                scaled = None if part.score is None else others * part.score
                parts.append(part._replace(name=f"{name}/{part.name}", score=scaled))
        return Parts(parts, total)


class Gated(_Combined):
    """Score `reward` where `gate` is at least `threshold`, and `otherwise` where it is not.

    Where the gate gives None, so does this; where it is open, the score is the reward's own. Both get the whole batch.

    Args:
        reward: The reward to gate. In a selection, a selection.
        gate: The reward that opens the gate. In a selection, a selection.
        threshold: The least score of `gate` that opens it.
        otherwise: The score where the gate is closed; may be None.
    """

    __name__ = "gated"
    _example: ClassVar = {"parameters": {"reward": "gsm8k_accuracy", "gate": "think_format"}}
    declares = RewardDeclaration(takes=("reward", "gate"), conformance=_example)

    def __init__(self, reward: _Reward, gate: _Reward, *, threshold: float = 1.0, otherwise: Any = 0.0) -> None:
        self.reward = self._checked("reward", reward)
        self.gate = self._checked("gate", gate)
        self.threshold = checked_number("gated: threshold", threshold, "a finite number")
        self.otherwise = None if otherwise is None else checked_number("gated: otherwise", otherwise, "a finite number")
        self._children = [self.gate, self.reward]

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        """`B` scores. Both rewards get all columns."""
        columns = {"completions": completions, **kwargs}
        scores: list[float | None] = []
        for gate, score in zip(self._scores(self.gate, columns), self._scores(self.reward, columns), strict=True):
            if gate is None:
                scores.append(None)
            else:
                scores.append(score if gate >= self.threshold else self.otherwise)
        return scores


class PerColumn(_Combined):
    """Score each completion with the reward for its row's value in a column.

    Each reward is called once per batch with its own rows in order, or not at all if it has none. Scores pass through,
    including None and parts. A column that it logs has None in other rows.

    Values are compared as text, `str(value)`, because YAML converts keys: the key `true` matches the values True and
    "True". The metric `per_column/<column>/unrouted` is the share of rows without a key; it warns without a default.

    Args:
        column: The column's name.
        rewards: The reward for each of its values. In a selection, selections.
        default: The reward for all other values; without it they get None.
    """

    __name__ = "per_column"
    _example: ClassVar = {"parameters": {"column": "task", "rewards": {"math": "gsm8k_accuracy"}}}
    declares = RewardDeclaration(takes=("rewards", "default"), conformance=_example)

    def __init__(self, column: str, rewards: Mapping[Any, _Reward], default: _Reward | None = None) -> None:
        if not isinstance(rewards, Mapping) or not rewards:
            raise ConfigurationError(f"per_column: rewards must map values of the column to rewards, got {rewards!r}")
        self.column = checked_text("per_column: column", column)
        self.rewards = {str(value): self._checked(f"rewards[{value!r}]", one) for value, one in rewards.items()}
        if len(self.rewards) < len(rewards):
            raise ConfigurationError(f"per_column: two keys of rewards are the same text: {list(rewards)!r}")
        self.default = None if default is None else self._checked("default", default)
        self._children = [reward for reward in (*self.rewards.values(), self.default) if reward is not None]

    def _routes(self, columns: Mapping[str, Any], count: int) -> Iterator[tuple[str | None, Any, list[int]]]:
        """Each value that has a reward, and None for all others, with the reward and its rows, if it has any."""
        rows: dict[str | None, list[int]] = {value: [] for value in (*self.rewards, None)}
        for row, value in enumerate(map(str, column("per_column", self.column, columns, count))):
            rows[value if value in self.rewards else None].append(row)
        for route, some in rows.items():
            if some:
                yield route, self.default if route is None else self.rewards[route], some

    def start_scoring(self, completions: Sequence[Any], **columns: Any) -> None:
        count = len(completions)
        for _, reward, rows in self._routes(columns, count):
            start_scoring(reward, select_rows({"completions": completions, **columns}, count, rows))

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        """`B` scores, or None where there is no reward or the reward gave None."""
        count = len(completions)
        scores: list[float | None] = [None] * count
        logged: dict[str, list[Any]] = {}
        unrouted = 0
        for route, reward, rows in self._routes(kwargs, count):
            unrouted = len(rows) if route is None else unrouted
            if reward is None:
                unknown = sorted({str(kwargs[self.column][row]) for row in rows})
                warnings.warn(
                    f"per_column: no reward for {', '.join(map(shown, unknown[:10]))} ({len(unknown)} values) in the "
                    f"column {self.column!r}, which get None; there are rewards for {sorted(self.rewards)}.",
                    stacklevel=2,
                )
                continue
            cut = select_rows({"completions": completions, **kwargs}, count, rows)
            cut |= {name: kwargs[name] for name in ("log_metric", "log_extra") if name in kwargs}
            if cut.get("log_extra") is not None:

                def log_rows(name: str, values: Iterable[Any], rows: Sequence[int] = rows) -> None:
                    whole = logged.setdefault(name, [None] * count)
                    for row, value in zip(rows, values, strict=True):
                        whole[row] = value

                cut["log_extra"] = log_rows
            owner = f"{self.__name__}.{(route or 'default').replace('/', '_')}"
            for row, score in zip(rows, self._scores(reward, cut, owner), strict=True):
                scores[row] = score
        for name, values in logged.items():
            kwargs["log_extra"](name, values)
        if kwargs.get("log_metric") is not None and count:
            kwargs["log_metric"](f"per_column/{self.column}/unrouted", unrouted / count)
        return scores


def _logging_apart(owner: str, child: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns, with loggers that put the owner's name before the child's: it may be selected elsewhere as well."""
    name = reward_name(child)
    changed = dict(columns)

    def own(path: str) -> str:  # `outcomes/NAME/right`, `judge/NAME/seconds`; of a column, `NAME_outcome`
        last = rf"(.*/)?({re.escape(name)}(?:[._][^/]*)?)(?=/|\Z)"
        return re.sub(rf"^{last}", lambda found: f"{found[1] or ''}{owner}.{found[2]}", path)

    if (log_metric := columns.get("log_metric")) is not None:
        changed["log_metric"] = lambda path, value: log_metric(own(path), value)
    if (log_extra := columns.get("log_extra")) is not None:
        changed["log_extra"] = lambda column, values: log_extra(own(column), values)
    return changed
