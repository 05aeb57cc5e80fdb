"""Problems of a mixture of reasoning-gym tasks, and for each task the share of completions that solve theirs."""

import functools
import math
import random
from collections.abc import Sequence
from typing import Any

from common.errors import RecipeError

from trl_grpo_ext.guard.parameters import column
from trl_grpo_ext.plugins.selection import parse_selection
from trl_grpo_ext.rewards.reasoning_gym import ReasoningGym, reasoning_gym_rows

Row = dict[str, Any]
APART = 1_000_000
"""Between seeds: the package draws problem `index` from `seed + index`, so seeds 1 and 2 share nearly all of them."""
ASKED = {
    "whole": "Reply with the answer alone.",
    "answer": "Think, then write the answer between <answer> and </answer>.",
}


def make_problems(
    tasks: Sequence[Any], sizes: tuple[int, int], seed: int, *, examples: int, extract: str, chat: bool = True
) -> tuple[list[Row], list[Row]]:
    """Training and held-out problems, mixed by the tasks' weights.

    A task is a name, or a mapping with `name`, `weight` and the task's own settings. Held-out problems are the same for
    all seeds, and none of them is trained on. Each prompt begins with `examples` answered problems; it is a
    conversation or, without `chat`, plain text.
    """
    selected = [parse_selection("reward", task) for task in tasks]
    weights = [1.0 if one.weight is None else one.weight for one in selected]
    if not selected or min(weights) <= 0 or min(*sizes, examples + 1) < 1:
        raise RecipeError("Name at least one task (--tasks), with a positive weight, and problems of both splits.")
    train: list[Row] = []
    held_out: list[Row] = []
    for one, weight in zip(selected, weights, strict=True):
        counts = [examples, *(math.ceil(size * weight / sum(weights)) for size in reversed(sizes))]
        shown, held, drawn = (
            reasoning_gym_rows(one.name, first * APART, count, **one.parameters)
            for first, count in zip((0, 1, seed + 2), counts, strict=True)
        )
        known = {row["prompt"] for row in held}
        train += [_with_examples(row, shown, extract, chat) for row in drawn if row["prompt"] not in known]
        held_out += [_with_examples(row, shown, extract, chat) for row in held]
    random.Random(0).shuffle(held_out)  # a batch that is cut off takes from all tasks
    return train, held_out


def _with_examples(row: Row, shown: Sequence[Row], extract: str, chat: bool) -> Row:
    tags = ("<answer>", "</answer>") if extract == "answer" else ("", "")
    messages = [{"role": "system", "content": ASKED[extract]}]
    for example in shown:
        messages.append({"role": "user", "content": example["prompt"]})
        messages.append({"role": "assistant", "content": example["answer"].join(tags)})
    messages.append({"role": "user", "content": row["prompt"]})
    plain = "\n".join(message["content"] for message in messages)
    return {**row, "prompt": messages if chat else f"{plain}\n"}


@functools.cache
def _verifier(extract: str) -> ReasoningGym:
    """One set of worker processes for all tasks."""
    return ReasoningGym(extract=extract)


class Solved:
    """1.0 where the verifier of this task gives the full score, else 0.0; None in other tasks' rows."""

    def __init__(self, task: str, extract: str) -> None:
        self.task = task
        self.extract = extract
        self.__name__ = f"solved_{task}"

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """`B` scores."""
        tasks = column(self.__name__, "task", columns, len(completions))
        mine = {"task": [task if task == self.task else None for task in tasks], "log_metric": None, "log_extra": None}
        scores = _verifier(self.extract)(completions, **{**columns, **mine})
        return [None if score is None else float(score == 1) for score in scores]
