"""Scores that point at characters, and the tokens that these characters become."""

import copy
import json
import math
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.contexts import make_rollout
from trl_grpo_ext.errors import PluginOutputError
from trl_grpo_ext.types import Rollout, Span, SpanScore, span_reward


class TestSpanScore:
    def test_it_is_the_number(self) -> None:
        score = SpanScore(0.5, [(0, 7, 1)])
        assert isinstance(score, float)
        assert score == 0.5
        assert score + 1 == 1.5
        assert hash(score) == hash(0.5)
        assert json.dumps([score]) == "[0.5]"
        assert torch.tensor([score, SpanScore(2)]).tolist() == [0.5, 2.0]  # how TRL takes it
        assert math.isnan(SpanScore(math.nan))

    def test_it_travels_with_its_spans(self) -> None:
        score = SpanScore(-0.25, [(1, 2, 3.0)])
        for other in (pickle.loads(pickle.dumps(score)), copy.copy(score), copy.deepcopy(score)):
            assert type(other) is SpanScore
            assert other == score
            assert other.spans == score.spans

    @pytest.mark.parametrize("spans", [[(0, 1)], [(0, 1, 2, 3, 4)], [(None, 1, 2)], [("a", 1, 2)], 5])
    def test_what_is_no_span_is_refused_where_it_is_made(self, spans: Any) -> None:
        with pytest.raises((TypeError, ValueError)):
            SpanScore(1.0, spans)


@span_reward
def good_words(completions: Sequence[str], **columns: Any) -> list[list[Span] | None]:
    """Half a point for each good."""
    found = [[(i, i + 4, 0.5) for i in range(len(text)) if text.startswith("good", i)] for text in completions]
    return [None if text == "?" else spans for text, spans in zip(completions, found, strict=True)]


class TestSpanReward:
    def test_the_reward_is_the_sum_of_the_values(self) -> None:
        two, none, nothing = good_words(completions=["good, good", "bad", "?"])
        assert two == 1.0
        assert two is not None
        assert two.spans == ((0, 4, 0.5), (6, 10, 0.5))
        assert none == 0.0
        assert none is not None
        assert none.spans == ()
        assert nothing is None


def texts_and_offsets(texts: list[str], offsets: list[list[tuple[int, int]]], **settings: Any) -> Rollout:
    return make_rollout([len(row) for row in offsets], texts=texts, offsets=lambda row: offsets[row], **settings)


class TestSpanValues:
    def test_by_hand(self) -> None:
        # "ab", "", "c", "cd" (the c is cut over two tokens), "e": a special token writes nothing.
        rollout = texts_and_offsets(["abcde"], [[(0, 2), (2, 2), (2, 3), (2, 4), (4, 5)]], width=6)
        assert rollout.span_values([[(0, 5, 1.0)]]).tolist() == [[1, 0, 1, 1, 1, 0]]
        assert rollout.span_values([[(1, 2, 2.0)]]).tolist() == [[2, 0, 0, 0, 0, 0]]
        assert rollout.span_values([[(2, 3, 3.0)]]).tolist() == [[0, 0, 3, 3, 0, 0]]
        assert rollout.span_values([[(3, 4, 4.0)]]).tolist() == [[0, 0, 0, 4, 0, 0]]
        assert rollout.span_values([[(0, 3, 1.0), (2, 5, -0.5)]]).tolist() == [[1, 0, 0.5, 0.5, -0.5, 0]]
        assert rollout.span_values([[(2, 2, 9.0), (5, 5, 9.0), (0, 0, 9.0)]]).tolist() == [[0] * 6]
        assert rollout.span_values([None]).tolist() == rollout.span_values([[]]).tolist() == [[0] * 6]

    def test_rows_keep_to_themselves_and_empty_ones_are_not_asked(self) -> None:
        def offsets(row: int) -> list[tuple[int, int]]:
            assert row == 1
            return [(0, 1), (1, 2)]

        rollout = make_rollout([0, 2, 2], texts=["", "xy", "zz"], offsets=offsets)
        assert rollout.span_values([None, [(1, 2, 1.0)], []]).tolist() == [[0, 0], [0, 1], [0, 0]]

    @pytest.mark.parametrize(
        "span", [(-1, 1, 1.0), (0, 3, 1.0), (2, 1, 1.0), (0, 1, math.nan), (0, 1, math.inf), (3, 3, 1.0)]
    )
    def test_a_span_that_cannot_be_is_refused_with_its_row(self, span: Span) -> None:
        with pytest.raises(PluginOutputError, match="row 1 must lie within the completion's 2 characters"):
            make_rollout([2, 2]).span_values([None, [span]])

    def test_no_offsets_say_so(self) -> None:
        rollout = make_rollout([2], offsets=Rollout.__dataclass_fields__["offsets"].default)
        with pytest.raises(PluginOutputError, match="no text offsets"):
            rollout.span_values([[(0, 1, 1.0)]])
