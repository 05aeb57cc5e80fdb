"""What a chain tells about its hooks: the four metrics by hand, their names, and that parts of a batch add up."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contexts import make_forward, make_rollout, mask_of, padded
from trl_grpo_ext import load_advantage_hooks
from trl_grpo_ext.credit.chain import HookChain, change_tables, metrics_of
from trl_grpo_ext.credit.metrics import change_metrics, change_table
from trl_grpo_ext.errors import ConfigurationError, PluginContractError, PluginTypeError
from trl_grpo_ext.types import ROLES, acting_order, role_of


class Add:
    def __init__(self, number: float, *stages: str) -> None:
        self.role = "transform" if "on_rollout" in stages else "forward"
        for stage in stages:
            setattr(self, stage, lambda advantages_B_T, context: advantages_B_T + number)


def metrics(before: Any, after: Any, lengths: list[int]) -> dict[str, float]:
    mask = mask_of(lengths, width=before.size(1))
    found = change_metrics("x", change_table(before, after, mask))
    return {name.removeprefix("advantage/x/"): value for name, value in found.items()}


def test_by_hand() -> None:
    before = padded([[1, 1, 1], [-2, -2, 0]])
    after = padded([[1, -1, 3], [-2, 0, 0]])  # the last token of the second row is padding
    found = metrics(before, after, [3, 2])
    assert found["mean"] == pytest.approx((1 - 1 + 3 - 2 + 0) / 5)
    assert found["std"] == pytest.approx(math.sqrt((1 + 1 + 9 + 4 + 0) / 5 - 0.2**2))
    assert found["sign_flips"] == pytest.approx(1 / 5)  # to zero is no flip
    assert found["mass_moved"] == pytest.approx((0 + 2 + 2 + 0 + 2) / (1 + 1 + 1 + 2 + 2))


@given(st.lists(st.integers(0, 4), min_size=2, max_size=6), st.integers(0, 99), st.data())
@settings(max_examples=50)
def test_ranks_add_up(lengths: list[int], seed: int, data: Any) -> None:
    torch.manual_seed(seed)
    mask = mask_of(lengths, width=5)
    before, after = torch.randn(mask.shape) * mask, torch.randn(mask.shape) * mask
    whole = change_table(before, after, mask)
    at = data.draw(st.integers(0, len(lengths)))
    parts = [change_table(before[rows], after[rows], mask[rows]) for rows in (slice(0, at), slice(at, None))]
    torch.testing.assert_close(torch.cat(parts), whole)
    mine = {k.split("/")[-1]: v for k, v in change_metrics("x", whole).items()}
    live = after[mask > 0].double()
    if live.numel():
        assert mine["mean"] == pytest.approx(float(live.mean()), abs=1e-6)
        assert mine["std"] == pytest.approx(float(live.std(correction=0)), abs=1e-6)


@pytest.mark.parametrize("value", [1 / 3, 1000.1, -1e-7])
def test_advantages_that_are_all_alike_have_no_spread(value: float) -> None:
    after = torch.full((5, 7), value)
    assert metrics(torch.zeros(5, 7), after, [7] * 5)["std"] == pytest.approx(0.0, abs=1e-6 * abs(value))


def test_a_chain_tells_what_each_hook_did() -> None:
    twice = Add(1.0, "on_rollout")
    chain = HookChain([twice, Add(2.0, "on_forward"), Add(3.0, "on_rollout", "on_forward"), twice])
    rollout = make_rollout([2, 1])
    result, changes = chain.on_rollout(torch.zeros(2, dtype=torch.float64), rollout)
    assert result.tolist() == [[5, 5], [5, 0]]
    assert [change.name for change in changes] == ["Add", "Add_2", "Add_3"]
    assert [change.after_B_T[0, 0].item() for change in changes] == [1, 4, 5]

    forward = make_forward(rollout.mask_B_T, rollout.mask_B_T, rollout.mask_B_T)
    result, changes = chain.on_forward(result, forward)
    assert result.tolist() == [[10, 10], [10, 0]]
    assert [change.name for change in changes] == ["Add_2/forward", "Add_4"]

    found = metrics_of(changes, change_tables(changes, rollout.mask_B_T))
    assert found["advantage/Add_4/mean"] == 10
    assert found["advantage/Add_2/forward/mass_moved"] == pytest.approx(3 / 5)
    assert len(found) == 8


# ---------------------------------------------------------------------------------------------- roles


class Hook:
    """A hook of any role that multiplies by a factor, or adds it to the rewards."""

    def __init__(self, name: str, role: str, factor: float = 2.0, **attributes: Any) -> None:
        self.__name__, self.role = name, role
        vars(self).update(attributes)
        if role == "shaper":
            self.on_rewards = lambda rollout: torch.full_like(rollout.rewards_B, factor)
        else:
            setattr(self, ROLES[role], lambda advantages_B_T, context: advantages_B_T * factor)


SHAPER, OTHER_SHAPER = Hook("s", "shaper"), Hook("s2", "shaper", 3.0)
ESTIMATOR, TRANSFORM, OTHER = Hook("e", "estimator"), Hook("t", "transform"), Hook("t2", "transform")
MASK, FORWARD = Hook("m", "transform", 0.0, last=True), Hook("f", "forward")
LAST_FORWARD = Hook("fl", "forward", last=True)
IN_ORDER = [SHAPER, OTHER_SHAPER, ESTIMATOR, TRANSFORM, OTHER, MASK, FORWARD, LAST_FORWARD]


@given(st.permutations(range(len(IN_ORDER))))
def test_the_chain_is_built_by_roles_and_then_as_selected(order: list[int]) -> None:
    selected = [IN_ORDER[place] for place in order]
    kept = [0, 1, 3, 4]  # of one role: their order is the selection's
    expected = sorted(IN_ORDER, key=lambda hook: (acting_order(hook), selected.index(hook)))
    assert HookChain(selected).hooks == expected == load_advantage_hooks(selected)
    assert [hook.__name__ for hook in expected if IN_ORDER.index(hook) not in kept] == ["e", "m", "f", "fl"]


def test_rewards_after_two_shapers_by_hand() -> None:
    tokens = Hook("tokens", "shaper")
    tokens.on_rewards = lambda rollout: torch.full_like(rollout.mask_B_T, 0.5)
    rollout = make_rollout([2, 1, 3], [1.0, math.nan, 0.0])
    shaped = HookChain([tokens, SHAPER]).on_rewards(rollout)
    assert shaped.reward_names == ("r", "tokens", "s")
    assert shaped.reward_weights_K.tolist() == [1, 1, 1]
    assert shaped.rewards_B.nan_to_num(nan=-9).tolist() == [1 + 1 + 2, -9, 0 + 1.5 + 2]
    assert shaped.rewards_B_K.nan_to_num(nan=-9).tolist() == [[1, 1, 2], [-9, -9, -9], [0, 1.5, 2]]
    assert shaped.raw_rewards_B.nan_to_num(nan=-9).tolist() == [1, -9, 0]
    assert shaped.group_baselines_B.tolist() == [3.75] * 3
    assert shaped.token_rewards_B_T is not None
    assert shaped.token_rewards_B_T.tolist() == [[0.5, 0.5, 0], [0, 0, 0], [0.5, 0.5, 0.5]]
    assert rollout.rewards_B_K.shape == (3, 1)  # what came in is as it was
    assert rollout.raw_rewards_B is rollout.rewards_B


def test_what_a_mask_took_away_is_held_by_sign_after_the_forward_stage() -> None:
    keeps_negative = Hook("n", "transform", last=True)
    keeps_negative.on_rollout = lambda a_B_T, rollout: torch.where(
        rollout.truncated_B[:, None], a_B_T.clamp(max=0), a_B_T
    )
    adds = Hook("adds", "forward")
    rollout = make_rollout([2, 2], truncated_B=torch.tensor([True, False]))
    forward = make_forward(rollout.mask_B_T, rollout.mask_B_T, rollout.mask_B_T)
    assert HookChain([keeps_negative]).allowed_signs(rollout) is None  # nobody acts behind it
    chain = HookChain([adds, keeps_negative])
    held = chain.allowed_signs(rollout)
    assert held is not None
    assert held.tolist() == [[2, 2], [3, 3]]
    for number, expected in ((1.0, [[0, 0], [1, 1]]), (-1.0, [[-1, -1], [-1, -1]])):
        adds.on_forward = lambda a_B_T, forward, number=number: a_B_T + number
        start_B_T, _ = chain.on_rollout(torch.zeros(2, dtype=torch.float64), rollout)
        result_B_T, (change,) = chain.on_forward(start_B_T, forward, held)
        assert result_B_T.tolist() == expected
        assert torch.equal(change.after_B_T, result_B_T)  # what is logged is what is trained on
    # A mask behind another: what either took away.
    assert HookChain([adds, keeps_negative, MASK]).allowed_signs(rollout).tolist() == [[0, 0], [0, 0]]


REFUSED: dict[str, tuple[Any, str]] = {
    "no role": (SimpleNamespace(on_rollout=len), r'on_rollout and no role.*Write role = "estimator" .* or role = "tra'),
    "no method": (SimpleNamespace(weights=len), "no hook method and no role"),
    "two that may be meant": (SimpleNamespace(on_rewards=len, on_forward=len), "on_rewards and on_forward and no role"),
    "another role": (SimpleNamespace(role="mask", on_rollout=len), "role = 'mask'; it must be one of 'shaper', 'estim"),
    "no string": (SimpleNamespace(role=["shaper"], on_rewards=len), r"role = \['shaper'\]; it must be one of"),
    "not its method": (
        SimpleNamespace(role="shaper", on_rollout=len),
        "role = 'shaper' but not that role.s method",
    ),
    "a forward hook's rollout": (
        SimpleNamespace(role="forward", on_forward=len, on_rollout=len),
        "role = 'forward' and on_rollout as well, which would never run.* make the role 'estimator' or 'transform'",
    ),
    "a shaper's forward": (
        SimpleNamespace(role="shaper", on_rewards=len, on_forward=len),
        "on_forward as well, which would never run.* make the role 'forward'",
    ),
    "last of an estimator": (
        SimpleNamespace(role="estimator", on_rollout=len, last=True),
        "last = True and role = 'estimator': `last` is for transforms and forward hooks",
    ),
}


@pytest.mark.parametrize(("hook", "sentence"), REFUSED.values(), ids=REFUSED)
def test_a_role_that_is_missing_or_not_true(hook: Any, sentence: str) -> None:
    for made in (role_of, acting_order, lambda hook: HookChain([hook])):
        with pytest.raises(PluginContractError, match=sentence):
            made(hook)
    with pytest.raises((PluginContractError, PluginTypeError)):
        load_advantage_hooks([hook])


def test_a_role_that_only_one_method_can_have_need_not_be_said() -> None:
    assert role_of(SimpleNamespace(on_forward=len)) == "forward"
    assert role_of(SimpleNamespace(on_rewards=len)) == "shaper"
    assert role_of(SimpleNamespace(on_rollout=len, on_forward=len, role="estimator")) == "estimator"


class Skips:
    __name__ = "token_mean, skip_zero_variance"
    skips_zero_variance = True


THROWN_AWAY: dict[str, tuple[list[Hook], Any, str]] = {
    "two estimators": ([ESTIMATOR, Hook("e2", "estimator")], None, "'e' and 'e2' are both estimators"),
    "a shaper that nobody reads": (
        [SHAPER, Hook("e", "estimator", uses_total_reward=False)],
        None,
        "'s' shapes the total reward, which the estimator 'e' does not read",
    ),
    "two that make signal": (
        [Hook("z", "forward", makes_signal=True), Hook("z2", "forward", makes_signal=True)],
        None,
        "'z' and 'z2' both give groups of equal rewards an advantage",
    ),
    "no group without signal": (
        [Hook("k", "transform", signal_everywhere=True), Hook("z", "forward", makes_signal=True)],
        None,
        "'k' gives groups of equal rewards an advantage, so 'z' would do nothing",
    ),
    "an aggregation that skips": (
        [Hook("z", "forward", makes_signal=True)],
        Skips(),
        "'z' gives groups of equal rewards an advantage, and the loss aggregation 'token_mean, skip_zero_variance'",
    ),
}


@pytest.mark.parametrize(("hooks", "aggregation", "sentence"), THROWN_AWAY.values(), ids=THROWN_AWAY)
def test_what_would_be_thrown_away_is_refused_in_either_order(
    hooks: list[Hook], aggregation: Any, sentence: str
) -> None:
    for selected in (hooks, hooks[::-1]):
        with pytest.raises(ConfigurationError) as raised:
            HookChain(selected, aggregation)
        assert all(repr(hook.__name__) in str(raised.value) for hook in hooks)
    with pytest.raises(ConfigurationError, match=sentence):
        HookChain(hooks, aggregation)
