"""By hand, by autograd, and by the rules of hooks."""

from __future__ import annotations

import math

import pytest
import torch
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.testing import assert_conforms, make_forward

from grpo_gspo_token import GSPOToken

OLD = torch.tensor([[-1.0, -2.0], [-1.0, -1.0]])


def test_it_conforms() -> None:
    assert_conforms("advantage_hook", "gspo_token")


def test_by_hand() -> None:
    now = OLD + torch.tensor([[0.2, 0.0], [-0.3, -0.1]])  # s is e^0.1 and e^-0.2
    forward = make_forward(now, torch.ones(2, 2), old_logps_B_T=OLD)
    after = GSPOToken(low=0.5, high=0.5).on_forward(torch.tensor([[1.0, 2.0], [1.0, -1.0]]), forward)
    expected = [[math.exp(-0.1), 2 * math.exp(0.1)], [math.exp(0.1), -math.exp(-0.1)]]
    torch.testing.assert_close(after, torch.tensor(expected))
    clipped = GSPOToken(low=0.1, high=0.05).on_forward(torch.tensor([[1.0, -2.0], [1.0, -1.0]]), forward)
    assert clipped[0, 0] == 0  # it rose beyond 0.05
    assert clipped[0, 1] < 0  # a negative advantage pulls it back
    assert clipped[1, 1] == 0
    assert clipped[1, 0] > 0


def test_the_gradient_is_the_sequence_ratios() -> None:
    torch.manual_seed(0)
    old_B_T, now_B_T = -torch.rand(3, 4), (-torch.rand(3, 4)).requires_grad_()
    advantages_B_T = torch.randn(3, 4)
    forward = make_forward(now_B_T.detach(), torch.ones(3, 4), old_logps_B_T=old_B_T)
    changed_B_T = GSPOToken(low=0.9, high=10).on_forward(advantages_B_T, forward)
    (ours,) = torch.autograd.grad((changed_B_T * (now_B_T - old_B_T).exp()).sum(), now_B_T)
    sequence_B_1 = (now_B_T.detach() - old_B_T).mean(dim=1, keepdim=True).exp()
    (paper,) = torch.autograd.grad((advantages_B_T * sequence_B_1 * (now_B_T - now_B_T.detach()).exp()).sum(), now_B_T)
    torch.testing.assert_close(ours, paper)


@pytest.mark.parametrize("wrong", [{"low": 0}, {"low": 1}, {"high": 0}])
def test_its_parameters(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="gspo_token: low must be"):
        GSPOToken(**wrong)
