"""Reward functions in all their forms are recognised, called and named, and what they return is checked."""

import asyncio
import functools
import math
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from trl_grpo_ext.errors import PluginOutputError
from trl_grpo_ext.guard.calls import call, check_scores, is_async, reward_name, select_rows, unique_names
from trl_grpo_ext.types import Parts


def plain(completions: list[str], factor: float = 1.0, **columns: Any) -> list[float]:
    return [factor * len(completion) for completion in completions]


async def awaited(completions: list[str], factor: float = 1.0, **columns: Any) -> list[float]:
    await asyncio.sleep(0)
    return plain(completions, factor)


class Plain:
    def __call__(self, **columns: Any) -> list[float]:
        return plain(**columns)


class Awaited:
    __name__ = "its_own_name"

    def __init__(self) -> None:
        self.lock: asyncio.Lock | None = None

    async def __call__(self, **columns: Any) -> list[float]:
        self.lock = self.lock or asyncio.Lock()
        async with self.lock:  # belongs to the loop of its first use
            await asyncio.sleep(0)
            return plain(**columns)


FORMS: dict[Any, tuple[bool, str]] = {
    plain: (False, "plain"),
    awaited: (True, "awaited"),
    functools.partial(functools.partial(plain, factor=1.0)): (False, "plain"),
    functools.partial(awaited, factor=1.0): (True, "awaited"),
    Plain(): (False, "Plain"),
    Awaited(): (True, "its_own_name"),
}


@pytest.mark.parametrize("function", FORMS, ids=lambda function: str(type(function).__name__))
def test_every_form_is_called_and_named(function: Any) -> None:
    assert (is_async(function), reward_name(function)) == FORMS[function]
    for _ in range(2):
        assert call(function, {"completions": ["a", "bcd"]}) == [1.0, 3.0]


def test_call_of_an_async_reward_in_any_thread() -> None:
    reward = Awaited()
    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(lambda _: call(reward, {"completions": ["ab"]}), range(4))] == [[2.0]] * 4

    async def inside() -> Any:
        return call(reward, {"completions": ["abc"]})

    assert asyncio.run(inside()) == [3.0]


def test_a_call_for_some_of_the_completions() -> None:
    columns = {"completions": ["a", "b", "c"], "answer": ("1", "2", "3"), "k": 3, "trainer_state": [1, 2, 3]}
    cut = select_rows({**columns, "log_metric": print, "short": ["x"]}, 3, [1])
    assert cut == {"completions": ["b"], "answer": ["2"], "k": 3, "trainer_state": [1, 2, 3], "short": ["x"]}


def test_names_by_hand() -> None:
    assert unique_names(["a", "b", "a", "a"]) == ["a", "b", "a_2", "a_3"]
    assert unique_names(["a", "a", "a_2"]) == ["a", "a_3", "a_2"]  # names that are unique already stay


@pytest.mark.parametrize(
    "returned",
    [
        (1, None, 0.5),
        (score for score in (True, None, Fraction(1, 2))),
        [np.int64(1), None, np.float64(0.5)],
        [Decimal(1), None, torch.tensor(0.5, requires_grad=True)],
    ],
    ids=lambda returned: type(returned).__name__,
)
def test_one_number_or_none_per_completion(returned: Any) -> None:
    scores = check_scores(returned, 3, "r")
    assert scores == [1.0, None, 0.5]
    assert [type(score) for score in scores if score is not None] == [float, float]


def test_an_array_of_one_axis_is_a_list() -> None:
    assert check_scores(np.array([1.0, 0.0, 0.5]), 3, "r") == [1.0, 0.0, 0.5]
    for other in ([[1.0], [0.0], [0.5]], 1.0):
        with pytest.raises(PluginOutputError):
            check_scores(torch.tensor(other), 3, "r")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "1 values for 2 completions"),
        ("ab", "str, 'ab'"),
        ([1.0, "0"], "str, '0', at row 1"),
        ([1.0, 10**400], "at row 1"),
        ([-1e39, 1.0], "-1e.39, at row 0"),
        ([1.0, torch.ones(2)], "Tensor"),
    ],
)
def test_anything_else_is_refused(returned: Any, message: str) -> None:
    with pytest.raises(PluginOutputError, match=f"The reward 'my_reward' .*{message}"):
        check_scores(returned, 2, "my_reward")
    parts = Parts({"a": (3.4e38, (0, 1))})  # float32 can hold that
    assert check_scores([parts, None, math.nan], 3, "r")[0] is parts
