"""Credit by turn, for completions with tools or an environment."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..credit.groups import compute_dtype, gather_groups, gather_rewards, group_apart, number_of
from ..credit.parts import no_such_turn
from ..credit.turns import true_runs
from ..errors import ConfigurationError
from ..guard.parameters import Checked, choice, flag, number, text
from ..types import HookDeclaration, Rollout, Turn
from .returns import discounted_returns

_EPSILON = 1e-4  # beside the standard deviation, as in TRL and in MT-GRPO's code
_GIGPO_EPSILON = 1e-6  # as in the authors' code


@dataclass(kw_only=True, eq=False)
class TurnRewards(Checked):
    """Credit a turn's tokens with the rewards of their own and later turns, relative to the group's same turn.

    A part whose place is a turn, or in one (`Place(turn=...)`), adds its score times its weight to that turn's reward;
    the function's other parts and its value then do not count. All other rewards form the outcome, which belongs to the
    last turn (a shaper's rewards for single tokens belong to their turns). With `r_{i,k}` the weighted rewards of turn
    k of completion i, `K_i` its turns and `o_i` its outcome:

        G_{i,k} = Σ_{j≥k} γ^(j-k) · (r_{i,j} + [j = K_i] · o_i)                  form "returns"
        A_{i,k} = (G_{i,k} - mean G_k) / (std G_k + 1e-4)

        A_{i,k} = A°_i + λ · A'_{i,k} for k < K_i,   A_{i,K_i} = A°_i            form "turn_plus_outcome"
        A°_i = (o_i - mean o) / (std o + 1e-4),   A'_{i,k} = (r_{i,k} - mean r_k) / (std r_k + 1e-4)

    Means and deviations (n - 1) are over the group's scored completions that have a turn k, so a turn that no other
    completion reached gets 0.

    Source: Multi-turn credit assignment with MT-GRPO (2505.11821), the turn plus outcome form, with λ = 1 in its
    authors' code; rewards to go per turn are process supervision in GRPO (2402.03300), with turns for steps.
    Departures: MT-GRPO has two turns and no γ. If a completion never got an answer from a tool, its authors take the
    advantage of the rewards' sum; here its only turn gets the outcome's.

    Args:
        form: "returns" or "turn_plus_outcome".
        gamma: γ, from 0 to 1, per turn; only for "returns".
        turn_weight: λ, not negative; only for "turn_plus_outcome".
        normalise: Divide by the standard deviation plus 1e-4.
    """

    __name__ = "turn_rewards"
    declares = HookDeclaration(role="estimator", independent=True, makes_signal=True)
    form: str = choice("returns", "turn_plus_outcome")
    gamma: float = number(1.0, "from 0 to 1", lambda x: 0 <= x <= 1)
    turn_weight: float = number(1.0, "at least 0", lambda x: x >= 0)
    normalise: bool = flag(True)

    def __post_init__(self) -> None:
        super().__post_init__()
        unused = "turn_weight" if self.form == "returns" else "gamma"
        if getattr(self, unused) != 1:
            raise ConfigurationError(f"turn_rewards: {unused} must not be set with form {self.form!r}.")

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        rewards = rewards_of_turns(rollout)
        groups_N = gather_groups(rollout)
        if self.form == "returns":
            returns_B_M = discounted_returns(rewards.with_outcome(), rewards.scored_B_M, self.gamma)
            values_B_M = self._against_the_group(returns_B_M, rewards.scored_B_M, rollout, groups_N)
        else:
            outcome_B_1, scored_B_1 = rewards.outcome_B.unsqueeze(1), rewards.scored_B_M[:, :1]
            turns_B_M = self._against_the_group(rewards.turns_B_M, rewards.scored_B_M, rollout, groups_N)
            outcome_B_1 = self._against_the_group(outcome_B_1, scored_B_1, rollout, groups_N)
            values_B_M = outcome_B_1 + torch.where(rewards.last_B_M, 0.0, self.turn_weight * turns_B_M)
        return to_tokens(values_B_M, rollout.turns_B_T).to(advantages_B_T.dtype)

    def _against_the_group(
        self, values_B_M: torch.Tensor, scored_B_M: torch.Tensor, rollout: Rollout, groups_N: torch.Tensor
    ) -> torch.Tensor:
        """Values minus the mean of their column in the group."""
        known_N_M = gather_values(values_B_M, scored_B_M, rollout)
        columns = known_N_M.size(1)
        places_NM = (groups_N.unsqueeze(1) * columns + torch.arange(columns, device=groups_N.device)).flatten()
        apart_N_M = group_apart(known_N_M.flatten(), places_NM, _EPSILON if self.normalise else None).view_as(known_N_M)
        return apart_N_M[rollout.local_rows, : values_B_M.size(1)]


@dataclass(kw_only=True, eq=False)
class GiGPO(Checked):
    """Add to a completion's advantage that of each turn among the group's turns that began in the same state.

        A_{i,k} = A^E_i + ω · A^S_{i,k}
        A^E_i = (R_i - mean R) / F(R)
        A^S_{i,k} = (G_{i,k} - mean G_s) / F(G_s),   G_{i,k} = Σ_{j≥k} γ^(j-k) · r_{i,j}

    Turns of a group with the same anchor state s are compared with each other; a turn with a unique state has
    `A^S = 0`. F is the standard deviation (n - 1) plus 1e-6 with `normalise`, else 1. The rewards of turns and of the
    outcome are as in `turn_rewards`. A turn's state is the answer of the tools or the environment right before it,
    token by token (for first turns the prompt), or its entry in the column `states`, compared as JSON.

    Source: Group-in-Group Policy Optimization (2505.10978), equations 3 and 6 to 8, with its code's γ = 0.95 and ω = 1.
    F = 1 is the code's `mean_norm`, its default, and the other its `mean_std_norm`.
    Departures: each completion, a whole conversation, counts once in the statistics of episodes, as in the paper; in
    the code each step does. The code can take observations for the same that are only alike.

    Args:
        step_weight: ω, not negative.
        gamma: γ, from 0 to 1, per turn.
        normalise: Divide by the standard deviation.
        states: A column with a list of states, one for each turn; None compares what came right before.
    """

    __name__ = "gigpo"
    declares = HookDeclaration(role="estimator", independent=True, makes_signal=True)
    step_weight: float = number(1.0, "at least 0", lambda x: x >= 0)
    gamma: float = number(0.95, "from 0 to 1", lambda x: 0 <= x <= 1)
    normalise: bool = flag(False)
    states: str | None = text(None)

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        rewards = rewards_of_turns(rollout)
        totals_N, groups_N = gather_rewards(rollout)
        epsilon = _GIGPO_EPSILON if self.normalise else None
        episode_B = group_apart(totals_N, groups_N, epsilon)[rollout.local_rows]
        returns_N_M = gather_values(
            discounted_returns(rewards.with_outcome(), rewards.scored_B_M, self.gamma), rewards.scored_B_M, rollout
        )
        states_N_M = rollout.gather(self._states(rollout, rewards.scored_B_M.size(1)).to(groups_N.device))
        began_NM_2 = torch.stack([groups_N.unsqueeze(1).expand_as(states_N_M), states_N_M], dim=2).view(-1, 2)
        places_NM = torch.unique(began_NM_2, dim=0, return_inverse=True)[1]
        steps_N_M = group_apart(returns_N_M.flatten(), places_NM, epsilon).view_as(returns_N_M)
        steps_B_M = steps_N_M[rollout.local_rows, : rewards.scored_B_M.size(1)]
        values_B_M = episode_B.unsqueeze(1) + self.step_weight * steps_B_M
        return to_tokens(values_B_M, rollout.turns_B_T).to(advantages_B_T.dtype)

    def _states(self, rollout: Rollout, width: int) -> torch.Tensor:
        """A number for the state in which each turn began, `(B, M)`."""
        given: Sequence[Any] = [None] * len(rollout.texts)
        if self.states is not None:
            if self.states not in rollout.columns:
                known = ", ".join(rollout.columns) or "none"
                raise ConfigurationError(f"gigpo: there is no column {self.states!r}; there are: {known}.")
            given = rollout.columns[self.states]
        table = []
        numbers_B, ids_B = rollout.turns_B_T.tolist(), rollout.completion_ids_B_T.tolist()
        for row, (numbers, ids, states) in enumerate(zip(numbers_B, ids_B, given, strict=True)):
            runs = true_runs([number >= 0 for number in numbers])
            if self.states is not None:
                if not isinstance(states, list | tuple) or len(states) != len(runs):
                    raise ConfigurationError(
                        f"gigpo: the column {self.states!r} must have a list of {len(runs)} states at row {row}, one "
                        f"for each turn of the completion, got {states!r:.100}."
                    )
                keys = [number_of(json.dumps(state, sort_keys=True, default=str).encode()) for state in states]
            else:
                begins = [0, *(end for _, end in runs)]
                seen = [ids[begin:first] for begin, (first, _) in zip(begins, runs, strict=False)]
                keys = [number_of(struct.pack(f"{len(part)}q", *part)) for part in seen]
            table.append([*keys, *[0] * (width - len(keys))])
        return torch.tensor(table, dtype=torch.int64).view(len(table), width)


@dataclass(kw_only=True, eq=False)
class ToolErrors(Checked):
    """Subtract a constant from the advantages of failed tool calls: `A'_t = A_t - c` for the tokens of such a call.

    A call fails if it cannot be parsed, or if the tool raised, got arguments that it does not take, or does not exist.
    Its tokens are found by the tokenizer's `response_template`, with which TRL parses. Without one they are those of
    its whole turn, and calls that cannot be parsed go unnoticed, as do those that the template takes for plain text.

    Source: none of its own; penalties for calls that fail are part of many agents' rewards (ToolRL, 2504.13958), where
    they fall on all tokens of the completion.
    Departures: none.

    Args:
        penalty: c, positive, in units of the advantages.
        over: "call" for the call's tokens, or "turn" for those of its whole turn, once per turn.
    """

    __name__ = "tool_errors"
    declares = HookDeclaration(role="transform", needs=("offsets",), independent=True)
    penalty: float = number(0.5, "positive", lambda x: x > 0)
    over: str = choice("call", "turn")

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        failed_B_T = torch.zeros_like(advantages_B_T, dtype=torch.bool)
        for row, turn in _turns(rollout):
            for call in turn.calls:
                if call.failed:
                    failed_B_T[row, slice(*(turn.tokens if self.over == "turn" else call.tokens))] = True
        return torch.where(failed_B_T, advantages_B_T - self.penalty, advantages_B_T)


@dataclass(kw_only=True, eq=False)
class MaskedTurns(Checked):
    """Credit some turns only: the tokens of all others get 0, also at the loss forward.

    A turn is picked as the `first` or `last` of its completion; since it makes a tool call (`calls`) or none
    (`answers`); or since one of its calls failed (`failed`, see `tool_errors`) or none did (`sound`). Masked tokens
    stay in the denominators of the loss and under a KL penalty.

    Source: none of its own; masking turns is common in training agents (Search-R1, 2503.09516, masks the search
    results, which have no advantage here anyway).
    Departures: none.

    Args:
        pick: "first", "last", "calls", "answers", "failed" or "sound".
    """

    __name__ = "masked_turns"
    pick: str = choice("calls", "answers", "first", "last", "failed", "sound")

    def __post_init__(self) -> None:
        super().__post_init__()
        needs = () if self.pick in ("first", "last") else ("offsets",)
        self.declares = HookDeclaration(role="transform", needs=needs, independent=True, last=True)

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        numbers_B_T = rollout.turns_B_T
        if self.pick in ("first", "last"):
            picked_B_1 = 0 if self.pick == "first" else numbers_B_T.amax(dim=1, keepdim=True)
            return torch.where(numbers_B_T == picked_B_1, advantages_B_T, 0.0)
        kept_B_T = torch.zeros_like(advantages_B_T, dtype=torch.bool)
        for row, turn in _turns(rollout):
            has = turn.calls if self.pick in ("calls", "answers") else turn.failed
            if bool(has) == (self.pick in ("calls", "failed")):
                kept_B_T[row, slice(*turn.tokens)] = True
        return torch.where(kept_B_T, advantages_B_T, 0.0)


def _turns(rollout: Rollout) -> Iterator[tuple[int, Turn]]:
    """The turns of the completions with tokens that count, each with its row."""
    for row, counts in enumerate((rollout.lengths_B > 0).tolist()):
        for turn in rollout.turns(row) if counts else ():
            yield row, turn


@dataclass(frozen=True)
class RewardsOfTurns:
    """The weighted rewards of one rank's completions."""

    turns_B_M: torch.Tensor
    outcome_B: torch.Tensor  # of no turn
    scored_B_M: torch.Tensor  # whether the completion is scored and has the turn
    last_B_M: torch.Tensor  # whether it is the completion's last turn

    def with_outcome(self) -> torch.Tensor:
        """The rewards of each turn, the outcome added to the last, `(B, M)`."""
        return self.turns_B_M + torch.where(self.last_B_M, self.outcome_B.unsqueeze(1), 0.0)


def rewards_of_turns(rollout: Rollout) -> RewardsOfTurns:
    """Distribute the rewards: parts in turns and shapers' token rewards to these, the rest to the outcome."""
    rewards_B_K = rollout.rewards_B_K.to(compute_dtype(rollout.rewards_B_K.dtype))
    device, numbers_B_T = rewards_B_K.device, rollout.turns_B_T
    counts_B = numbers_B_T.amax(dim=1) + 1
    width = max(1, int(counts_B.max())) if len(counts_B) else 1
    rest_B_K = rewards_B_K.nan_to_num(nan=0.0) * rollout.reward_weights_K.to(rewards_B_K.dtype)
    turns_B_M = torch.zeros(len(counts_B), width, dtype=rewards_B_K.dtype, device=device)
    for name, table in rollout.parts.items():
        column, precise = list(rollout.reward_names).index(name), rewards_B_K.dtype
        by_turn_B_M = (table.turns_B_M >= 0) & ~torch.isnan(table.scores_B_M)
        for row, turn in ((table.turns_B_M >= counts_B.unsqueeze(1)) & by_turn_B_M).nonzero().tolist()[:1]:
            raise no_such_turn(f"The reward {name!r}", int(table.turns_B_M[row, turn]), row, int(counts_B[row]))
        worth_B_M = torch.where(by_turn_B_M, table.scores_B_M.to(precise) * table.weights_B_M.to(precise), 0.0)
        worth_B_M = rollout.reward_weights_K[column].to(precise) * worth_B_M
        turns_B_M = turns_B_M.scatter_add(1, table.turns_B_M.clamp(min=0), worth_B_M)
        rest_B_K[:, column] = rest_B_K[:, column].masked_fill(by_turn_B_M.any(dim=1), 0.0)
    outcome_B = rest_B_K.sum(dim=1)
    if rollout.token_rewards_B_T is not None:
        tokens_B_T = torch.where(numbers_B_T >= 0, rollout.token_rewards_B_T.to(rewards_B_K.dtype), 0.0)
        turns_B_M = turns_B_M.scatter_add(1, numbers_B_T.clamp(min=0), tokens_B_T)
        outcome_B = outcome_B - tokens_B_T.sum(dim=1)
    places_M = torch.arange(width, device=device)
    scored_B_M = (places_M < counts_B.unsqueeze(1)) & ~torch.isnan(rollout.rewards_B).unsqueeze(1)
    return RewardsOfTurns(turns_B_M, outcome_B, scored_B_M, places_M == counts_B.unsqueeze(1) - 1)


def gather_values(values_B_M: torch.Tensor, scored_B_M: torch.Tensor, rollout: Rollout) -> torch.Tensor:
    """The values of all ranks, `(N, M)`, NaN where there is none. Gathers twice."""
    values_N_M = rollout.gather(torch.where(scored_B_M, values_B_M, 0.0))
    return values_N_M.masked_fill(rollout.gather(scored_B_M.to(values_B_M.dtype)) == 0, torch.nan)


def to_tokens(values_B_M: torch.Tensor, turns_B_T: torch.Tensor) -> torch.Tensor:
    """Give each token its turn's value, `(B, T)`; 0 outside turns."""
    return torch.where(turns_B_T >= 0, values_B_M.gather(1, turns_B_T.clamp(min=0)), 0.0)
