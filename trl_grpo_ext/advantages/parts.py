"""Credit by parts: each pays the tokens that wrote it, or as a step of the completion."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import field

import torch

from ..credit.groups import compute_dtype, gather_groups, group_apart, group_mean, group_std
from ..guard.parameters import Checked, checked_choice, choice, flag, number, text
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
    (see `reach` and `baseline`). Weights are not divided by their sum. Tokens in several parts get the sum of their
    credits. A part whose place is all of the completion (`WHOLE`) pays all tokens, and so does a plain number.

    A part is missing where it is scored and has no place: it credits nobody and is in no mean. Whether it is there is a
    part of its own, its completeness: with `q_{i,m}` the mean of s_m over `H_m` for those that have the part and
    `s_{i,m}` for the others, `q_{i,m} - mean q_m` is paid. So a part's two payments sum to `s - mean s`, unless
    they are normalised.

    The metrics `advantage/part_credit/to_all` and `/missing` say which share of the absolute credit went to all tokens
    or to no part's own (near 1: parts change nothing), and which share of the scored parts was missing.

    Source: none of its own for one advantage per part; per reward function GDPO (2601.05242) has them. `baseline:
    previous` is the outcome-conditioned baseline of Blockwise Advantage Estimation (2602.10231).
    Departures: GDPO whitens the sum over the batch once more. In 2602.10231 an outcome is any function of the block
    before; here it is the score of the part before.

    Args:
        normalise: Divide by the standard deviation (n - 1) over the same completions plus 1e-4. What `completeness`
            pays is divided as one sum, times the mean weight of the parts that some completion of the group lacks:
            JSON that is cut lacks all of them at once, which is one failure.
        completeness: It is paid to "all" tokens, to the "structure", which are those in no part, or to "none".
        outside: Tokens in no part get "nothing"; the "sum" of all credits; or the "value", the centred reward.
        reach: "own" tokens only: least noise, biased where they decide about other parts too. "before": also all tokens
            before the part, so that each token gets the parts to come, which is unbiased.
        baseline: "group"; or "previous", which compares a part only with those of the group in which the part listed
            before it has the same score, for parts that build on each other.
    """

    __name__ = "part_credit"
    normalise: bool = flag(False)
    completeness: str = choice("all", "structure", "none")
    outside: str = choice("nothing", "sum", "value")
    reach: str = choice("own", "before")
    baseline: str = choice("group", "previous")
    metrics: dict[str, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.declares = HookDeclaration(
            role="estimator",
            needs=("offsets",),
            independent=True,
            makes_signal=True,  # equal sums may hide parts that differ
            uses_total_reward=not self.normalise,
        )

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        precise = compute_dtype(rollout.rewards_B_K.dtype)
        own_B_T = torch.zeros(advantages_B_T.shape, dtype=precise, device=advantages_B_T.device)
        all_B_T = torch.zeros_like(own_B_T)
        groups_N = gather_groups(rollout)
        local = rollout.local_rows
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
        lacked_N_M = torch.stack([group_std(expected_N, groups_N) > 0 for expected_N in expected_N_M.unbind(dim=1)], 1)
        lacked_N_M &= scored_N_M & (weights_N_M > 0)
        weight_N = (weights_N_M * lacked_N_M).sum(dim=1) / lacked_N_M.sum(dim=1).clamp(min=1)
        scaled_N = sum_N / torch.where(weight_N > 0, weight_N, 1.0)  # so that the epsilon has the scores' scale
        std_N = group_std(torch.where(scored_N_M.any(dim=1), scaled_N, torch.nan), groups_N)
        return weight_N * scaled_N / (std_N + _EPSILON)


def _shares(
    own_B_T: torch.Tensor, all_B_T: torch.Tensor, counts_B: tuple[torch.Tensor, torch.Tensor], rollout: Rollout
) -> dict[str, float]:
    """How much was paid where, and how much was missing, over all ranks."""
    sums = [torch.where(rollout.mask_B_T > 0, paid_B_T, 0.0).abs().sum(dim=1) for paid_B_T in (own_B_T, all_B_T)]
    own, everywhere, missing, scored = rollout.gather(torch.stack([*sums, *counts_B], dim=1)).sum(dim=0).tolist()
    shares = {"to_all": (everywhere, own + everywhere), "missing": (missing, scored)}
    return {name: part / whole for name, (part, whole) in shares.items() if whole > 0}


class _Paid:
    """What one function's parts pay on this rank, before its weight."""

    def __init__(
        self, hook: PartCredit, table: PartTable, rollout: Rollout, groups_N: torch.Tensor, precise: torch.dtype
    ) -> None:
        count = len(table.names)
        local = rollout.local_rows
        self.scores_B_M = table.scores_B_M.to(precise)
        weights_B_M = table.weights_B_M.to(precise)
        wrote_B_T = [table.tokens(part) for part in range(count)]
        placed_B_M = torch.stack([tokens_B_T.any(dim=1) for tokens_B_T in wrote_B_T], dim=1)
        scored_B_M = ~torch.isnan(self.scores_B_M)
        self.missing_B_M = scored_B_M & ~placed_B_M & ~table.whole_B_M
        there_B_M = scored_B_M & ~self.missing_B_M
        known_N_3M = rollout.gather(torch.cat([self.scores_B_M, there_B_M.to(precise), weights_B_M], dim=1))
        scores_N_M = known_N_3M[:, :count]
        there_N_M = known_N_3M[:, count : 2 * count] > 0
        weights_N_M = known_N_3M[:, 2 * count :]

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


class ProcessRewards(Checked):
    """Credit each token with the rewards of its step and all later steps, minus a baseline.

    Each scored part of a function's `Parts` is a step (in order of its last token) whose reward `r_j` is its score
    times its weight. A part without a place ends where the completion ends, and a completion scored without parts is
    one step. With `s(t)` the first step that ends at token `t` or later (the special tokens after it included):

        G_t = Σ_{j ≥ s(t)} γ^(j - s(t)) · r_j            form "sum"
        G_t = Σ_{j ≥ s(t)} γ^(j - s(t)) · r*_j           form "min", r*_j = softmax(-r/T)_j · r_j over all steps
        A_t = coefficient · (G_t - b),   b = mean of G at the first token over the group's scored completions

    In the minimum form a low temperature, relative to the rewards, gives nearly all weight to the worst step.

    Source: PURE (2504.15275) for the minimum form, with its authors' temperature of 0.1 for rewards between -1 and 1;
    the plain sum is process supervision in GRPO (2402.03300).
    Departures: the baseline is one number per group, the mean return of whole completions. γ counts steps, not tokens.
    Tokens after the last step, and completions that the function did not score, get 0. Its weight is not used.

    Args:
        reward: Name of the reward function. None means the only one that returns parts, or the only one.
        form: "min" or "sum".
        temperature: T of the minimum form, positive, in units of the reward.
        gamma: γ, from 0 to 1.
        baseline: "group" or "none".
        mode: "replace" the incoming advantages, or "add" to them.
        coefficient: Factor on the result.
    """

    __name__ = "process_rewards"
    reward: str | None = text(None)
    form: str = choice("min", "sum")
    temperature: float = number(0.1, "positive", lambda v: v > 0)
    gamma: float = number(1.0, "from 0 to 1", lambda v: 0 <= v <= 1)
    baseline: str = choice("group", "none")
    mode: str = choice("replace", "add")
    coefficient: float = number(1.0, "a finite number")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.declares = HookDeclaration(
            role="estimator" if self.mode == "replace" else "transform",
            needs=("offsets",),
            makes_signal=True,
            uses_total_reward=False,
            uses_weights=False,
        )

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        precise = compute_dtype(rollout.rewards_B_K.dtype)
        column = self._column(rollout)
        steps = _steps(rollout.parts.get(rollout.reward_names[column]), rollout)
        live = (rollout.lengths_B > 0).tolist()
        values_B_T = advantages_B_T.new_full(advantages_B_T.shape, math.nan, dtype=precise)  # where nothing is placed
        firsts_B = values_B_T.new_full((len(live),), math.nan)
        for row, reward in enumerate(rollout.rewards_B_K[:, column].tolist()):
            if math.isnan(reward):
                continue
            offsets = rollout.offsets(row)
            ends, rewards = zip(*(steps[row] or [(len(offsets), reward)]), strict=True)
            to_go = rewards_to_go(min_form(rewards, self.temperature) if self.form == "min" else rewards, self.gamma)
            firsts_B[row] = to_go[0]
            if live[row]:
                returns = spread_returns(to_go, after_silence(offsets, ends))
                values_B_T[row, : len(returns)] = values_B_T.new_tensor(returns)
        if self.baseline == "group":
            means_N = group_mean(rollout.gather(firsts_B), gather_groups(rollout))
            values_B_T = values_B_T - means_N[rollout.local_rows].unsqueeze(1)
        values_B_T = torch.where(torch.isnan(values_B_T), 0.0, self.coefficient * values_B_T).to(advantages_B_T.dtype)
        return advantages_B_T + values_B_T if self.mode == "add" else values_B_T

    def _column(self, rollout: Rollout) -> int:
        """The reward function's column, agreed on by all ranks."""
        names = list(rollout.reward_names)
        pointing = [name for name in names if name in rollout.parts]  # the same on all ranks
        known = names if len(names) == 1 else pointing
        if self.reward is None and len(known) == 1:
            return names.index(known[0])
        return names.index(checked_choice("process_rewards: reward", self.reward, names))


def _steps(table: PartTable | None, rollout: Rollout) -> list[list[tuple[int, float]]]:
    """Of each completion, where its steps end (the token after) and their rewards, in order."""
    if table is None:
        return [[] for _ in rollout.texts]
    ends: dict[tuple[int, int], int] = {}
    for row, part, _, end in table.ranges_R_4.tolist():
        ends[row, part] = max(end, ends.get((row, part), 0))
    written = rollout.completion_mask_B_T.sum(dim=1).long().tolist()
    steps = []
    for row, worth in enumerate((table.scores_B_M * table.weights_B_M).tolist()):
        found = [(ends.get((row, part), written[row]), one) for part, one in enumerate(worth) if not math.isnan(one)]
        steps.append(sorted(found, key=lambda step: step[0]))
    return steps


def after_silence(offsets: Sequence[tuple[int, int]], ends: Sequence[int]) -> list[int]:
    """For each end of a step, the last token of those after it that wrote nothing, such as the end of the sequence."""
    lasts = []
    for end in ends:
        while end < len(offsets) and offsets[end][0] == offsets[end][1]:
            end += 1
        lasts.append(end - 1)
    return lasts


def min_form(rewards: Sequence[float], temperature: float) -> list[float]:
    """`softmax(-r/T)_j · r_j`: at a low temperature nearly all weight is on the lowest reward."""
    lowest = min(rewards, default=0.0)
    weights = [math.exp((lowest - reward) / temperature) for reward in rewards]
    total = math.fsum(weights)
    return [weight / total * reward for weight, reward in zip(weights, rewards, strict=True)]


def rewards_to_go(rewards: Sequence[float], gamma: float) -> list[float]:
    """`Σ_{j ≥ s} γ^(j - s) · r_j` for each step `s`."""
    return [*itertools.accumulate(reversed(rewards), lambda later, reward: reward + gamma * later)][::-1]


def spread_returns(returns: Sequence[float], lasts: Sequence[int]) -> list[float]:
    """Give each token, up to the last step's end, the return of the first step that ends at it or later."""
    tokens: list[float] = []
    for value, last in zip(returns, lasts, strict=True):
        tokens += [value] * (last + 1 - len(tokens))
    return tokens
