"""What the kit says of rewards in the forms of public projects: no rule is broken that they keep in a real run."""

# ruff: noqa: B905  # as they are written there

import re
from typing import Any

import pytest
from trl.rewards import think_format_reward

from trl_grpo_ext.testing import check


def contents(completions: Any) -> list[str]:
    return [completion[0]["content"] for completion in completions]


def answer_in(text: str) -> str:
    return text.split("<answer>")[-1].split("</answer>")[0].strip()


# willccbb's gist grpo_demo.py, copied into hundreds of projects: messages, the reference in `answer`
def correctness(prompts, completions, answer, **kwargs):
    print("-" * 20, f"Question:\n{prompts[0][-1]['content']}", f"\nAnswer:\n{answer[0]}")
    return [2.0 if answer_in(text) == a else 0.0 for text, a in zip(contents(completions), answer)]


# huggingface/open-r1, src/open_r1/rewards.py
def len_reward(completions, solution, **kwargs):
    lengths = [len(text) for text in contents(completions)]
    low, high = min(lengths), max(lengths)
    if low == high:
        return [0.0] * len(lengths)
    return [0.5 - (length - low) / (high - low) for length in lengths]


# open-r1's code_reward: the reference in kwargs alone
def from_kwargs(completions, **kwargs):
    return [1.0 if truth in text else 0.0 for text, truth in zip(contents(completions), kwargs["verification_info"])]


# TRL's documentation (docs/source/grpo_trainer.md, rloo_trainer.md) and its notebooks
def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]


def boxed(completions, ground_truth, **kwargs):
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    found = [match.group(1) if match else "" for match in matches]
    return [1.0 if content == truth else 0.0 for content, truth in zip(found, ground_truth)]


REWARDS: dict[Any, tuple[dict[str, Any], list[str]]] = {
    think_format_reward: ({}, []),
    correctness: ({"answer": ["18", "3"]}, []),
    len_reward: ({"solution": ["18", "3"]}, ["neighbours"]),  # compares completions, undeclared
    from_kwargs: ({"verification_info": ["18", "3"]}, []),
    reward_len: ({}, ["formats"]),  # measures the length of a list
    boxed: ({"ground_truth": ["18", "3"]}, []),
}
"""The columns of its data, and the rules that it truly breaks."""
NEEDS_COLUMNS = {boxed, from_kwargs}


@pytest.mark.parametrize("reward", REWARDS, ids=lambda reward: reward.__name__)
def test_public_rewards_are_believed(reward: Any) -> None:
    columns, expected = REWARDS[reward]
    untried = reward in NEEDS_COLUMNS
    report = check("reward", reward)
    assert [one.rule.short for one in report.violations] == expected * (not untried), str(report)
    assert (report.passed == ()) == untried, str(report)
    assert (report.no_effect == "none of its rules could be tried") == untried
    if columns:
        report = check("reward", reward, columns=columns)
        assert [one.rule.short for one in report.violations] == expected
    if reward is boxed:
        assert str(report).count("it takes texts alone, no conversations: it raised TypeError") == 1
