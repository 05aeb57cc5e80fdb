"""`preserve_sign` and `preserve_sum`: by hand, as properties, and as keys of any selection."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contexts import make_forward, make_rollout, padded
from trl_grpo_ext import load_advantage_hooks
from trl_grpo_ext.credit import flow
from trl_grpo_ext.credit.composition import Preserving, keep_signs, keep_sums
from trl_grpo_ext.errors import ConfigurationError, PluginParameterError
from trl_grpo_ext.plugins.loading import parse_selection
from trl_grpo_ext.types import Forward, Rollout, implements, role_of

HERE = "tests.credit.test_composition"
values = st.floats(-8, 8).map(lambda x: round(x, 3))
rows = st.lists(st.tuples(values, values), min_size=1, max_size=6)


class Multiply:
    """Multiplies the advantages of a row's tokens by these factors."""

    needs = ("old_logps",)
    role = "transform"

    def __init__(self, factors: Any = (1.0, 2.0)) -> None:
        self.factors = factors
        self.memory = 1

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        return advantages_B_T * torch.tensor(self.factors, dtype=advantages_B_T.dtype)

    def state_dict(self) -> dict[str, Any]:
        return {"memory": self.memory}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.memory = state["memory"]


class Spans:
    """Gives the second character -3."""

    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> list[Any]:
        return [[(1, 2, -3.0)] for _ in rollout.texts]


class AtForward:
    """Adds one where the entropy is above one."""

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Forward) -> torch.Tensor:
        return advantages_B_T - (forward.entropies_B_T > 1) * 5.0


def table(*values: Any) -> torch.Tensor:
    return padded(values)


# ---------------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([1, 1, 1, 1], [1, 1, 2, 2], [2 / 3, 2 / 3, 4 / 3, 4 / 3]),  # 6 must become 4, ratios stay
        ([1, 1], [0, 2], [0, 2]),  # the sum is right already
        ([1, 1, 0], [0, 1, 0], [0, 2, 0]),  # zeros stay zero
        ([-1, -1], [-1, -3], [-0.5, -1.5]),
        ([1, -1], [4, -1], [2, -2]),  # 4f - 1/f = 0, f = 1/2
        ([1, 0], [2, -1], [2, -1]),  # 2f - 1/f = 1, f = 1
        ([-2, -1], [2, -1], [0.5616, -3.5616]),  # 2f - 1/f = -3: f = (sqrt(17) - 3) / 4
    ],
)
def test_sums_by_hand(before: list[float], after: list[float], expected: list[float]) -> None:
    result = keep_sums(table(before), table(after))
    torch.testing.assert_close(result, table(expected), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([1, 2], [0, 0]),  # nothing left to scale
        ([1, 2], [-1, 0]),  # no positive advantage, and the sum is positive
        ([-1, -2], [1, 5]),
        ([0, 0], [1, 2]),  # a sum of zero cannot be had from positive advantages alone
        ([1, -1], [0, -4]),
    ],
)
def test_a_row_whose_sum_cannot_be_restored_keeps_what_came_in(before: list[float], after: list[float]) -> None:
    assert keep_sums(table(before), table(after)).tolist() == [before]


def test_signs_by_hand() -> None:
    before, after = table([1, 1, 1, -1, -1, 0, 0]), table([2, -2, 0, -3, 4, 5, 0])
    assert keep_signs(before, after).tolist() == [[2, 0, 0, -3, 0, 0, 0]]


# ---------------------------------------------------------------------------------------------- properties


@given(rows)
@settings(max_examples=200)
def test_the_sum_is_restored_and_nothing_turns(pairs: list[tuple[float, float]]) -> None:
    before, after = table([b for b, _ in pairs]), table([a for _, a in pairs])
    result = keep_sums(before, after)
    assert float(result.sum()) == pytest.approx(float(before.sum()), abs=1e-9)
    if torch.equal(result, before):
        return
    assert torch.equal(torch.sign(result), torch.sign(after))
    for sign in (1, -1):
        part = torch.sign(after) == sign
        ratios = result[part] / after[part]
        assert ratios.numel() == 0 or float(ratios.max() - ratios.min()) < 1e-9 * float(ratios.max())


# ---------------------------------------------------------------------------------------------- in a chain


def run(hooks: Any, advantages: list[float], lengths: list[int]) -> torch.Tensor:
    incoming = torch.tensor(advantages, dtype=torch.float64)
    return flow.apply_rollout_hooks(incoming, load_advantage_hooks(hooks), make_rollout(lengths))


def test_as_keys_of_a_selection() -> None:
    plain = run([f"{HERE}:Multiply"], [1.0, -1.0], [2, 2])
    assert plain.tolist() == [[1, 2], [-1, -2]]
    kept = run([{"name": f"{HERE}:Multiply", "preserve_sum": True}], [1.0, -1.0], [2, 2])
    torch.testing.assert_close(kept, table([2 / 3, 4 / 3], [-2 / 3, -4 / 3]))
    turned = {"name": f"{HERE}:Multiply", "factors": [-1.0, 3.0]}
    assert run([{**turned, "preserve_sign": True}], [1.0], [2]).tolist() == [[0, 3]]
    both = run([{**turned, "preserve_sign": True, "preserve_sum": True}], [1.0], [2])
    assert both.tolist() == [[0, 2]]  # first the signs, then the sum
    assert run([{**turned, "preserve_sign": False}], [1.0], [2]).tolist() == [[-1, 3]]


def test_for_spans_and_at_the_forward_stage() -> None:
    kept = run([{"name": f"{HERE}:Spans", "preserve_sum": True}], [2.0], [2])  # [2, -1] must sum to 4
    factor = (4 + math.sqrt(16 + 8)) / 4
    torch.testing.assert_close(kept, table([2 * factor, -1 / factor]))

    (hook,) = load_advantage_hooks([{"name": f"{HERE}:AtForward", "preserve_sign": True}])
    forward = make_forward(torch.zeros(1, 2), torch.tensor([[0.5, 2.0]]))
    assert flow.apply_forward_hooks(torch.ones(1), [hook], forward).tolist() == [[1, 0]]


def test_it_answers_for_the_hook() -> None:
    (hook,) = load_advantage_hooks([{"name": f"{HERE}:Multiply", "preserve_sum": True}])
    assert isinstance(hook, Preserving)
    assert hook.__name__ == "Multiply"
    assert implements(hook, "on_rollout")
    assert not implements(hook, "on_forward")
    assert hook.needs == ("old_logps",)
    assert getattr(hook, "teachers", ()) == ()
    hook.load_state_dict({"memory": 5})
    assert hook.state_dict() == {"memory": 5}
    copy = pickle.loads(pickle.dumps(hook))
    assert copy.state_dict() == {"memory": 5}
    assert copy.on_rollout(torch.ones(1, 2), make_rollout([2])).sum() == 2


def test_the_keys_are_switches_of_hooks_alone() -> None:
    selection = parse_selection("advantage_hook", {"name": "centred", "preserve_sum": True, "preserve_sign": False})
    assert selection.switches == {"preserve_sum"}
    assert selection.plain() == {"name": "centred", "preserve_sum": True}
    assert parse_selection("advantage_hook", selection) == selection
    with pytest.raises(ConfigurationError, match="preserve_sum of 'centred' is 'yes'; it must be true or false"):
        parse_selection("advantage_hook", {"name": "centred", "preserve_sum": "yes"})
    assert parse_selection("reward", {"name": "r", "preserve_sum": True}).parameters == {"preserve_sum": True}
    with pytest.raises(PluginParameterError, match="skip_zero_variance"):
        load_advantage_hooks([{"name": "centred", "skip_zero_variance": True}])


@pytest.mark.parametrize(
    ("selection", "sentence"),
    [
        ({"name": "centred", "preserve_sign": True}, "preserve_sign of .*'centred' has no effect: as estimator"),
        ({"name": "prefix_tree", "preserve_sum": True}, "preserve_sum of .*'prefix_tree' has no effect: as est"),
        ({"name": "truncation_masking", "preserve_sum": True}, "would give completions that this mask masks"),
        (
            {"name": "zero_variance_credit", "preserve_sign": True},
            "would leave nothing of it, since it gives advantages",
        ),
    ],
)
def test_it_is_refused_where_there_is_nothing_to_preserve(selection: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        load_advantage_hooks([selection])


def test_the_role_passes_through() -> None:
    hooks = load_advantage_hooks(
        [
            {"name": "truncation_masking", "preserve_sign": True},
            {"name": "prefix_tree", "mode": "add", "preserve_sum": True},
            {"name": "low_probability", "preserve_sum": True},
        ]
    )
    assert [(hook.__name__, role_of(hook), getattr(hook, "last", False)) for hook in hooks] == [
        ("prefix_tree", "transform", False),
        ("truncation_masking", "transform", True),
        ("low_probability", "forward", False),
    ]
