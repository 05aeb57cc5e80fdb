"""Group filters: by advantages, rewards and lengths, and combinations of filters.

The members of a group may be on several ranks, so a filter gathers its data first.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..credit.flow import group_verdicts
from ..credit.groups import gather_groups, group_is_equal, group_mean
from ..credit.signal import signal_of, signal_table
from ..errors import ConfigurationError
from ..guard.parameters import Checked, checked_choice, number, text
from ..types import FilterDeclaration, Rollout, implements

Verdicts = list[bool | str]


class Signal:
    """Keep groups with different rewards and an advantage: dynamic sampling.

    Dropped are groups in which each function's rewards are equal before any shaper, and those whose advantages are all
    0 on the tokens that count, after the rollout stage of the hooks; beside a hook that reads more than rewards, only
    the latter. The reason is "equal rewards" where the rewards are equal in sum, else "no advantage".

    Source: DAPO (2503.14476), section 3.2, which asks for answers that are neither all right nor all wrong.
    """

    __name__ = "signal"
    declares = FilterDeclaration(needs=("advantages",))

    def keep(self, rollout: Rollout) -> Verdicts:
        groups_N = gather_groups(rollout)
        signal_N = signal_of(rollout.gather(signal_table(rollout)))
        equal_N = group_is_equal(rollout.gather(rollout.raw_rewards_B), groups_N)
        return _verdicts(rollout, signal_N, lambda row: "equal rewards" if equal_N[row] else "no advantage")


class AccuracyBetween(Checked):
    """Keep groups whose mean of one reward lies between two bounds.

    With the defaults and a reward of 0 and 1: groups that are neither all right nor all wrong. Groups are dropped as
    "too hard" or "too easy", and for "no reward" if the function scored no completion.

    Source: dynamic sampling of DAPO (2503.14476), section 3.2, which looks at the number of right answers; with closer
    bounds the online prompt filtering of PRIME (2502.01456).

    Args:
        reward: The reward function's name; None means the weighted sum of all.
        low: The mean must be above this.
        high: The mean must be below this.
    """

    __name__ = "accuracy_between"
    reward: str | None = text(None)
    low: float = number(0.0, "a finite number")
    high: float = number(1.0, "a finite number")

    def keep(self, rollout: Rollout) -> Verdicts:
        rewards_B = rollout.raw_rewards_B
        if self.reward is not None:
            names = list(rollout.reward_names)
            column = names.index(checked_choice("accuracy_between: reward", self.reward, names))
            rewards_B = rollout.rewards_B_K[:, column]
        means_N = group_mean(rollout.gather(rewards_B), gather_groups(rollout))
        hard_N = means_N <= self.low
        easy_N = means_N >= self.high

        def why(row: int) -> str:
            return "too hard" if hard_N[row] else "too easy" if easy_N[row] else "no reward"

        return _verdicts(rollout, (self.low < means_N) & (means_N < self.high), why)


class NotAllTruncated(Checked):
    """Drop groups as "truncated" if all their completions, or a large share, ended at the limit.

    Source: overlong filtering of DAPO (2503.14476), section 3.4, which masks single completions.
    Departures: this leaves out whole groups; `truncation_masking` masks completions.

    Args:
        below: The share of truncated completions must be below this; above 0, at most 1.
    """

    __name__ = "not_all_truncated"
    below: float = number(1.0, "a share above 0 and at most 1", lambda x: 0 < x <= 1)

    def keep(self, rollout: Rollout) -> Verdicts:
        shares_N = group_mean(rollout.gather(rollout.truncated_B.float()), gather_groups(rollout))
        return _verdicts(rollout, shares_N < self.below, lambda row: "truncated")


class AllOf:
    """Keep groups that all of several filters keep. The reason is that of the first filter that drops the group.

    Source: our own.

    Args:
        filters: Selections of filters.
    """

    __name__ = "all_of"
    declares = FilterDeclaration(
        takes=("filters",), conformance={"parameters": {"filters": ["signal", "not_all_truncated"]}}
    )

    def __init__(self, *, filters: Sequence[Any]) -> None:
        several = filters if isinstance(filters, list | tuple) else [filters]
        if not several or not all(implements(one, "keep") for one in several):
            raise ConfigurationError(f"all_of: filters must be a list of group filters, got {filters!r}.")
        self.filters = list(several)
        declared = [FilterDeclaration.of(one) for one in self.filters]
        self.declares = replace(
            self.declares,
            needs=tuple(sorted({need for one in declared for need in one.needs})),
            teachers=tuple(sorted({teacher for one in declared for teacher in one.teachers})),
        )

    def keep(self, rollout: Rollout) -> Verdicts:
        asked = [group_verdicts(one, rollout) for one in self.filters]  # each on every rank, since it may gather
        return [next((said for said in row if said is not True), True) for row in zip(*asked, strict=True)]


def _verdicts(rollout: Rollout, kept_N: torch.Tensor, why: Callable[[int], str]) -> Verdicts:
    """A filter's verdicts on this rank's completions, from those on all completions."""
    first = rollout.local_rows.start or 0
    kept = kept_N[rollout.local_rows].tolist()
    return [keep or why(first + row) for row, keep in enumerate(kept)]
