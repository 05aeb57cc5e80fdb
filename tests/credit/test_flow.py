"""The flow of pure tensors: Euler's identity, the KL estimate, an aggregation's bias, and what the contracts refuse."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.contexts import make_forward, make_rollout, mask_of
from trl_grpo_ext import load_loss_aggregation
from trl_grpo_ext.credit import flow
from trl_grpo_ext.errors import ConfigurationError, PluginOutputError, PluginRunError
from trl_grpo_ext.types import HookDeclaration, Totals

TOTALS = Totals(tokens=7, sequences=3, prompts=1, max_completion_length=8)


def hook(role: str = "transform", **methods: Any) -> Any:
    return SimpleNamespace(__name__="my_hook", declares=HookDeclaration(role=role), **methods)


def test_expand_advantages_leaves_padding_at_zero() -> None:
    assert flow.expand_advantages(torch.tensor([2.0, -1.0]), mask_of([3, 1])).tolist() == [[2, 2, 2], [-1, 0, 0]]
    advantages = torch.tensor([[1.0, math.nan], [2.0, 3.0]])
    assert flow.expand_advantages(advantages, mask_of([1, 2])).tolist() == [[1, 0], [2, 3]]


def test_split_loss_of_a_clipped_loss_by_hand() -> None:
    # Token 1: ratio 1.5, A = 2: clipped at 1.2, -2.4. Token 2: ratio 1.5, A = -2: not clipped, 3. Weight 1/2 each.
    ratio = torch.tensor([[1.5, 1.5]], requires_grad=True)
    advantages = torch.tensor([[2.0, -2.0]], requires_grad=True)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    loss = -torch.min(ratio * advantages, clipped * advantages).mean() + 7.0  # 7 stands for what has no advantage
    terms = flow.split_loss(loss, advantages)
    assert terms.tolist() == [[pytest.approx(-1.2), pytest.approx(1.5)]]
    (gradient,) = torch.autograd.grad(terms.sum(), ratio)
    assert gradient.tolist() == [[0.0, 1.0]]
    with pytest.raises(RuntimeError):  # a loss without advantages is an error, not a zero
        flow.split_loss(torch.ones((), requires_grad=True) * 2, advantages)


def test_kl_k3_by_hand() -> None:
    # d = -1.5 - (-1) = -0.5: exp(-0.5) + 0.5 - 1
    assert flow.kl_k3(torch.tensor([[-1.0]]), torch.tensor([[-1.5]])).item() == pytest.approx(0.10653, abs=1e-5)


def test_importance_ratio_of_a_sequence_is_the_geometric_mean_over_live_tokens() -> None:
    logps, old = torch.tensor([[-1.0, -2.0, 9.0]]), torch.tensor([[-1.5, -1.0, 0.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    ratio = flow.importance_ratio(logps, old, mask, "sequence")
    assert ratio.tolist() == [[pytest.approx(math.exp((0.5 - 1.0) / 2))]]
    per_token = flow.importance_ratio(logps, old, mask, "token")
    assert per_token[0, :2].tolist() == [pytest.approx(math.exp(0.5)), pytest.approx(math.exp(-1.0))]


def test_apply_hooks_in_the_order_given_and_without_a_gradient() -> None:
    plus = hook(on_rollout=lambda a, rollout: a + torch.ones(1, requires_grad=True))
    times = hook(on_rollout=lambda a, rollout: a * 10)
    rollout = make_rollout([2, 1])
    advantages = torch.tensor([1.0, 2.0])
    assert flow.apply_hooks(advantages, [plus, times], rollout).tolist() == [[20, 20], [30, 0]]
    result = flow.apply_hooks(advantages, [times, plus], rollout)
    assert result.tolist() == [[11, 11], [21, 0]]
    assert not result.requires_grad
    forward = make_forward(torch.zeros(1, 2), torch.zeros(1, 2))
    leaks = hook("forward", on_forward=lambda a, f: a * torch.ones(1, 2, requires_grad=True))
    assert not flow.apply_hooks(torch.tensor([1.0]), [leaks], forward).requires_grad


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.zeros(2), "expected shape (2, 3) (completions, tokens), got (2,)"),
        (torch.zeros(2, 3, dtype=torch.long), "expected a floating point tensor"),
        (torch.tensor([[0.0, 0, 0], [math.nan, 0, 0]]), "got nan at row 1, token 0"),
        ([[], [0.5, 0.0]], "expected a tensor (B, T), or for each completion a list of spans"),
        ([0.5, 0.0], "got 0.5 at row 0"),
    ],
)
def test_run_hook_refuses(result: Any, message: str) -> None:
    with pytest.raises(PluginOutputError, match="my_hook") as error:
        flow.apply_hooks(torch.zeros(2), [hook(on_rollout=lambda a, r: result)], make_rollout([3, 1]))
    assert message in str(error.value)


def test_tensor_like_brings_a_result_to_the_device_of_the_others() -> None:
    assert flow.tensor_like(torch.zeros(2, 3, device="meta"), torch.ones(2, 3), "mine").device.type == "meta"


@pytest.mark.parametrize(("role", "expected"), [("transform", [[3, 4]]), ("estimator", [[0, 1]])])
def test_run_hook_adds_spans_by_role(role: str, expected: list[Any]) -> None:
    points = hook(role, on_rollout=lambda a, rollout: [[(1, 2, 1.0)]])
    assert flow.apply_hooks(torch.tensor([3.0]), [points], make_rollout([2])).tolist() == expected


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
def test_run_hook_names_who_raised(raised: BaseException, error: Any, message: str | None) -> None:
    def raises(advantages_B_T: Any, rollout: Any) -> None:
        raise raised

    with pytest.raises(error, match=message):
        flow.apply_hooks(torch.zeros(1), [hook(on_rollout=raises)], make_rollout([1]))


def test_what_is_none_because_nobody_needs_it_is_named_with_the_line() -> None:
    reads = hook(on_rollout=torch.no_grad()(lambda a, rollout: a * rollout.old_logps_B_T))
    said = r" \(test_flow.py, line \d+: .*\)\. old_logps_B_T is None unless declared, as in needs=\(\"old_logps\",\)\.$"
    with pytest.raises(PluginRunError, match=f"'NoneType'{said}"):
        flow.apply_hooks(torch.zeros(1), [reads], make_rollout([1]))
    reads.declares = HookDeclaration(role="transform", needs=("old_logps",))
    with pytest.raises(PluginRunError) as raised:  # it is declared, and missing for another reason
        flow.apply_hooks(torch.zeros(1), [reads], make_rollout([1]))
    assert "needs=" not in str(raised.value)


@pytest.mark.parametrize(
    ("reduce", "message"),
    [
        (lambda loss, mask, totals: loss.sum(1), "got (2,)"),
        (lambda loss, mask, totals: loss.detach().sum(), "no gradient"),
        (lambda loss, mask, totals: loss.sum() / (mask * 0).sum(), "got inf"),
    ],
)
def test_reduced_loss_refuses(reduce: Any, message: str) -> None:
    loss = torch.ones(2, 3, requires_grad=True) * 2
    with pytest.raises(PluginOutputError, match="my_reduce") as error:
        flow.reduced_loss(SimpleNamespace(__name__="my_reduce", reduce=reduce), loss, torch.ones(2, 3), TOTALS)
    assert message in str(error.value)


def test_reduced_weights_must_come_from_the_losses() -> None:
    loss_B_T, other = torch.ones(1, 2, requires_grad=True), torch.ones((), requires_grad=True)
    with pytest.raises(PluginOutputError, match="'my_reduce'"):
        flow.reduced_weights(SimpleNamespace(__name__="my_reduce"), other * 2, loss_B_T, torch.ones(1, 2))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_mean", [1.0] * 6),  # it has no bias
        # Twelve tokens with a total weight of 1: 1/12 on average. A completion's tokens have 1/4 over its length. Those
        # of positive advantages have half the weight on three tokens, the others on nine.
        ("seq_mean_token_mean", [12 / 4, 12 / 8, 12 / 12, 12 / 24, 1 / 2 / 3 * 12, 1 / 2 / 9 * 12]),
    ],
)
def test_weight_metrics_by_hand(name: str, expected: list[float]) -> None:
    rollout = make_rollout([1, 2, 3, 6], width=8)
    advantages_B_T = flow.expand_advantages(torch.tensor([1.0, 1.0, -1.0, -1.0]), rollout.mask_B_T)
    weights_B_T = flow.token_weights(load_loss_aggregation(name), rollout)
    metrics = flow.weight_metrics(flow.row_table(weights_B_T, advantages_B_T, rollout.mask_B_T))
    quarters = [f"length_q{quarter}" for quarter in (1, 2, 3, 4)]
    assert [*metrics] == [f"loss_weight/{of}" for of in (*quarters, "positive_advantage", "negative_advantage")]
    assert [*metrics.values()] == pytest.approx(expected, rel=1e-6)
