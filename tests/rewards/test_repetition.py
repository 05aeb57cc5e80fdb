"""`Repetition` by values counted by hand, against TRL's own, and against a plain count of n-grams."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.rewards.repetition import Repetition, repeats
from trl_grpo_ext.types import SpanScore


def of_tokens(reward: Repetition, *ids: list[int]) -> list[float | None]:
    return reward(prompts=["?"] * len(ids), completions=["x"] * len(ids), completion_ids=list(ids))


def of_words(text: Any, n: int = 2) -> SpanScore:
    [score] = Repetition(n=n, units="words")(completions=[text])
    assert isinstance(score, SpanScore)
    return score


def test_the_share_of_n_grams_that_were_there_before_is_the_penalty() -> None:
    reward = Repetition(n=2)
    # 12 23 34 | 55 55 55 55 | 12 21 12 21, two of four are new | too short | nothing
    assert of_tokens(reward, [1, 2, 3, 4], [5] * 5, [1, 2, 1, 2, 1], [1], []) == [0.0, -0.75, -0.5, 0.0, 0.0]
    assert of_tokens(Repetition(n=2, max_penalty=-4.0), [5] * 5) == [-3.0]
    assert of_tokens(Repetition(n=1), [1, 1, 2, 3]) == [-0.25]


ids = st.lists(st.integers(0, 3), max_size=40)


@given(n=st.integers(1, 8), penalty=st.floats(-10, 0), rows=st.lists(ids, max_size=4))
def test_over_tokens_it_is_trls_reward(n: int, penalty: float, rows: list[list[int]]) -> None:
    other = pytest.importorskip("trl.rewards.other_rewards", reason="TRL's own reward is the oracle here")
    theirs = other.get_repetition_penalty_reward(ngram_size=n, max_penalty=penalty)(completion_ids=rows)
    assert of_tokens(Repetition(n=n, max_penalty=penalty), *rows) == theirs


@given(row=ids, n=st.integers(1, 12))
def test_repeated_is_what_a_plain_look_back_says(row: list[int], n: int) -> None:
    grams = [tuple(row[i : i + n]) for i in range(len(row) - n + 1)]
    assert repeats(row, n) == [gram in grams[:i] for i, gram in enumerate(grams)]


def test_words_are_what_white_space_separates_whatever_their_case() -> None:
    # "no no", "no YES", "yes no", "no no", "no yes": the last two were there before
    text = "no No  YES\nno no\tyes"
    score = of_words(text)
    assert score == pytest.approx(-2 / 5)
    assert [text[start:end] for start, end, _ in score.spans] == ["no", "yes"]
    assert [(start, end) for start, end, _ in score.spans] == [(14, 16), (17, 20)]
    assert sum(value for *_, value in score.spans) == pytest.approx(score)


def test_a_megabyte_and_long_n_grams_take_linear_time_and_memory() -> None:
    assert of_words("ab " * 350_000, n=3) == pytest.approx(-1, abs=1e-4)
    assert of_tokens(Repetition(n=20_000), [3] * 40_001) == pytest.approx([-(1 - 1 / 20_002)])
