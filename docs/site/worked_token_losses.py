"""Worked examples of the token losses: the same two completions of two tokens for all of them."""

from collections.abc import Mapping
from typing import Any

import torch

from trl_grpo_ext import load_token_losses
from trl_grpo_ext.credit.token_losses import carried_values, value_and_slope
from trl_grpo_ext.testing.builders import make_rollout, make_terms

from .worked import Worked

OLD = (0.5, 0.25, 0.4, 0.1)
NOW = (0.6, 0.3, 0.2, 0.11)
ADVANTAGES = (1.0, 1.0, -1.0, -1.0)
_TOKENS = [f"completion {row}, token {token}" for row in (1, 2) for token in (1, 2)]


def losses(selection: Any) -> Mapping[str, Any]:
    """Each token's loss, and its slope in the token's log-probability."""
    (loss,) = load_token_losses([selection])
    now_B_T, old_B_T = (torch.tensor(row, dtype=torch.float64).view(2, 2).log() for row in (NOW, OLD))
    advantages_B_T = torch.tensor(ADVANTAGES, dtype=torch.float64).view(2, 2)
    rollout = make_rollout([2, 2], old_logps_B_T=old_B_T, advantages_B_T=advantages_B_T)
    terms = make_terms(now_B_T, old_B_T, advantages_B_T, carried_B_T=carried_values(loss, rollout))
    loss_B_T, slope_B_T = value_and_slope(loss, terms)
    return {"loss": loss_B_T.flatten().tolist(), "its gradient in log π": slope_B_T.flatten().tolist()}


def _example(selection: Any, note: str = "") -> Worked:
    return Worked(selection, _TOKENS, {"π_old": OLD, "π": NOW, "advantage": ADVANTAGES}, losses, note)


EXAMPLES: dict[str, Worked] = {
    "squared_log_ratio": _example({"name": "squared_log_ratio", "coefficient": 0.1}),
    "kl_cov": _example(
        {"name": "kl_cov", "share": 0.25}, "A quarter of the tokens: the one with the largest covariance."
    ),
    "smooth_clip": _example({"name": "smooth_clip", "epsilon": 0.2}),
    "clip_cov": _example(
        {"name": "clip_cov", "share": 0.25, "low": 0.8, "high": 5.0}, "One token's covariance lies between the bounds."
    ),
    "topr": _example("topr", "The second completion's ratio is 0.5 · 1.1 = 0.55."),
}
