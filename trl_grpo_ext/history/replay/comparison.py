"""What a replay found: everything that the command prints, as data classes with `plain()`.

A share of gradient mass is a part of `Σ weight · |advantage|` over all tokens of all completions. A number that is not
defined (a share of nothing, the correlation of what does not vary) is None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .played import Played
    from .saved import SavedBatch

_NOT_PLAIN = ("batches", "played")


@dataclass(frozen=True, kw_only=True)
class RewardNumbers:
    """One reward of a selection over all completions.

    Attributes:
        name: Its name.
        mean: Mean of its values.
        std: Their standard deviation, with n - 1.
        none: Completions to which it gave no value.
        outcomes: How many completions had which outcome, where the reward tells.
    """

    name: str
    mean: float | None
    std: float | None
    none: int
    outcomes: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class SelectionNumbers:
    """One selection over all completions.

    Attributes:
        name: Its name.
        rewards: Its rewards.
        hooks: Its advantage hooks.
        aggregation: Its loss aggregation.
        aggregation_of: The `loss_type` that the aggregation stands for; None where the selection names one.
        reward_mean: Mean of the weighted sums of the rewards.
        reward_std: Their standard deviation.
        without_signal: Share of the groups without signal: equal rewards, and no hook that made a difference.
        advantage_std: Standard deviation of the completions' advantages.
        positive_mass: Share of the gradient mass on tokens with an advantage above 0.
        total_weight: Sum of all weights, over the number of generation batches.
    """

    name: str
    rewards: Sequence[RewardNumbers]
    hooks: Sequence[str]
    aggregation: str
    aggregation_of: str | None
    reward_mean: float | None
    reward_std: float | None
    without_signal: float | None
    advantage_std: float | None
    positive_mass: float | None
    total_weight: float


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some of the completions, or a tenth of each.

    Attributes:
        name: Which.
        completions: How many there are; None for tenths.
        tokens: Their share of the live tokens; None for tenths.
        mass: By selection, their share of the gradient mass.
        advantage: By selection, the mean advantage of these completions; empty for tenths.
        weight: By selection, the mean total weight of one of them, relative to the mean over all completions; empty for
            tenths.
    """

    name: str
    completions: int | None = None
    tokens: float | None = None
    mass: Mapping[str, float | None]
    advantage: Mapping[str, float | None] = field(default_factory=dict)
    weight: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Side:
    """What one selection made of one completion: reward, mean advantage, total weight, share of the gradient mass."""

    reward: float | None
    advantage: float
    weight: float
    mass: float | None


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """One completion of which two selections make something different.

    Attributes:
        step: The step at which it was saved.
        group: Its group, by the file's number or a running one.
        member: Its number within the group.
        tokens: Its live tokens.
        prompt: The prompt as text; messages as JSON.
        completion: The completion's text.
        base: What the base made of it.
        other: What the other selection made of it.
    """

    step: int
    group: str
    member: int
    tokens: int
    prompt: str
    completion: str
    base: Side
    other: Side


@dataclass(frozen=True, kw_only=True)
class RankingFlip:
    """A group whose completions two selections put into another order.

    Attributes:
        step: The step at which it was saved.
        group: The group, by the file's number or a running one.
        pairs: How many pairs of its completions stand the other way round.
        prompt: The prompt as text.
        base: The members' advantages under the base.
        other: The members' advantages under the other selection.
    """

    step: int
    group: str
    pairs: int
    prompt: str
    base: Sequence[float]
    other: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The base and another selection.

    Attributes:
        base: Name of the base.
        other: Name of the other.
        pearson: Pearson's correlation of the completions' advantages.
        spearman: Spearman's.
        same_sign: Share of the completions whose advantages have the same sign, none included.
        moved: Share of the gradient mass that lies on other completions: half the sum of the absolute differences.
        moved_between_tokens: The same, between tokens.
        groups_flipped: Share of the groups in which a pair of completions stands the other way round.
        disagreements: The completions whose shares of the gradient mass differ most, the greatest difference first.
        flips: The groups with most pairs turned, most first.
    """

    base: str
    other: str
    pearson: float | None
    spearman: float | None
    same_sign: float
    moved: float | None
    moved_between_tokens: float | None
    groups_flipped: float
    disagreements: Sequence[Disagreement]
    flips: Sequence[RankingFlip]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What selections of plugins make of the same saved completions.

    Attributes:
        source: The file or folder.
        tokens_are: "records", "tokenizer" or "words".
        notes: How the files were understood, and what the numbers leave out; one sentence each.
        steps: The steps replayed, one for each generation batch.
        completions: How many.
        groups: How many.
        num_generations: The number of completions of a group; the smallest where batches differ.
        tokens: Live tokens under the base.
        correct_by: The reward or column that says which completions are right; None where there is none.
        right_at: From which value on a completion is right.
        selections: The numbers of each; the first is the base.
        pairs: The base with each of the others.
        by_length: Quarters of the completions by their live tokens.
        by_correctness: Right and wrong ones, and those of which nothing is known; empty without `correct_by`.
        by_position: Tenths of every completion.
        batches: What was replayed; not in `plain()`.
        played: By selection, what it made of each batch, token by token; not in `plain()`.
    """

    source: str
    tokens_are: str
    notes: Sequence[str]
    steps: Sequence[int]
    completions: int
    groups: int
    num_generations: int
    tokens: int
    correct_by: str | None
    right_at: float
    selections: Sequence[SelectionNumbers]
    pairs: Sequence[Pair]
    by_length: Sequence[Part]
    by_correctness: Sequence[Part]
    by_position: Sequence[Part]
    batches: Sequence[SavedBatch] = field(default=(), repr=False)
    played: Mapping[str, Sequence[Played]] = field(default_factory=dict, repr=False)

    def plain(self) -> dict[str, Any]:
        """Everything but the tensors, as JSON can hold it."""
        return {
            field_.name: _plain(getattr(self, field_.name))
            for field_ in dataclasses.fields(self)
            if field_.name not in _NOT_PLAIN
        }


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field_.name: _plain(getattr(value, field_.name)) for field_ in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
