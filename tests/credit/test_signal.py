"""Groups without signal: which they are, and that leaving them out is as if they had never been sampled."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contexts import Ranks, cut, make_forward, make_rollout, mask_of
from trl_grpo_ext import load_advantage_hooks, load_loss_aggregation
from trl_grpo_ext.credit import flow
from trl_grpo_ext.credit.chain import PATIENCE, HookChain, change_tables
from trl_grpo_ext.credit.signal import (
    SkipZeroVariance,
    groups_of,
    has_signal,
    rewards_are_equal,
    signal_of,
    signal_table,
    with_signal_only,
    zero_variance_of,
)
from trl_grpo_ext.errors import ConfigurationError, PluginOutputError
from trl_grpo_ext.filters.conditions import Signal
from trl_grpo_ext.plugins.loading import available, implements, parse_selection
from trl_grpo_ext.types import Rollout

NAN = float("nan")
BY_WEIGHTS = [
    info.name
    for info in available("loss_aggregation")
    if info.builtin and implements(load_loss_aggregation(info.name), "weights")
]
loaded = cache(load_loss_aggregation)


def test_has_signal_counts_live_tokens() -> None:
    mask_B_T = mask_of([2, 2, 1, 0])
    advantages_B_T = torch.tensor([[0.0, 1e-30], [0.0, -0.0], [0.0, 5.0], [5.0, 5.0]], dtype=torch.float64)
    assert has_signal(advantages_B_T, mask_B_T).tolist() == [True, False, False, False]
    assert has_signal(torch.tensor([1e-30, 0.0, -2.0, 5.0]), mask_B_T).tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    ("rows", "summed", "each"),
    [
        ([[1, 0, 3], [0, 1, 4]], True, False),  # the same sum of different rewards
        ([[0.3, 0.2, 3], [0.3, 0.2, 4]], True, True),  # a function of weight 0 has no say
        ([[100, 0, 0], [100.00001, 0, 0]], False, False),
        ([[1, NAN, 0], [1, 0, 0]], True, True),  # one reward alone has no spread
        ([[1, NAN, 0], [NAN, NAN, NAN], [0, NAN, 0]], False, False),
    ],
)
def test_where_trls_advantages_are_zero_but_for_rounding(rows: list[list[float]], summed: bool, each: bool) -> None:
    rewards, weights = torch.tensor(rows, dtype=torch.float64), torch.tensor([1.0, 1.0, 0.0])
    groups = torch.zeros(len(rows), dtype=torch.long)
    for setting, expected in (("sum_then_normalize", summed), ("normalize_then_sum", each)):
        assert rewards_are_equal(rewards, weights, groups, setting).tolist() == [expected] * len(rows), setting


ALL_RIGHT, ALL_WRONG, MIXED, ONE_RIGHT = [1.0] * 4, [0.0] * 4, [1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]


def after(hooks: list[Any], *groups: list[float], **overrides: Any) -> tuple[HookChain, Rollout]:
    """A chain, and the batch of these groups after its rollout stage."""
    rewards = [reward for group in groups for reward in group]
    ids = [number for number, group in enumerate(groups) for _ in group]
    logps = -1 - torch.arange(3 * len(rewards), dtype=torch.float64).view(-1, 3) / 50
    logps = {"old_logps_B_T": logps, "ref_logps_B_T": logps.flip(0), "teacher_logps_B_T": {"t": logps.flip(0)}}
    rollout = make_rollout([3] * len(rewards), rewards, ids, **{**logps, **overrides})
    chain = HookChain(load_advantage_hooks(hooks))
    rollout = chain.on_rewards(rollout)
    trls_B = rollout.rewards_B - rollout.group_baselines_B
    advantages_B_T, _ = chain.on_rollout(trls_B, rollout)
    return chain, replace(rollout, advantages_B_T=advantages_B_T, uninformative_B=chain.uninformative(rollout))


def verdicts(rollout: Rollout) -> tuple[list[bool], list[bool]]:
    """Of each group: has it signal, has it zero variance?"""
    table, size = signal_table(rollout), rollout.num_generations
    return signal_of(table)[::size].tolist(), zero_variance_of(table)[::size].tolist()


def test_signal_of_pass_at_k_groups() -> None:
    chain, rollout = after([{"name": "pass_at_k", "k": 2}, "zero_variance_credit"], MIXED, ALL_RIGHT, ONE_RIGHT)
    assert rollout.advantages_B_T is not None
    assert verdicts(rollout) == ([False, False, True], [False, True, False])
    forward = make_forward(
        torch.zeros(12, 3),
        torch.rand(12, 3),
        raw_rewards_B=rollout.raw_rewards_B,
        zero_variance_B=zero_variance_of(signal_table(rollout)),
    )
    credit_B_T, _ = chain.on_forward(rollout.advantages_B_T.float(), forward)
    assert not credit_B_T[:4].any()  # 1, 1, 1, 0 is left alone, as `pass_at_k` has decided
    assert bool((credit_B_T[4:8] > 0).all())


EVERYWHERE: list[list[Any]] = [
    ["kl_in_reward"],
    [{"name": "kl_in_reward", "form": "completion"}],
    [{"name": "teacher_log_ratio", "mode": "add"}],
    ["running_baseline"],
    ["raw_reward"],
    [{"name": "repetition_penalty", "ngram": 1}],
    ["sign_scaling", "whiten"],
]


@pytest.mark.parametrize("hooks", EVERYWHERE, ids=str)
def test_signal_beside_credit_for_equal_groups(hooks: list[Any]) -> None:
    _, rollout = after(hooks, ONE_RIGHT, ALL_RIGHT, MIXED, ALL_WRONG)
    expected = [True] * 4 + ["equal rewards"] * 4 + [True] * 4 + ["equal rewards"] * 4
    assert Signal().keep(rollout) == expected
    assert with_signal_only(rollout).totals.prompts == 2
    assert groups_of(signal_table(rollout)).tolist() == [True, False, True, False]


@pytest.mark.parametrize("hooks", [["teacher_log_ratio"], ["turn_rewards"], ["gigpo"], ["process_rewards"]], ids=str)
def test_signal_of_a_hook_with_more_than_rewards(hooks: list[Any]) -> None:
    _, rollout = after(hooks, ONE_RIGHT, ALL_RIGHT)
    assert rollout.uninformative_B is None
    learns = hooks == ["teacher_log_ratio"]
    assert verdicts(rollout)[0] == [True, learns]


def test_zero_variance_is_of_raw_rewards_on_all_ranks() -> None:
    both = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    columns = {"rewards_B_K": both, "reward_names": ("a", "b"), "reward_weights_K": torch.ones(2).double()}
    rollout = make_rollout([1] * 4, [1.0] * 4, [0, 0, 1, 1], **columns)
    seen = Ranks(cut(rollout, [1, 2, 1])).run(HookChain([]).uninformative)
    assert torch.cat(seen).tolist() == [False, False, True, True]


@pytest.mark.parametrize(("base", "scheduled", "learns"), [(0.0, 1.0, True), (1.0, 0.0, False)])
def test_signal_goes_by_the_scheduled_weights(base: float, scheduled: float, learns: bool) -> None:
    # All are right, the form differs.
    columns: dict[str, Any] = {"rewards_B_K": torch.tensor([[1.0, 0.0], [1.0, 1.0]]).double()}
    columns |= {"reward_names": ("right", "form"), "reward_weights_K": torch.tensor([1.0, base]).double()}
    schedule = {"name": "reward_schedule", "weights": {"form": [[0, scheduled]]}}
    _, rollout = after([schedule, "centred"], [1.0, 1.0 + base], **columns)
    assert rollout.advantages_B_T is not None
    assert rollout.advantages_B_T[:, 0].tolist() == [-scheduled / 2, scheduled / 2]
    assert verdicts(rollout) == ([learns], [not learns])
    assert Signal().keep(rollout) == [learns or "equal rewards"] * 2


def test_a_hook_without_effect_says_so_once_and_another_never() -> None:
    chain, rollout = after(["clip_advantages", "sign_scaling"], ONE_RIGHT)
    said = []
    for step in range(2 * PATIENCE):
        for _ in range(3):  # micro-batches of a step count once
            _, changes = chain.on_rollout(torch.tensor([0.75, -0.25, -0.25, -0.25]), rollout)
            said += [(step, *chain.without_effect(changes, change_tables(changes, rollout.mask_B_T), step))]
    (found,) = [entry for entry in said if len(entry) > 1]
    assert found[0] == PATIENCE - 1
    assert "'clip_advantages'" in str(found[1])


def two_groups(**overrides: Any) -> Rollout:
    """Two groups of two, lengths 2, 4 and 1, 3; the second has equal rewards."""
    rollout = make_rollout([2, 4, 1, 3], [1.0, 0.0, 0.5, 0.5], [0, 0, 1, 1], **overrides)
    values = torch.tensor([0.7, -0.7, 0.0, 0.0], dtype=torch.float64)
    return replace(rollout, advantages_B_T=flow.expand_advantages(values, rollout.mask_B_T))


def test_token_mean_by_hand() -> None:
    # Ten live tokens, six in the group with signal: 1/6 each, and nothing for the rest.
    seen = with_signal_only(two_groups())
    assert seen.lengths_B.tolist() == [2, 4, 0, 0]
    assert (seen.totals.tokens, seen.totals.sequences, seen.totals.prompts) == (6, 2, 1)
    aggregation = load_loss_aggregation({"name": "token_mean", "skip_zero_variance": True})
    weights_B_T = flow.token_weights(aggregation, two_groups())
    expected = [[1 / 6, 1 / 6, 0, 0], [1 / 6] * 4, [0] * 4, [0] * 4]
    torch.testing.assert_close(weights_B_T, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


PAIRS = st.tuples(st.lists(st.integers(0, 5), min_size=2, max_size=2), st.booleans())


@settings(max_examples=25)
@given(groups=st.lists(PAIRS, min_size=1, max_size=4))
def test_any_weights_are_those_of_a_batch_that_never_had_them(groups: list[tuple[list[int], bool]]) -> None:
    def batch(chosen: list[tuple[list[int], bool]]) -> Rollout:
        lengths = [length for pair, _ in chosen for length in pair]
        rewards = [reward for _, varies in chosen for reward in ([1.0, 0.0] if varies else [1.0, 1.0])]
        numbers = [number for number, _ in enumerate(chosen) for _ in range(2)]
        rollout = make_rollout(lengths, rewards, numbers, width=5)
        values = torch.tensor([a for _, varies in chosen for a in ([0.7, -0.7] if varies else [0.0, 0.0])])
        return replace(rollout, advantages_B_T=flow.expand_advantages(values, rollout.mask_B_T))

    whole = batch(groups)
    groups = [(pair, varies and any(pair)) for pair, varies in groups]  # without a token there is no signal
    kept_B = torch.tensor([varies for _, varies in groups for _ in range(2)])
    with_signal = [group for group in groups if group[1]]
    for name in BY_WEIGHTS:
        weights_B_T = flow.token_weights(SkipZeroVariance(loaded(name)), whole)
        assert not weights_B_T[~kept_B].any(), name
        if with_signal:
            expected_B_T = flow.token_weights(loaded(name), batch(with_signal))
            torch.testing.assert_close(weights_B_T[kept_B], expected_B_T, rtol=1e-12, atol=0)


def test_an_aggregation_that_brings_them_back_is_refused() -> None:
    class OwnMask:
        def weights(self, rollout: Rollout) -> torch.Tensor:
            return (rollout.completion_ids_B_T > 0).to(rollout.mask_B_T.dtype)

    own = SkipZeroVariance(OwnMask())
    with pytest.raises(PluginOutputError, match=r"'OwnMask, skip_zero_variance'.*mask_B_T"):
        flow.token_weights(own, two_groups(width=4))


def test_it_is_an_option_of_the_selection_and_not_of_the_plugin() -> None:
    selection = parse_selection("loss_aggregation", "{name: length_power, skip_zero_variance: true, alpha: 0.5}")
    assert selection.switches == {"skip_zero_variance"}
    assert selection.parameters == {"alpha": 0.5}
    assert parse_selection("loss_aggregation", selection.plain()) == selection
    skipping = load_loss_aggregation(selection)
    assert isinstance(skipping, SkipZeroVariance)
    assert skipping.aggregation.alpha == 0.5
    plain = load_loss_aggregation({"name": "token_mean", "skip_zero_variance": False})
    assert not isinstance(plain, SkipZeroVariance)
    for name, value in (("tail_mean", True), ("token_mean", "yes")):  # the first of which has `reduce`
        with pytest.raises(ConfigurationError, match=name):
            load_loss_aggregation({"name": name, "skip_zero_variance": value})
