"""Sums over what is still to come in a completion, counted in live tokens.

A live token is one on the loss mask. What a tool wrote in between is neither in the sums nor in the distances.
"""

from __future__ import annotations

import torch


def discounted_returns(values_B_T: torch.Tensor, live_B_T: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return-to-go `G_t = Σ_{s≥t} γ^(s-t) v_s` over live tokens, where `s-t` counts live tokens.

    Args:
        values_B_T: `v`; ignored off the live tokens, whatever stands there.
        live_B_T: Which tokens are live, bool.
        gamma: γ, in [0, 1].

    Returns:
        `(B, T)`, zero off the live tokens, in float32 or the wider dtype of `values_B_T`.
    """
    zero = torch.zeros((), dtype=wide(values_B_T.dtype), device=values_B_T.device)
    live_first_B_T = (~live_B_T).to(torch.uint8).argsort(dim=1, stable=True)
    returns_B_T = torch.where(live_B_T, values_B_T.to(zero.dtype), zero).gather(1, live_first_B_T)
    # By doubling: before a round each entry sums `reach` tokens, after it twice as many. log2(T) rounds, no powers that
    # overflow, and every term is only ever added, so padding changes no bit.
    reach = 1
    while reach < returns_B_T.size(1):
        further_B_T = torch.zeros_like(returns_B_T)
        further_B_T[:, :-reach] = gamma**reach * returns_B_T[:, reach:]
        returns_B_T = returns_B_T + further_B_T
        reach *= 2
    in_place_B_T = torch.zeros_like(returns_B_T).scatter(1, live_first_B_T, returns_B_T)
    return torch.where(live_B_T, in_place_B_T, zero)


def live_tokens_behind(live_B_T: torch.Tensor) -> torch.Tensor:
    """How many live tokens of the completion follow each token, `(B, T)`, integer; 0 at the last live one."""
    return live_B_T.sum(dim=1, keepdim=True) - live_B_T.cumsum(dim=1)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float32 or, where it is wider, `dtype`."""
    return torch.promote_types(dtype, torch.float32)
