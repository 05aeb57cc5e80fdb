"""Groups without signal: which they are, and that leaving them out is as if they had never been sampled."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contexts import make_rollout
from trl_grpo_ext import load_loss_aggregation
from trl_grpo_ext.credit import flow
from trl_grpo_ext.credit.signal import SkipZeroVariance, groups_have_signal, with_signal_only
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


def signal(rewards: list[float], advantages: list[float], groups: list[int]) -> list[bool]:
    table = torch.tensor(rewards, dtype=torch.float64), torch.tensor(advantages, dtype=torch.float64)
    return groups_have_signal(*table, torch.tensor(groups)).tolist()


@pytest.mark.parametrize(
    ("rewards", "advantages", "expected"),
    [
        ([1.0, 0.0], [0.7, 0.7], True),
        ([1.0, 1.0], [0.0, 0.0], False),
        ([0.1, 0.1 + 1e-9], [0.0, 0.0], False),  # the same number, summed in another order
        ([100.0, 100.0 + 1e-5], [0.05, 0.05], False),  # float32 at 100, divided by TRL's 1e-4
        ([1.0, 1.0], [0.5, 0.0], True),  # a hook gave a token credit all the same
        ([1.0, NAN], [0.0, 0.0], False),  # one reward alone has no spread
        ([NAN, NAN], [0.0, 0.0], False),
        ([1.0, NAN, 0.0], [0.7, 0.0, 0.7], True),
    ],
)
def test_which_groups_have_signal(rewards: list[float], advantages: list[float], expected: bool) -> None:
    assert signal(rewards, advantages, [0] * len(rewards)) == [expected]
    # Beside other groups, in any order of the rows.
    beside = signal([*rewards, 1.0, 0.0], [*advantages, 0.7, 0.7], [*([1] * len(rewards)), 0, 0])
    assert beside == [True, expected]


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
@settings(max_examples=25, deadline=None)
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
