"""The loss as a list of terms, and what each term allows an update to leave out, to move or to scale.

loss = Σ over tokens of w · (policy + KL penalty + ...)  +  what is no sum over tokens (entropy bonus, ...)
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from . import flow


@dataclass(frozen=True, kw_only=True)
class Term:
    """What one term of the loss declares."""

    mixes_rows: bool = False  # a row's values depend on the others of its micro-batch, so these stay together
    acts_without_advantage: bool = False  # it is not 0 on rows whose advantages are all 0, so these have to run
    unscaled: bool = False  # it does not scale with the advantages, which cannot make up for another denominator


KL = Term(acts_without_advantage=True, unscaled=True)
ENTROPY = Term(mixes_rows=True)
AUXILIARY = Term(mixes_rows=True)


@dataclass(frozen=True)
class TakenApart:
    """A scalar loss taken apart: the sum of its terms for each token, `(B, T)`, unweighted; and the rest, a scalar."""

    loss_B_T: torch.Tensor
    rest: torch.Tensor


def take_apart(
    loss: torch.Tensor,
    advantages_B_T: torch.Tensor,
    weights_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    kl_B_T: torch.Tensor | None,
    has_rest: bool,
    further: Iterable[torch.Tensor] = (),
    replaced: bool = False,
) -> TakenApart:
    """Take a scalar loss apart whose policy term is homogeneous of degree one in the advantages (Euler's identity).

    `weights_B_T` is the weight that the loss's own reduction gave each token, `kl_B_T` the KL penalty, which does not
    depend on the advantages, and `has_rest` says whether there are parts that are no sum over tokens. `further` are
    the terms of token losses; `replaced` says that one of them takes the place of the policy's.
    """
    live_B_T = mask_B_T > 0
    terms_B_T = flow.split_loss(loss, advantages_B_T)
    added = [] if replaced else [terms_B_T / torch.where(live_B_T, weights_B_T, 1.0)]
    if kl_B_T is not None:
        added.append(torch.where(live_B_T, kl_B_T, 0.0))
        terms_B_T = terms_B_T + weights_B_T * added[-1]
    first_B_T, *others = [*added, *further]
    return TakenApart(sum(others, first_B_T), loss - terms_B_T.sum() if has_rest else loss.new_zeros(()))
