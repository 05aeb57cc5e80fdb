"""The results of a replay: everything that the command prints, as data classes with `plain()`, and how it is computed.

A share of gradient mass is a part of `Σ weight · |advantage|` over all tokens of all completions. An undefined number
(a share of nothing, a correlation of constants) is None.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...credit.flow import plugin_label
from ...errors import ConfigurationError
from .running import BatchResult
from .saved import SavedBatch, columns_of, join_key, number_of
from .selections import ReplaySelection
from .tokens import Tokens


@dataclass(frozen=True, kw_only=True)
class RewardNumbers:
    """One reward of a selection over all completions.

    Attributes:
        name: Its name.
        mean: Mean of its values.
        std: Their standard deviation, with n - 1.
        none: Completions to which it gave no value.
    """

    name: str
    mean: float | None
    std: float | None
    none: int


@dataclass(frozen=True, kw_only=True)
class SelectionNumbers:
    """One selection over all completions.

    Attributes:
        name: Its name.
        rewards: Its rewards.
        hooks: Its advantage hooks.
        aggregation: Its loss aggregation.
        aggregation_of: The `loss_type` that the aggregation stands for; None if the selection names an aggregation.
        reward_mean: Mean of the weighted sums of the rewards.
        reward_std: Their standard deviation.
        without_signal: Share of the groups without signal, as training logs it in `groups/zero_variance`.
        positive_mass: Share of the gradient mass on tokens with an advantage above 0.
    """

    name: str
    rewards: Sequence[RewardNumbers]
    hooks: Sequence[str]
    aggregation: str
    aggregation_of: str | None
    reward_mean: float | None
    reward_std: float | None
    without_signal: float | None
    positive_mass: float | None


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some of the completions, or a tenth of each.

    Attributes:
        name: Which.
        completions: Their number; None for tenths.
        tokens: Their share of the live tokens; None for tenths.
        mass: By selection, their share of the gradient mass.
    """

    name: str
    completions: int | None = None
    tokens: float | None = None
    mass: Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One completion under one selection: reward, mean advantage, total weight, share of the gradient mass."""

    reward: float | None
    advantage: float
    weight: float
    mass: float | None


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """A completion that two selections treat differently.

    Attributes:
        step: The step at which it was saved.
        group: Its group, by the file's number or a running one.
        member: Its number within the group.
        tokens: Its live tokens.
        prompt: The prompt as text; messages as JSON.
        completion: The completion's text.
        base: Under the base.
        other: Under the other selection.
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
class Pair:
    """The base and another selection.

    Attributes:
        base: Name of the base.
        other: Name of the other.
        same_sign: Share of the completions whose advantages have the same sign, or are 0 under both.
        moved: Share of the gradient mass that moves to other completions: half the sum of the absolute differences.
        moved_between_tokens: The same, between tokens.
        disagreements: The completions whose shares of the gradient mass differ most, largest difference first.
    """

    base: str
    other: str
    same_sign: float
    moved: float | None
    moved_between_tokens: float | None
    disagreements: Sequence[Disagreement]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A comparison of selections of plugins on the same saved completions.

    Attributes:
        source: The file or folder.
        tokens_are: "records", "tokenizer" or "words".
        notes: How the files were read, and what the numbers leave out; one sentence each.
        steps: The steps replayed, one for each generation batch.
        completions: Their number.
        groups: Their number.
        num_generations: Completions per group; the smallest number if batches differ.
        tokens: Live tokens under the base.
        correct_by: The reward or column that says which completions are right; None if there is none.
        right_at: The least value of a right completion.
        selections: The numbers of each; the first is the base.
        pairs: The base with each of the others.
        by_length: Quarters of the completions by their live tokens.
        by_correctness: Right and wrong ones, and unjudged ones; empty without `correct_by`.
        by_position: Tenths of every completion.
        batches: What was replayed; not in `plain()`.
        results: By selection, its result on each batch, token by token; not in `plain()`.
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
    results: Mapping[str, Sequence[BatchResult]] = field(default_factory=dict, repr=False)

    def plain(self) -> dict[str, Any]:
        """Everything but the tensors, as JSON can hold it."""
        whole = dataclasses.asdict(dataclasses.replace(self, batches=(), results={}))
        return {name: value for name, value in whole.items() if name not in ("batches", "results")}


# ----------------------------------------------------------------------------------------- from batches to numbers


QUARTERS = ("shortest quarter", "second quarter", "third quarter", "longest quarter")
TENTHS = 10
_NOTHING = 1e-3
"""Advantages up to this size count as zero: they are rounding errors."""
_SAME = 1e-6
"""Shares of the mass that differ by no more, relative to the largest, count as equal."""


@dataclass(frozen=True)
class SelectionTotals:
    """One selection's numbers of all `N` completions, in float64."""

    selection: ReplaySelection
    rewards_N: torch.Tensor
    advantages_N: torch.Tensor
    weights_N: torch.Tensor
    lengths_N: torch.Tensor
    mass_N: torch.Tensor
    positive_N: torch.Tensor
    tenths_N: torch.Tensor

    @property
    def shares_N(self) -> torch.Tensor:
        """Each completion's share of the gradient mass; zeros if there is none."""
        return self.mass_N / self.mass_N.sum().clamp(min=torch.finfo(torch.float64).tiny)


def totals_of(selection: ReplaySelection, results: Sequence[BatchResult], tokens: Sequence[Tokens]) -> SelectionTotals:
    """Put the batches of one selection together."""

    def sums(name: str) -> torch.Tensor:
        return torch.cat([getattr(one, name).double().sum(dim=1) for one in results])

    positive = [one.mass_B_T.where(one.advantages_B_T > 0, 0.0).double().sum(dim=1) for one in results]
    both = zip(results, tokens, strict=True)
    return SelectionTotals(
        selection=selection,
        rewards_N=torch.cat([one.rewards_B for one in results]).double(),
        advantages_N=torch.cat([one.advantages_B for one in results]).double(),
        weights_N=sums("weights_B_T"),
        lengths_N=sums("mask_B_T"),
        mass_N=sums("mass_B_T"),
        positive_N=torch.cat(positive),
        tenths_N=torch.cat([by_tenth(one.mass_B_T, of_batch.completion_mask_B_T) for one, of_batch in both]),
    )


def selection_numbers(totals: SelectionTotals, results: Sequence[BatchResult]) -> SelectionNumbers:
    """The numbers of one selection."""
    selection = totals.selection
    mean, std = _mean_and_std(totals.rewards_N)
    signal = torch.cat([one.signal_Q for one in results]).double()
    return SelectionNumbers(
        name=selection.name,
        rewards=_rewards(results),
        hooks=tuple(plugin_label(hook) for hook in selection.hooks),
        aggregation=plugin_label(selection.aggregation),
        aggregation_of=None if selection.own_aggregation else selection.settings["loss_type"],
        reward_mean=mean,
        reward_std=std,
        without_signal=1.0 - float(signal.mean()),
        positive_mass=share(totals.positive_N, totals.mass_N),
    )


def by_length(all_totals: Sequence[SelectionTotals]) -> list[Part]:
    """Quarters of the completions by their live tokens under the base."""
    lengths_N = all_totals[0].lengths_N
    quarters_N = quarters(lengths_N)
    parts = []
    for number, name in enumerate(QUARTERS):
        chosen_N = quarters_N == number
        if chosen_N.any():
            low, high = int(lengths_N[chosen_N].min()), int(lengths_N[chosen_N].max())
            name = f"{name} ({low:,} tokens)" if low == high else f"{name} ({low:,} to {high:,} tokens)"
        parts.append(_part(name, chosen_N, all_totals))
    return parts


def by_correctness(
    values: Sequence[float | None], right_at: float, all_totals: Sequence[SelectionTotals]
) -> list[Part]:
    """Right and wrong completions, and those without a value, if any."""
    values_N = torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)
    chosen = {"right": values_N >= right_at, "wrong": values_N < right_at, "no value": values_N.isnan()}
    parts = [_part(name, chosen_N, all_totals) for name, chosen_N in chosen.items()]
    return [part for part in parts if part.name != "no value" or part.completions]


def by_position(all_totals: Sequence[SelectionTotals]) -> list[Part]:
    """Tenths of every completion."""
    parts = []
    for tenth in range(TENTHS):
        mass = {one.selection.name: share(one.tenths_N[:, tenth], one.mass_N) for one in all_totals}
        parts.append(Part(name=f"position {tenth * 10} to {tenth * 10 + 10} %", mass=mass))
    return parts


def correct_values(name: str, batches: Sequence[SavedBatch], results: Sequence[BatchResult]) -> list[float | None]:
    """A number for each completion: a reward's of the first selection if it has it, else a saved column's.

    Raises:
        ConfigurationError: There is no such reward or column, or its values are not numbers.
    """
    values: list[float | None] = []
    for batch, result in zip(batches, results, strict=True):
        rewards = dict(zip(result.reward_names, result.rewards_B_K.unbind(dim=1), strict=True))
        found = rewards[name].tolist() if name in rewards else columns_of(batch).get(name)
        if found is None:
            raise ConfigurationError(
                f"--correct {name!r} is no reward of the base and no column of {batch.where}; there are: "
                f"{', '.join(sorted({*rewards, *columns_of(batch)})) or 'none'}."
            )
        numbers = [number_of(value) for value in found]
        if found and all(value is not None and not isinstance(value, int | float) for value in found):
            raise ConfigurationError(
                f"--correct {name!r}: the column holds {found[0]!r:.60}, expected numbers or true/false."
            )
        values += numbers
    return values


def pair(
    base: SelectionTotals,
    other: SelectionTotals,
    results: Mapping[str, Sequence[BatchResult]],
    batches: Sequence[SavedBatch],
    show: int,
) -> Pair:
    """The base and another selection: how far they agree, and where not."""
    names = [one.selection.name for one in (base, other)]
    masses = [one.mass_N.sum() for one in (base, other)]
    differences_N = (base.shares_N - other.shares_N).abs()
    # In multiples of the rounding error, so that equal differences keep the order of the file.
    steps_N = (differences_N / (_SAME * base.shares_N.max())).round().nan_to_num(nan=0.0)
    has_mass = all(mass > 0 for mass in masses)
    worst = steps_N.argsort(descending=True, stable=True)[:show].tolist() if has_mass else []
    rows = [(batch, row) for batch in batches for row in range(len(batch.texts))]
    one_sign, other_sign = (
        one.advantages_N.masked_fill(one.advantages_N.abs() <= _NOTHING, 0.0).sign() for one in (base, other)
    )
    between_tokens = sum(
        float((a.mass_B_T.double() / masses[0] - b.mass_B_T.double() / masses[1]).abs().sum())
        for a, b in zip(*(results[name] for name in names), strict=True)
    )

    def disagreement(index: int) -> Disagreement:
        batch, row = rows[index]
        return Disagreement(
            step=batch.step,
            group=str(batch.group_names[row]),
            member=row % batch.num_generations,
            tokens=int(base.lengths_N[index]),
            prompt=join_key(batch.prompts[row]),
            completion=batch.texts[row],
            base=_side(base, index),
            other=_side(other, index),
        )

    return Pair(
        base=names[0],
        other=names[1],
        same_sign=float((one_sign == other_sign).double().mean()),
        moved=float(differences_N.sum()) / 2 if has_mass else None,
        moved_between_tokens=between_tokens / 2 if has_mass else None,
        disagreements=[disagreement(index) for index in worst if steps_N[index] > 0],
    )


def _part(name: str, chosen_N: torch.Tensor, all_totals: Sequence[SelectionTotals]) -> Part:
    lengths_N = all_totals[0].lengths_N
    return Part(
        name=name,
        completions=int(chosen_N.sum()),
        tokens=share(lengths_N[chosen_N], lengths_N),
        mass={one.selection.name: share(one.mass_N[chosen_N], one.mass_N) for one in all_totals},
    )


def _rewards(results: Sequence[BatchResult]) -> list[RewardNumbers]:
    numbers = []
    for name in dict.fromkeys(name for one in results for name in one.reward_names):
        having = [one for one in results if name in one.reward_names]
        values = torch.cat([one.rewards_B_K[:, list(one.reward_names).index(name)] for one in having]).double()
        mean, std = _mean_and_std(values)
        numbers.append(RewardNumbers(name=name, mean=mean, std=std, none=int(values.isnan().sum())))
    return numbers


def _mean_and_std(values: torch.Tensor) -> tuple[float | None, float | None]:
    known = values[~values.isnan()]
    return (float(known.mean()) if len(known) else None, float(known.std()) if len(known) > 1 else None)


def _side(totals: SelectionTotals, index: int) -> Side:
    reward = float(totals.rewards_N[index])
    return Side(
        reward=None if math.isnan(reward) else reward,
        advantage=float(totals.advantages_N[index]),
        weight=float(totals.weights_N[index]),
        mass=float(totals.shares_N[index]),
    )


# ------------------------------------------------------------------------------------------------ shares and ranks


def by_tenth(mass_B_T: torch.Tensor, completion_mask_B_T: torch.Tensor) -> torch.Tensor:
    """The mass in each tenth of each completion, `(B, 10)`; a token belongs to the tenth in which its middle lies."""
    middles_T = torch.arange(mass_B_T.size(1)) + 0.5
    lengths_B_1 = completion_mask_B_T.sum(dim=1, keepdim=True).clamp(min=1)
    tenths_B_T = (TENTHS * middles_T / lengths_B_1).long().clamp(max=TENTHS - 1)
    return torch.zeros(len(mass_B_T), TENTHS, dtype=torch.float64).scatter_add_(1, tenths_B_T, mass_B_T.double())


def quarters(lengths_N: torch.Tensor) -> torch.Tensor:
    """The quarter of the completions that each belongs to by length, 0 to 3; -1 for those without a live token.

    A length on a bound belongs to the shorter quarter, so completions of one length are all in one.
    """
    live_N = lengths_N > 0
    if not live_N.any():
        return torch.full_like(lengths_N, -1).long()
    bounds = torch.quantile(lengths_N[live_N].double(), torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    return torch.where(live_N, torch.bucketize(lengths_N.double(), bounds), -1)


def share(part: torch.Tensor, whole: torch.Tensor) -> float | None:
    """A part's share of a sum; None if the sum is 0."""
    total = float(whole.sum())
    return float(part.sum()) / total if total > 0 else None
