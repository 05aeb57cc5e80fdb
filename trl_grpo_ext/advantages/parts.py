"""Credit by parts: each thing that a completion is judged by pays the tokens that wrote it."""

from __future__ import annotations

from dataclasses import field

import torch

from ..credit.groups import compute_dtype, gather_groups, group_apart, group_mean, group_std
from ..guard.parameters import Checked, choice, flag
from ..types import HookDeclaration, PartTable, Rollout

_EPSILON = 1e-4  # beside the standard deviation, as in TRL


class PartCredit(Checked):
    """Pay each part of a reward to the tokens that wrote that part, relative to the same part in the group.

    For the score `s_{i,m}` of part m of a function's `Parts` in completion i, its weight `w_{i,m}`, the function's
    weight `w_k`, and the group's completions `H_m` that have this part,

        a_{i,m} = s_{i,m} - mean of s_m over H_m
        A_{i,t} = Σ_k w_k Σ_m w_{i,m} · a_{i,m} · [t wrote part m]

    Each part is compared with itself alone, so with K independent parts the gradient has about K times less noise than
    their sum's, paid to all tokens. It is assumed that the tokens of a part decide about that part, and about no other
    (see `reach` and `baseline`). Weights are not divided by their sum.

    - *All of the completion* (`WHOLE`) as a part's place pays all tokens, and so does a plain number of a function.
    - *A part that is missing*, scored where it has no place, credits nobody and is in no mean. Whether it is there is a
      part of its own, `completeness`: with `q_{i,m}` the mean of s_m over `H_m` for those that have the part and
      `s_{i,m}` for the others, `q_{i,m} - mean q_m` is paid to "all" tokens, or to the "structure", those in no part.
      So a part's two payments sum to `s - mean s`. "none" pays only the parts that are there.
    - *Tokens in several parts* get the sum of their credits.
    - *Tokens in no part* get nothing; or (`outside`) the "sum" of all credits; or the "value", the function's centred
      reward.
    - *Reach.* "own" tokens only: least noise, biased where they decide about other parts too. "before": also all tokens
      before the part, so each token gets the parts to come, which is unbiased.
    - *Baseline.* With "previous", part m is compared only with those of the group in which the part listed before it
      has the same score, for parts that build on each other.

    The metrics `advantage/part_credit/to_all` and `/missing` say which share of the absolute credit went to all tokens
    or to no part's own (near 1: parts change nothing), and which share of the scored parts was missing.

    Source: none of its own for one advantage per part; per reward function GDPO (2601.05242) has them. `baseline:
    previous` is the outcome-conditioned baseline of Blockwise Advantage Estimation (2602.10231).
    Departures: GDPO whitens the sum over the batch once more. In 2602.10231 an outcome is any function of the block
    before; here it is the score of the part before.

    Args:
        normalise: Divide by the standard deviation (n - 1) over the same completions plus 1e-4. What `completeness`
            pays is summed over the parts before (times their mean weight after): JSON that is cut lacks all of them.
        completeness: "all", "structure" or "none".
        outside: "nothing", "sum" or "value".
        reach: "own" or "before".
        baseline: "group" or "previous".
    """

    __name__ = "part_credit"
    # Equal sums may hide parts that differ.
    declares = HookDeclaration(role="estimator", needs=("offsets",), independent=True, makes_signal=True)
    normalise: bool = flag(False)
    completeness: str = choice("all", "structure", "none")
    outside: str = choice("nothing", "sum", "value")
    reach: str = choice("own", "before")
    baseline: str = choice("group", "previous")
    metrics: dict[str, float] = field(init=False, default_factory=dict)

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        precise = compute_dtype(rollout.rewards_B_K.dtype)
        own_B_T = torch.zeros(advantages_B_T.shape, dtype=precise, device=advantages_B_T.device)
        all_B_T = torch.zeros_like(own_B_T)
        groups_N, local = gather_groups(rollout), rollout.local_rows
        rewards_N_K = rollout.gather(rollout.rewards_B_K.to(precise))
        counts_B = own_B_T.new_zeros(len(own_B_T)), own_B_T.new_zeros(len(own_B_T))
        for k, name in enumerate(rollout.reward_names):
            weight = rollout.reward_weights_K[k].to(precise)
            value_B = weight * self._apart(rewards_N_K[:, k], groups_N)[local]
            table = rollout.parts.get(name)
            if table is None or not table.names:
                all_B_T += value_B.unsqueeze(1)
                continue
            paid = _Paid(self, table, rollout, groups_N, precise)
            plain_B = torch.isnan(paid.scores_B_M).all(dim=1)
            all_B_T += torch.where(plain_B, value_B, weight * paid.everywhere_B).unsqueeze(1)
            own_B_T += weight * paid.own_B_T
            rest_B = weight * paid.structure_B
            if self.outside != "nothing":
                rest_B = rest_B + (weight * paid.sum_B if self.outside == "sum" else value_B)
            all_B_T += torch.where(paid.reached_B_T | plain_B.unsqueeze(1), 0.0, rest_B.unsqueeze(1))
            counts_B = counts_B[0] + paid.missing_B_M.sum(1), counts_B[1] + (~torch.isnan(paid.scores_B_M)).sum(1)
        self.metrics = _shares(own_B_T, all_B_T, counts_B, rollout)
        return (own_B_T + all_B_T).to(advantages_B_T.dtype)

    def _apart(self, values_N: torch.Tensor, groups_N: torch.Tensor) -> torch.Tensor:
        return group_apart(values_N, groups_N, _EPSILON if self.normalise else None)

    def _presence(self, expected_N_M: torch.Tensor, weights_N_M: torch.Tensor, groups_N: torch.Tensor) -> torch.Tensor:
        """What each completion gets for the parts that it has and lacks."""
        apart_N_M = torch.stack([group_apart(expected_N, groups_N) for expected_N in expected_N_M.unbind(dim=1)], dim=1)
        sum_N = (weights_N_M * apart_N_M).sum(dim=1)
        if not self.normalise:
            return sum_N
        scored_N_M = ~torch.isnan(expected_N_M)
        count_N = scored_N_M.sum(dim=1)
        mean_weight_N = (weights_N_M * scored_N_M).sum(dim=1) / count_N.clamp(min=1)
        std_N = group_std(torch.where(count_N > 0, sum_N, torch.nan), groups_N)
        return mean_weight_N * sum_N / (std_N + _EPSILON)


def _shares(
    own_B_T: torch.Tensor, all_B_T: torch.Tensor, counts_B: tuple[torch.Tensor, torch.Tensor], rollout: Rollout
) -> dict[str, float]:
    """How much was paid where, and how much was missing, over all ranks."""
    sums = [torch.where(rollout.mask_B_T > 0, paid_B_T, 0.0).abs().sum(dim=1) for paid_B_T in (own_B_T, all_B_T)]
    own, everywhere, missing, scored = rollout.gather(torch.stack([*sums, *counts_B], dim=1)).sum(dim=0).tolist()
    shares = {"to_all": everywhere / (own + everywhere)} if own + everywhere > 0 else {}
    return {**shares, "missing": missing / scored} if scored > 0 else shares


class _Paid:
    """What one function's parts pay on this rank, before its weight."""

    def __init__(
        self, hook: PartCredit, table: PartTable, rollout: Rollout, groups_N: torch.Tensor, precise: torch.dtype
    ) -> None:
        count, local = len(table.names), rollout.local_rows
        self.scores_B_M = table.scores_B_M.to(precise)
        weights_B_M = table.weights_B_M.to(precise)
        wrote_B_T = [table.tokens(part) for part in range(count)]
        placed_B_M = torch.stack([tokens_B_T.any(dim=1) for tokens_B_T in wrote_B_T], dim=1)
        scored_B_M = ~torch.isnan(self.scores_B_M)
        self.missing_B_M = scored_B_M & ~placed_B_M & ~table.whole_B_M
        there_B_M = scored_B_M & ~self.missing_B_M
        known_N_3M = rollout.gather(torch.cat([self.scores_B_M, there_B_M.to(precise), weights_B_M], dim=1))
        scores_N_M, are_there_N_M, weights_N_M = known_N_3M.split(count, dim=1)
        there_N_M = are_there_N_M > 0

        own_N_M = []
        expected_N_M = []
        for part in range(count):
            has_N = torch.where(there_N_M[:, part], scores_N_M[:, part], torch.nan)
            within_N = groups_N
            if hook.baseline == "previous" and part > 0:
                within_N = _strata(groups_N, scores_N_M[:, part - 1])
            own_N_M.append(hook._apart(has_N, within_N))
            expected_N_M.append(torch.where(there_N_M[:, part], group_mean(has_N, groups_N), scores_N_M[:, part]))
        credit_B_M = weights_B_M * torch.stack(own_N_M, dim=1)[local]
        whole_B_M = table.whole_B_M & there_B_M
        self.everywhere_B = torch.where(whole_B_M, credit_B_M, 0.0).sum(dim=1)
        self.sum_B = torch.where(whole_B_M, 0.0, credit_B_M).sum(dim=1)
        self.structure_B = torch.zeros_like(self.sum_B)
        if hook.completeness != "none":
            presence_B = hook._presence(torch.stack(expected_N_M, dim=1), weights_N_M, groups_N)[local]
            if hook.completeness == "all":
                self.everywhere_B = self.everywhere_B + presence_B
            else:
                self.structure_B = presence_B
        self.own_B_T = torch.zeros(rollout.mask_B_T.shape, dtype=precise, device=rollout.mask_B_T.device)
        self.reached_B_T = torch.zeros_like(self.own_B_T, dtype=torch.bool)
        for part, tokens_B_T in enumerate(wrote_B_T):
            pays_B_T = tokens_B_T & ~whole_B_M[:, part : part + 1]
            if hook.reach == "before":  # a token from which on some token of the part is to come
                pays_B_T = pays_B_T.flip(1).cumsum(dim=1).flip(1) > 0
            self.own_B_T += torch.where(pays_B_T, credit_B_M[:, part : part + 1], 0.0)
            self.reached_B_T |= pays_B_T


def _strata(groups_N: torch.Tensor, scores_N: torch.Tensor) -> torch.Tensor:
    """The groups, cut by a score that may be NaN, numbered from 0."""
    parts = [groups_N.to(scores_N.dtype), scores_N.nan_to_num(nan=0.0), torch.isnan(scores_N).to(scores_N.dtype)]
    strata_N: torch.Tensor = torch.unique(torch.stack(parts, dim=1), dim=0, return_inverse=True)[1]
    return strata_N
