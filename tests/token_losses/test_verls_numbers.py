"""Covariance losses beside verl's own functions, run on these tensors: its numbers, not its code.

verl at b178a3cd56f58b2d502255daba591e92833930a7 (2026-01-29), `verl/trainer/ppo/core_algos.py`:
`compute_policy_loss_kl_cov` and `compute_policy_loss_clip_cov` with `loss_agg_mode="token-mean"`. The policy is the one
that sampled with 0.1 added to each log-probability, which changes no covariance, so verl's micro-batch under the policy
at hand and our batch under the policy that sampled are the same.
"""

import torch

from tests.contexts import make_rollout
from trl_grpo_ext.credit.token_losses import carried_values, value_and_slope
from trl_grpo_ext.testing import make_terms
from trl_grpo_ext.token_losses.losses import ClipCov, KLCov

LENGTHS = [5, 3, 6, 2]
OLD = torch.tensor(
    [
        [-1.93, -0.78, -1.08, -0.95, -0.80, -2.55],
        [-1.74, -2.16, -2.54, -1.36, -1.07, -0.98],
        [-2.40, -0.66, -0.33, -0.99, -1.06, -1.12],
        [-2.27, -1.52, -1.96, -1.19, -0.11, -1.05],
    ],
    dtype=torch.float64,
)
ADVANTAGES = torch.tensor([[1.2], [-0.4], [0.6], [-1.4]], dtype=torch.float64).expand(4, 6)

KL_COV_SLOPES = [
    [-1.3262051016907772, -0.326205101690777, -1.326205101690777, -1.326205101690777, -1.326205101690777, 0.0],
    [0.4420683672302591, 1.442068367230259, 1.442068367230259, 0.0, 0.0, 0.0],
    [-0.6631025508453886] * 6,
    [2.5472392853059067, 1.5472392853059067, 0.0, 0.0, 0.0, 0.0],
]
"""Of verl's loss in the log-probabilities, times the number of tokens: `kl_cov_ratio=0.25`, `ppo_kl_coef=1.0`."""

CLIP_COV_SLOPES = [
    [-1.3262051016907772, 0.0, 0.0, 0.0, 0.0, 0.0],
    [0.0] * 6,
    [-0.6631025508453886, -0.6631025508453886, 0.0, -0.6631025508453886, -0.6631025508453886, -0.6631025508453886],
    [1.5472392853059067, 0.0, 0.0, 0.0, 0.0, 0.0],
]
"""The same: `clip_cov_ratio=1.0`, so that nothing is drawn, `clip_cov_lb=0.2`, `clip_cov_ub=0.9`."""


def test_kl_cov_holds_the_tokens_that_verl_holds() -> None:
    rollout = make_rollout(LENGTHS, old_logps_B_T=OLD, advantages_B_T=ADVANTAGES)
    ratio_slope_B_T = -ADVANTAGES * torch.tensor(0.1, dtype=torch.float64).exp()
    of_verl_B_T = (torch.tensor(KL_COV_SLOPES, dtype=torch.float64) - ratio_slope_B_T) * rollout.mask_B_T
    held_B_T = carried_values(KLCov(share=0.25), rollout)["held"]
    torch.testing.assert_close(held_B_T, of_verl_B_T, rtol=0.0, atol=1e-12)  # its penalty has the slope 1 there


def test_clip_cov_has_verls_slopes() -> None:
    loss = ClipCov(share=1.0, low=0.2, high=0.9, epsilon=0.2)
    rollout = make_rollout(LENGTHS, old_logps_B_T=OLD, advantages_B_T=ADVANTAGES)
    carried = carried_values(loss, rollout)
    terms = make_terms(OLD + 0.1, OLD, ADVANTAGES, mask_B_T=rollout.mask_B_T, carried_B_T=carried)
    slopes_B_T = value_and_slope(loss, terms)[1]
    torch.testing.assert_close(slopes_B_T, torch.tensor(CLIP_COV_SLOPES, dtype=torch.float64), rtol=0.0, atol=1e-12)
