"""`RewardWatch` without a trainer: what it says of a reward that fails, runs for long, or cannot start."""

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

from trl_grpo_ext.errors import PluginRunError
from trl_grpo_ext.guard import reward_watch
from trl_grpo_ext.guard.reward_watch import RewardWatch


def fails(**columns: Any) -> list[float]:
    raise KeyError("difficulty")


async def fails_at_five(completions: list[str], **columns: Any) -> list[float]:
    return [1.0 / (completion != "5") for completion in completions]


@pytest.mark.parametrize(
    ("function", "rows", "said"),
    [
        (fails, 4, "no single one of the 4 completions is at fault"),
        (fails, 1, "at row 0 of 1"),
        (fails_at_five, 4, "at row 1 of 4, whose completion is '5'"),
    ],
)
def test_the_completion_at_fault_is_named(function: Callable[..., Any], rows: int, said: str) -> None:
    watched = RewardWatch().wrap(function, "mine")
    with pytest.raises(PluginRunError, match=f"'mine' raised .*{said}"):
        reward_watch.call(watched, {"completions": ["4", "5", "", "four"][:rows]})


def test_what_runs_for_long_is_named_in_ever_longer_intervals(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reward_watch, "_FIRST_LINE_SECONDS", 0.2)
    monkeypatch.setattr(reward_watch, "_TICK_SECONDS", 0.05)

    def slow(completions: list[str], **columns: Any) -> list[float]:
        time.sleep(1.2)
        return [1.0] * len(completions)

    def quick(completions: list[str], **columns: Any) -> list[float]:
        return [1.0] * len(completions)

    watch = RewardWatch(limit=30.0)
    with caplog.at_level(logging.WARNING), watch.time_limit():
        watch.wrap(quick, "quick")(completions=["a"])
        time.sleep(0.5)  # no reward runs
        watch.wrap(slow, "slow")(completions=["a"])
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3  # after 0.2, 0.4 and 0.8 seconds
    assert all("The reward 'slow' has been running for" in line and "is 30 s" in line for line in lines)


def test_a_reward_that_cannot_start_is_named() -> None:
    class Starts:
        def start_scoring(self, completions: list[str], **columns: Any) -> None:
            raise OSError("no such server")

    with pytest.raises(PluginRunError, match="'starts' raised OSError: no such server"):
        RewardWatch().start_scoring([Starts()], ["starts"], [{"prompt": "?"}], prompts=["?"], completions=["a"])
