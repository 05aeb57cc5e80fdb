"""`span_credit`: by hand, against a slow loop, with functions that point, that don't, and that do so now and then."""

from __future__ import annotations

import math
import pickle
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contexts import Ranks, cut, make_rollout
from trl_grpo_ext import load_advantage_hooks
from trl_grpo_ext.credit import flow
from trl_grpo_ext.errors import ConfigurationError, PluginParameterError
from trl_grpo_ext.types import Rollout

NAN = math.nan


def rollout_of(
    lengths: list[int],
    rewards: list[list[float]],
    spans: dict[str, Any] | None = None,
    weights: list[float] | None = None,
    **overrides: Any,
) -> Rollout:
    """Reward functions r0, r1, ..., and tokens of one character."""
    functions = len(rewards[0])
    settings = {
        "rewards_B_K": torch.tensor(rewards, dtype=torch.float64),
        "reward_names": tuple(f"r{k}" for k in range(functions)),
        "reward_weights_K": torch.tensor(weights or [1.0] * functions, dtype=torch.float64),
        "reward_spans": spans or {},
    }
    return make_rollout(lengths, **{**settings, **overrides})


def credit(rollout: Rollout, dtype: torch.dtype = torch.float64, **parameters: Any) -> torch.Tensor:
    (hook,) = load_advantage_hooks([{"name": "span_credit", **parameters}])
    incoming = torch.full((len(rollout.texts),), 9.0, dtype=dtype)  # replaced, whatever it was
    return flow.apply_rollout_hooks(incoming, [hook], rollout)


def test_by_hand() -> None:
    # r0: 1, 0, weight 2: centred .5, -.5, paid 1, -1. r1: 4, 0: centred 2, -2.
    # r0 points at the character 1 of the first, and at 0 and 1 of the second completion; r1 points nowhere.
    spans = {"r0": [[(1, 2, 0.7)], [(0, 2, 0.3), (1, 2, 0.1)]]}
    rollout = rollout_of([3, 3], [[1, 4], [0, 0]], spans, weights=[2, 1])
    assert credit(rollout).tolist() == [[2, 3, 2], [-3, -3, -2]]


def test_normalised_by_hand() -> None:
    # r0: 1, 0: standard deviation √.5, r1: 4, 0: √8.
    rollout = rollout_of([1, 1], [[1, 4], [0, 0]], weights=[2, 1])
    expected = 2 * 0.5 / (math.sqrt(0.5) + 1e-4) + 2 / (math.sqrt(8) + 1e-4)
    torch.testing.assert_close(
        credit(rollout, normalise=True).squeeze(1), torch.tensor([expected, -expected], dtype=torch.float64)
    )


def test_pointing_at_nothing() -> None:
    # Centred 1, -1, 0. The first points, the second doesn't, the third was not even given spans.
    rollout = rollout_of([2, 2, 2], [[2], [0], [1]], {"r0": [[(0, 1, 1.0)], [], ()]})
    assert credit(rollout).tolist() == [[1, 0], [-1, -1], [0, 0]]
    assert credit(rollout, without_spans="none").tolist() == [[1, 0], [0, 0], [0, 0]]
    # A span without characters, or whose characters no token wrote, is nothing, too.
    silent = rollout_of(
        [2, 2], [[2], [0]], {"r0": [[(1, 1, 1.0)], [(0, 1, 1.0)]]}, offsets=lambda row: [(0, 0), (1, 2)]
    )
    assert credit(silent).tolist() == [[1, 1], [-1, -1]]
    assert credit(silent, without_spans="none").tolist() == [[0, 0], [0, 0]]
    # A function that found nothing in any completion of the batch is still one that points.
    nowhere = rollout_of([2, 2], [[2], [0]], {"r0": [(), ()]})
    assert credit(nowhere, without_spans="none").tolist() == [[0, 0], [0, 0]]
    # A function that returns plain numbers pays everything.
    assert credit(rollout_of([2, 2], [[2], [0]]), without_spans="none").tolist() == [[1, 1], [-1, -1]]


def test_patterns_point_for_functions_that_do_not() -> None:
    rollout = rollout_of(
        [4, 4], [[1, 1], [0, 0]], {"r1": [[(0, 1, 1.0)], [(0, 1, 1.0)]]}, texts=["a12b", "7abc"], weights=[2, 4]
    )
    # r0 (±.5 · 2) pays the digits, r1 (±.5 · 4) what it points at itself.
    assert credit(rollout, patterns={"r0": r"\d+"}).tolist() == [[2, 1, 1, 0], [-3, 0, 0, 0]]
    # A pattern takes the place of the function's own spans; matches without characters are none.
    assert credit(rollout, patterns={"r0": "b", "r1": "x*"}).tolist() == [[2, 2, 2, 3], [-2, -2, -3, -2]]


def test_an_unknown_reward_in_patterns_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigurationError, match=r"patterns has 'format', but the reward functions .* 'r0', 'r1'"):
        credit(rollout_of([1], [[1, 2]]), patterns={"format": "a"})


def test_unscored_completions_are_in_nobodys_mean() -> None:
    # r0: 1, -, 3: mean 2. r1 scored only the second: no one to compare with. The last row has no tokens.
    rollout = rollout_of(
        [1, 1, 1, 0], [[1, NAN], [NAN, 5], [3, NAN], [2, NAN]], {"r0": [None, None, [(0, 1, 1)], None]}
    )
    assert credit(rollout).tolist() == [[-1], [0], [1], [0]]
    assert credit(rollout, normalise=True).tolist()[1] == [0]


def test_groups_that_agree_get_exactly_nothing() -> None:
    rewards = [[0.1, 0.7]] * 3
    for normalise in (False, True):
        assert not credit(rollout_of([1, 1, 1], rewards), normalise=normalise).any()


def test_without_spans_it_is_the_weighted_sum_of_the_centred_rewards() -> None:
    rollout = rollout_of([2, 1, 3, 1], [[1, 0.5], [3, 0], [0, 1], [10, 4]], weights=[0.5, 2], groups=[0, 0, 1, 1])
    # 0.5·(∓1) + 2·(±.25) and 0.5·(∓5) + 2·(∓1.5)
    assert credit(rollout).tolist() == [[0, 0, 0], [0, 0, 0], [-5.5, -5.5, -5.5], [5.5, 0, 0]]


def slow(rollout: Rollout, normalise: bool, none: bool) -> list[list[float]]:
    """The formula, completion by completion, function by function, token by token."""
    rewards, groups = rollout.rewards_B_K.tolist(), rollout.group_ids_B.tolist()
    result = []
    for i, text in enumerate(rollout.texts):
        row = [0.0] * rollout.mask_B_T.size(1)
        for k, name in enumerate(rollout.reward_names):
            mine = rewards[i][k]
            others = [rewards[j][k] for j in range(len(rewards)) if groups[j] == groups[i]]
            others = [reward for reward in others if not math.isnan(reward)]
            if math.isnan(mine):
                continue
            pay = mine - statistics.fmean(others)
            if normalise:
                pay /= (statistics.stdev(others) if len(others) > 1 else 0.0) + 1e-4
            pay *= rollout.reward_weights_K.tolist()[k]
            pointed = set()
            for start, end, _ in (rollout.reward_spans.get(name, [None] * len(groups))[i]) or []:
                pointed |= set(range(start, end))
            for t in range(len(text)):
                if t in pointed or (not pointed and not (none and name in rollout.reward_spans)):
                    row[t] += pay
        result.append(row)
    return result


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    functions, members = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rows = members * draw(st.integers(1, 2))
    lengths = draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
    reward = st.sampled_from([0.0, 0.1, 1.0, -2.5, NAN])
    rewards = draw(st.lists(st.lists(reward, min_size=functions, max_size=functions), min_size=rows, max_size=rows))
    spans = {}
    for k in draw(st.sets(st.integers(0, functions - 1))):
        spans[f"r{k}"] = [
            draw(st.none() | st.lists(st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted), max_size=3))
            for n in lengths
        ]
        spans[f"r{k}"] = [None if row is None else [(a, b, 1.0) for a, b in row] for row in spans[f"r{k}"]]
    weights = draw(st.lists(st.sampled_from([0.0, 1.0, -0.5, 3.0]), min_size=functions, max_size=functions))
    return rollout_of(lengths, rewards, spans, weights, groups=[i // members for i in range(rows)])


@given(rollouts(), st.booleans(), st.booleans(), st.data())
@settings(max_examples=80, deadline=None)
def test_against_a_slow_loop_on_one_rank_and_on_several(
    rollout: Rollout, normalise: bool, none: bool, data: st.DataObject
) -> None:
    parameters = {"normalise": normalise, "without_spans": "none" if none else "all"}
    result = credit(rollout, **parameters)
    expected = torch.tensor(slow(rollout, normalise, none), dtype=torch.float64).view_as(result)
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)
    rows = len(rollout.texts)
    if rows > 1:
        first = data.draw(st.integers(1, rows - 1))
        parts = Ranks(cut(rollout, [first, rows - first])).run(lambda r: credit(r, **parameters))
        torch.testing.assert_close(torch.cat(parts), result, rtol=1e-12, atol=1e-12)
    order = data.draw(st.permutations(range(rows)))
    mixed = rollout_of(
        [len(rollout.texts[i]) for i in order],
        rollout.rewards_B_K[order].tolist(),
        {name: [spans[i] for i in order] for name, spans in rollout.reward_spans.items()},
        rollout.reward_weights_K.tolist(),
        groups=rollout.group_ids_B[order].tolist(),
        width=rollout.mask_B_T.size(1) + 2,
    )
    torch.testing.assert_close(
        credit(mixed, **parameters)[:, :-2], result[order].view(rows, -1), rtol=1e-12, atol=1e-12
    )


def test_whether_a_function_points_is_agreed_on_by_all_ranks() -> None:
    # The second rank's only completion came without spans, so its rewards are plain numbers there.
    spans = {"r0": [[(0, 1, 1.0)], []]}
    whole = rollout_of([2, 2], [[2], [0]], spans)
    first, second = cut(whole, [1, 1])
    second.reward_spans.clear()  # type: ignore[attr-defined]
    results = Ranks([first, second]).run(lambda r: credit(r, without_spans="none"))
    assert torch.cat(results).tolist() == credit(whole, without_spans="none").tolist() == [[1, 0], [0, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_of_the_advantages_stays(dtype: torch.dtype) -> None:
    rollout = rollout_of([2, 2], [[1], [0]], {"r0": [[(0, 1, 1)], []]})
    result = credit(rollout, dtype)
    assert result.dtype == dtype
    assert result.tolist() == [[0.5, 0], [-0.5, -0.5]]
    low = rollout_of([2, 2], [[1], [0]], rewards_B_K=torch.tensor([[1.0], [0.0]], dtype=torch.bfloat16))
    assert credit(low, dtype).dtype == dtype


def test_it_pickles_with_its_patterns() -> None:
    (hook,) = load_advantage_hooks([{"name": "span_credit", "patterns": {"r0": r"\d+"}}])
    assert pickle.loads(pickle.dumps(hook)).patterns["r0"].pattern == r"\d+"


@pytest.mark.parametrize(
    "parameters",
    [
        {"normalise": "yes"},
        {"normalise": 1},
        {"without_spans": "some"},
        {"without_spans": None},
        {"patterns": ["a"]},
        {"patterns": {"r0": 5}},
        {"patterns": {5: "a"}},
        {"patterns": {"r0": "(unclosed"}},
    ],
)
def test_parameters_out_of_range_are_refused_by_name(parameters: dict[str, Any]) -> None:
    (name,) = parameters
    with pytest.raises((ConfigurationError, PluginParameterError), match=f"span_credit: {name} must"):
        load_advantage_hooks([{"name": "span_credit", **parameters}])
