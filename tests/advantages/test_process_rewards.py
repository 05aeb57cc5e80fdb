"""`process_rewards`: both forms by hand, against a slow loop, and what becomes of steps, silence and ranks."""

import math
from typing import Any

import pytest
import torch

from tests.advantages.token_batches import hook
from tests.contexts import Ranks, cut, make_rollout
from trl_grpo_ext.advantages.process_rewards import after_silence, min_form
from trl_grpo_ext.credit import flow
from trl_grpo_ext.errors import ConfigurationError, PluginOutputError
from trl_grpo_ext.types import Part, Parts, Rollout

NAN = math.nan
PLAIN = {"form": "sum", "baseline": "none"}


def advantages(rollout: Rollout, incoming: float = 9.0, dtype: torch.dtype = torch.float64, **parameters: Any) -> Any:
    incoming_B = torch.full((len(rollout.texts),), incoming, dtype=dtype)
    return flow.apply_hooks(incoming_B, [hook("process_rewards", **parameters)], rollout)


def steps(spans: Any, value: float = 0.0) -> Parts | float | None:
    """What a function returns for steps `(start, end, worth)`: a plain number without, and None for None."""
    parts = [
        Part(f"step {number}", worth, places=(start, end)) for number, (start, end, worth) in enumerate(spans or [])
    ]
    return None if spans is None else Parts(parts, value) if parts else value


def stepped(rows: list[list[float]], **overrides: Any) -> Rollout:
    """Every step is one token of one character; the reward is the steps' sum."""
    parts = [steps([(i, i + 1, value) for i, value in enumerate(row)]) for row in rows]
    rewards = [sum(row) for row in rows]
    return make_rollout([len(row) for row in rows], rewards, parts={"r": parts}, **overrides)


# ------------------------------------------------------------------------------------------------------- by hand


def test_the_minimum_form_by_hand() -> None:
    # exp(-.8), exp(.4), exp(-.6) are .44933, 1.49182, .54881 and sum to 2.48996: weights .18046, .59914, .22041.
    assert min_form([0.8, -0.4, 0.6], 1.0) == pytest.approx([0.14436, -0.23965, 0.13225], abs=1e-5)
    result = advantages(stepped([[0.8, -0.4, 0.6]]), baseline="none", temperature=1.0)
    to_go = [0.14436 - 0.23965 + 0.13225, -0.23965 + 0.13225, 0.13225]
    assert result[0].tolist() == pytest.approx(to_go, abs=2e-5)
    # At 0.1, the default, exp(-12) and exp(-10) beside 1: what comes before the worst step is worth about its reward.
    result = advantages(stepped([[0.8, -0.4, 0.6]]), baseline="none")
    assert result[0].tolist() == pytest.approx([-0.4, -0.4, 0.0], abs=1e-4)


def test_the_sum_by_hand() -> None:
    rollout = stepped([[0.8, -0.4, 0.6]])
    assert advantages(rollout, **PLAIN)[0].tolist() == pytest.approx([1.0, 0.2, 0.6])
    # .8 - .4/2 + .6/4, -.4 + .6/2, .6
    assert advantages(rollout, **PLAIN, gamma=0.5)[0].tolist() == pytest.approx([0.75, -0.1, 0.6])
    assert advantages(rollout, **PLAIN, gamma=0)[0].tolist() == pytest.approx([0.8, -0.4, 0.6])


def test_the_baseline_is_the_groups_mean_return() -> None:
    # Returns at the first token 3 and 1 (mean 2), and 10 alone in its group; the unscored is in nobody's.
    rollout = stepped([[1, 2], [1], [10], []], groups=[0, 0, 1, 1])
    rollout.rewards_B_K[3] = NAN
    assert advantages(rollout, form="sum").tolist() == [[1, 0], [-1, 0], [0, 0], [0, 0]]
    assert advantages(rollout, form="sum", coefficient=-2.0).tolist() == [[-2, 0], [2, 0], [0, 0], [0, 0]]
    added = advantages(rollout, form="sum", mode="add", incoming=0.5)
    assert added.tolist() == [[1.5, 0.5], [-0.5, 0], [0.5, 0], [0, 0]]


def test_spans_are_steps_up_to_their_ends() -> None:
    # Tokens of two characters. Steps end at 2 (first token), at 5 (inside the third), and nothing comes after.
    rollout = make_rollout(
        [5],
        [7.0],
        texts=["abcdefghij"],
        offsets=lambda row: [(2 * i, 2 * i + 2) for i in range(5)],
        parts={"r": [steps([(3, 5, 2.0), (0, 2, 1.0)])]},  # in any order
    )
    assert advantages(rollout, **PLAIN).tolist() == [[3, 2, 2, 0, 0]]
    # With a baseline, too: of one completion, its own return, which only the steps' tokens are held against.
    assert advantages(rollout, form="sum").tolist() == [[0, -1, -1, 0, 0]]


def test_the_end_of_sequence_belongs_to_the_step_that_it_follows() -> None:
    texts: dict[str, Any] = {"texts": ["ab"], "completions": ["ab"]}
    parts = {"r": [steps([(0, 1, 1.0), (1, 2, 2.0)])]}
    rollout = make_rollout([4], [1.0], **texts, offsets=lambda row: [(0, 1), (1, 1), (1, 2), (2, 2)], parts=parts)
    assert advantages(rollout, **PLAIN).tolist() == [[3, 3, 2, 2]]
    only_an_end = make_rollout([1], [5.0], texts=[""], offsets=lambda row: [(0, 0)])
    assert advantages(only_an_end, **PLAIN).tolist() == [[5]]


def test_a_score_without_parts_is_one_step() -> None:
    # A plain number in a batch with parts, in one without, and a part that has no place.
    nowhere = Parts({"a": (1.0, None)}, 2.0)
    mixed = make_rollout([2, 2, 2], [4.0, 1.0, 2.0], parts={"r": [4.0, steps([(0, 1, 1.0)]), nowhere]})
    assert advantages(mixed, **PLAIN).tolist() == [[4, 4], [1, 0], [1, 1]]
    weighted = make_rollout([2], [4.0], parts={"r": [Parts([Part("a", 2.0, 0.25, (0, 1)), Part("b", None)])]})
    assert advantages(weighted, **PLAIN).tolist() == [[0.5, 0]]
    assert advantages(make_rollout([2, 1], [4.0, 1.0]), **PLAIN).tolist() == [[4, 4], [1, 0]]


def test_silent_tokens_belong_to_the_step_before() -> None:
    offsets = [(0, 0), (0, 2), (2, 2), (2, 3), (2, 4), (4, 6), (6, 6)]
    assert after_silence(offsets, [2, 4, 5, 6, 7]) == [2, 3, 4, 6, 6]
    assert after_silence([(0, 0), (0, 0)], [0]) == [1]
    assert after_silence([], [0]) == [-1]


# ------------------------------------------------------------------------------------------- which function, dtypes


def several(spans: dict[str, Any], rewards: list[list[float]]) -> Rollout:
    return make_rollout(
        [2, 2],
        parts={name: [steps(row) for row in rows] for name, rows in spans.items()},
        reward_names=("a", "b"),
        reward_weights_K=torch.tensor([5.0, 7.0]),
        rewards_B_K=torch.tensor(rewards, dtype=torch.float64),
    )


def test_the_function_is_the_one_that_points_or_the_one_named() -> None:
    steps: list[Any] = [[(0, 1, 1.0), (1, 2, 2.0)], None]
    rewards = [[10.0, 3.0], [20.0, NAN]]
    expected = [[3, 2], [0, 0]]
    assert advantages(several({"b": steps}, rewards), **PLAIN).tolist() == expected
    assert advantages(several({"a": steps, "b": steps}, rewards), **PLAIN, reward="b").tolist() == expected
    assert advantages(several({"b": steps}, rewards), **PLAIN, reward="a").tolist() == [[10, 10], [20, 20]]
    with pytest.raises(ConfigurationError, match="of which 2 have parts, got None"):
        advantages(several({"a": steps, "b": steps}, rewards))
    with pytest.raises(ConfigurationError, match=r"one of \['a', 'b'\], of which 0 have parts, got None"):
        advantages(several({}, rewards))
    with pytest.raises(ConfigurationError, match="got 'c'"):
        advantages(several({"a": steps}, rewards), reward="c")


def test_ranks_agree() -> None:
    whole = several({"b": [[(0, 1, 1.0)], None]}, [[10.0, 1.0], [20.0, NAN]])
    results = Ranks(cut(whole, [1, 1])).run(lambda r: advantages(r, **PLAIN))
    assert torch.cat(results).tolist() == advantages(whole, **PLAIN).tolist() == [[1, 0], [0, 0]]


def test_a_place_outside_the_text_is_refused_with_its_row() -> None:
    with pytest.raises(PluginOutputError, match=r"'process_rewards': on_rollout: the reward 'r' has a part .* row 1"):
        advantages(make_rollout([2, 2], parts={"r": [0.0, steps([(0, 3, 1.0)])]}))
