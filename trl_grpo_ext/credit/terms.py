"""The loss as a list of terms, and what each term allows an update to leave out, to move or to scale.

loss = Σ over tokens of w · (policy + KL penalty + ...)  +  what is no sum over tokens (entropy bonus, ...)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from . import flow


@dataclass(frozen=True, kw_only=True)
class Term:
    """What one term of the loss declares."""

    name: str
    mixes_rows: bool = False  # a row's values depend on the others of its micro-batch, so these stay together
    acts_without_advantage: bool = False  # it is not 0 on rows whose advantages are all 0, so these have to run
    unscaled: bool = False  # it does not scale with the advantages, which cannot make up for another denominator


POLICY = Term(name="policy")
KL = Term(name="kl", acts_without_advantage=True, unscaled=True)
ENTROPY = Term(name="entropy", mixes_rows=True)
AUXILIARY = Term(name="auxiliary", mixes_rows=True)


@dataclass(frozen=True)
class FurtherTerms:
    """The values of token losses, `(B, T)` by name, and whether one of them takes the place of TRL's policy loss."""

    values: Mapping[str, torch.Tensor]
    replace_policy: bool


NO_FURTHER = FurtherTerms({}, replace_policy=False)


@dataclass(frozen=True)
class TakenApart:
    """A scalar loss taken apart: each term's value of every token, `(B, T)`, unweighted; and the rest, a scalar."""

    tokens: Mapping[str, torch.Tensor]
    rest: torch.Tensor

    def changed_by(self, further: FurtherTerms) -> TakenApart:
        """With further terms, and without the policy's if one of them takes its place."""
        kept = dict(self.tokens)
        if further.replace_policy:
            del kept[POLICY.name]
        return replace(self, tokens={**kept, **further.values})

    @property
    def loss_B_T(self) -> torch.Tensor:
        """The sum of the terms, `(B, T)`."""
        return functools.reduce(torch.add, self.tokens.values())


def take_apart(
    loss: torch.Tensor,
    advantages_B_T: torch.Tensor,
    weights_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    kl_B_T: torch.Tensor | None,
    has_rest: bool,
) -> TakenApart:
    """Take a scalar loss apart whose policy term is homogeneous of degree one in the advantages (Euler's identity).

    `weights_B_T` is the weight that the loss's own reduction gave each token, `kl_B_T` the KL penalty, which does not
    depend on the advantages, and `has_rest` says whether there are parts that are no sum over tokens.
    """
    live_B_T = mask_B_T > 0
    terms_B_T = flow.split_loss(loss, advantages_B_T)
    tokens = {POLICY.name: terms_B_T / torch.where(live_B_T, weights_B_T, 1.0)}
    if kl_B_T is not None:
        tokens[KL.name] = torch.where(live_B_T, kl_B_T, 0.0)
        terms_B_T = terms_B_T + weights_B_T * tokens[KL.name]
    return TakenApart(tokens, loss - terms_B_T.sum() if has_rest else loss.new_zeros(()))
