"""`think_format` by hand-made cases, and against TRL's own reward on the same texts."""

from __future__ import annotations

import pickle
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.rewards.think_format import think_format
from trl_grpo_ext.types import SpanScore

GOOD = [
    "<think>\nThis is my reasoning.\n</think>\nThis is my answer.",
    "<think>a</think>18",
    "<think></think>18",
    "<think>a</think>b</think>18",
    "<think>a</think>18</think>",
    "<think>a < b > c </ think></think><answer>18</answer>",
    "<think>a</think>\x00",
]
BAD = [
    "",
    "18",
    "<think>a",
    "<think>a 18",
    "a</think>18",
    "</think>a<think>18",
    " <think>a</think>18",
    "\n<think>a</think>18",
    "Well: <think>a</think>18",
    "<think>a</think>",
    "<think>a</think> \n\t",
    "<think>a</think></think>",
    "<think>a</think> </think> ",
    "<think><think>a</think>18",
    "<think>a</think><think>b</think>18",
    "<think>a</think>18<think>",
    "<THINK>a</THINK>18",
    "<think >a</think>18",
]


@pytest.mark.parametrize("text", GOOD)
def test_thoughts_and_then_an_answer_score_one(text: str) -> None:
    assert think_format(completions=[text, [{"role": "assistant", "content": text}]]) == [1.0, 1.0]


@pytest.mark.parametrize("text", BAD)
def test_anything_else_scores_zero(text: str) -> None:
    assert think_format(completions=[text, [{"role": "assistant", "content": text}]]) == [0.0, 0.0]


@given(st.lists(st.sampled_from(["<think>", "</think>", "a", " ", "\n"]), max_size=8).map("".join))
def test_it_is_trls_reward_where_an_answer_follows(text: str) -> None:
    format_rewards = pytest.importorskip("trl.rewards.format_rewards", reason="TRL's own reward is the oracle here")
    [theirs] = format_rewards.think_format_reward(completions=[[{"content": text + "!"}]])
    assert think_format(completions=[text + "!"]) == [theirs]
    [ours] = think_format(completions=[text])
    assert ours is not None
    assert ours <= theirs


@given(st.text())
def test_no_text_raises(text: str) -> None:
    assert think_format(completions=[f"<think>{text}", text, None, 5, [{}]])[2:] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("text", [*GOOD, *BAD])
def test_the_spans_are_the_tags_and_share_the_score(text: str) -> None:
    [score] = think_format(completions=[[{"role": "assistant", "content": text}]])
    assert isinstance(score, SpanScore)
    pieces = [text[start:end] for start, end, _ in score.spans]
    assert pieces == [part for part in re.split("(</?think>)", text) if part in ("<think>", "</think>")]
    assert sum(value for *_, value in score.spans) == pytest.approx(score)


def test_spans_by_hand() -> None:
    [good, bad, none] = think_format(completions=["<think>ab</think>18", "ab</think>18", "18"])
    assert good.spans == ((0, 7, 0.5), (9, 17, 0.5))
    assert bad.spans == ((2, 10, 0.0),)
    assert none.spans == ()


def test_it_takes_what_trl_passes_and_pickles() -> None:
    reward = pickle.loads(pickle.dumps(think_format))
    assert reward(prompts=["?"], completions=[GOOD[0]], completion_ids=[[1]], trainer_state=None) == [1.0]
    assert reward.__name__ == "think_format"
    assert think_format(completions=[]) == []


def test_hostile_completions_take_linear_time() -> None:
    parts = ["<think>", "</think>", "<think>a</think>", "<think" + "<" * 9, " ", "a"]
    texts = [start + part * 20_000 for part in parts for start in ("", "<think>", "<think>a</think>")]
    started = time.perf_counter()
    scores = think_format(completions=[*texts, *texts, *texts, *texts, GOOD[0]])
    assert time.perf_counter() - started < 5.0
    assert scores[-1] == 1.0
