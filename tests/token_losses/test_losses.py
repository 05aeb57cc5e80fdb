"""The token losses: by hand, against slow loops, gradients and verl's numbers, and what they refuse."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.contexts import Ranks, cut, make_rollout, padded
from tests.token_losses.made_up import batch_of, difference_gap, random_batch, terms_of
from trl_grpo_ext.credit.token_losses import carried_values, value_and_slope
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.testing import make_terms
from trl_grpo_ext.token_losses.losses import TOPR, ClipCov, KLCov, SmoothClip, SquaredLogRatio


def test_smooth_clip_by_hand() -> None:
    # r = 1, 1.2, 0.5: -(1 + .2·tanh((r - 1)/.2)), with tanh(1) = .76159 and tanh(2.5) = .98661.
    ratios = padded([[1.0, 1.2, 0.5]])
    terms = make_terms(ratios.log(), torch.zeros(1, 3, dtype=torch.float64), padded([[1.0, 1.0, -2.0]]))
    loss_B_T, slope_B_T = value_and_slope(SmoothClip(epsilon=0.2), terms)
    assert loss_B_T[0].tolist() == pytest.approx([-1.0, -1.15232, 1.60536], abs=1e-5)
    # -A·r·(1 - tanh²)
    assert slope_B_T[0].tolist() == pytest.approx([-1.0, -1.2 * (1 - 0.58002), 1.0 * (1 - 0.97340)], abs=1e-4)


def test_topr_by_hand() -> None:
    # R of the rows: e^(.5 - .2) > 1, e^(-.4), and e^(-.7) with a positive advantage, which does not look at it.
    old = padded([[-1.0, -1.0]] * 3)
    now = old + padded([[0.5, -0.2], [-0.3, -0.1], [-0.5, -0.2]])
    terms = make_terms(now, old, padded([[-1.0, -1.0], [-2.0, -2.0], [1.0, 1.0]]))
    loss_B_T, slope_B_T = value_and_slope(TOPR(), terms)
    tapered = 2.0 * math.exp(-0.4)
    expected = [[-0.5, -1.2], [-1.3 * tapered, -1.1 * tapered], [1.5, 1.2]]
    assert loss_B_T.tolist() == [pytest.approx(row) for row in expected]
    assert slope_B_T.tolist() == [pytest.approx([value] * 2) for value in (1.0, tapered, -1.0)]
    assert TOPR().measures(terms)["tapered"].tolist() == [[0, 0], [1, 1], [0, 0]]


def test_clip_cov_by_hand() -> None:
    # Means: A 0, log π_old -1. c = .9, -.1, .4, .4: one candidate between .5 and 5, two of three between .3 and 5.
    rollout = batch_of([[-0.1, -1.1], [-1.4, -1.4]], [[1.0, 1.0], [-1.0, -1.0]])
    one: Any = ClipCov(share=0.5, low=0.5, high=5.0)
    assert carried_values(one, rollout)["kept"].tolist() == [[0, 1], [1, 1]]
    for low, kept in ((0.3, 2), (0.9001, 4)):
        kept_B_T = carried_values(ClipCov(share=0.5, low=low, high=5.0), rollout)["kept"]
        assert kept_B_T.sum() == kept
        assert kept_B_T[0, 1] == 1
    # r = 1.5, 0.5, 1.5, 0.5: left out; -.5; the clip does not bound 1.5; and it bounds 0.5 at 0.8.
    now = torch.tensor([[1.5, 0.5], [1.5, 0.5]], dtype=torch.float64).log()
    assert rollout.old_logps_B_T is not None
    loss_B_T, slope_B_T = value_and_slope(one, terms_of(rollout, rollout.old_logps_B_T + now, one))
    assert loss_B_T.tolist() == [pytest.approx([0.0, -0.5]), pytest.approx([1.5, 0.8])]
    assert slope_B_T.tolist() == [pytest.approx([0.0, -0.5]), pytest.approx([1.5, 0.0])]


def test_clip_cov_draws_by_the_step_whatever_the_padding() -> None:
    loss: Any = ClipCov(share=0.2, low=-5.0)
    kept = [carried_values(loss, random_batch(6, 9, seed)[0])["kept"] for seed in (0, 0, 1)]
    assert torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[0], kept[2])
    rollout, _ = random_batch(6, 9)
    names = ("mask_B_T", "old_logps_B_T", "advantages_B_T")
    wider: Any = {name: torch.nn.functional.pad(getattr(rollout, name), (0, 4)) for name in names}
    assert torch.equal(carried_values(loss, replace(rollout, **wider))["kept"][:, :9], kept[0])


@pytest.mark.parametrize("sizes", [[3, 3], [2, 2, 2], [1, 5]])
@pytest.mark.parametrize(("loss", "name"), [(ClipCov(share=0.2, low=0.0), "kept"), (KLCov(share=0.2), "held")])
def test_carried_values_on_several_ranks(loss: Any, name: str, sizes: list[int]) -> None:
    rollout, _ = random_batch(6, 9)
    parts = Ranks(cut(rollout, sizes)).run(lambda part: carried_values(loss, part)[name])
    assert torch.equal(torch.cat(parts), carried_values(loss, rollout)[name])


Slow = Callable[[float, float, float, float, float], float]
"""From a token's log π, log π_old and advantage, the sum of its row's log-ratios and what it carries to its loss."""


def ppo(now: float, old: float, advantage: float) -> float:
    ratio = math.exp(now - old)
    return max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2))


def topr(now: float, old: float, advantage: float, row: float, carried: float) -> float:
    return -advantage * now * (min(1.0, math.exp(row)) if advantage < 0 else 1.0)


SLOWLY: list[tuple[Any, Slow]] = [
    (ClipCov(share=0.3, low=0.0), lambda now, old, a, row, carried: carried * ppo(now, old, a)),
    (TOPR(), topr),
]


@pytest.mark.parametrize(("loss", "slow"), SLOWLY)
def test_against_a_slow_computation_and_finite_differences(loss: Any, slow: Slow) -> None:
    rollout, moved_B_T = random_batch(5, 8)
    terms = terms_of(rollout, moved_B_T, loss)
    loss_B_T, slope_B_T = value_and_slope(loss, terms)
    assert bool(slope_B_T.any())
    for row in range(5):
        live = [token for token in range(8) if terms.mask_B_T[row, token] > 0]
        gap = sum(float(moved_B_T[row, token] - terms.old_logps_B_T[row, token]) for token in live)
        for token in range(8):
            carried = terms.carried_B_T.get("kept")
            numbers = (moved_B_T, terms.old_logps_B_T, terms.advantages_B_T)
            now, old, advantage = (float(table[row, token]) for table in numbers)
            expected = slow(now, old, advantage, gap, 1.0 if carried is None else float(carried[row, token]))
            assert float(loss_B_T[row, token]) == pytest.approx(expected if token in live else 0.0, abs=1e-12)
    if not isinstance(loss, TOPR):  # whose weight stops the gradient
        assert difference_gap(loss, terms) < 1e-6


def test_squared_log_ratio_by_hand() -> None:
    terms = make_terms(padded([[-1.0, -0.5, -2.0]]), padded([[-1.5, -0.5, -1.0]]), padded([[1.0, 1.0, 0.0]]))
    loss_B_T, slope_B_T = value_and_slope(SquaredLogRatio(coefficient=0.1), terms)
    assert loss_B_T.tolist() == [pytest.approx([0.0125, 0.0, 0.05])]
    assert slope_B_T.tolist() == [pytest.approx([0.05, 0.0, -0.1])]


def test_kl_cov_by_hand() -> None:
    # Means: A 0, log π_old -1. c = (1)(.9), (1)(-.1); (-1)(-.4), (-1)(-.4): the first, then, of equal ones, the third.
    rollout = batch_of([[-0.1, -1.1], [-1.4, -1.4]], [[1.0, 1.0], [-1.0, -1.0]])
    for share, second in ((0.25, [0, 0]), (0.5, [1, 0]), (1e-9, [0, 0])):  # one at least
        assert carried_values(KLCov(share=share), rollout)["held"].tolist() == [[1, 0], second]
    loss = KLCov(share=0.5, coefficient=2.0)
    terms = terms_of(rollout, padded([[-0.4, -3.0], [-1.1, -3.0]]), loss)
    loss_B_T, slope_B_T = value_and_slope(loss, terms)
    assert loss_B_T.tolist() == [pytest.approx([0.09, 0.0]), pytest.approx([0.09, 0.0])]
    assert slope_B_T.tolist() == [pytest.approx([-0.6, 0.0]), pytest.approx([0.6, 0.0])]
    assert loss.measures(terms)["held"].sum() == 2


def test_the_slope_of_kl_cov_is_not_the_sign_of_rounding() -> None:
    rollout = batch_of([[-0.1, -1.1]], [[1.0, -1.0]])
    loss = KLCov(share=1.0)
    _, slope_B_T = value_and_slope(loss, terms_of(rollout, padded([[-0.1 + 1e-7, -1.1 - 1e-7]]), loss))
    assert float(slope_B_T.abs().max()) < 1e-6


def held_slowly(logps: np.ndarray, advantages: np.ndarray, mask: np.ndarray, share: float) -> set[tuple[int, int]]:
    """The tokens that KL-Cov holds, as its paper writes it: covariances of single tokens, and the largest of them."""
    places = [(int(row), int(token)) for row, token in np.argwhere(mask > 0)]
    mean_advantage = sum(advantages[place] for place in places) / len(places)
    mean_logp = sum(logps[place] for place in places) / len(places)
    covariance = {place: (advantages[place] - mean_advantage) * (logps[place] - mean_logp) for place in places}
    count = max(1, math.floor(share * len(places)))
    return {*sorted(places, key=lambda place: -covariance[place])[:count]}


@pytest.mark.parametrize("share", [0.002, 0.1, 0.5, 1.0])
def test_kl_cov_against_a_slow_computation_and_finite_differences(share: float) -> None:
    rollout, moved_B_T = random_batch(6, 9)
    loss = KLCov(share=share, coefficient=0.7)
    terms = terms_of(rollout, moved_B_T, loss)
    loss_B_T, _ = value_and_slope(loss, terms)
    old, advantages = terms.old_logps_B_T.numpy(), terms.advantages_B_T.numpy()
    held = held_slowly(old, advantages, terms.mask_B_T.numpy(), share)
    for (row, token), value in np.ndenumerate(loss_B_T.numpy()):
        expected = 0.35 * (float(moved_B_T[row, token]) - old[row, token]) ** 2 if (row, token) in held else 0.0
        assert value == pytest.approx(expected, abs=1e-12)
    assert difference_gap(loss, terms) < 1e-6
    assert difference_gap(SquaredLogRatio(coefficient=2.0), terms) < 1e-6


BEYOND: list[tuple[Any, str, float]] = [
    (SquaredLogRatio, "coefficient", math.nan),
    (KLCov, "share", 1.1),
    (KLCov, "coefficient", 0),
    (SmoothClip, "epsilon", 0),
    (ClipCov, "share", 0),
    (ClipCov, "low", math.inf),
    (ClipCov, "epsilon", 1.0),
]


@pytest.mark.parametrize(("loss", "parameter", "value"), BEYOND)
def test_a_parameter_is_refused_with_name_and_value(loss: Any, parameter: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=f"^[a-z_]+: {parameter} ") as caught:
        loss(**{parameter: value})
    assert repr(value) in str(caught.value)


# verl at b178a3cd56f58b2d502255daba591e92833930a7 (2026-01-29), `verl/trainer/ppo/core_algos.py`, run on these tensors:
# `compute_policy_loss_kl_cov` and `compute_policy_loss_clip_cov`, `loss_agg_mode="token-mean"`. The policy is the one
# that sampled with 0.1 added to each log-probability, which changes no covariance, so verl's micro-batch under the
# policy at hand and our batch under the policy that sampled are the same.
LENGTHS = [5, 3, 6, 2]
OLD = torch.tensor(
    [
        [-1.93, -0.78, -1.08, -0.95, -0.80, -2.55],
        [-1.74, -2.16, -2.54, -1.36, -1.07, -0.98],
        [-2.40, -0.66, -0.33, -0.99, -1.06, -1.12],
        [-2.27, -1.52, -1.96, -1.19, -0.11, -1.05],
    ],
    dtype=torch.float64,
)
ADVANTAGES = torch.tensor([[1.2], [-0.4], [0.6], [-1.4]], dtype=torch.float64).expand(4, 6)

KL_COV_SLOPES = [
    [-1.3262051016907772, -0.326205101690777, -1.326205101690777, -1.326205101690777, -1.326205101690777, 0.0],
    [0.4420683672302591, 1.442068367230259, 1.442068367230259, 0.0, 0.0, 0.0],
    [-0.6631025508453886] * 6,
    [2.5472392853059067, 1.5472392853059067, 0.0, 0.0, 0.0, 0.0],
]
"""Of verl's loss in the log-probabilities, times the number of tokens: `kl_cov_ratio=0.25`, `ppo_kl_coef=1.0`."""

CLIP_COV_SLOPES = [
    [-1.3262051016907772, 0.0, 0.0, 0.0, 0.0, 0.0],
    [0.0] * 6,
    [-0.6631025508453886, -0.6631025508453886, 0.0, -0.6631025508453886, -0.6631025508453886, -0.6631025508453886],
    [1.5472392853059067, 0.0, 0.0, 0.0, 0.0, 0.0],
]
"""The same: `clip_cov_ratio=1.0`, so that nothing is drawn, `clip_cov_lb=0.2`, `clip_cov_ub=0.9`."""


def test_kl_cov_holds_the_tokens_that_verl_holds() -> None:
    rollout = make_rollout(LENGTHS, old_logps_B_T=OLD, advantages_B_T=ADVANTAGES)
    ratio_slope_B_T = -ADVANTAGES * torch.tensor(0.1, dtype=torch.float64).exp()
    of_verl_B_T = (torch.tensor(KL_COV_SLOPES, dtype=torch.float64) - ratio_slope_B_T) * rollout.mask_B_T
    held_B_T = carried_values(KLCov(share=0.25), rollout)["held"]
    torch.testing.assert_close(held_B_T, of_verl_B_T, rtol=0.0, atol=1e-12)  # its penalty has the slope 1 there


def test_clip_cov_has_verls_slopes() -> None:
    loss = ClipCov(share=1.0, low=0.2, high=0.9, epsilon=0.2)
    rollout = make_rollout(LENGTHS, old_logps_B_T=OLD, advantages_B_T=ADVANTAGES)
    carried = carried_values(loss, rollout)
    terms = make_terms(OLD + 0.1, OLD, ADVANTAGES, mask_B_T=rollout.mask_B_T, carried_B_T=carried)
    slopes_B_T = value_and_slope(loss, terms)[1]
    torch.testing.assert_close(slopes_B_T, torch.tensor(CLIP_COV_SLOPES, dtype=torch.float64), rtol=0.0, atol=1e-12)
