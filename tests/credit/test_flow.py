"""The flow of pure tensors: Euler's identity, the KL estimate, and what the contracts refuse."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.contexts import make_forward, make_rollout, mask_of
from trl_grpo_ext.credit import flow
from trl_grpo_ext.errors import ConfigurationError, PluginOutputError, PluginRunError
from trl_grpo_ext.types import HookDeclaration, Totals

TOTALS = Totals(tokens=7, sequences=3, prompts=1, max_completion_length=8)


def hook(**methods: Any) -> Any:
    role = "transform" if "on_rollout" in methods else "forward"
    return SimpleNamespace(__name__="my_hook", declares=HookDeclaration(role=role), **methods)


class TestExpandAdvantages:
    def test_token_advantages_leave_padding_at_zero(self) -> None:
        expanded = flow.expand_advantages(torch.tensor([2.0, -1.0]), mask_of([3, 1]))
        assert expanded.tolist() == [[2, 2, 2], [-1, 0, 0]]

    def test_flow_cuts_nan_off_the_mask(self) -> None:
        advantages = torch.tensor([[1.0, math.nan], [2.0, 3.0]])
        assert flow.expand_advantages(advantages, mask_of([1, 2])).tolist() == [[1, 0], [2, 3]]


class TestSplitLoss:
    def test_clipped_loss_by_hand(self) -> None:
        # Token 1: ratio 1.5, A = 2: clipped at 1.2, -2.4. Token 2: ratio 1.5, A = -2: not clipped, 3. Weight 1/2 each.
        ratio = torch.tensor([[1.5, 1.5]], requires_grad=True)
        advantages = torch.tensor([[2.0, -2.0]], requires_grad=True)
        clipped = torch.clamp(ratio, 0.8, 1.2)
        loss = -torch.min(ratio * advantages, clipped * advantages).mean() + 7.0  # 7 stands for what has no advantage
        terms = flow.split_loss(loss, advantages)
        assert terms.tolist() == [[pytest.approx(-1.2), pytest.approx(1.5)]]
        (gradient,) = torch.autograd.grad(terms.sum(), ratio)
        assert gradient.tolist() == [[0.0, 1.0]]

    def test_a_loss_without_advantages_is_an_error_not_a_zero(self) -> None:
        advantages = torch.ones(1, 2, requires_grad=True)
        with pytest.raises(RuntimeError):
            flow.split_loss(torch.ones((), requires_grad=True) * 2, advantages)


class TestKL:
    def test_k3_by_hand(self) -> None:
        # d = -1.5 - (-1) = -0.5: exp(-0.5) + 0.5 - 1
        kl = flow.kl_k3(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]))
        assert kl.item() == pytest.approx(0.10653, abs=1e-5)

    def test_sequence_ratio_is_the_geometric_mean_over_live_tokens(self) -> None:
        logps, old = torch.tensor([[-1.0, -2.0, 9.0]]), torch.tensor([[-1.5, -1.0, 0.0]])
        mask = torch.tensor([[1.0, 1.0, 0.0]])
        ratio = flow.importance_ratio(logps, old, mask, "sequence")
        assert ratio.tolist() == [[pytest.approx(math.exp((0.5 - 1.0) / 2))]]
        per_token = flow.importance_ratio(logps, old, mask, "token")
        assert per_token[0, :2].tolist() == [pytest.approx(math.exp(0.5)), pytest.approx(math.exp(-1.0))]


class TestHooks:
    def test_hooks_act_in_the_order_given(self) -> None:
        plus = hook(on_rollout=lambda a, rollout: a + 1)
        times = hook(on_rollout=lambda a, rollout: a * 10)
        rollout = make_rollout([2, 1])
        advantages = torch.tensor([1.0, 2.0])
        assert flow.apply_hooks(advantages, [plus, times], rollout).tolist() == [[20, 20], [30, 0]]
        assert flow.apply_hooks(advantages, [times, plus], rollout).tolist() == [[11, 11], [21, 0]]

    def test_a_hook_cannot_leak_a_gradient(self) -> None:
        leak = torch.ones(1, 2, requires_grad=True)
        forward = make_forward(torch.zeros(1, 2), torch.zeros(1, 2))
        result = flow.apply_hooks(torch.tensor([1.0]), [hook(on_forward=lambda a, f: a * leak)], forward)
        assert not result.requires_grad

    @pytest.mark.parametrize(
        ("result", "message"),
        [
            (torch.zeros(2), "expected shape (2, 3) (completions, tokens), got (2,)"),
            (torch.zeros(2, 3, dtype=torch.long), "expected a floating point tensor"),
            (torch.tensor([[0.0, 0, 0], [math.nan, 0, 0]]), "got nan at row 1, token 0"),
        ],
    )
    def test_what_a_hook_may_not_return(self, result: Any, message: str) -> None:
        with pytest.raises(PluginOutputError, match="my_hook") as error:
            flow.apply_hooks(torch.zeros(2), [hook(on_rollout=lambda a, r: result)], make_rollout([3, 1]))
        assert message in str(error.value)

    @pytest.mark.parametrize(("role", "expected"), [("transform", [[3, 4]]), ("estimator", [[0, 1]])])
    def test_flow_adds_spans_by_role(self, role: str, expected: list[Any]) -> None:
        points = SimpleNamespace(
            __name__="points", declares=HookDeclaration(role=role), on_rollout=lambda a, rollout: [[(1, 2, 1.0)]]
        )
        advantages = torch.tensor([3.0])
        assert flow.apply_hooks(advantages, [points], make_rollout([2])).tolist() == expected

    @pytest.mark.parametrize(
        ("raised", "error", "message"),
        [
            (KeyError("x"), PluginRunError, "advantage hook 'my_hook': on_rollout raised KeyError: 'x'"),
            (SystemExit(3), PluginRunError, "on_rollout raised SystemExit: 3"),
            (ConfigurationError("no teacher"), ConfigurationError, "'my_hook': on_rollout: no teacher"),
            (ConfigurationError("my_hook: no"), ConfigurationError, "^my_hook: no$"),  # says it already
            (KeyboardInterrupt(), KeyboardInterrupt, None),
        ],
    )
    def test_what_a_hook_raises_is_named(self, raised: BaseException, error: Any, message: str | None) -> None:
        def raises(advantages_B_T: Any, rollout: Any) -> None:
            raise raised

        with pytest.raises(error, match=message):
            flow.apply_hooks(torch.zeros(1), [hook(on_rollout=raises)], make_rollout([1]))


class TestReducedLoss:
    @pytest.mark.parametrize(
        ("reduce", "message"),
        [
            (lambda loss, mask, totals: loss.sum(1), "must return a scalar tensor, got shape (2,)"),
            (lambda loss, mask, totals: loss.detach().sum(), "without a gradient"),
            (lambda loss, mask, totals: loss.sum() / (mask * 0).sum(), "from finite losses"),
        ],
    )
    def test_what_a_reduction_may_not_return(self, reduce: Any, message: str) -> None:
        aggregation = SimpleNamespace(__name__="my_reduce", reduce=reduce)
        loss = torch.ones(2, 3, requires_grad=True) * 2
        with pytest.raises(PluginOutputError, match="my_reduce") as error:
            flow.reduced_loss(aggregation, loss, torch.ones(2, 3), TOTALS)
        assert message in str(error.value)

    def test_reduced_loss_must_come_from_the_losses(self) -> None:
        loss_B_T = torch.ones(1, 2, requires_grad=True)
        other = torch.ones((), requires_grad=True) * 2
        with pytest.raises(PluginOutputError, match=r"'my_reduce': .*loss_B_T"):
            flow.reduced_weights(SimpleNamespace(__name__="my_reduce"), other, loss_B_T, torch.ones(1, 2))
