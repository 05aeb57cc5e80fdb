"""What a comparison found, as data classes, and what moves between the selections: who gains and who loses.

A share of gradient mass is a part of `Σ weight · |advantage|` over all tokens of all completions. An undefined number
(a share of nothing, a correlation of constants) is None.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .running import BatchResult
from .saved import SavedBatch, number_of
from .statistics import Estimate


@dataclass(frozen=True, kw_only=True)
class SelectionNumbers:
    """One selection over all completions."""

    name: str
    reward_mean: float | None  # of the weighted sums
    without_signal: float | None  # share of the groups, after hooks at the forward stage too
    positive_mass: float | None  # share of the gradient mass on tokens with an advantage above 0


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some of the completions, with their share of the gradient mass by selection."""

    name: str
    completions: int
    tokens: float | None  # share of the live tokens
    mass: Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The base and another selection, by their names."""

    base: str
    other: str
    same_sign: float  # share of the completions whose advantages have the same sign, or are 0 under both
    moved: float | None  # share of the mass that moves to other completions: half the sum of absolute differences
    moved_between_tokens: float | None  # the same, between tokens
    turned: float | None  # share of the other's mass on tokens that the base pushes the other way


@dataclass(frozen=True, kw_only=True)
class SelectionGradient:
    """The gradient of one selection, with mean `μ` and covariance `Σ` for `Gradients.batch_size` completions.

    The cosines are undefined where the selection, or what it is compared to, shows no signal.
    """

    name: str
    ratio: Estimate  # signal to noise, |μ|² / tr Σ
    worth: Estimate  # how many times more completions plain TRL needs for the same ratio
    to_plain: Estimate  # cosine of the mean gradient to plain TRL's
    to_policy_gradient: Estimate  # cosine of the mean gradient to the policy gradient of the raw reward
    signal_seen: bool  # whether the interval of the ratio lies above 0


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Signal, noise and direction of the selections' gradients. Undefined numbers are None."""

    model: str  # its path or its class
    prompts: int  # groups of one prompt are not independent, so this decides how wide the intervals are
    parameters: int  # trained ones
    dimensions: int  # of the sketch
    sketch_error: float  # bound on the relative standard error of a squared norm; 0 if the sketch is exact
    batch_size: int  # completions of the batch whose ratio is given: the mean of the batches that were read
    selections: Sequence[SelectionGradient]  # plain TRL, the policy gradient, and then each given one
    sketches: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)  # by selection, (groups, k)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A comparison of selections of plugins on the same completions; the first selection is the base."""

    source: str  # the file or folder
    notes: Sequence[str]  # how the files were read, and what the numbers leave out; one sentence each
    steps: Sequence[int]  # that were read, one for each generation batch
    completions: int
    groups: int
    tokens: int  # live ones under the base
    correct_by: str  # the reward that says which completions are right: the base's first
    right_at: float  # the least value of a right completion
    selections: Sequence[SelectionNumbers]
    pairs: Sequence[Pair]  # the base with each of the others
    by_length: Sequence[Part]  # quarters of the completions by their live tokens
    by_correctness: Sequence[Part]  # right and wrong ones, and unjudged ones
    gradients: Gradients | None = None  # None without a model
    batches: Sequence[SavedBatch] = field(default=(), repr=False)
    results: Mapping[str, Sequence[BatchResult]] = field(default_factory=dict, repr=False)  # by selection, per batch

    def plain(self) -> dict[str, Any]:
        """Everything but the tensors, as JSON can hold it."""
        return _plain(self)  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    """Data classes as mappings, without the fields that their `repr` leaves out."""
    if dataclasses.is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in dataclasses.fields(value) if one.repr}
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


QUARTERS = ("shortest quarter", "second quarter", "third quarter", "longest quarter")
_NOTHING = 1e-3  # advantages up to this size count as zero: they are rounding errors


class _Totals:
    """One selection's numbers of all `N` completions, in float64."""

    def __init__(self, name: str, results: Sequence[BatchResult]) -> None:
        self.name = name
        self.rewards_N = torch.cat([one.rewards_B for one in results]).double()
        self.advantages_N = torch.cat([one.advantages_B for one in results]).double()
        self.lengths_N = torch.cat([one.mask_B_T.double().sum(dim=1) for one in results])
        self.mass_N = torch.cat([one.mass_B_T.double().sum(dim=1) for one in results])


def what_moves(
    batches: Sequence[SavedBatch], results: Mapping[str, Sequence[BatchResult]], *, right_at: float, **read: Any
) -> Comparison:
    """All numbers that need no model; `read` is what the comparison says of how the completions were read."""
    totals = [_Totals(name, of_selection) for name, of_selection in results.items()]
    base = totals[0]
    values_N = torch.cat([one.rewards_B_K[:, 0] for one in results[base.name]])
    judged = {"right": values_N >= right_at, "wrong": values_N < right_at}
    if values_N.isnan().any():
        judged["no value"] = values_N.isnan()
    return Comparison(
        **read,
        steps=tuple(batch.step for batch in batches),
        completions=len(base.mass_N),
        groups=sum(len(batch.texts) // batch.num_generations for batch in batches),
        tokens=int(base.lengths_N.sum()),
        correct_by=results[base.name][0].reward_names[0],
        right_at=right_at,
        selections=[_numbers(one, results[one.name]) for one in totals],
        pairs=[_pair(base, one, results) for one in totals[1:]],
        by_length=[_part(name, chosen_N, totals) for name, chosen_N in _by_length(base.lengths_N)],
        by_correctness=[_part(name, chosen_N, totals) for name, chosen_N in judged.items()],
        batches=tuple(batches),
        results=results,
    )


def _numbers(totals: _Totals, results: Sequence[BatchResult]) -> SelectionNumbers:
    positive = torch.cat([one.mass_B_T.where(one.advantages_B_T > 0, 0.0).double().sum(dim=1) for one in results])
    return SelectionNumbers(
        name=totals.name,
        reward_mean=number_of(float(totals.rewards_N.nanmean())),
        without_signal=1.0 - float(torch.cat([one.signal_Q for one in results]).double().mean()),
        positive_mass=share(positive, totals.mass_N),
    )


def _by_length(lengths_N: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    quarters_N = quarters(lengths_N)
    for number, name in enumerate(QUARTERS):
        chosen_N = quarters_N == number
        if chosen_N.any():
            low, high = (int(bound) for bound in lengths_N[chosen_N].aminmax())
            name += f" ({low:,} to {high:,} tokens)"
        yield name, chosen_N


def _pair(base: _Totals, other: _Totals, results: Mapping[str, Sequence[BatchResult]]) -> Pair:
    base_sign, other_sign = (
        one.advantages_N.masked_fill(one.advantages_N.abs() <= _NOTHING, 0.0).sign() for one in (base, other)
    )
    base_mass = base.mass_N.sum()
    other_mass = other.mass_N.sum()
    moved: float | None = None
    between_tokens: float | None = None
    turned: float | None = None
    if base_mass > 0 and other_mass > 0:
        moved = float((base.mass_N / base_mass - other.mass_N / other_mass).abs().sum()) / 2
        pairs = list(zip(results[base.name], results[other.name], strict=True))
        apart = [(a.mass_B_T.double() / base_mass - b.mass_B_T.double() / other_mass).abs().sum() for a, b in pairs]
        between_tokens = float(sum(apart)) / 2
        against = [b.mass_B_T[a.advantages_B_T * b.advantages_B_T < 0].double().sum() for a, b in pairs]
        turned = float(sum(against) / other_mass)
    return Pair(
        base=base.name,
        other=other.name,
        same_sign=float((base_sign == other_sign).double().mean()),
        moved=moved,
        moved_between_tokens=between_tokens,
        turned=turned,
    )


def _part(name: str, chosen_N: torch.Tensor, all_totals: Sequence[_Totals]) -> Part:
    lengths_N = all_totals[0].lengths_N
    return Part(
        name=name,
        completions=int(chosen_N.sum()),
        tokens=share(lengths_N[chosen_N], lengths_N),
        mass={one.name: share(one.mass_N[chosen_N], one.mass_N) for one in all_totals},
    )


def quarters(lengths_N: torch.Tensor) -> torch.Tensor:
    """Each completion's quarter by length, 0 to 3, the same for equal lengths; -1 for those without a live token."""
    live_N = lengths_N > 0
    if not live_N.any():
        return torch.full_like(lengths_N, -1).long()
    bounds = torch.quantile(lengths_N[live_N].double(), torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    return torch.where(live_N, torch.bucketize(lengths_N.double(), bounds), -1)


def share(part: torch.Tensor, whole: torch.Tensor) -> float | None:
    """A part's share of a sum; None if the sum is 0."""
    total = float(whole.sum())
    return float(part.sum()) / total if total > 0 else None
