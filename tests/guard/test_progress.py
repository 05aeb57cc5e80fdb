"""Rewards that take their time say how far they are, to whoever listens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from trl_grpo_ext.guard.guarded import guarded
from trl_grpo_ext.guard.progress import listen
from trl_grpo_ext.rewards.math_accuracy import MathAccuracy


def lengths(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


@pytest.fixture
def heard() -> Iterator[list[tuple[int, int]]]:
    said: list[tuple[int, int]] = []
    with listen(lambda done, total: said.append((done, total))):
        yield said


def assert_counts_up(said: list[tuple[int, int]], total: int) -> None:
    done = [number for number, _ in said]
    assert {of for _, of in said} == {total}
    assert done == sorted(done)
    assert done[-1] == total
    assert len({*done}) >= 3, said


@pytest.mark.parametrize("workers", [0, 2])
def test_a_guarded_reward_counts_its_calls(heard: list[tuple[int, int]], workers: int) -> None:
    reward = guarded(lengths, timeout=20.0, workers=workers, batch_size=1)
    texts = ["a", "bc", "def", "ghij", "klmno", "pqrstu"]
    assert reward(prompts=["p"] * 6, completions=texts, completion_ids=[[1]] * 6) == [1, 2, 3, 4, 5, 6]
    reward.close()
    assert_counts_up(heard, 6)


@pytest.mark.slow
def test_math_accuracy_counts_its_pairs_and_not_its_loading(heard: list[tuple[int, int]]) -> None:
    texts = [f"\\boxed{{\\sqrt{{{number}}} + x}}" for number in range(1, 6)]
    reward = MathAccuracy(workers=1)
    assert reward(completions=texts, solution=["$x+\\sqrt{2}$"] * 5) == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert_counts_up(heard, 5)
