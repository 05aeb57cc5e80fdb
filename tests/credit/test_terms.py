"""A loss taken apart into terms by hand, and with other terms in place of the policy's."""

import pytest
import torch

from trl_grpo_ext.credit.terms import take_apart


def test_take_apart_by_hand() -> None:
    # Three tokens of weight 1/2, the last of them padding: Σ w·(-A·r + KL) over the first two, and 7 that is no sum.
    advantages = torch.tensor([[2.0, -1.0, 3.0]], requires_grad=True)
    ratios, kl = torch.tensor([[1.5, 0.5, 9.0]]), torch.tensor([[0.1, 0.2, 0.4]])
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    loss = (0.5 * mask * (kl - advantages * ratios)).sum() + 7.0
    apart = take_apart(loss, advantages, 0.5 * mask, mask, kl, has_rest=True)
    assert apart.rest.item() == pytest.approx(7.0)
    assert apart.loss_B_T.tolist() == [[pytest.approx(-2.9), pytest.approx(0.7), 0.0]]
    apart = take_apart(loss, advantages, 0.5 * mask, mask, kl, True, [torch.ones(1, 3)], replaced=True)
    assert apart.rest.item() == pytest.approx(7.0)
    assert apart.loss_B_T.tolist() == [[pytest.approx(1.1), pytest.approx(1.2), 1.0]]
