"""Lines for long work: rewards and generation, in terminals alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cli.terminal import _in_terminal, without_escapes
from tests.trainer.live.screens import Screen
from tests.trainer.live.worker import environment
from trl_grpo_ext.guard.progress import listen, report_progress
from trl_grpo_ext.trainer.live import LOG_FILE
from trl_grpo_ext.trainer.live.bars import bars_wanted, generation_bar, with_bar

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


# ---------------------------------------------------------------------------------------------- slow rewards


def test_a_reward_says_how_far_it_is_only_where_somebody_listens() -> None:
    report_progress(1, 2)
    heard: list[tuple[int, int]] = []
    with listen(lambda done, total: heard.append((done, total))):
        report_progress(3, 4)
        with listen(None):
            report_progress(5, 6)
    report_progress(9, 9)
    assert heard == [(3, 4)]


def test_a_bar_changes_nothing_about_a_reward() -> None:
    import torch

    def plain(completions: list[str], **columns: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    async def asynchronous(completions: list[str], **columns: Any) -> list[float]:
        return [2.0 * len(text) for text in completions]

    def broken(**columns: Any) -> list[float]:
        raise KeyError("missing")

    import asyncio

    before = threading.active_count()
    assert with_bar(plain, "plain", 2)(completions=["a", "bc"]) == [1.0, 2.0]
    shown = with_bar(asynchronous, "asynchronous", 2)
    assert asyncio.iscoroutinefunction(shown)
    assert asyncio.run(shown(completions=["a", "bc"])) == [2.0, 4.0]
    with pytest.raises(KeyError, match="missing"):
        with_bar(broken, "broken", 2)(completions=["a"])
    model = torch.nn.Linear(1, 1)
    assert with_bar(model, "model", 2) is model
    assert threading.active_count() == before


def test_bars_are_for_terminals_and_the_main_process(monkeypatch: pytest.MonkeyPatch) -> None:
    loud, quiet = SimpleNamespace(disable_tqdm=False), SimpleNamespace(disable_tqdm=True)
    monkeypatch.setattr(sys, "stderr", Screen(terminal=True))
    assert bars_wanted(loud, True)
    assert not bars_wanted(loud, False)
    assert not bars_wanted(quiet, True)
    monkeypatch.setattr(sys, "stderr", Screen(terminal=False))
    assert not bars_wanted(loud, True)


def test_a_bar_is_drawn_and_taken_away_and_of_two_at_once_one(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(terminal=True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr("trl_grpo_ext.trainer.live.bars.AFTER_SECONDS", 0.0)
    monkeypatch.setattr("trl_grpo_ext.trainer.live.bars._EVERY_SECONDS", 0.05)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")

    def slow() -> list[float]:
        time.sleep(0.5)
        report_progress(3, 4)
        with_bar(lambda: time.sleep(0.5) or [], "inner", 4)()
        return [1.0]

    assert with_bar(slow, "[red]a\x1b[2Jb", 8, 0.25)() == [1.0]
    plain = without_escapes(screen.getvalue())
    assert "scoring with [red]a\\x1b[2Jb (0.250 before): 8 completions" in plain
    assert "(0.250 before): 6/8 completions" in plain
    assert "inner" not in plain
    assert "\x1b[2J" not in screen.getvalue()
    assert screen.getvalue().startswith("\n")
    assert screen.getvalue().endswith("\x1b[2K\x1b[1A")  # the line is empty, and the cursor where it was


@pytest.mark.parametrize("error", [BrokenPipeError, ValueError])
def test_a_bar_in_a_terminal_that_has_gone_costs_nothing(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    tried = []

    class Gone(Screen):
        def write(self, text: str) -> int:
            tried.append(text)
            raise error

    monkeypatch.setattr(sys, "stderr", Gone(terminal=True))
    monkeypatch.setattr("trl_grpo_ext.trainer.live.bars.AFTER_SECONDS", 0.0)
    assert with_bar(lambda: time.sleep(0.3) or [1.0], "slow", 1)() == [1.0]
    assert tried
    assert not recwarn.list  # pytest turns a thread's exception into a warning


def test_in_a_terminal_a_slow_reward_has_a_bar_and_the_summary_a_table(command: list[str], tmp_path: Path) -> None:
    chosen = {"max_steps": 2, "seconds": 3.2, "steady": True, "summary_steps": 1, "disable_tqdm": False}
    done = _in_terminal([*command, str(tmp_path), json.dumps(chosen)], 70, environment(), ROOT, 120)
    assert done.status == 0, done.plain
    shown = re.findall(r"scoring with second_reward: (\d)/8 completions", done.plain)
    assert len(shown) >= 3
    assert [*map(int, shown)] != [int(shown[0])] * len(shown)
    assert "length_reward:" not in done.plain  # it took no time
    rows = re.findall(r"^ *(\d)/2 ", done.plain.replace("\r", "\n"), re.MULTILINE)
    assert rows == ["1", "2"]
    # The mean of the batch before, which nothing is known of at first.
    before = [*map(float, re.findall(r"second_reward \((\d\.\d{3}) before\)", done.plain))]
    assert 0 < len(before) < len(re.findall("scoring with second_reward", done.plain))
    history = json.loads((tmp_path / LOG_FILE).read_text().splitlines()[0])
    assert before == [pytest.approx(history["rewards/second_reward/mean"], abs=6e-4)] * len(before)


def test_in_a_terminal_slow_generation_has_a_bar_of_tokens(command: list[str], tmp_path: Path) -> None:
    chosen = {"max_steps": 2, "per_token": 0.4, "scripted": False, "summary_steps": 1, "disable_tqdm": False}
    done = _in_terminal([*command, str(tmp_path), json.dumps(chosen)], 90, environment(), ROOT, 120)
    assert done.status == 0, done.plain
    shown = re.findall(r"generating(.*?), 8 completions: *(\d+)/10 tokens", done.plain)
    tokens = [int(number) for _, number in shown]
    assert len(set(tokens)) >= 2
    assert all(1 <= number <= 10 for number in tokens)
    firsts = [number for text, number in zip((text for text, _ in shown), tokens, strict=True) if not text]
    assert firsts == sorted(firsts)  # of the first batch; it only grows
    first = json.loads((tmp_path / LOG_FILE).read_text().splitlines()[0])
    assert {text for text, _ in shown} <= {"", f" (reward {first['reward']:.3f} before)"}
    assert shown[0][0] == ""


@pytest.mark.parametrize("counted", [True, False])
def test_a_generation_bar_counts_the_output_layers_calls_and_leaves_nothing_behind(counted: bool) -> None:
    import torch

    layer = torch.nn.Linear(1, 1)
    with generation_bar(4, 10, 0.5, layer if counted else None):
        assert len(layer._forward_pre_hooks) == counted
        assert layer(torch.ones(1)).shape == (1,)
    with pytest.raises(KeyError), generation_bar(4, 10, None, layer):
        raise KeyError
    assert not layer._forward_pre_hooks


def test_in_a_pipe_there_is_neither_bar_nor_control_sequence(command: list[str], tmp_path: Path) -> None:
    chosen = json.dumps({"max_steps": 2, "seconds": 2.6, "summary_steps": 1, "disable_tqdm": False})
    process: dict[str, Any] = {"env": environment(), "cwd": ROOT, "text": True, "timeout": 120, "check": True}
    done = subprocess.run([*command, str(tmp_path), chosen], capture_output=True, **process)
    assert "scoring with" not in done.stderr
    lines = [line for line in done.stdout.splitlines() if re.match(r" *(step|\d/2) ", line)]
    assert [line.split()[0] for line in lines] == ["step", "1/2", "2/2"]
    assert not any(character in done.stdout for character in "\x1b\r")
