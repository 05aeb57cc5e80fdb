"""Reward functions in all their forms are recognised, called and named."""

from __future__ import annotations

import asyncio
import functools
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.guard.calls import call, is_async, reward_name, rows_of, run_async, unique_names


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


def test_an_async_reward_can_be_called_from_any_thread_and_from_a_running_loop() -> None:
    reward, seen = Awaited(), []
    threads = [threading.Thread(target=lambda: seen.append(call(reward, {"completions": ["ab"]}))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert seen == [[2.0]] * 4

    async def inside() -> Any:
        return call(reward, {"completions": ["abc"]})

    assert asyncio.run(inside()) == [3.0]


def test_a_coroutine_that_takes_too_long_is_cancelled() -> None:
    cancelled = threading.Event()

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(TimeoutError):
        run_async(slow(), timeout=0.05)
    assert cancelled.wait(5)


def test_a_call_for_some_of_the_completions() -> None:
    columns = {"completions": ["a", "b", "c"], "answer": ("1", "2", "3"), "k": 3, "trainer_state": [1, 2, 3]}
    cut = rows_of({**columns, "log_metric": print, "short": ["x"]}, 3, slice(1, 2))
    assert cut == {"completions": ["b"], "answer": ("2",), "k": 3, "trainer_state": [1, 2, 3], "short": ["x"]}


def test_names_by_hand() -> None:
    assert unique_names(["a", "b", "a", "a"]) == ["a", "b", "a_2", "a_3"]
    assert unique_names(["a", "a", "a_2"]) == ["a", "a_3", "a_2"]  # names that are unique already stay


@given(st.lists(st.sampled_from(["a", "a_2", "a_2_2", "b"]), max_size=8))
def test_names_are_unique_and_first_ones_stay(names: list[str]) -> None:
    unique = unique_names(names)
    assert len({*unique}) == len(names)
    for place, name in enumerate(names):
        if name not in names[:place]:
            assert unique[place] == name
