"""Credit by turn, for completions with tools or an environment."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..credit.groups import compute_dtype, gather_groups, gather_rewards, group_apart
from ..credit.parts import no_such_turn
from ..credit.turns import exchanges, true_runs
from ..errors import AlignmentError, ConfigurationError
from ..guard.parameters import Checked, checked_choice, choice, flag, number, text
from ..types import HookDeclaration, Rollout, Turn
from .returns import discounted_returns

_EPSILON = 1e-4  # beside the standard deviation, as in TRL and in MT-GRPO's code
_GIGPO_EPSILON = 1e-6  # as in the authors' code


@dataclass(frozen=True)
class RewardsOfTurns:
    """The weighted rewards of one rank's completions."""

    turns_B_M: torch.Tensor
    outcome_B: torch.Tensor  # of no turn
    scored_B_M: torch.Tensor  # whether the completion is scored and has the turn
    last_B_M: torch.Tensor  # whether it is the completion's last turn

    def returns(self, gamma: float) -> torch.Tensor:
        """The discounted rewards of each turn and those after it, the outcome added to the last, `(B, M)`."""
        rewards_B_M = self.turns_B_M + torch.where(self.last_B_M, self.outcome_B.unsqueeze(1), 0.0)
        return discounted_returns(rewards_B_M, self.scored_B_M, gamma)


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

    Means and deviations (n - 1) are over the group's scored completions that have a turn k; a single one gets 0.

    Source: Multi-turn credit assignment with MT-GRPO (2505.11821), the second form, with λ = 1 in its authors' code;
    rewards to go per turn are process supervision in GRPO (2402.03300), with turns for steps.
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
        if self.form == "returns":
            values_B_M = self._against_the_group(rewards.returns(self.gamma), rewards, rollout)
        else:
            turns_B_M = self._against_the_group(rewards.turns_B_M, rewards, rollout)
            outcome_B_M = rewards.outcome_B.unsqueeze(1).expand_as(turns_B_M)
            outcome_B_1 = self._against_the_group(outcome_B_M, rewards, rollout)[:, :1]
            values_B_M = outcome_B_1 + torch.where(rewards.last_B_M, 0.0, self.turn_weight * turns_B_M)
        return to_tokens(values_B_M, rollout.turns_B_T).to(advantages_B_T.dtype)

    def _against_the_group(self, values_B_M: torch.Tensor, rewards: RewardsOfTurns, rollout: Rollout) -> torch.Tensor:
        """Values minus the mean of their column in the group."""
        known_N_M = gather_values(values_B_M, rewards.scored_B_M, rollout)
        columns_M = torch.arange(known_N_M.size(1), device=known_N_M.device)
        groups_N_1 = gather_groups(rollout).unsqueeze(1)
        apart_N_M = _apart_by_place(known_N_M, groups_N_1 * len(columns_M) + columns_M, self.normalise, _EPSILON)
        return apart_N_M[rollout.local_rows, : values_B_M.size(1)]


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
        episode_N = group_apart(totals_N, groups_N, _GIGPO_EPSILON if self.normalise else None)
        returns_N_M = gather_values(rewards.returns(self.gamma), rewards.scored_B_M, rollout)
        states_N_M = rollout.gather(self._states(rollout, rewards.scored_B_M.size(1)).to(groups_N.device))
        began_N_M_2 = torch.stack([groups_N.unsqueeze(1).expand_as(states_N_M), states_N_M], dim=2)
        places_NM = torch.unique(began_N_M_2.view(-1, 2), dim=0, return_inverse=True)[1]
        steps_N_M = _apart_by_place(returns_N_M, places_NM, self.normalise, _GIGPO_EPSILON)
        values_N_M = episode_N.unsqueeze(1) + self.step_weight * steps_N_M
        values_B_M = values_N_M[rollout.local_rows, : rewards.scored_B_M.size(1)]
        return to_tokens(values_B_M, rollout.turns_B_T).to(advantages_B_T.dtype)

    def _states(self, rollout: Rollout, width: int) -> torch.Tensor:
        """A number for the state in which each turn began, `(B, M)`."""
        if self.states is not None:
            checked_choice("gigpo: states", self.states, [*rollout.columns])
        table = torch.zeros(len(rollout.texts), width, dtype=torch.int64)
        rows = zip(rollout.turns_B_T.tolist(), rollout.completion_ids_B_T.tolist(), strict=True)
        for row, (numbers, ids) in enumerate(rows):
            runs = true_runs([number >= 0 for number in numbers])
            begins = [0, *(end for _, end in runs)]
            seen: Any = [ids[begin:first] for begin, (first, _) in zip(begins, runs, strict=False)]
            if self.states is not None:
                seen = rollout.columns[self.states][row]
                if not isinstance(seen, list | tuple) or len(seen) != len(runs):
                    what = f"a list of {len(runs)} states at row {row}, one for each turn"
                    raise ConfigurationError(f"gigpo: the column {self.states!r} must have {what}, got {seen!r:.100}.")
            for turn, state in enumerate(seen):
                text = json.dumps(state, sort_keys=True, default=str).encode()
                digest = hashlib.blake2b(text, digest_size=8).digest()  # the same on every rank
                table[row, turn] = int.from_bytes(digest, "big", signed=True)
        return table


class ToolErrors(Checked):
    """Subtract a constant from the advantages of turns with a failed tool call: `A'_t = A_t - c` for their tokens.

    A call fails if the tool raised, got arguments that it does not take, or does not exist. Unreadable calls are none.

    Source: none of its own; penalties for calls that fail are part of many agents' rewards (ToolRL, 2504.13958), where
    they fall on all tokens of the completion.

    Args:
        penalty: c, positive, in units of the advantages.
    """

    __name__ = "tool_errors"
    declares = HookDeclaration(role="transform", needs=("offsets",), independent=True)
    penalty: float = number(0.5, "positive", lambda x: x > 0)

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        failed_B_T = _tokens_of(rollout, lambda turn: turn.failed)
        return torch.where(failed_B_T, advantages_B_T - self.penalty, advantages_B_T)


class MaskedTurns(Checked):
    """Credit some turns only: the tokens of all others get 0, also at the loss forward.

    A turn is picked if it is the `first` or `last` of its completion; if it makes a tool call (`calls`) or none
    (`answers`); or if one of its calls failed (`failed`, see `tool_errors`) or none did (`sound`). Masked tokens stay
    in the denominators of the loss and under a KL penalty.

    Source: none of its own; Search-R1 (2503.09516) masks the search results, which have no advantage here anyway.

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
        if self.pick == "first":
            kept_B_T = rollout.turns_B_T == 0
        elif self.pick == "last":
            kept_B_T = rollout.turns_B_T == rollout.turns_B_T.amax(dim=1, keepdim=True)
        elif self.pick in ("calls", "answers"):
            kept_B_T = _tokens_of(rollout, lambda turn: bool(turn.calls) == (self.pick == "calls"))
        else:
            kept_B_T = _tokens_of(rollout, lambda turn: turn.failed == (self.pick == "failed"))
        return torch.where(kept_B_T, advantages_B_T, 0.0)


def _tokens_of(rollout: Rollout, picks: Callable[[Turn], bool]) -> torch.Tensor:
    """The tokens of some turns, by their calls, in the completions with tokens that count, `(B, T)`, bool."""
    picked_B_T = torch.zeros_like(rollout.mask_B_T, dtype=torch.bool)
    for row, counts in enumerate((rollout.lengths_B > 0).tolist()):
        turns = rollout.turns(row) if counts else ()
        messages = len(exchanges(rollout.completions[row]))
        if len(turns) > 1 and messages != len(turns) and not any(turn.calls for turn in turns):
            counts = f"{len(turns)} turns and {messages} assistant messages"
            raise AlignmentError(f"The completion at row {row} has {counts}: return one message for each turn.")
        for turn in turns:
            if picks(turn):
                picked_B_T[row, slice(*turn.tokens)] = True
    return picked_B_T


def rewards_of_turns(rollout: Rollout) -> RewardsOfTurns:
    """Distribute the rewards: parts in turns and shapers' token rewards to these, the rest to the outcome."""
    rewards_B_K = rollout.rewards_B_K.to(compute_dtype(rollout.rewards_B_K.dtype))
    device = rewards_B_K.device
    numbers_B_T = rollout.turns_B_T
    counts_B = numbers_B_T.amax(dim=1) + 1
    width = max(1, int(counts_B.max())) if len(counts_B) else 1
    rest_B_K = rewards_B_K.nan_to_num(nan=0.0) * rollout.reward_weights_K.to(rewards_B_K.dtype)
    turns_B_M = torch.zeros(len(counts_B), width, dtype=rewards_B_K.dtype, device=device)
    for name, table in rollout.parts.items():
        column = list(rollout.reward_names).index(name)
        precise = rewards_B_K.dtype
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


def _apart_by_place(values_N_M: torch.Tensor, places: torch.Tensor, normalise: bool, epsilon: float) -> torch.Tensor:
    """Values minus the mean of all those with the same place."""
    return group_apart(values_N_M.flatten(), places.flatten(), epsilon if normalise else None).view_as(values_N_M)


def to_tokens(values_B_M: torch.Tensor, turns_B_T: torch.Tensor) -> torch.Tensor:
    """Give each token its turn's value, `(B, T)`; 0 outside turns."""
    return torch.where(turns_B_T >= 0, values_B_M.gather(1, turns_B_T.clamp(min=0)), 0.0)
