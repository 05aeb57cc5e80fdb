"""The terms that hold the policy: by hand, against a slow computation, by finite differences, on several ranks."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.contexts import Ranks, cut, padded
from tests.token_losses.made_up import batch_of, difference_gap, random_batch, terms_of
from trl_grpo_ext.credit.token_losses import carried_values, value_and_slope
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.testing import make_terms
from trl_grpo_ext.token_losses.regularisers import KLCov, SquaredLogRatio


def test_squared_log_ratio_by_hand() -> None:
    terms = make_terms(padded([[-1.0, -0.5, -2.0]]), padded([[-1.5, -0.5, -1.0]]), padded([[1.0, 1.0, 0.0]]))
    loss_B_T, slope_B_T = value_and_slope(SquaredLogRatio(coefficient=0.1), terms)
    assert loss_B_T.tolist() == [pytest.approx([0.0125, 0.0, 0.05])]
    assert slope_B_T.tolist() == [pytest.approx([0.05, 0.0, -0.1])]


def test_kl_cov_by_hand() -> None:
    # Means: A 0, log π_old -1. c = (1)(.9), (1)(-.1); (-1)(-.4), (-1)(-.4): the first, then, of equal ones, the third.
    rollout = batch_of([[-0.1, -1.1], [-1.4, -1.4]], [[1.0, 1.0], [-1.0, -1.0]])
    assert carried_values(KLCov(share=0.25), rollout)["held"].tolist() == [[1, 0], [0, 0]]
    assert carried_values(KLCov(share=0.5), rollout)["held"].tolist() == [[1, 0], [1, 0]]
    assert carried_values(KLCov(share=1e-9), rollout)["held"].tolist() == [[1, 0], [0, 0]]  # one at least
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


@pytest.mark.parametrize("sizes", [[3, 3], [2, 2, 2], [1, 5]])
def test_kl_cov_holds_the_same_tokens_on_several_ranks(sizes: list[int]) -> None:
    rollout, _ = random_batch(6, 9)
    loss: Any = KLCov(share=0.2)
    parts = Ranks(cut(rollout, sizes)).run(lambda part: carried_values(loss, part)["held"])
    assert torch.equal(torch.cat(parts), carried_values(loss, rollout)["held"])


@pytest.mark.parametrize(
    ("loss", "parameter", "values"),
    [
        (SquaredLogRatio, "coefficient", (0, -1.0, math.nan)),
        (KLCov, "share", (0, 1.1)),
        (KLCov, "coefficient", (0, math.inf)),
    ],
)
def test_a_parameter_is_refused_with_name_and_value(loss: Any, parameter: str, values: tuple[float, ...]) -> None:
    for value in values:
        with pytest.raises(ConfigurationError, match=f"^[a-z_]+: {parameter} ") as caught:
            loss(**{parameter: value})
        assert repr(value) in str(caught.value)
