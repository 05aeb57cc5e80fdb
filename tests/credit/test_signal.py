"""Groups without signal: which they are, and that leaving them out is as if they had never been sampled."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contexts import make_rollout, mask_of
from trl_grpo_ext import load_loss_aggregation
from trl_grpo_ext.credit import flow
from trl_grpo_ext.credit.signal import (
    SkipZeroVariance,
    groups_have_signal,
    has_signal,
    rewards_are_equal,
    with_signal_only,
)
from trl_grpo_ext.errors import ConfigurationError, PluginOutputError
from trl_grpo_ext.plugins.loading import available, implements, parse_selection
from trl_grpo_ext.trainer.config import GRPOExtConfig
from trl_grpo_ext.types import Rollout

NAN = float("nan")
BY_WEIGHTS = [
    info.name
    for info in available("loss_aggregation")
    if info.builtin and implements(load_loss_aggregation(info.name), "weights")
]
loaded = cache(load_loss_aggregation)


def test_a_completion_has_signal_where_a_token_that_counts_has_an_advantage() -> None:
    mask_B_T = mask_of([2, 2, 1, 0])
    advantages_B_T = torch.tensor([[0.0, 1e-30], [0.0, -0.0], [0.0, 5.0], [5.0, 5.0]], dtype=torch.float64)
    assert has_signal(advantages_B_T, mask_B_T).tolist() == [True, False, False, False]
    assert has_signal(torch.tensor([1e-30, 0.0, -2.0, 5.0]), mask_B_T).tolist() == [True, False, True, False]


def test_a_group_has_signal_where_one_of_its_completions_has() -> None:
    groups = torch.tensor([2, 0, 2, 0, 1])
    has = torch.tensor([False, False, True, False, False])
    assert groups_have_signal(has, groups).tolist() == [True, False, True, False, False]


WEIGHTS = torch.tensor([1.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("rows", "summed", "each"),
    [
        ([[1, 0, 3], [0, 1, 4]], True, False),  # the same sum of different rewards
        ([[0.3, 0.2, 3], [0.3, 0.2, 4]], True, True),  # a function of weight 0 has no say
        ([[100, 0, 0], [100.00001, 0, 0]], False, False),
        ([[1, NAN, 0], [1, 0, 0]], True, True),  # one reward alone has no spread
        ([[NAN, NAN, NAN], [NAN, NAN, NAN]], True, True),
        ([[1, NAN, 0], [NAN, NAN, NAN], [0, NAN, 0]], False, False),
    ],
)
def test_where_trls_advantages_are_zero_but_for_rounding(rows: list[list[float]], summed: bool, each: bool) -> None:
    rewards = torch.tensor(rows, dtype=torch.float64)
    groups = torch.zeros(len(rows), dtype=torch.long)
    for setting, expected in (("sum_then_normalize", summed), ("normalize_then_sum", each)):
        assert rewards_are_equal(rewards, WEIGHTS, groups, setting).tolist() == [expected] * len(rows), setting


def two_groups(advantages: list[float] | None = None, **overrides: Any) -> Rollout:
    """Two groups of two, lengths 2, 4 and 1, 3; the second has equal rewards."""
    rollout = make_rollout([2, 4, 1, 3], [1.0, 0.0, 0.5, 0.5], [0, 0, 1, 1], **overrides)
    values = torch.tensor(advantages or [0.7, -0.7, 0.0, 0.0], dtype=torch.float64)
    return Rollout(**{**vars(rollout), "advantages_B_T": flow.expand_advantages(values, rollout.mask_B_T)})


def test_the_rollout_without_them() -> None:
    seen = with_signal_only(two_groups())
    assert seen.lengths_B.tolist() == [2, 4, 0, 0]
    assert (seen.totals.tokens, seen.totals.sequences, seen.totals.prompts) == (6, 2, 1)


def test_token_mean_by_hand() -> None:
    # Ten live tokens, six in the group with signal: 1/6 each, and nothing for the rest.
    aggregation = load_loss_aggregation({"name": "token_mean", "skip_zero_variance": True})
    weights_B_T = flow.token_weights(aggregation, two_groups())
    expected = [[1 / 6, 1 / 6, 0, 0], [1 / 6] * 4, [0] * 4, [0] * 4]
    torch.testing.assert_close(weights_B_T, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_a_hooks_credit_keeps_a_group() -> None:
    seen = with_signal_only(two_groups([0.7, -0.7, 0.2, 0.0]))
    assert seen.totals.tokens == 10


@pytest.mark.parametrize("name", BY_WEIGHTS)
@settings(max_examples=25)
@given(
    groups=st.lists(
        st.tuples(st.lists(st.integers(0, 5), min_size=2, max_size=2), st.booleans()), min_size=1, max_size=4
    )
)
def test_any_weights_are_those_of_a_batch_that_never_had_them(name: str, groups: list[tuple[list[int], bool]]) -> None:
    def batch(chosen: list[tuple[list[int], bool]]) -> Rollout:
        lengths = [length for pair, _ in chosen for length in pair]
        rewards = [reward for _, varies in chosen for reward in ([1.0, 0.0] if varies else [1.0, 1.0])]
        numbers = [number for number, _ in enumerate(chosen) for _ in range(2)]
        rollout = make_rollout(lengths, rewards, numbers, width=5)
        values = torch.tensor([a for _, varies in chosen for a in ([0.7, -0.7] if varies else [0.0, 0.0])])
        return Rollout(**{**vars(rollout), "advantages_B_T": flow.expand_advantages(values, rollout.mask_B_T)})

    weights_B_T = flow.token_weights(SkipZeroVariance(loaded(name)), batch(groups))
    groups = [(pair, varies and any(pair)) for pair, varies in groups]  # without a token there is no signal
    kept_B = torch.tensor([varies for _, varies in groups for _ in range(2)])
    assert not weights_B_T[~kept_B].any()
    with_signal = [group for group in groups if group[1]]
    if with_signal:
        expected_B_T = flow.token_weights(loaded(name), batch(with_signal))
        torch.testing.assert_close(weights_B_T[kept_B], expected_B_T, rtol=1e-12, atol=0)


def test_a_batch_without_any_signal_has_no_weight() -> None:
    flat = make_rollout([2, 3], [1.0, 1.0])
    flat = Rollout(**{**vars(flat), "advantages_B_T": torch.zeros_like(flat.mask_B_T)})
    for name in BY_WEIGHTS:
        weights_B_T = flow.token_weights(SkipZeroVariance(load_loss_aggregation(name)), flat)
        assert not weights_B_T.any(), name


def test_an_aggregation_that_brings_them_back_is_refused() -> None:
    class OwnMask:
        def weights(self, rollout: Rollout) -> torch.Tensor:
            return (rollout.completion_ids_B_T > 0).to(rollout.mask_B_T.dtype)

    rollout = two_groups(width=4)
    own = SkipZeroVariance(OwnMask())
    with pytest.raises(ValueError, match=r"rollout\.advantages_B_T is None"):
        own.weights(make_rollout([2, 1]))
    with pytest.raises(PluginOutputError, match=r"'OwnMask, skip_zero_variance'.*zero where rollout.mask_B_T is zero"):
        flow.token_weights(own, rollout)


# ---------------------------------------------------------------------------------------------- selecting it


def test_it_is_an_option_of_the_selection_and_not_of_the_plugin(tmp_path: Any) -> None:
    selection = parse_selection("loss_aggregation", "{name: length_power, skip_zero_variance: true, alpha: 0.5}")
    assert selection.switches == {"skip_zero_variance"}
    assert selection.parameters == {"alpha": 0.5}
    assert parse_selection("loss_aggregation", selection) == selection
    assert parse_selection("loss_aggregation", selection.plain()) == selection
    config = GRPOExtConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, loss_aggregation=selection.plain())
    assert config.loss_aggregation == {"name": "length_power", "skip_zero_variance": True, "alpha": 0.5}
    skipping = load_loss_aggregation(selection)
    assert isinstance(skipping, SkipZeroVariance)
    assert skipping.aggregation.alpha == 0.5
    assert flow.plugin_label(skipping) == "length_power, skip_zero_variance"


def test_false_is_the_plain_aggregation() -> None:
    plain = load_loss_aggregation({"name": "token_mean", "skip_zero_variance": False})
    assert not isinstance(plain, SkipZeroVariance)


@pytest.mark.parametrize("name", ["tail_mean", "token_mean_step"])
def test_a_reduction_cannot_take_it(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}.*has `reduce`, and skip_zero_variance works with `weights`"):
        load_loss_aggregation({"name": name, "skip_zero_variance": True})


def test_it_must_be_a_truth_value() -> None:
    with pytest.raises(
        ConfigurationError, match="skip_zero_variance of 'token_mean' is 'yes'; it must be true or false"
    ):
        load_loss_aggregation({"name": "token_mean", "skip_zero_variance": "yes"})
