"""The hooks at the loss forward: by hand, against loops, at their edges, and micro-batches spread over ranks."""

import math
from typing import Any

import pytest
import torch

from tests.advantages.token_batches import Rows, hook
from tests.contexts import make_forward, mask_of, padded
from trl_grpo_ext.credit import flow
from trl_grpo_ext.types import Forward


def after_forward(forward: Forward, advantages: Any, name: str, **parameters: Any) -> Rows:
    incoming = torch.as_tensor(advantages, dtype=torch.float64)
    rows: Rows = flow.apply_hooks(incoming, [hook(name, **parameters)], forward).tolist()
    return rows


def shaped(advantage: float, entropies: list[float], **parameters: Any) -> list[float]:
    entropies_B_T = torch.tensor([entropies], dtype=torch.float64)
    forward = make_forward(torch.zeros_like(entropies_B_T), entropies_B_T)
    return after_forward(forward, [advantage], "entropy_shaping", **parameters)[0]


def test_entropy_shaping_by_hand() -> None:
    # A = 1: bonuses min(.04, .5), min(.4, .5), min(.8, .5), min(.2, .5). A = -0.5: the cap is .25.
    entropies = [0.1, 1.0, 2.0, 0.5]
    assert shaped(1.0, entropies, alpha=0.4, kappa=2.0) == pytest.approx([1.04, 1.4, 1.5, 1.2])
    assert shaped(-0.5, entropies, alpha=0.4, kappa=2.0) == pytest.approx([-0.46, -0.25, -0.25, -0.3])


def test_zero_variance_credit_by_hand() -> None:
    entropies = padded([[1.0, 3.0, 2.0]] * 3)
    of_groups = {"rewards_B": torch.tensor([1.0, 0.0, 1.0]), "zero_variance_B": torch.tensor([True, True, False])}
    forward = make_forward(-entropies, entropies, mask_of([3] * 3, 3), **of_groups)
    right, wrong, other = after_forward(forward, [7.0] * 3, "zero_variance_credit", alpha=0.1)
    assert right == pytest.approx([0.1, 0.3, 0.2])
    assert wrong == pytest.approx([-0.2, 0, -0.1])
    assert other == [7, 7, 7]


def test_low_probability_has_the_old_policys_weight() -> None:
    old = padded([[0.9, 0.5, 0.1]]).log()
    for now in (old, old + 0.5):
        forward = make_forward(now, torch.zeros(1, 3), old_logps_B_T=old)
        up, down = (after_forward(forward, [a], "low_probability", alpha=0.3)[0] for a in (1.0, -2.0))
        assert up == pytest.approx([0.97, 0.85, 0.73])
        assert down == pytest.approx([-1.94, -1.70, -1.46])
        # α is 0.2 by default, as in the authors' script of this method alone.
        assert after_forward(forward, [1.0], "low_probability")[0] == pytest.approx([0.98, 0.9, 0.82])


class TestFutureKL:
    WIDE: dict[str, Any] = {"half_life": 1.0, "epsilon_low": 1.0, "epsilon_high": 1e9}  # noqa: RUF012

    def rows(self, moved: list[list[float]], advantages: Any, mask: Any = None, **parameters: Any) -> Rows:
        """`moved` is log π - log π_old."""
        old = torch.full((len(moved), len(moved[0])), -1.0, dtype=torch.float64)
        logps = old + padded(moved)
        forward = make_forward(logps, torch.zeros_like(logps), mask, old_logps_B_T=old)
        return after_forward(forward, advantages, "future_kl", **parameters)

    def test_by_hand(self) -> None:
        # γ = 1/2: .4; -.2 + .2 = 0; .1 + 0 = .1.
        (row,) = self.rows([[0.1, -0.2, 0.4]], [2.0], **self.WIDE)
        assert row == pytest.approx([2 * math.exp(0.1), 2, 2 * math.exp(0.4)])

    def test_weights_are_clipped(self) -> None:
        moved = [[0.5], [0.1], [-0.1], [-0.5]]
        by_default = self.rows(moved, [1.0, -1.0, 1.0, -1.0])
        assert by_default == [[pytest.approx(1.2)], [pytest.approx(-math.exp(0.1))], [1], [-1]]
        both = self.rows(moved, [1.0] * 4, epsilon_low=0.2, epsilon_high=0.2)
        assert [value for (value,) in both] == pytest.approx([1.2, math.exp(0.1), math.exp(-0.1), 0.8])

    def test_tools_and_extremes(self) -> None:
        mask = torch.tensor([[1.0, 0.0, 1.0]], dtype=torch.float64)
        (row,) = self.rows([[0.1, math.nan, 0.4]], [1.0], mask, **self.WIDE)
        assert row == pytest.approx([math.exp(0.3), 0, math.exp(0.4)])
        (row,) = self.rows([[2.0] * 900], [1.0], half_life=1e6)  # exp overflows
        assert row == pytest.approx([1.2] * 900)


NOW = padded([[0.9, 0.5, 0.05, 0.3]]).log()
FORWARD = make_forward(NOW, -NOW, old_logps_B_T=padded([[0.6, 0.45, 0.01, 0.7]]).log())


def test_divergence_mask_by_hand() -> None:
    # π - μ is 0.3, 0.05, 0.04 (of which the ratio is 5) and -0.4.
    assert after_forward(FORWARD, [1.0], "divergence_mask") == [[0, 1, 1, 1]]
    assert after_forward(FORWARD, [-1.0], "divergence_mask") == [[-1, -1, -1, 0]]
    assert after_forward(FORWARD, [1.0], "divergence_mask", high=0.045) == [[0, 0, 1, 1]]
    assert after_forward(FORWARD, [-1.0], "divergence_mask", low=0.4001) == [[-1, -1, -1, -1]]
    # On the first pass nothing has moved.
    assert after_forward(make_forward(NOW, -NOW), [2.0], "divergence_mask") == [[2, 2, 2, 2]]


def test_ratio_bounds_by_hand() -> None:
    # The ratios are 1.5, 1.111, 5 and 0.4286; their geometric mean is 3.5714 ** 0.25 = 1.3747.

    def after(advantage: float, **parameters: Any) -> list[float]:
        return after_forward(FORWARD, [advantage], "ratio_bounds", **parameters)[0]

    assert after(-1.0) == pytest.approx([-1, -1, -0.4, -1])
    assert after(2.0, mode="token_mask", low=0.5) == pytest.approx([2, 2, 0, 0])
    assert after(-1.0, mode="sequence_truncate", high=1.2) == pytest.approx([-1.2 / 3.5714285714**0.25] * 4)
    assert after(1.0, mode="sequence_mask", high=1.2) == [0, 0, 0, 0]
    assert after(1.0, mode="sequence_mask", high=1.4, low=0.99) == [1, 1, 1, 1]
    assert after_forward(make_forward(NOW, -NOW), [2.0], "ratio_bounds") == [[2, 2, 2, 2]]


def test_divergence_mask_by_kl() -> None:
    # μ·log(μ/π) + (1-μ)·log((1-μ)/(1-π)): .6 to .9: .31124; .45 to .5: .00501; .01 to .05: .02473; .7 to .3: .33892.

    def masked(advantage: float, forward: Forward = FORWARD, **thresholds: float) -> Rows:
        return after_forward(forward, [advantage], "divergence_mask", divergence="kl", **thresholds)

    assert masked(1.0, high=0.05) == [[0, 1, 1, 1]]
    assert masked(1.0, high=0.3113) == [[1, 1, 1, 1]]
    assert masked(1.0, high=0.0247) == [[0, 1, 0, 1]]
    assert masked(-1.0, low=0.3389) == [[-1, -1, -1, 0]]
    assert masked(-1.0, low=0.339) == [[-1, -1, -1, -1]]
    # A probability that is 1 in floating point, and one that was.
    for one, other in ((0.0, -30.0), (-30.0, 0.0)):
        forward = make_forward(padded([[one]]), padded([[0.0]]), old_logps_B_T=padded([[other]]))
        assert masked(1.0 if one > other else -1.0, forward, low=0.05, high=0.05) == [[0]]
