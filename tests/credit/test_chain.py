"""The chain by roles: order, shaped rewards, held masks, metrics of each hook by hand, and what is refused."""

import math
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.contexts import make_forward, make_rollout, mask_of, padded
from trl_grpo_ext import load_advantage_hooks
from trl_grpo_ext.credit.chain import Change, HookChain, change_tables, metrics_of
from trl_grpo_ext.credit.signal import SkipZeroVariance
from trl_grpo_ext.errors import ConfigurationError, PluginContractError, PluginOutputError, PluginTypeError
from trl_grpo_ext.types import ROLES, HookDeclaration, acting_order, role_of


class Hook:
    """A hook of any role that multiplies by a factor, or adds it to the rewards."""

    def __init__(self, name: str, role: str, factor: float = 2.0, **declared: Any) -> None:
        self.__name__, self.declares = name, HookDeclaration(role=role, **declared)
        if role == "shaper":
            self.on_rewards = lambda rollout: torch.full_like(rollout.rewards_B, factor)
        else:
            setattr(self, ROLES[role], lambda advantages_B_T, context: advantages_B_T * factor)


def adding(number: float, *stages: str) -> Any:
    role = "transform" if "on_rollout" in stages else "forward"
    add = {stage: lambda advantages_B_T, context: advantages_B_T + number for stage in stages}
    return SimpleNamespace(__name__="Add", declares=HookDeclaration(role=role), **add)


def test_metrics_of_a_change_by_hand_and_by_parts() -> None:
    before, after = padded([[1, 1, 1], [-2, -2, 7]]), padded([[1, -1, 3], [-2, 0, -9]])  # the last token is padding
    change = Change("x", before, after)
    table = change_tables([change], mask_of([3, 2]))
    found = {name.removeprefix("advantage/x/"): value for name, value in metrics_of([change], table).items()}
    assert found["mean"] == pytest.approx((1 - 1 + 3 - 2 + 0) / 5)
    assert found["std"] == pytest.approx(math.sqrt((1 + 1 + 9 + 4 + 0) / 5 - 0.2**2))
    assert found["sign_flips"] == pytest.approx(1 / 5)  # to zero is no flip
    assert found["mass_moved"] == pytest.approx((0 + 2 + 2 + 0 + 2) / (1 + 1 + 1 + 2 + 2))
    rows = (slice(1), slice(1, 2))
    parts = [change_tables([Change("x", before[row], after[row])], mask_of([3, 2])[row]) for row in rows]
    torch.testing.assert_close(torch.cat(parts), table)
    change = Change("x", torch.zeros(5, 7), torch.full((5, 7), 1 / 3))
    alike = metrics_of([change], change_tables([change], mask_of([7] * 5)))
    assert alike["advantage/x/std"] == pytest.approx(0.0, abs=1e-6)
    assert math.isnan(alike["advantage/x/mass_moved"])  # nothing came in


def test_chain_names_each_hooks_metrics() -> None:
    twice = adding(1.0, "on_rollout")
    chain = HookChain([twice, adding(2.0, "on_forward"), adding(3.0, "on_rollout", "on_forward"), twice])
    rollout = make_rollout([2, 1])
    result, changes = chain.on_rollout(torch.zeros(2, dtype=torch.float64), rollout)
    assert result.tolist() == [[5, 5], [5, 0]]
    assert {change.name: change.after_B_T[0, 0].item() for change in changes} == {"Add": 1, "Add_2": 4, "Add_3": 5}
    result, changes = chain.on_forward(result, make_forward(rollout.mask_B_T, rollout.mask_B_T, rollout.mask_B_T))
    assert result.tolist() == [[10, 10], [10, 0]]
    assert [change.name for change in changes] == ["Add_2/forward", "Add_4"]
    found = metrics_of(changes, change_tables(changes, rollout.mask_B_T))
    assert found["advantage/Add_4/mean"] == 10
    assert found["advantage/Add_2/forward/mass_moved"] == pytest.approx(3 / 5)
    assert len(found) == 8


@pytest.mark.parametrize("name", ["mean", "std", "sign_flips", "mass_moved"])
def test_chain_refuses_metrics_of_a_figures_name(name: str) -> None:
    hook = adding(1.0, "on_rollout")
    hook.metrics = {"forward/mean": 0.1, "size": 2.0}  # it has no second stage
    chain = HookChain([hook, hook])
    own = hook.metrics
    assert chain.metrics() == {f"advantage/{hook}/{what}": of for hook in ("Add", "Add_2") for what, of in own.items()}
    hook.metrics = {name: 0.5}
    with pytest.raises(PluginOutputError, match=f"'Add': its metric '{name}' has the name of one that the run logs"):
        chain.metrics()
    shaper = Hook("s", "shaper")  # which has no advantages to log
    shaper.metrics = {name: 0.5}
    assert HookChain([shaper]).metrics() == {f"advantage/s/{name}": 0.5}


SHAPER, OTHER_SHAPER = Hook("s", "shaper"), Hook("s2", "shaper", 3.0)
WEIGHTS = Hook("w", "shaper", changes_weights=True)
ESTIMATOR, TRANSFORM, OTHER = Hook("e", "estimator"), Hook("t", "transform"), Hook("t2", "transform")
MASK, FORWARD = Hook("m", "transform", 0.0, last=True), Hook("f", "forward")
IN_ORDER = [WEIGHTS, SHAPER, OTHER_SHAPER, ESTIMATOR, TRANSFORM, OTHER, MASK, FORWARD]
IN_ORDER.append(Hook("fl", "forward", last=True))


@given(st.permutations(range(len(IN_ORDER))))
def test_the_chain_is_built_by_roles_and_then_as_selected(order: list[int]) -> None:
    selected = [IN_ORDER[place] for place in order]
    expected = sorted(IN_ORDER, key=lambda hook: (acting_order(hook), selected.index(hook)))
    assert HookChain(selected).hooks == expected == load_advantage_hooks(selected)
    named = [hook.__name__ for hook in expected if hook not in (SHAPER, OTHER_SHAPER, TRANSFORM, OTHER)]
    assert named == ["w", "e", "m", "f", "fl"]


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
    weights = Hook("weights", "shaper", changes_weights=True)
    weights.on_rewards = lambda rollout: torch.full_like(rollout.reward_weights_K, 3.0)
    shaped = HookChain([SHAPER, weights]).on_rewards(rollout)  # these weights come first, whatever was selected first
    assert shaped.reward_weights_K.tolist() == [3, 1]
    assert shaped.rewards_B.nan_to_num(nan=-9).tolist() == [3 + 2, -9, 2]
    assert shaped.raw_rewards_B.nan_to_num(nan=-9).tolist() == [3, -9, 0]
    for wrong, says in ((torch.ones(2), "shape"), (torch.tensor([math.nan]), "finite"), ([1.0], "tensor")):
        weights.on_rewards = lambda rollout, wrong=wrong: wrong
        with pytest.raises(PluginOutputError, match=f"'weights': on_rewards.*{says}"):
            HookChain([weights]).on_rewards(rollout)


def test_chain_keeps_masks_after_the_forward_stage() -> None:
    keeps_negative, adds = Hook("n", "transform", last=True), Hook("adds", "forward")
    keeps_negative.on_rollout = lambda a_B_T, rollout: torch.where(
        rollout.truncated_B[:, None], a_B_T.clamp(max=0), a_B_T
    )
    rollout = make_rollout([2, 2], truncated_B=torch.tensor([True, False]))
    forward = make_forward(rollout.mask_B_T, rollout.mask_B_T, rollout.mask_B_T)
    assert HookChain([keeps_negative]).allowed_signs(rollout) is None  # nobody acts after it
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
    # A mask after another: what either took away.
    assert HookChain([adds, keeps_negative, MASK]).allowed_signs(rollout).tolist() == [[0, 0], [0, 0]]


class Noting:
    """A mask of negative advantages that keeps what came in."""

    __name__, declares = "noting", HookDeclaration(role="transform", last=True)

    def __init__(self) -> None:
        self.metrics, self.seen, self.held = dict[str, float](), deque[float](), [threading.Lock()]

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        self.seen.append(float(advantages_B_T.mean()))
        self.metrics["mean"] = self.seen[-1]
        return advantages_B_T.clamp(min=0.0)


def test_trying_a_mask_leaves_its_metrics_and_state() -> None:
    mask, rollout = Noting(), make_rollout([2, 2])
    (chain := HookChain([mask, FORWARD])).on_rollout(torch.tensor([0.25, 0.75], dtype=torch.float64), rollout)
    assert chain.allowed_signs(rollout).tolist() == [[1, 1], [1, 1]]
    assert (mask.metrics, mask.seen) == ({"mean": 0.5}, deque([0.5]))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"on_rollout": len}, r'on_rollout and no role.*HookDeclaration\(role="estimator"\) .* or role="transform"'),
    ({"weights": len}, "no hook method and no role"),
    ({"on_rewards": len, "on_forward": len}, "on_rewards and on_forward and no role"),
    ({"role": "shaper", "on_rollout": len}, "the role 'shaper', which needs on_rewards .*; it has on_rollout"),
    ({"role": "forward", "on_forward": len, "on_rollout": len}, "only runs on_forward; it has on_rollout and on_f"),
    ({"role": "estimator", "on_rollout": len, "last": True}, "`last` is for transforms and forward hooks"),
    ({"role": "transform", "on_rollout": len, "last": True, "deterministic": False}, "last and deterministic=False"),
    ({"role": "forward", "on_forward": len, "changes_weights": True}, "changes_weights .*: that is for shapers"),
]


def test_a_role_that_is_missing_or_not_true_is_refused() -> None:
    for attributes, sentence in REFUSED:
        fields = HookDeclaration.__dataclass_fields__
        declared = {name: value for name, value in attributes.items() if name in fields}
        methods = {name: value for name, value in attributes.items() if name not in declared}
        hook = SimpleNamespace(declares=HookDeclaration(**declared), **methods)
        for made in (role_of, acting_order, lambda hook: HookChain([hook])):
            with pytest.raises(PluginContractError, match=sentence):
                made(hook)
        with pytest.raises((PluginContractError, PluginTypeError)):
            load_advantage_hooks([hook])
    assert role_of(SimpleNamespace(on_forward=len)) == "forward"  # which only one role can have
    assert role_of(SimpleNamespace(on_rewards=len)) == "shaper"


SKIPS = SkipZeroVariance(SimpleNamespace(__name__="token_mean"))
MAKER = Hook("z", "forward", makes_signal=True)
DISCARDED: list[tuple[list[Hook], Any]] = [
    ([ESTIMATOR, Hook("e2", "estimator")], None),
    ([SHAPER, Hook("e", "estimator", uses_total_reward=False)], None),
    ([WEIGHTS, Hook("e", "estimator", uses_weights=False)], None),
    ([SHAPER, *load_advantage_hooks(["decoupled_normalisation"])], None),
    ([SHAPER, *load_advantage_hooks([{"name": "part_credit", "normalise": True}])], None),
    ([MAKER, Hook("z2", "forward", makes_signal=True)], None),
    ([MAKER], SKIPS),
]


@pytest.mark.parametrize(("hooks", "aggregation"), DISCARDED)
def test_what_would_be_discarded_is_refused_in_either_order(hooks: list[Hook], aggregation: Any) -> None:
    named = [*hooks, aggregation] if aggregation else hooks
    for selected in (hooks, hooks[::-1]):
        with pytest.raises(ConfigurationError) as raised:
            HookChain(selected, aggregation)
        assert all(repr(plugin.__name__) in str(raised.value) for plugin in named)
