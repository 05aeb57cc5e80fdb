"""`RewardWatch`: every form of reward, what it says of one that fails, runs for long or cannot start, and its limit."""

import logging
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.judge_server import judge_server
from tests.trainer.launch import launch
from tests.trainer.process_worker import Job, run_job
from trl_grpo_ext import GRPOExtConfig
from trl_grpo_ext.errors import ConfigurationError, PluginRunError
from trl_grpo_ext.guard import reward_watch
from trl_grpo_ext.guard.reward_watch import RewardWatch, reward_limit

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


EARLY: Job = {"max_steps": 1, "per_device_train_batch_size": 4}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_judge_is_asked_before_a_slower_reward_ends(tiny_model: Path, tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("openai", reason="the extra `judge` is not installed")
    with judge_server() as server:
        job = {**EARLY, "judge": server.url}
        if ranks == 1:
            results = [run_job(tiny_model, tmp_path, job)]
        else:
            results = [jobs["early"] for jobs in launch({"early": job}, tiny_model, tmp_path)]
        assert {request["model"] for request in server.requests} == {f"rank{rank}" for rank in range(ranks)}
    assert [result["logs"][0]["rewards/waits/mean"] for result in results] == [1.0] * ranks


@pytest.mark.slow
def test_reward_watch_ends_a_held_interpreter(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import trl_grpo_ext.guard.reward_watch as reward_watch

        reward_watch._GRACE_SECONDS = 1.0

        def tower(**columns):
            return [float(9 ** 9 ** 9)]

        watch = reward_watch.RewardWatch(limit=0.5)
        with watch.time_limit():
            watch.wrap(tower, "tower")(completions=["a"])
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "in tower" in done.stderr


def test_reward_limit_bounds(tmp_path: Path) -> None:
    assert GRPOExtConfig(str(tmp_path), use_cpu=True, bf16=False).reward_timeout == 3600
    assert reward_limit(3600, 1800.0, 1) == 3600
    assert reward_limit(3600, 1800.0, 2) == 1440
    assert reward_limit(5, 100.0, 1) == reward_limit(5, 100.0, 2) == 5
    assert reward_limit(None, 100.0, 1) is reward_limit(None, 100.0, 2) is None
    for value in (0, -1.0, True, "5", float("nan")):
        with pytest.raises(ConfigurationError, match="reward_timeout"):
            GRPOExtConfig(str(tmp_path), use_cpu=True, bf16=False, reward_timeout=value)
