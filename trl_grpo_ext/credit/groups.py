"""Statistics over groups, to compare the completions of a prompt.

Values `(N,)` are those of all rows, NaN where a row has none (no reward function scored it); statistics skip such rows.
Groups `(N,)` are whole numbers from 0 to `N - 1`, in any order of rows. Each statistic is `(N,)` too: every row gets
its group's number.

A group may be spread over ranks, so a hook gathers, computes, and keeps `[rollout.local_rows]`:

    rewards_N, groups_N = gather_rewards(rollout)
    new_N = rewards_N - group_mean(rewards_N, groups_N)
"""

from collections.abc import Iterator

import torch

from ..types import Rollout


def weighted_rewards(rewards_B_K: torch.Tensor, weights_K: torch.Tensor) -> torch.Tensor:
    """Weighted sums over the columns that have a value, as TRL takes them; NaN where none has."""
    return (rewards_B_K * weights_K).nansum(dim=1).masked_fill(rewards_B_K.isnan().all(dim=1), torch.nan)


def without_rounding(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The values, with 0 for those that are only what rounding leaves of 0: a millionth of the scale, or less."""
    return torch.where(values.abs() > 1e-6 * scale, values, 0.0)


def gather_rewards(rollout: Rollout, shaped: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards after or before the shapers (at least float32) and groups of all ranks' completions. Gathers twice."""
    rewards_B = rollout.rewards_B if shaped else rollout.raw_rewards_B
    return rollout.gather(rewards_B.to(torch.promote_types(rewards_B.dtype, torch.float32))), gather_groups(rollout)


def gather_groups(rollout: Rollout) -> torch.Tensor:
    """The groups of all ranks' completions, renumbered from 0. Gathers once."""
    groups_N: torch.Tensor = torch.unique(rollout.gather(rollout.group_ids_B), return_inverse=True)[1]
    return groups_N


def group_sum(values_N: torch.Tensor, groups_N: torch.Tensor) -> torch.Tensor:
    """Each row's group's sum; 0 where the group has no value."""
    known_N = torch.where(torch.isnan(values_N), 0.0, values_N)
    return torch.zeros_like(values_N).index_add(0, groups_N, known_N)[groups_N]


def group_count(values_N: torch.Tensor, groups_N: torch.Tensor) -> torch.Tensor:
    """How many values each row's group has, in the dtype of the values."""
    return group_sum((~torch.isnan(values_N)).to(values_N.dtype), groups_N)


def group_extremes(values_N: torch.Tensor, groups_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's group's lowest and highest value; NaN where the group has none."""
    missing_N = torch.isnan(values_N)

    def extreme_N(start: float, how: str) -> torch.Tensor:
        start_Q = torch.full_like(values_N, start)
        return start_Q.scatter_reduce(0, groups_N, values_N.masked_fill(missing_N, start), how)[groups_N]

    nobody_N = group_count(values_N, groups_N) == 0
    lowest_N = extreme_N(torch.inf, "amin")
    highest_N = extreme_N(-torch.inf, "amax")
    return lowest_N.masked_fill(nobody_N, torch.nan), highest_N.masked_fill(nobody_N, torch.nan)


def group_mean(values_N: torch.Tensor, groups_N: torch.Tensor, weights_N: torch.Tensor | None = None) -> torch.Tensor:
    """Each row's group's mean, or its weighted mean `Σ w·v / Σ w`; NaN where the group has no value of any weight.

    From the distances to the group's lowest value, so that equal values have exactly that mean.
    """
    if weights_N is None:
        weights_N = torch.ones_like(values_N)
    values_N = torch.where(weights_N > 0, values_N, torch.nan)
    lowest_N, _ = group_extremes(values_N, groups_N)
    totals_N = group_sum(torch.where(torch.isnan(values_N), 0.0, weights_N), groups_N)
    return lowest_N + group_sum(weights_N * (values_N - lowest_N), groups_N) / totals_N


def group_std(values_N: torch.Tensor, groups_N: torch.Tensor) -> torch.Tensor:
    """Each row's group's standard deviation, with n - 1; 0 where the group has fewer than two values."""
    squares_N = (values_N - group_mean(values_N, groups_N)).square()
    return (group_sum(squares_N, groups_N) / (group_count(values_N, groups_N) - 1).clamp(min=1)).sqrt()


def group_apart(values_N: torch.Tensor, groups_N: torch.Tensor, epsilon: float | None = None) -> torch.Tensor:
    """Each value minus its group's mean, in the group's standard deviations plus `epsilon` if given; 0 without one."""
    apart_N = values_N - group_mean(values_N, groups_N)
    if epsilon is not None:
        apart_N = apart_N / (group_std(values_N, groups_N) + epsilon)
    return torch.where(torch.isnan(values_N), 0.0, apart_N)


def group_is_equal(values_N: torch.Tensor, groups_N: torch.Tensor) -> torch.Tensor:
    """Whether all values of each row's group are equal, bool; also True if the group has none."""
    lowest_N, highest_N = group_extremes(values_N, groups_N)
    return (lowest_N == highest_N) | torch.isnan(lowest_N)


def groups_with_prefixes(rollout: Rollout) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Each group's rows on this rank `(B,)` and on all `(N,)`, and how many tokens any two share `(b, G)`."""
    groups_N = rollout.gather(rollout.group_ids_B)
    ids_N_T = rollout.gather(rollout.completion_ids_B_T)
    written_N_T = rollout.gather(rollout.completion_mask_B_T) > 0
    width = rollout.mask_B_T.size(1)  # what others wrote beyond is beyond every shared prefix
    for group in sorted(set(rollout.group_ids_B.tolist())):
        rows_B = rollout.group_ids_B == group
        members_N = groups_N == group
        ids_b_T = rollout.completion_ids_B_T[rows_B]
        written_b_T = rollout.completion_mask_B_T[rows_B] > 0
        lengths = []
        for ids_T, written_T in zip(ids_N_T[members_N, :width], written_N_T[members_N, :width], strict=True):
            same_b_T = (ids_b_T == ids_T) & written_b_T & written_T
            lengths.append(same_b_T.cumprod(dim=1, dtype=torch.uint8).sum(dim=1))
        yield rows_B, members_N, torch.stack(lengths, dim=1)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float32 or, where it is wider, `dtype`."""
    return torch.promote_types(dtype, torch.float32)
