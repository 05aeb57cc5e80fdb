"""`preserve_sign` and `preserve_sum`: by hand, as a property, and as keys of any selection."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.contexts import make_forward, make_rollout, padded
from trl_grpo_ext import load_advantage_hooks
from trl_grpo_ext.credit import flow
from trl_grpo_ext.credit.composition import Preserving, keep_signs, keep_sums
from trl_grpo_ext.errors import ConfigurationError, PluginParameterError
from trl_grpo_ext.plugins.loading import parse_selection
from trl_grpo_ext.types import Forward, Rollout, implements, role_of

HERE = "tests.credit.test_composition"


class Multiply:
    """Multiplies the advantages of a row's tokens by these factors."""

    needs = ("old_logps",)
    role = "transform"

    def __init__(self, factors: Any = (1.0, 2.0)) -> None:
        self.factors, self.memory = factors, 1

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        return advantages_B_T * torch.tensor(self.factors, dtype=advantages_B_T.dtype)

    def state_dict(self) -> dict[str, Any]:
        return {"memory": self.memory}


class Spans:
    """Gives the second character -3."""

    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> list[Any]:
        return [[(1, 2, -3.0)] for _ in rollout.texts]


class AtForward:
    def on_forward(self, advantages_B_T: torch.Tensor, forward: Forward) -> torch.Tensor:
        return advantages_B_T - (forward.entropies_B_T > 1) * 5.0


def table(values: Any) -> torch.Tensor:
    return padded([values])


SUMS: list[tuple[list[float], list[float], list[float] | None]] = [
    ([1, 1, 1, 1], [1, 1, 2, 2], [2 / 3, 2 / 3, 4 / 3, 4 / 3]),  # 6 must become 4, ratios stay
    ([1, 1], [0, 2], [0, 2]),  # the sum is right already
    ([1, 1, 0], [0, 1, 0], [0, 2, 0]),  # zeros stay zero
    ([-1, -1], [-1, -3], [-0.5, -1.5]),
    ([1, -1], [4, -1], [2, -2]),  # 4f - 1/f = 0, f = 1/2
    ([1, 0], [2, -1], [2, -1]),  # 2f - 1/f = 1, f = 1
    ([-2, -1], [2, -1], [0.5616, -3.5616]),  # 2f - 1/f = -3: f = (sqrt(17) - 3) / 4
    # What cannot be restored keeps what came in: nothing left to scale, or no advantage of the sum's sign.
    ([1, 2], [0, 0], None),
    ([1, 2], [-1, 0], None),
    ([-1, -2], [1, 5], None),
    ([0, 0], [1, 2], None),
    ([1, -1], [0, -4], None),
]


def test_sums_and_signs_by_hand() -> None:
    for before, after, expected in SUMS:
        result = keep_sums(table(before), table(after))
        torch.testing.assert_close(result, table(before if expected is None else expected), rtol=0, atol=1e-4)
    before, after = table([1, 1, 1, -1, -1, 0, 0]), table([2, -2, 0, -3, 4, 5, 0])
    assert keep_signs(before, after).tolist() == [[2, 0, 0, -3, 0, 0, 0]]


values = st.floats(-8, 8).map(lambda x: round(x, 3))


@given(st.lists(st.tuples(values, values), min_size=1, max_size=6))
def test_the_sum_is_restored_and_no_sign_flips(pairs: list[tuple[float, float]]) -> None:
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


def test_in_a_chain_at_both_stages_and_for_spans() -> None:
    def run(selection: dict[str, Any], advantages: list[float], lengths: list[int]) -> Any:
        incoming = torch.tensor(advantages, dtype=torch.float64)
        hooks = load_advantage_hooks([{"name": f"{HERE}:{selection.pop('name')}", **selection}])
        return flow.apply_rollout_hooks(incoming, hooks, make_rollout(lengths)).tolist()

    assert run({"name": "Multiply"}, [1.0, -1.0], [2, 2]) == [[1, 2], [-1, -2]]
    third = [pytest.approx([2 / 3, 4 / 3]), pytest.approx([-2 / 3, -4 / 3])]
    assert run({"name": "Multiply", "preserve_sum": True}, [1.0, -1.0], [2, 2]) == third
    assert run({"name": "Multiply", "factors": [-1.0, 2.0], "preserve_sign": True}, [1.0], [2]) == [[0, 2]]
    assert run(
        {"name": "Multiply", "factors": [-1.0, 2.0], "preserve_sign": True, "preserve_sum": True}, [1.0], [2]
    ) == [[0, 2]]
    assert run({"name": "Spans", "preserve_sign": True}, [1.0], [2]) == [[1, 0]]  # 1 - 3 has another sign
    hooks = load_advantage_hooks([{"name": f"{HERE}:AtForward", "preserve_sign": True}])
    forward = make_forward(table([0, 0]), table([0.5, 2]))
    assert flow.apply_forward_hooks(torch.tensor([1.0]), hooks, forward).tolist() == [[1, 0]]
    assert not implements(hooks[0], "on_rollout")


def test_it_answers_for_the_hook() -> None:
    kept = Preserving(Multiply(), preserve_sum=True)
    assert kept.needs == ("old_logps",)
    assert (kept.__name__, kept.role, kept.state_dict()) == ("Multiply", "transform", {"memory": 1})
    assert not hasattr(kept, "load_state_dict")
    assert not hasattr(kept, "teachers")
    assert pickle.loads(pickle.dumps(kept)).hook.memory == 1
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


def test_the_keys_are_switches_of_hooks_alone_and_refused_where_nothing_comes_in() -> None:
    selection = parse_selection("advantage_hook", {"name": "centred", "preserve_sum": True, "preserve_sign": False})
    assert selection.switches == {"preserve_sum"}
    assert parse_selection("advantage_hook", selection.plain()) == selection
    with pytest.raises(ConfigurationError, match="preserve_sum of 'centred' is 'yes'; it must be true or false"):
        parse_selection("advantage_hook", {"name": "centred", "preserve_sum": "yes"})
    assert parse_selection("reward", {"name": "r", "preserve_sum": True}).parameters == {"preserve_sum": True}
    with pytest.raises(PluginParameterError, match="skip_zero_variance"):
        load_advantage_hooks([{"name": "centred", "skip_zero_variance": True}])
    for refused, sentence in (
        ({"name": "centred", "preserve_sign": True}, "preserve_sign of .*'centred' has no effect: as estimator"),
        ({"name": "truncation_masking", "preserve_sum": True}, "would give completions that this mask masks"),
        ({"name": "zero_variance_credit", "preserve_sign": True}, "would leave nothing of it, since it gives"),
    ):
        with pytest.raises(ConfigurationError, match=sentence):
            load_advantage_hooks([refused])
