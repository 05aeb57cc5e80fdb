"""The loss as a list of terms, and what each term allows an update to leave out, to move or to scale.

loss = Σ over tokens of w · (policy + KL penalty + ...)  +  what is no sum over tokens (entropy bonus, ...)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from . import flow


@dataclass(frozen=True, kw_only=True)
class Term:
    """What one term of the loss declares. A text says why something may not be done; empty means that it may."""

    name: str
    mixes_rows: Sequence[str] = ()  # why a row's values depend on the others of its micro-batch, which stay together
    acts_without_advantage: Sequence[str] = ()  # why it is not 0 on rows whose advantages are all 0, which have to run
    # why it does not scale with the advantages, so that these cannot make up for another denominator
    unscaled: Sequence[str] = ()


POLICY = Term(name="policy")
KL = Term(
    name="kl",
    acts_without_advantage=("the KL penalty acts on rows without signal too",),
    unscaled=("a KL penalty",),
)
ENTROPY = Term(name="entropy", mixes_rows=("the entropy bonus is a mean over each micro-batch",))
AUXILIARY = Term(name="auxiliary", mixes_rows=("the router's auxiliary loss is computed over each micro-batch",))


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
        kept = {
            name: values_B_T
            for name, values_B_T in self.tokens.items()
            if not (further.replace_policy and name == POLICY.name)
        }
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
