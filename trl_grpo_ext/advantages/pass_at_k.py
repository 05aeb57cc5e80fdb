"""Advantages that raise the chance that one of k completions succeeds (pass@k training)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ..errors import ConfigurationError, PluginOutputError
from ..guard.parameters import checked_number
from .group_statistics import gather_rewards, group_sums, on_every_token

if TYPE_CHECKING:
    from ..types import Rollout


class PassAtK:
    """Credit a completion by what it adds to sets of k: whether any of a prompt's k completions succeeds.

    All `C(n, k)` sets of k out of a group's n completions are worth 1 if they hold a success and 0 if not; their worth
    is normalised by its mean `R̄ = 1 - C(n-c, k) / C(n, k)`, where c completions succeed, and by its standard deviation
    `σ = √(R̄ (1 - R̄))`; a completion gets the mean over the sets that it is in:

    - a success: `(1 - R̄) / σ`;
    - a failure: `(1 - R̄ - C(n-c-1, k-1) / C(n-1, k-1)) / σ`.

    They sum to zero over a group. All are 0 where no completion succeeds, and where so many do that every set holds a
    success: what is solved well enough is left alone, which keeps the policy exploring. k = 1 is `normalised`, with
    the biased standard deviation and no ε. It replaces the advantages that come in on every token, so it stands first
    in a chain.

    Source: Pass@k Training for Adaptively Balancing Exploration and Exploitation (2508.10751), the analytical solution.

    Departures: a completion that no reward function scored gets advantage 0, and n does not count it. A group that has
    fewer than k scored completions gets 0 as well: there is no set of k to judge.

    Args:
        k: Size of the sets; at least 1, and at most the size of a group, `num_generations`.
        threshold: A completion succeeds where its reward is greater than this. 0.5 suits rewards of 0 and 1.

    Raises:
        ConfigurationError: A parameter is out of its range.
        PluginOutputError: From `on_rollout` in training: groups have fewer than k completions, scored or not.
    """

    __name__ = "pass_at_k"

    def __init__(self, *, k: int = 4, threshold: float = 0.5) -> None:
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ConfigurationError(f"pass_at_k: k must be a whole number of at least 1, got {k!r}.")
        self.k = k
        self.threshold = checked_number("pass_at_k: threshold", threshold, "a finite number", lambda x: True)

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Return the new advantages `(B, T)`, constant over each completion's tokens."""
        if rollout.training and self.k > rollout.num_generations:
            raise PluginOutputError(
                f"pass_at_k: k={self.k} completions cannot be drawn from a group of {rollout.num_generations}. "
                "Lower k, or raise num_generations."
            )
        rewards_N, scored_N, groups_N = gather_rewards(rollout)
        succeeds_N = scored_N * (rewards_N > self.threshold)
        counts_N_2 = torch.stack([group_sums(scored_N, groups_N), group_sums(succeeds_N, groups_N)], dim=1)
        pairs_N = [(int(n), int(c)) for n, c in counts_N_2.tolist()]
        credit_of = {(n, c): set_credit(n, c, self.k) for n, c in set(pairs_N)}
        credits_N_2 = rewards_N.new_tensor([credit_of[pair] for pair in pairs_N])
        new_N = scored_N * torch.where(succeeds_N > 0, credits_N_2[:, 0], credits_N_2[:, 1])
        return on_every_token(new_N[rollout.local_rows], advantages_B_T)


def set_credit(n: int, c: int, k: int) -> tuple[float, float]:
    """Advantages of a success and of a failure in a group of n completions of which c succeed.

    In whole numbers up to the last step, so there is nothing to overflow or to cancel in large groups. With
    `f = 1 - R̄`, the share of the sets without a success, a success gets `f / √(f (1 - f)) = √(f / (1 - f))`. A group's
    advantages sum to zero, because `C(n-c-1, k-1) / C(n-1, k-1) = f · n / (n - c)`; hence a failure's.
    """
    sets, failing = math.comb(n, k), math.comb(n - c, k)  # both 0 where n < k
    if failing in (0, sets):
        return 0.0, 0.0
    success = math.sqrt(failing / (sets - failing))
    return success, -success * c / (n - c)
