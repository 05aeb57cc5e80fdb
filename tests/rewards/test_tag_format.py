"""`tag_format` by cases computed by hand from its three rules."""

from __future__ import annotations

import pickle
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.rewards.tag_format import tag_format
from trl_grpo_ext.types import SpanScore

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
    assert tag_format(completions=[text, [{"role": "assistant", "content": text}]]) == [value, value]


@pytest.mark.parametrize(("text", "value"), CASES)
def test_the_spans_are_what_earned(text: str, value: float) -> None:
    [score] = tag_format(completions=[text])
    assert isinstance(score, SpanScore)
    assert len(score.spans) / 10 == value
    assert all(worth == 0.1 for *_, worth in score.spans)
    tags = [text[start:end] for start, end, _ in score.spans if text[start:end].startswith("<")]
    assert all(text.count(tag) == 1 for tag in tags)


def test_spans_by_hand() -> None:
    [full, half, out_of_order] = tag_format(
        completions=["<think>a</think><answer>18</answer>", "<answer>many</answer>", "</think><think>"]
    )
    assert [span[:2] for span in full.spans] == [(0, 7), (8, 16), (16, 24), (26, 35), (24, 26)]
    assert [span[:2] for span in half.spans] == [(0, 8), (12, 21)]
    assert out_of_order.spans == ((8, 15, 0.1),)


@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "18", "a"]), max_size=10))
def test_scores_are_tenths_up_to_a_half_and_only_the_full_form_gets_it(parts: list[str]) -> None:
    text = "".join(parts)
    [value] = tag_format(completions=[text])
    assert value in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
    tags = [part for part in parts if part.startswith("<")]
    inside = text.partition("<answer>")[2].partition("</answer>")[0]
    assert (value == 0.5) == (tags == ["<think>", "</think>", "<answer>", "</answer>"] and inside[-2:].isdigit())


@given(st.text())
def test_no_text_raises(text: str) -> None:
    assert tag_format(completions=[f"<answer>{text}</answer>", text, None, 5, [{}]])[2:] == [0.0, 0.0, 0.0]


def test_it_takes_what_trl_passes_and_pickles() -> None:
    reward = pickle.loads(pickle.dumps(tag_format))
    assert reward(prompts=["?"], completions=[CASES[0][0]], completion_ids=[[1]], trainer_state=None) == [0.5]
    assert reward.__name__ == "tag_format"
    assert tag_format(completions=[]) == []


def test_hostile_completions_take_linear_time() -> None:
    parts = ["<think>", "</answer>", "<answer>1", "1", "<", "\\boxed{", "the answer is "]
    texts = [f"<think></think><answer>{part * 12_000}</answer>" for part in parts]
    started = time.perf_counter()
    scores = tag_format(completions=[*texts * 9, CASES[0][0]])
    assert time.perf_counter() - started < 5.0
    assert scores[-1] == 0.5
