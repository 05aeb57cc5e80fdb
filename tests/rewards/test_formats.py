"""`think_format` by hand-made cases and against TRL's own; `tag_format` by cases computed from its three rules."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.rewards.formats import tag_format, think_format

GOOD = [
    *("<think>\na\n</think>\n18", "<think></think>18", "<think>a</think>b</think>18", "<think>a</think>\x00"),
    "<think>a < b > c </ think></think><answer>18</answer>",
]
BAD = [
    *("", "18", "<think>a 18", "a</think>18", "</think>a<think>18", " <think>a</think>18", "<think>a</think> \n\t"),
    *("<think>a</think> </think> ", "<think><think>a</think>18", "<think>a</think>18<think>", "<think >a</think>18"),
]


@pytest.mark.parametrize(("texts", "value"), [(GOOD, 1.0), (BAD, 0.0)])
def test_think_format_scores(texts: list[str], value: float) -> None:
    for text in texts:
        scores: list[Any] = think_format(completions=[text, [{"role": "assistant", "content": text}]])
        (part,) = scores[1].parts
        assert [*scores, part.score] == [value] * 3
        assert [text[slice(*place[:2])] for place in part.places] == re.findall("</?think>", text)


@given(st.lists(st.sampled_from(["<think>", "</think>", "a", " ", "\n"]), max_size=8).map("".join))
def test_think_format_is_trls_reward_where_an_answer_follows(text: str) -> None:
    format_rewards = pytest.importorskip("trl.rewards.format_rewards", reason="TRL's own reward is the oracle here")
    [theirs] = format_rewards.think_format_reward(completions=[[{"content": text + "!"}]])
    assert think_format(completions=[text + "!"]) == [theirs]
    [ours] = think_format(completions=[text])
    assert ours is not None
    assert ours <= theirs


# A missing tag costs its own 0.1, the number counts only inside both answer tags, a tag that occurs twice or stands
# before one that earned earns nothing, and only the exact tags are tags.
CASES: dict[float, list[str]] = {
    0.5: ["So <think>\n9 * 2\n</think>\n\n<answer>\nShe makes $18.\n</answer>", "<think></think><answer>1/2</answer>"],
    0.4: ["<think>1</think><answer>no</answer>18", "<think></think><answer>H2O</answer>", "</think><answer>1</answer>"],
    0.3: ["<answer>18</answer>", "<think></think></answer>18<answer>", "<think></think><answer>18</answer></answer>"],
    0.2: ["<think></answer>18", "<answer>18</answer><think>a</think>", "<think></think>" + "<answer>1</answer>" * 2],
    0.1: ["<think>18", "</answer>18", "</think><think>", "</answer><answer></think><think>"],
    0.0: ["", "<think></think><answer>18</answer>" * 2, "&lt;think&gt;", "<THINK></THINK><Answer>18</Answer>< /think>"],
}  # fmt: skip


@pytest.mark.parametrize("value", CASES)
def test_each_tag_earns_a_tenth_and_the_number_another(value: float) -> None:
    for text in CASES[value]:
        scores: list[Any] = tag_format(completions=[text, [{"role": "assistant", "content": text}]])
        assert scores == [value, value]
        earned = [part for part in scores[0].parts if part.score]
        assert (len(scores[0].parts), len(earned) / 10) == (5, value)
        assert all((part.score, part.weight, len(part.places)) == (1.0, 0.1, 1) for part in earned)
        tags = [part for part in earned if part.name != "number"]
        assert all(text[slice(*tag.places[0][:2])] == tag.name and text.count(tag.name) == 1 for tag in tags)
