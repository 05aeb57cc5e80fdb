"""From what selections made of each batch to the `Comparison`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...credit.flow import plugin_label
from ...credit.signal import ROUNDING
from ...errors import ConfigurationError
from . import shares
from .comparison import Disagreement, Pair, Part, RankingFlip, RewardNumbers, SelectionNumbers, Side
from .files import number_of
from .played import Played
from .saved import SavedBatch, join_key
from .selections import ReplaySelection
from .tokens import Tokens

_QUARTERS = ("shortest quarter", "second quarter", "third quarter", "longest quarter")
_SAME = 1e-6
"""Shares of the mass that differ by no more, relative to the largest, differ by rounding."""


@dataclass(frozen=True)
class Totals:
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
        """Each completion's share of the gradient mass; zeros where there is none."""
        return self.mass_N / self.mass_N.sum().clamp(min=torch.finfo(torch.float64).tiny)


def totals_of(selection: ReplaySelection, played: Sequence[Played], tokens: Sequence[Tokens]) -> Totals:
    """Put the batches of one selection together."""
    positive = [one.mass_B_T.where(one.advantages_B_T > 0, 0.0).double().sum(dim=1) for one in played]
    masks = [of_batch.completion_mask_B_T for of_batch in tokens]
    return Totals(
        selection=selection,
        rewards_N=torch.cat([one.rewards_B for one in played]).double(),
        advantages_N=torch.cat([one.advantages_B for one in played]).double(),
        weights_N=torch.cat([one.weights_B_T.double().sum(dim=1) for one in played]),
        lengths_N=torch.cat([one.mask_B_T.sum(dim=1) for one in played]).double(),
        mass_N=torch.cat([one.mass_B_T.double().sum(dim=1) for one in played]),
        positive_N=torch.cat(positive),
        tenths_N=torch.cat([shares.by_position(one.mass_B_T, mask) for one, mask in zip(played, masks, strict=True)]),
    )


def selection_numbers(totals: Totals, played: Sequence[Played]) -> SelectionNumbers:
    """The numbers of one selection."""
    selection = totals.selection
    mean, std = _mean_and_std(totals.rewards_N)
    signal = torch.cat([one.signal_Q for one in played]).double()
    return SelectionNumbers(
        name=selection.name,
        rewards=_rewards(played),
        hooks=tuple(selection.hook_names),
        aggregation=plugin_label(selection.aggregation),
        aggregation_of=None if selection.own_aggregation else selection.settings["loss_type"],
        reward_mean=mean,
        reward_std=std,
        without_signal=1.0 - float(signal.mean()),
        advantage_std=_mean_and_std(totals.advantages_N)[1],
        positive_mass=shares.share(totals.positive_N, totals.mass_N),
        total_weight=float(totals.weights_N.sum()) / len(played),
    )


def by_length(all_totals: Sequence[Totals]) -> list[Part]:
    """Quarters of the completions by their live tokens under the base."""
    lengths_N = all_totals[0].lengths_N
    quarters_N = shares.quarters(lengths_N)
    parts = []
    for number, name in enumerate(_QUARTERS):
        chosen_N = quarters_N == number
        if chosen_N.any():
            low, high = int(lengths_N[chosen_N].min()), int(lengths_N[chosen_N].max())
            name = f"{name} ({low:,} tokens)" if low == high else f"{name} ({low:,} to {high:,} tokens)"
        parts.append(_part(name, chosen_N, all_totals))
    return parts


def by_correctness(values: Sequence[float | None], right_at: float, all_totals: Sequence[Totals]) -> list[Part]:
    """Right and wrong completions, and those without a value where there are any."""
    values_N = torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)
    chosen = {"right": values_N >= right_at, "wrong": values_N < right_at, "no value": values_N.isnan()}
    parts = [_part(name, chosen_N, all_totals) for name, chosen_N in chosen.items()]
    return [part for part in parts if part.name != "no value" or part.completions]


def by_position(all_totals: Sequence[Totals]) -> list[Part]:
    """Tenths of every completion."""
    parts = []
    for tenth in range(shares.TENTHS):
        mass = {one.selection.name: shares.share(one.tenths_N[:, tenth], one.mass_N) for one in all_totals}
        parts.append(Part(name=f"{tenth * 10} to {tenth * 10 + 10} %", mass=mass))
    return parts


def correct_values(name: str, batches: Sequence[SavedBatch], played: Sequence[Sequence[Played]]) -> list[float | None]:
    """A number for each completion: a reward's of the first selection that has it, else a saved one, else a column.

    Args:
        name: Of the reward or the column.
        batches: What was replayed.
        played: For each selection, what it made of each batch.

    Raises:
        ConfigurationError: There is no such reward or column, or its values are no numbers.
    """
    for of_batches in played:
        if all(name in one.reward_names for one in of_batches):
            return [
                None if math.isnan(value) else value
                for one in of_batches
                for value in one.rewards_B_K[:, list(one.reward_names).index(name)].tolist()
            ]
    values: list[float | None] = []
    for batch in batches:
        found: Sequence[Any] | None = batch.rewards.get(name, batch.columns.get(name))
        if found is None:
            known = sorted({*batch.rewards, *batch.columns, *(n for of in played for n in of[0].reward_names)})
            raise ConfigurationError(
                f"--correct {name!r} is no reward of a selection and no column of {batch.where}; there are: "
                f"{', '.join(known) or 'none'}."
            )
        numbers = [number_of(value) for value in found]
        if all(number is None for number in numbers):
            raise ConfigurationError(
                f"--correct {name!r}: the column holds {found[0]!r:.60}, expected numbers or true/false."
            )
        values += numbers
    return values


def pair(
    base: Totals, other: Totals, played: Mapping[str, Sequence[Played]], batches: Sequence[SavedBatch], show: int
) -> Pair:
    """The base and another selection: how far they agree, and where not."""
    names = base.selection.name, other.selection.name
    has_mass = bool(base.mass_N.sum() > 0) and bool(other.mass_N.sum() > 0)
    differences_N = (base.shares_N - other.shares_N).abs()
    # In whole multiples of what is rounding, so that the order of equal differences is that of the file.
    steps_N = (differences_N / (_SAME * base.shares_N.max())).round() if has_mass else torch.zeros_like(differences_N)
    worst = steps_N.argsort(descending=True, stable=True)[:show].tolist()
    places = [(number, row) for number, batch in enumerate(batches) for row in range(len(batch.texts))]
    first_rows = _first_rows(batches)
    flips = _flips(base, other, batches)
    signs = [shares.signs(one.advantages_N, ROUNDING) for one in (base, other)]
    return Pair(
        base=names[0],
        other=names[1],
        pearson=shares.pearson(base.advantages_N, other.advantages_N),
        spearman=shares.spearman(base.advantages_N, other.advantages_N),
        same_sign=float((signs[0] == signs[1]).double().mean()),
        moved=float(differences_N.sum()) / 2 if has_mass else None,
        moved_between_tokens=_moved_between_tokens(base, other, played) if has_mass else None,
        groups_flipped=sum(pairs > 0 for pairs, *_ in flips) / len(flips),
        disagreements=[
            _disagreement(batches[places[place][0]], places[place][1], place, base, other)
            for place in worst
            if steps_N[place] > 0
        ],
        flips=[
            _ranking_flip(batches[number], group, pairs, first_rows[number], base, other)
            for pairs, number, group in sorted(flips, key=lambda flip: -flip[0])[:show]
            if pairs
        ],
    )


def _part(name: str, chosen_N: torch.Tensor, all_totals: Sequence[Totals]) -> Part:
    lengths_N = all_totals[0].lengths_N
    some = bool(chosen_N.any())
    advantage, weight = {}, {}
    for one in all_totals:
        mean_weight = float(one.weights_N.mean())
        advantage[one.selection.name] = float(one.advantages_N[chosen_N].mean()) if some else None
        relative = float(one.weights_N[chosen_N].mean()) / mean_weight if some and mean_weight > 0 else None
        weight[one.selection.name] = relative
    return Part(
        name=name,
        completions=int(chosen_N.sum()),
        tokens=shares.share(lengths_N[chosen_N], lengths_N),
        mass={one.selection.name: shares.share(one.mass_N[chosen_N], one.mass_N) for one in all_totals},
        advantage=advantage,
        weight=weight,
    )


def _rewards(played: Sequence[Played]) -> list[RewardNumbers]:
    names = dict.fromkeys(name for one in played for name in one.reward_names)
    numbers = []
    for name in names:
        having = [one for one in played if name in one.reward_names]
        values = torch.cat([one.rewards_B_K[:, list(one.reward_names).index(name)] for one in having]).double()
        outcomes: Counter[str] = Counter()
        for one in having:
            outcomes.update(one.outcomes.get(name, {}))
        mean, std = _mean_and_std(values)
        numbers.append(
            RewardNumbers(name=name, mean=mean, std=std, none=int(values.isnan().sum()), outcomes=dict(outcomes))
        )
    return numbers


def _mean_and_std(values: torch.Tensor) -> tuple[float | None, float | None]:
    known = values[~values.isnan()]
    return (float(known.mean()) if len(known) else None, float(known.std()) if len(known) > 1 else None)


def _first_rows(batches: Sequence[SavedBatch]) -> list[int]:
    firsts, first = [], 0
    for batch in batches:
        firsts.append(first)
        first += len(batch.texts)
    return firsts


def _flips(base: Totals, other: Totals, batches: Sequence[SavedBatch]) -> list[tuple[int, int, int]]:
    """For each group the pairs that are turned, the number of its batch, and its number there."""
    flips = []
    for number, (batch, first) in enumerate(zip(batches, _first_rows(batches), strict=True)):
        rows = slice(first, first + len(batch.texts))
        both = base.advantages_N[rows], other.advantages_N[rows]
        turned_Q = shares.flipped_pairs(*both, batch.num_generations, ROUNDING)
        flips += [(int(pairs), number, group) for group, pairs in enumerate(turned_Q.tolist())]
    return flips


def _moved_between_tokens(base: Totals, other: Totals, played: Mapping[str, Sequence[Played]]) -> float:
    masses = [one.mass_N.sum() for one in (base, other)]
    both = zip(played[base.selection.name], played[other.selection.name], strict=True)
    return (
        sum(
            float((one.mass_B_T.double() / masses[0] - two.mass_B_T.double() / masses[1]).abs().sum())
            for one, two in both
        )
        / 2
    )


def _disagreement(batch: SavedBatch, row: int, place: int, base: Totals, other: Totals) -> Disagreement:
    return Disagreement(
        step=batch.step,
        group=str(batch.group_names[row]),
        member=row % batch.num_generations,
        tokens=int(base.lengths_N[place]),
        prompt=join_key(batch.prompts[row]),
        completion=batch.texts[row],
        base=_side(base, place),
        other=_side(other, place),
    )


def _side(totals: Totals, place: int) -> Side:
    reward = float(totals.rewards_N[place])
    return Side(
        reward=None if math.isnan(reward) else reward,
        advantage=float(totals.advantages_N[place]),
        weight=float(totals.weights_N[place]),
        mass=float(totals.shares_N[place]),
    )


def _ranking_flip(
    batch: SavedBatch, group: int, pairs: int, first_row: int, base: Totals, other: Totals
) -> RankingFlip:
    row = group * batch.num_generations
    rows = slice(first_row + row, first_row + row + batch.num_generations)
    return RankingFlip(
        step=batch.step,
        group=str(batch.group_names[row]),
        pairs=pairs,
        prompt=join_key(batch.prompts[row]),
        base=base.advantages_N[rows].tolist(),
        other=other.advantages_N[rows].tolist(),
    )
