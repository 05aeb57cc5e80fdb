"""`RewardWatch` without a trainer: what it says of a reward that fails everywhere, runs for long, or cannot start."""

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

from trl_grpo_ext.errors import PluginRunError
from trl_grpo_ext.guard import reward_watch
from trl_grpo_ext.guard.reward_watch import RewardWatch

MESSAGES = {
    "prompts": [[{"role": "user", "content": "2 + 2?"}]] * 4,
    "completions": [[{"role": "assistant", "content": text}] for text in ("4", "5", "", "four")],
}
TEXTS = {"prompts": ["2 + 2?"] * 4, "completions": ["4", "5", "", "four"]}


def for_texts(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    return [float(p.startswith("2") and text.isdigit()) for p, text in zip(prompts, completions, strict=True)]


async def for_messages(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    return [float(p[0]["content"] == c[0]["content"]) for p, c in zip(prompts, completions, strict=True)]


def fails(**columns: Any) -> list[float]:
    raise KeyError("difficulty")


@pytest.mark.parametrize(
    ("function", "columns", "said"),
    [
        (for_texts, MESSAGES, "works on texts"),
        (for_messages, TEXTS, "works on messages"),
        (fails, TEXTS, "no single one of the 4 completions"),
    ],
)
def test_a_reward_for_the_other_form_is_told_so(
    function: Callable[..., Any], columns: dict[str, Any], said: str
) -> None:
    watched = RewardWatch().wrap(function, "mine")
    with pytest.raises(PluginRunError, match=f"'mine' raised.*{said}"):
        reward_watch.call(watched, columns)


def test_what_runs_for_long_is_named_in_ever_longer_intervals(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reward_watch, "_FIRST_LINE_SECONDS", 0.2)
    monkeypatch.setattr(reward_watch, "_TICK_SECONDS", 0.05)

    def takes(seconds: float, name: str) -> Any:
        return watch.wrap(lambda completions: [time.sleep(seconds) or 1.0 for _ in completions], name)  # type: ignore[func-returns-value]

    watch = RewardWatch(limit=30.0)
    with caplog.at_level(logging.WARNING), watch.time_limit():
        takes(0.0, "quick")(completions=["a"])
        time.sleep(0.5)  # no reward runs
        takes(1.2, "slow")(completions=["a"])
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3  # after 0.2, 0.4 and 0.8 seconds
    assert all("The reward 'slow' has been running for" in line and "after 30 s" in line for line in lines)


def test_a_reward_that_cannot_start_is_named() -> None:
    class Starts:
        def start_scoring(self, completions: list[str], **columns: Any) -> None:
            raise OSError("no such server")

    with pytest.raises(PluginRunError, match="'starts' raised OSError: no such server"):
        RewardWatch().start_scoring([Starts()], ["starts"], [{"prompt": "?"}], prompts=["?"], completions=["a"])
