"""Entropy shaping: by hand, and the two properties that its clipping is for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contexts import make_forward
from trl_grpo_ext import load_advantage_hooks
from trl_grpo_ext.credit import flow
from trl_grpo_ext.errors import ConfigurationError, PluginParameterError


def shaped(advantage: float, entropies: list[float], **parameters: Any) -> list[float]:
    (hook,) = load_advantage_hooks([{"name": "entropy_shaping", **parameters}])
    entropies_B_T = torch.tensor([entropies], dtype=torch.float64)
    forward = make_forward(torch.zeros_like(entropies_B_T), entropies_B_T)
    advantages_B = torch.tensor([advantage], dtype=torch.float64)
    row: list[float] = flow.apply_forward_hooks(advantages_B, [hook], forward)[0].tolist()
    return row


def test_by_hand() -> None:
    # A = 1: bonuses min(.04, .5), min(.4, .5), min(.8, .5), min(.2, .5). A = -0.5: the cap is .25.
    entropies = [0.1, 1.0, 2.0, 0.5]
    assert shaped(1.0, entropies, alpha=0.4, kappa=2.0) == pytest.approx([1.04, 1.4, 1.5, 1.2])
    assert shaped(-0.5, entropies, alpha=0.4, kappa=2.0) == pytest.approx([-0.46, -0.25, -0.25, -0.3])


def test_the_papers_values_are_the_defaults() -> None:
    assert shaped(1.0, [0.1, 2.0]) == pytest.approx([1.04, 1.5])


@given(
    st.floats(-5, 5),
    st.lists(st.floats(0, 20), min_size=1, max_size=5),
    st.floats(0.01, 5),
    st.floats(1.01, 10),
)
@settings(max_examples=80, deadline=None)
def test_signs_stay_and_the_bonus_is_bounded(
    advantage: float, entropies: list[float], alpha: float, kappa: float
) -> None:
    for value, entropy in zip(shaped(advantage, entropies, alpha=alpha, kappa=kappa), entropies, strict=True):
        assert value * advantage >= 0
        assert -1e-12 <= value - advantage <= min(alpha * entropy, abs(advantage) / kappa) + 1e-9


@pytest.mark.parametrize("parameters", [{"alpha": 0.0}, {"alpha": float("nan")}, {"kappa": 1.0}, {"kappa": -2.0}])
def test_parameters_out_of_range_are_refused_with_the_value(parameters: dict[str, float]) -> None:
    with pytest.raises((ConfigurationError, PluginParameterError), match=str(next(iter(parameters.values())))):
        load_advantage_hooks([{"name": "entropy_shaping", **parameters}])
