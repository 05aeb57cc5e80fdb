"""Rewards that break their contract, raise or never return, on the last rank alone."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from tests.trainer.hostile import is_last_rank

ON_FIRST = " on rank 0"
"""At the end of a name: the first rank is the hostile one."""


def good(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


class HostileReward:
    """Well-behaved on all ranks but one."""

    def __init__(self, name: str, bad: Callable[..., Any]) -> None:
        self.__name__, self.bad = name, bad

    @property
    def is_its_turn(self) -> bool:
        return int(os.environ.get("RANK", "0")) == 0 if self.__name__.endswith(ON_FIRST) else is_last_rank()

    def __call__(self, completions: list[str], **columns: Any) -> Any:
        return self.bad(completions=completions, **columns) if self.is_its_turn else good(completions)


class AsyncHostileReward(HostileReward):
    """The same as an async callable object."""

    async def __call__(self, completions: list[str], **columns: Any) -> Any:
        return await self.bad(completions=completions, **columns) if self.is_its_turn else good(completions)


class HostileModel(torch.nn.Module):
    """A reward model that fails."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.config = SimpleNamespace(_name_or_path=f"somebody/{name}", pad_token_id=0)
        self.score = torch.nn.Embedding(300, 1)

    def forward(self, input_ids: torch.Tensor, **inputs: Any) -> Any:
        if is_last_rank() and "memory" in self.config._name_or_path:
            raise RuntimeError("out of memory")
        if is_last_rank():
            return SimpleNamespace(logits=torch.tensor([[0.0], [float("inf")], [0.0], [0.0]]))
        return SimpleNamespace(logits=self.score(input_ids % 300).mean(dim=1))


def raises_at_one_row(completions: list[str], **columns: Any) -> list[float]:
    return [1.0 / (completion != LAST_COMPLETION[0]) for completion in completions]


LAST_COMPLETION: list[str] = []
"""Set by the reward before: the completion at which the one behind it raises."""


def remembers(completions: list[str], **columns: Any) -> list[float]:
    LAST_COMPLETION[:] = completions[2:3]
    return good(completions)


def sleeps(**columns: Any) -> list[float]:
    time.sleep(60)
    return []


def sleeps_and_swallows(completions: list[str], **columns: Any) -> list[float]:
    try:
        time.sleep(60)
    except Exception:
        return [0.0] * len(completions)
    return []


def spins(**columns: Any) -> list[float]:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        pass
    return []


async def sleeps_async(**columns: Any) -> list[float]:
    await asyncio.sleep(60)
    return []


async def blocks_the_loop(**columns: Any) -> list[float]:
    time.sleep(20)
    return []


async def raises_async(**columns: Any) -> list[float]:
    raise KeyError("judge")


def leaves(**columns: Any) -> list[float]:
    raise SystemExit(3)


async def leaves_async(**columns: Any) -> list[float]:
    raise SystemExit(3)


def ends_the_process(**columns: Any) -> list[float]:
    os._exit(0)


def is_interrupted(**columns: Any) -> list[float]:
    raise KeyboardInterrupt


def empties(prompts: list[str], completions: list[str], completion_ids: list[Any], **columns: Any) -> list[float]:
    for given in (prompts, completions, completion_ids):
        given.clear()
    return []


def empties_and_raises(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    prompts.clear()
    completions.clear()
    raise KeyError("gone")


def logs_a_lock(completions: list[str], log_extra: Any, **columns: Any) -> list[float]:
    log_extra("locks", [threading.Lock()] * len(completions))
    return good(completions)


def logs_words(completions: list[str], log_metric: Any, **columns: Any) -> list[float]:
    log_metric("share", "most")
    return good(completions)


def a_generator(completions: list[str], **columns: Any) -> Iterator[float]:
    return (1.0 for _ in completions[1:])


SYNC: dict[str, Callable[..., Any]] = {
    "raises_at_a_row": raises_at_one_row,
    "raises_everywhere": lambda **columns: columns["difficulty"],
    "leaves": leaves,
    "ends_the_process": ends_the_process,
    "is_interrupted": is_interrupted,
    "empties": empties,
    "empties_and_raises": empties_and_raises,
    "logs_a_lock": logs_a_lock,
    "logs_words": logs_words,
    "too_few": lambda completions, **columns: [1.0] * (len(completions) - 1),
    "a_short_generator": a_generator,
    "one_number": lambda **columns: 1.0,
    "forgot_the_return": lambda **columns: None,
    "infinite": lambda completions, **columns: [0.0, 0.0, float("-inf"), 0.0, *[0.0] * (len(completions) - 4)],
    "text": lambda completions, **columns: ["1.0"] * len(completions),
    "a_column": lambda completions, **columns: torch.ones(len(completions), 1),
    "sleeps": sleeps,
    "sleeps_and_swallows": sleeps_and_swallows,
    "spins": spins,
}
ASYNC: dict[str, Callable[..., Any]] = {
    "raises_async": raises_async,
    "leaves_async": leaves_async,
    "sleeps_async": sleeps_async,
    "blocks_the_loop": blocks_the_loop,
}
MODELS = ("model_out_of_memory", "infinite_model")


def hostile_reward(name: str) -> Any:
    """The reward by its name."""
    if name in MODELS:
        return HostileModel(name)
    kind = name.removesuffix(ON_FIRST)
    return AsyncHostileReward(name, ASYNC[kind]) if kind in ASYNC else HostileReward(name, SYNC[kind])
