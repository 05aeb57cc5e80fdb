"""`think_format` by hand-made cases and against TRL's own; `tag_format` by cases computed from its three rules."""

from __future__ import annotations

import pickle
import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.rewards.formats import tag_format, think_format
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


@pytest.mark.parametrize(("text", "value"), [*((text, 1.0) for text in GOOD), *((text, 0.0) for text in BAD)])
def test_thoughts_and_then_an_answer_score_one_and_the_tags_share_it(text: str, value: float) -> None:
    scores: list[Any] = think_format(completions=[text, [{"role": "assistant", "content": text}]])
    assert scores == [value, value]
    assert all(isinstance(score, SpanScore) for score in scores)
    pieces = [text[start:end] for start, end, _ in scores[1].spans]
    assert pieces == [part for part in re.split("(</?think>)", text) if part in ("<think>", "</think>")]
    assert sum(share for *_, share in scores[1].spans) == pytest.approx(value)


@given(st.lists(st.sampled_from(["<think>", "</think>", "a", " ", "\n"]), max_size=8).map("".join))
def test_think_format_is_trls_reward_where_an_answer_follows(text: str) -> None:
    format_rewards = pytest.importorskip("trl.rewards.format_rewards", reason="TRL's own reward is the oracle here")
    [theirs] = format_rewards.think_format_reward(completions=[[{"content": text + "!"}]])
    assert think_format(completions=[text + "!"]) == [theirs]
    [ours] = think_format(completions=[text])
    assert ours is not None
    assert ours <= theirs


CASES = [
    # All there, with and without a number in the answer.
    ("<think>9 * 2</think><answer>18</answer>", 0.5),
    ("Sure!\n<think>\n9 * 2\n</think>\n\n<answer>\nShe makes $18.\n</answer>\nBye.", 0.5),
    ("<think></think><answer>eighteen</answer>", 0.5),
    ("<think></think><answer>1/2</answer>", 0.5),
    ("<think></think><answer>x = -1.5</answer>", 0.5),
    ("<think>18</think><answer>many</answer>18", 0.4),
    ("<think></think><answer></answer>", 0.4),
    ("<think></think><answer>H2O</answer>", 0.4),
    # A missing tag costs its own 0.1, and the number counts only inside both answer tags.
    ("</think><answer>18</answer>", 0.4),
    ("<think><answer>18</answer>", 0.4),
    ("<think></think>18</answer>", 0.3),
    ("<think></think><answer>18", 0.3),
    ("<answer>18</answer>", 0.3),
    ("<answer>many</answer>", 0.2),
    ("<think>18</think>", 0.2),
    ("<think></answer>18", 0.2),
    ("<think>18", 0.1),
    ("</answer>18", 0.1),
    ("18", 0.0),
    ("", 0.0),
    # Out of order: a tag must stand after every tag that earned before it.
    ("</think><think>", 0.1),
    ("<answer>18</answer><think>9 * 2</think>", 0.2),
    ("</think><think><answer>18</answer>", 0.4),
    ("<think></think></answer>18<answer>", 0.3),
    ("<think><answer>18</think></answer>", 0.3),
    ("</answer><answer></think><think>", 0.1),
    # A tag that occurs twice earns nothing.
    ("<think><think></think><answer>18</answer>", 0.4),
    ("<think>a</think><think>b</think><answer>18</answer>", 0.3),
    ("<think></think><answer>17</answer><answer>18</answer>", 0.2),
    ("<think></think><answer>18</answer></answer>", 0.3),
    ("<think><think><think>", 0.0),
    ("<think></think><answer>18</answer>" * 2, 0.0),
    # Only the exact tags are tags.
    ("<THINK></THINK><Answer>18</Answer>", 0.0),
    ("<think >< /think>< answer>18</ answer>", 0.0),
    ("&lt;think&gt;", 0.0),
]


@pytest.mark.parametrize(("text", "value"), CASES)
def test_each_tag_earns_a_tenth_and_the_number_another(text: str, value: float) -> None:
    scores: list[Any] = tag_format(completions=[text, [{"role": "assistant", "content": text}]])
    assert scores == [value, value]
    assert all(isinstance(score, SpanScore) for score in scores)
    assert len(scores[0].spans) / 10 == value
    assert all(worth == 0.1 for *_, worth in scores[0].spans)
    tags = [text[start:end] for start, end, _ in scores[0].spans if text[start:end].startswith("<")]
    assert all(text.count(tag) == 1 for tag in tags)


@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "18", "a"]), max_size=10))
def test_scores_are_tenths_up_to_a_half_and_only_the_full_form_gets_it(parts: list[str]) -> None:
    text = "".join(parts)
    [value] = tag_format(completions=[text])
    assert value in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
    tags = [part for part in parts if part.startswith("<")]
    inside = text.partition("<answer>")[2].partition("</answer>")[0]
    assert (value == 0.5) == (tags == ["<think>", "</think>", "<answer>", "</answer>"] and inside[-2:].isdigit())


def test_spans_by_hand() -> None:
    scores: list[Any] = think_format(completions=["<think>ab</think>18", "ab</think>18", "18"])
    assert [score.spans for score in scores] == [((0, 7, 0.5), (9, 17, 0.5)), ((2, 10, 0.0),), ()]
    texts = ["<think>a</think><answer>18</answer>", "<answer>many</answer>", "</think><think>"]
    full, half, out_of_order = [score.spans for score in tag_format(completions=texts)]  # type: ignore[union-attr]
    assert [span[:2] for span in full] == [(0, 7), (8, 16), (16, 24), (26, 35), (24, 26)]
    assert [span[:2] for span in half] == [(0, 8), (12, 21)]
    assert out_of_order == ((8, 15, 0.1),)


@given(st.text())
def test_no_text_raises(text: str) -> None:
    for reward in (think_format, tag_format):
        completions = [f"<think>{text}", f"<answer>{text}</answer>", text, None, 5, [{}]]
        assert reward(completions=completions)[3:] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("function", "best"), [(think_format, 1.0), (tag_format, 0.5)])
def test_each_takes_what_trl_passes_and_pickles(function: Any, best: float) -> None:
    reward = pickle.loads(pickle.dumps(function))
    assert reward(prompts=["?"], completions=[CASES[0][0]], completion_ids=[[1]], trainer_state=None) == [best]
    assert reward(completions=[]) == []


def test_hostile_completions_take_linear_time() -> None:
    parts = ["<think>", "</think>", "<think>a</think>", "<think" + "<" * 9, " ", "a"]
    thoughts = [start + part * 20_000 for part in parts for start in ("", "<think>", "<think>a</think>")]
    parts = ["<think>", "</answer>", "<answer>1", "1", "<", "\\boxed{", "the answer is "]
    answers = [f"<think></think><answer>{part * 12_000}</answer>" for part in parts]
    started = time.perf_counter()
    assert think_format(completions=[*thoughts, GOOD[0]])[-1] == 1.0
    assert tag_format(completions=[*answers, CASES[0][0]])[-1] == 0.5
    assert time.perf_counter() - started < 5.0
