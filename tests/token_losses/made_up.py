"""Generation batches and micro-batches for the tests of token losses, and finite differences of a loss."""

from dataclasses import replace
from typing import Any

import torch

from tests.contexts import make_rollout, padded
from trl_grpo_ext import Rollout
from trl_grpo_ext.credit.token_losses import carried_values, run_token_loss, value_and_slope
from trl_grpo_ext.testing import make_terms
from trl_grpo_ext.types import LossTerms


def batch_of(old_logps: list[list[float]], advantages: list[list[float]], **more: Any) -> Rollout:
    """What a token loss sees of a generation batch."""
    lengths = [len(row) for row in old_logps]
    settings = {"old_logps_B_T": padded(old_logps), "advantages_B_T": padded(advantages), **more}
    return make_rollout(lengths, **settings)


def terms_of(rollout: Rollout, logps_B_T: torch.Tensor, loss: Any) -> LossTerms:
    """All rows as one micro-batch, with what the loss carries there."""
    assert rollout.old_logps_B_T is not None
    assert rollout.advantages_B_T is not None
    old_logps_B_T, carried = rollout.old_logps_B_T, carried_values(loss, rollout)
    given = {"mask_B_T": rollout.mask_B_T, "carried_B_T": carried, "step": rollout.step}
    return make_terms(logps_B_T, old_logps_B_T, rollout.advantages_B_T, **given)


def random_batch(rows: int, width: int, seed: int = 0) -> tuple[Rollout, torch.Tensor]:
    """A batch of completions of several lengths with a tool's tokens, and where the policy has moved since."""
    drawn = torch.Generator().manual_seed(seed)
    lengths = [width - row % 3 for row in range(rows)]
    mask_B_T = (torch.arange(width) < torch.tensor(lengths).unsqueeze(1)).double()
    mask_B_T[:, 2] = 0.0
    old_B_T = -3.0 * torch.rand(rows, width, generator=drawn, dtype=torch.float64)
    advantages_B_T = torch.randn(rows, width, generator=drawn, dtype=torch.float64) * mask_B_T
    moved_B_T = old_B_T + 0.3 * torch.randn(rows, width, generator=drawn, dtype=torch.float64)
    rollout = make_rollout(lengths, mask_B_T=mask_B_T, old_logps_B_T=old_B_T, advantages_B_T=advantages_B_T, step=seed)
    return rollout, moved_B_T


def difference_gap(loss: Any, terms: LossTerms, step: float = 1e-6) -> float:
    """The largest gap between the gradient and central differences of the summed loss."""
    _, slope_B_T = value_and_slope(loss, terms)
    gaps = []
    for row in range(slope_B_T.size(0)):
        for token in range(slope_B_T.size(1)):
            sums = []
            for shift in (step, -step):
                logps_B_T = terms.logps_B_T.clone()
                logps_B_T[row, token] += shift
                sums.append(float(run_token_loss(loss, replace(terms, logps_B_T=logps_B_T)).sum()))
            gaps.append(abs((sums[0] - sums[1]) / (2 * step) - float(slope_B_T[row, token])))
    return max(gaps)
