"""`segment_weights`: the parts by hand and against asking every character, and what the hook makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contexts import Ranks, cut, make_rollout
from trl_grpo_ext import load_advantage_hooks
from trl_grpo_ext.advantages.spans import around_markers, token_weights
from trl_grpo_ext.credit import flow
from trl_grpo_ext.errors import ConfigurationError, PluginParameterError

WEIGHTS = {"think": 2.0, "answer": 3.0, "tags": 5.0, "other": 7.0}


def weights_of(texts: list[str], offsets: list[list[tuple[int, int]]], **parameters: Any) -> list[list[float]]:
    """What the hook makes of advantages of 1."""
    (hook,) = load_advantage_hooks([{"name": "segment_weights", **WEIGHTS, **parameters}])
    rollout = make_rollout([len(row) for row in offsets], texts=texts, offsets=lambda row: offsets[row])
    ones = torch.ones(len(texts), dtype=torch.float64)
    result: list[list[float]] = flow.apply_rollout_hooks(ones, [hook], rollout).tolist()
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


@given(st.lists(st.sampled_from(["<think>", "</think>", "a", "<", "think>", "\n"]), max_size=8).map("".join), st.data())
@settings(max_examples=100, deadline=None)
def test_against_counting_characters(text: str, data: st.DataObject) -> None:
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
    parts = around_markers(text, "<think>", "</think>")
    # Two parts of the same kind (the two tags) are apart for the hook, together for the count above.
    whole = [pair for pair in zip(offsets, expected, strict=True) if kinds[pair[0][0] : pair[0][1]].count("tags") < 8]
    found = token_weights([offset for offset, _ in whole], parts, WEIGHTS)
    assert found == [weight for _, weight in whole]
    assert [parts[0][0], *(end for _, end, _ in parts)] == [*(start for start, *_ in parts), len(text)]


def test_weights_of_one_change_nothing_and_zero_silences() -> None:
    (plain,) = load_advantage_hooks(["segment_weights"])
    rollout = make_rollout([3, 0, 2])
    advantages = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float32)
    result = flow.apply_rollout_hooks(advantages, [plain], rollout)
    assert result.dtype == torch.float32
    assert result.tolist() == [[1, 1, 1], [0, 0, 0], [-3, -3, 0]]
    assert by_character("<think>a</think>b", think=0, tags=0, answer=1) == "0" * 16 + "11"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtypes_ranks_and_padding(dtype: torch.dtype) -> None:
    (hook,) = load_advantage_hooks([{"name": "segment_weights", **WEIGHTS}])
    texts = ["<think>a</think>", "", "a</think>b"]
    lengths = [len(text) for text in texts]
    advantages = torch.tensor([1.0, 2.0, -3.0], dtype=dtype)
    whole = make_rollout(lengths, texts=texts)
    expected = flow.apply_rollout_hooks(advantages, [hook], whole)
    assert expected.dtype == dtype
    wide = flow.apply_rollout_hooks(advantages, [hook], make_rollout(lengths, texts=texts, width=20))
    torch.testing.assert_close(wide[:, :16], expected, rtol=0, atol=0)
    parts = Ranks(cut(whole, [1, 2])).run(lambda r: flow.apply_rollout_hooks(advantages[r.local_rows], [hook], r))
    torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "parameters",
    [
        *({name: value} for name in WEIGHTS for value in (-0.1, float("nan"), float("inf"), True, "1", None)),
        {"open": ""},
        {"close": ""},
        {"open": 5},
        {"close": None},
        {"open": "</think>"},
    ],
)
def test_parameters_out_of_range_are_refused_by_name(parameters: dict[str, Any]) -> None:
    (name,) = parameters
    with pytest.raises((ConfigurationError, PluginParameterError), match=f"segment_weights: ({name}|close) must"):
        load_advantage_hooks([{"name": "segment_weights", **parameters}])
