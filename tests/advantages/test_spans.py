"""span_credit and segment_weights: by hand, against slow versions, with functions that point now and then."""

from __future__ import annotations

import math
import pickle
import statistics
from itertools import groupby
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.advantages.token_batches import hook
from tests.contexts import Ranks, cut, make_rollout
from trl_grpo_ext.advantages.spans import split_at_markers, token_weights
from trl_grpo_ext.credit import flow
from trl_grpo_ext.errors import ConfigurationError
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
    incoming = torch.full((len(rollout.texts),), 9.0, dtype=dtype)  # replaced, whatever it was
    return flow.apply_rollout_hooks(incoming, [hook("span_credit", **parameters)], rollout)


def test_span_credit_by_hand() -> None:
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


def test_groups_that_agree_get_exactly_nothing() -> None:
    rewards = [[0.1, 0.7]] * 3
    for normalise in (False, True):
        assert not credit(rollout_of([1, 1, 1], rewards), normalise=normalise).any()


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
def pointing_rollouts(draw: st.DrawFn) -> Rollout:
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


@given(pointing_rollouts(), st.booleans(), st.booleans(), st.data())
@settings(max_examples=80)
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


def test_it_pickles_with_its_patterns() -> None:
    pointing = hook("span_credit", patterns={"r0": r"\d+"})
    assert pickle.loads(pickle.dumps(pointing)).patterns["r0"].pattern == r"\d+"


WEIGHTS = {"think": 2.0, "answer": 3.0, "tags": 5.0, "other": 7.0}


def weights_of(texts: list[str], offsets: list[list[tuple[int, int]]], **parameters: Any) -> list[list[float]]:
    """What the hook makes of advantages of 1."""
    rollout = make_rollout([len(row) for row in offsets], texts=texts, offsets=lambda row: offsets[row])
    ones = torch.ones(len(texts), dtype=torch.float64)
    result: list[list[float]] = flow.apply_rollout_hooks(
        ones, [hook("segment_weights", **{**WEIGHTS, **parameters})], rollout
    ).tolist()
    return result


def by_character(text: str, **parameters: Any) -> str:
    """One token for each character, and an end of sequence: the weights as digits."""
    offsets = [*((i, i + 1) for i in range(len(text))), (len(text), len(text))]
    return "".join(str(round(weight)) for weight in weights_of([text], [offsets], **parameters)[0])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a<think>b</think>c", "755555552555555553" + "3"),
        ("<think>bb</think>cc", "5555555225555555533" + "3"),
        ("bb</think>cc", "225555555533" + "3"),  # the template has opened the thoughts
        ("a<think>b", "755555552" + "2"),  # never closed
        ("<think></think>", "555555555555555" + "3"),  # what came next would have been the answer
        ("abc", "333" + "3"),
        ("", "3"),
        ("b</think><think>c</think>", "2" + "5" * 8 + "3" * 16 + "3"),  # the first close counts, the rest is the answer
        ("a<think>b<think>c</think>d", "7" + "5" * 7 + "2" * 9 + "5" * 8 + "3" + "3"),
        ("<THINK>a</THINK>", "3" * 16 + "3"),
    ],
)
def test_characters_by_hand(text: str, expected: str) -> None:
    assert by_character(text) == expected


def test_other_markers() -> None:
    assert by_character("[a]b", open="[", close="]") == "52533"
    assert by_character("a((b))c", open="(", close=")") == "75225333"


def test_a_token_across_a_boundary_has_the_weight_of_its_larger_part() -> None:
    text = "ab<think>cd</think>e"  # other 0-2, tags 2-9, think 9-11, tags 11-19, answer 19-20
    offsets = [(0, 3), (3, 8), (8, 10), (10, 12), (12, 20), (20, 20)]
    # 2 other, 1 tag; tag; 1 tag, 1 think (a tie: the earlier); 1 think, 1 tag (the same); 7 tag, 1 answer; end.
    assert weights_of([text], [offsets]) == [[7, 5, 5, 2, 5, 3]]
    assert weights_of([text], [[(0, 20), (20, 20)]]) == [[5, 3]]  # 15 characters of tags, 2 of thoughts, 2 other
    # A silent token in the middle belongs to where it stands: at 9 the thoughts begin.
    assert weights_of([text], [[(0, 9), (9, 9), (9, 20)]]) == [[5, 2, 5]]
    # A character cut over three tokens, each of which has it.
    assert weights_of(["<think>€"], [[(0, 7), (7, 8), (7, 8), (7, 8), (8, 8)]]) == [[5, 2, 2, 2, 2]]


@pytest.mark.slow
@given(st.lists(st.sampled_from(["<think>", "</think>", "a", "<", "think>", "\n"]), max_size=8).map("".join), st.data())
@settings(max_examples=100)
def test_segments_against_counting_characters(text: str, data: st.DataObject) -> None:
    offsets, start = [], 0
    while start < len(text):
        end = data.draw(st.integers(start, min(len(text), start + 12)))
        offsets.append((start, end))
        start = end
    # The kind of every character, decided one by one.
    close, opening = text.find("</think>"), text.find("<think>")
    if opening >= 0 and (close < 0 or opening < close):
        first, shut = opening + 7, text.find("</think>", opening + 7)
    else:
        opening, first, shut = 0, 0, close
    kinds = []
    for i in range(len(text) + 1):
        if shut < 0 and first == 0:
            kinds.append("answer")
        elif i < opening:
            kinds.append("other")
        elif i < first:
            kinds.append("tags")
        elif shut < 0 or i < shut:
            kinds.append("think")
        else:
            kinds.append("tags" if i < shut + 8 else "answer")
    expected = []
    for start, end in offsets:
        inside = kinds[start:end] or [kinds[start]]
        expected.append(WEIGHTS[max(dict.fromkeys(inside), key=inside.count)])  # the first of the most frequent
    parts = split_at_markers(text, "<think>", "</think>")
    # Two parts of the same kind (the two tags) are apart for the hook, together for the count above.
    whole = [
        ((start, end), weight)
        for (start, end), weight in zip(offsets, expected, strict=True)
        if [kind for kind, _ in groupby(kinds[start:end])].count("tags") < 2
    ]
    found = token_weights([offset for offset, _ in whole], parts, WEIGHTS)
    assert found == [weight for _, weight in whole]
    assert [parts[0][0], *(end for _, end, _ in parts)] == [*(start for start, *_ in parts), len(text)]


def test_weights_of_one_change_nothing_and_zero_silences() -> None:
    rollout = make_rollout([3, 0, 2])
    advantages = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float32)
    result = flow.apply_rollout_hooks(advantages, [hook("segment_weights")], rollout)
    assert result.dtype == torch.float32
    assert result.tolist() == [[1, 1, 1], [0, 0, 0], [-3, -3, 0]]
    assert by_character("<think>a</think>b", think=0, tags=0, answer=1) == "0" * 16 + "11"
