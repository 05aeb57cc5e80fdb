"""Rewards in the forms that public projects have, in our words; each is correct for the data that it is made for.

Each names its project and the columns of its data. What `check` says of each is in `test_public_rewards`.
"""

# ruff: noqa: B905  # as they are written there

import math
import re
from typing import Any


def contents(completions: Any) -> list[str]:
    return [completion[0]["content"] for completion in completions]


def answer_in(text: str) -> str:
    return text.split("<answer>")[-1].split("</answer>")[0].strip()


# willccbb's gist grpo_demo.py, copied into hundreds of projects: messages, the reference in `answer`
def correctness(prompts, completions, answer, **kwargs):
    print("-" * 20, f"Question:\n{prompts[0][-1]['content']}", f"\nAnswer:\n{answer[0]}")
    return [2.0 if answer_in(text) == a else 0.0 for text, a in zip(contents(completions), answer)]


# huggingface/open-r1, src/open_r1/rewards.py
def make_cosine(min_value=-1.0, max_value=1.0, max_len=1000):
    def cosine_scaled_reward(completions, solution, **kwargs):
        rewards = []
        for text, reference in zip(contents(completions), solution):
            cosine = math.cos(min(len(text) / max_len, 1.0) * math.pi)
            sign = max_value if reference in text else min_value
            rewards.append(sign * 0.5 * (1.0 + cosine))
        return rewards

    return cosine_scaled_reward


cosine = make_cosine()


def len_reward(completions, solution, **kwargs):
    """Compares the completions of a batch with each other, as Kimi 1.5 does."""
    lengths = [len(text) for text in contents(completions)]
    low, high = min(lengths), max(lengths)
    if low == high:
        return [0.0] * len(lengths)
    return [0.5 - (length - low) / (high - low) for length in lengths]


# TRL's documentation (docs/source/grpo_trainer.md, rloo_trainer.md) and its notebooks
def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]


def token_length(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


async def not_empty(prompts, completions, **kwargs):
    return [1.0 if completion else 0.0 for completion in completions]


def boxed(completions, ground_truth, **kwargs):
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    found = [match.group(1) if match else "" for match in matches]
    return [1.0 if content == truth else 0.0 for content, truth in zip(found, ground_truth)]


def by_task(completions, task, **kwargs):
    return [float("def" in text) if t == "code" else None for text, t in zip(contents(completions), task)]


# countdown, as in philschmid's mini-R1: columns `target` and `nums`; what it cannot read is caught, messages too
def equation(completions, target, nums, **kwargs):
    rewards = []
    for completion, goal, numbers in zip(completions, target, nums):
        try:
            match = re.search(r"<answer>(.*?)<\/answer>", "<think>" + completion)
            text = match.group(1).strip() if match else ""
            used = [int(number) for number in re.findall(r"\d+", text)[:20] if len(number) < 10]
            right = sorted(used) == sorted(numbers) and re.match(r"^[\d+\-*/().\s]+$", text)
            rewards.append(1.0 if right and goal else 0.0)
        except Exception:
            rewards.append(0.0)
    return rewards


# open-r1's code_reward: the reference in kwargs alone
def from_kwargs(completions, **kwargs):
    return [1.0 if truth in text else 0.0 for text, truth in zip(contents(completions), kwargs["verification_info"])]


REWARDS: dict[str, dict[str, Any]] = {
    "correctness": {"answer": ["18", "3"]},
    "cosine": {"solution": ["18", "3"]},
    "len_reward": {"solution": ["18", "3"]},
    "reward_len": {},
    "token_length": {},
    "not_empty": {},
    "boxed": {"ground_truth": ["18", "3"]},
    "by_task": {"task": ["code", "math"]},
    "equation": {"target": [18, 3], "nums": [[1, 3, 18], [3]]},
    "from_kwargs": {"verification_info": ["18", "3"]},
}
"""Name: the columns of its data. One more is TRL's own `think_format_reward`."""
