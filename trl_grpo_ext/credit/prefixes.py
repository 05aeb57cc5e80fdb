"""Where the completions of a group part: how many of their first tokens any two of them share."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..types import Rollout


def groups_with_prefixes(rollout: Rollout) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Each group with completions on this rank: its rows here `(B,)`, its rows of all ranks `(N,)`, and how many tokens
    any two share `(b, G)`; all completion tokens count, whoever wrote them.

    Gathers three times, including the token ids of all ranks.
    """
    groups_N = rollout.gather(rollout.group_ids_B)
    ids_N_T = rollout.gather(rollout.completion_ids_B_T)
    written_N_T = rollout.gather(rollout.completion_mask_B_T) > 0
    width = rollout.mask_B_T.size(1)  # what others wrote beyond is beyond every shared prefix
    for group in sorted(set(rollout.group_ids_B.tolist())):
        rows_B, members_N = rollout.group_ids_B == group, groups_N == group
        lengths_b_G = shared_prefixes(
            rollout.completion_ids_B_T[rows_B],
            rollout.completion_mask_B_T[rows_B] > 0,
            ids_N_T[members_N, :width],
            written_N_T[members_N, :width],
        )
        yield rows_B, members_N, lengths_b_G


def shared_prefixes(
    ids_b_T: torch.Tensor, written_b_T: torch.Tensor, ids_G_T: torch.Tensor, written_G_T: torch.Tensor
) -> torch.Tensor:
    """The length of the common prefix of each of `b` completions with each of `G`, in tokens, `(b, G)`, integer."""
    lengths = []
    for ids_T, written_T in zip(ids_G_T, written_G_T, strict=True):
        same_b_T = (ids_b_T == ids_T) & written_b_T & written_T
        lengths.append(same_b_T.cumprod(dim=1, dtype=torch.uint8).sum(dim=1))
    return torch.stack(lengths, dim=1)
