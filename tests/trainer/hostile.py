"""Plugins that break their contract, raise or never return, most of them on the last rank alone."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trl_grpo_ext import Rollout
from trl_grpo_ext.errors import AlignmentError
from trl_grpo_ext.prompt_samplers.samplers import InOrder
from trl_grpo_ext.types import HOOK_METHODS, HookDeclaration

Expected = tuple[str, str]
"""The kind of an error, and a part of its message."""


def is_last_rank() -> bool:
    return int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1


def raising(error: BaseException) -> Callable[..., Any]:
    def bad(*given: Any, **columns: Any) -> Any:
        raise error

    return bad


GOOD: dict[str, Callable[..., Any]] = {
    "on_rollout": lambda advantages_B_T, rollout: advantages_B_T,
    "on_forward": lambda advantages_B_T, forward: advantages_B_T,
    "weights": lambda rollout: rollout.mask_B_T / rollout.totals.tokens,
    "reduce": lambda loss_B_T, mask_B_T, totals: (loss_B_T * mask_B_T).sum(),
}


class HostilePlugin:
    """Well-behaved on all ranks but the last."""

    def __init__(self, name: str, method: str, bad: Callable[..., Any]) -> None:
        self.__name__ = name
        if method in HOOK_METHODS:
            self.declares = HookDeclaration(role="transform" if method == "on_rollout" else "forward")
        setattr(self, method, lambda *given: (bad if is_last_rank() else GOOD[method])(*given))


def negative(rollout: Rollout) -> torch.Tensor:
    weights_B_T = rollout.mask_B_T.clone()
    weights_B_T[1, 0] = -0.5
    return weights_B_T


def gathers_alone(rollout: Rollout) -> torch.Tensor:
    rollout.gather(rollout.lengths_B)
    return rollout.mask_B_T


def infinite_advantage(advantages_B_T: torch.Tensor, context: Any) -> torch.Tensor:
    changed_B_T = advantages_B_T.clone()
    changed_B_T[2, 0] = float("inf")
    return changed_B_T


def without_slope(loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Any) -> torch.Tensor:
    return ((loss_B_T * mask_B_T).sum() * 0.0).abs().sqrt()  # √|x| has none at 0


OUTPUT = "PluginOutputError"
RUN = "PluginRunError"
ON_ONE_ALONE = (OUTPUT, "rollout.gather was called on rank 1 but not on rank 0")
"""Wrong only where there are other ranks."""

PLUGINS: dict[str, tuple[str, Callable[..., Any], Expected]] = {
    "negative": ("weights", negative, (OUTPUT, "-0.5 at row 1, token 0")),
    "raises": ("weights", raising(KeyError("difficulty")), (RUN, "raised KeyError: 'difficulty'")),
    "gathers_alone": ("weights", gathers_alone, ON_ONE_ALONE),
    "infinite_slope": ("reduce", without_slope, (OUTPUT, "nan at row 0, token 0")),
    "hook_infinite": ("on_rollout", infinite_advantage, (OUTPUT, "inf at row 2, token 0")),
    "hook_cannot_align": ("on_rollout", raising(AlignmentError("another text")), ("AlignmentError", "another text")),
    "hook_raises": ("on_forward", raising(ZeroDivisionError("no tokens")), (RUN, "ZeroDivisionError: no tokens")),
}


class HostileFilter:
    """Keeps nothing, and raises on the last rank in the second round."""

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.rounds = 0

    def keep(self, rollout: Rollout) -> torch.Tensor:
        self.rounds += 1
        if self.rounds == 2 and is_last_rank():
            raise KeyError("no such thing")
        return torch.zeros(len(rollout.texts), dtype=torch.bool)


FILTER = "a filter that raises in the second round"

ON_FIRST = " on rank 0"
"""At the end of a name: the first rank is the hostile one."""


class HostileSampler(InOrder):
    """Draws the first prompt twice, or raises, in the second round; rank 0 alone has it drawn."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def draw(self, count: int, round_number: int) -> Sequence[int] | None:
        if round_number == 1 and "raises" in self.__name__:
            raise KeyError("no such thing")
        return [0] * count if round_number == 1 else super().draw(count, round_number)


SAMPLERS: dict[str, Expected] = {
    f"draws_twice{ON_FIRST}": ("PluginOutputError", "got [0, 0"),
    f"draw_raises{ON_FIRST}": ("PluginRunError", "KeyError: 'no such thing'"),
}


def good(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


class HostileReward:
    """Well-behaved on all ranks but one."""

    def __init__(self, name: str, bad: Callable[..., Any]) -> None:
        self.__name__ = name
        self.bad = bad

    @property
    def is_its_turn(self) -> bool:
        return int(os.environ.get("RANK", "0")) == 0 if self.__name__.endswith(ON_FIRST) else is_last_rank()

    def __call__(self, completions: list[str], **columns: Any) -> Any:
        return self.bad(completions=completions, **columns) if self.is_its_turn else good(completions)


class AsyncHostileReward(HostileReward):
    """The same as an async callable object."""

    async def __call__(self, completions: list[str], **columns: Any) -> Any:
        answer = super().__call__(completions, **columns)
        return await answer if asyncio.iscoroutine(answer) else answer


LAST_COMPLETION: list[str] = []  # set by the reward before: that at which the one behind it raises


def raises_at_one_row(completions: list[str], **columns: Any) -> list[float]:
    return [1.0 / (completion != LAST_COMPLETION[0]) for completion in completions]


def remembers(completions: list[str], **columns: Any) -> list[float]:
    LAST_COMPLETION[:] = completions[2:3]
    return good(completions)


def spins(**columns: Any) -> list[float]:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        pass
    return []


def empties_and_raises(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    prompts.clear()
    completions.clear()
    raise KeyError("gone")


LIMIT = 1.0
LATE = ("RewardError", f"did not finish within {LIMIT:g} s")
REWARDS: dict[str, tuple[Callable[..., Any], Expected]] = {
    "raises_at_a_row": (raises_at_one_row, (RUN, "for completion in completions]) (at row 2 of 4, whose ")),
    "raises_everywhere": (lambda **columns: columns["difficulty"], (RUN, "no single one of the 4 completions")),
    "ends_the_process": (lambda **columns: os._exit(0), (RUN, "raised SystemExit: os._exit(0) was called")),
    "is_interrupted": (raising(KeyboardInterrupt()), ("KeyboardInterrupt", "interrupted")),
    "empties_and_raises": (empties_and_raises, (RUN, "raised KeyError: 'gone'")),
    "too_few": (lambda completions, **c: [1.0] * (len(completions) - 1), (OUTPUT, "3 values for 4 completions")),
    "infinite": (lambda completions, **c: [0.0, 0.0, -torch.inf, 0.0], (OUTPUT, "-inf, at row 2; it must be")),
    "spins": (spins, LATE),
    "raises_async": (raising(KeyError("judge")), (RUN, "raised KeyError: 'judge'")),
    "sleeps_async": (lambda **columns: asyncio.sleep(60), LATE),
}
for _name in ("ends_the_process", "is_interrupted", "empties_and_raises", "raises_async"):
    REWARDS[_name + ON_FIRST] = REWARDS[_name]
KILLED = "is_killed"
REWARDS[KILLED] = (lambda **columns: os.kill(os.getpid(), signal.SIGKILL), ("EngineError", "Rank 1 (process "))


def hostile_settings(name: str) -> dict[str, Any]:
    """Arguments of `tests.support.train` that select it."""
    if name == FILTER:
        return {"trainer_arguments": {"resample": {"filter": HostileFilter(name)}}, "prompt_count": 8}
    if name in SAMPLERS:
        return {"trainer_arguments": {"prompt_sampler": HostileSampler(name)}, "max_steps": 3, "prompt_count": 8}
    if name in PLUGINS:
        method, bad, _ = PLUGINS[name]
        plugin = HostilePlugin(name, method, bad)
        is_hook = method.startswith("on_")
        return {"hooks": ["centred", plugin]} if is_hook else {"trainer_arguments": {"loss_aggregation": plugin}}
    bad, expected = REWARDS[name]
    limit = {"reward_timeout": LIMIT} if expected == LATE else {}
    kind = AsyncHostileReward if name.removesuffix(ON_FIRST).endswith("_async") else HostileReward
    return {"reward_funcs": [remembers, kind(name, bad)], **limit}
