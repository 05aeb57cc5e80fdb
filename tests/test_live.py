"""A training that is watched: console, bars for slow rewards, live log, and the report that follows it."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from transformers import PrinterCallback, ProgressCallback, TrainerState
from trl import GRPOTrainer

from tests.commands.terminal import _in_terminal, without_escapes
from tests.interrupts import interruptible
from tests.support import length_reward, prompts, train
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.guard.progress import listening, scored
from trl_grpo_ext.live import LOG_FILE, ConsoleSummary, LiveLog
from trl_grpo_ext.live.cells import arrow, averaged, duration, metric_cells, notable_outcomes
from trl_grpo_ext.live.generation_bar import generation_bar
from trl_grpo_ext.live.late_bar import bars_wanted
from trl_grpo_ext.live.reward_bars import with_bar
from trl_grpo_ext.printable import printable_name
from trl_grpo_ext.report.run import LOG, load_run
from trl_grpo_ext.report.watch import signature, watch

ROOT = Path(__file__).parents[1]
HOSTILE = "a\x1b[2Jb\u202ec\nd\ud800"


class Screen(io.StringIO):
    """Something to print on: a terminal or not, in some encoding."""

    def __init__(self, terminal: bool = False, encoding: str = "utf-8") -> None:
        super().__init__()
        self._terminal, self._encoding = terminal, encoding

    def isatty(self) -> bool:
        return self._terminal

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding


def state(step: int, steps: int = 8, main: bool = True) -> TrainerState:
    return TrainerState(global_step=step, max_steps=steps, is_world_process_zero=main, num_input_tokens_seen=0)


def printed(
    monkeypatch: pytest.MonkeyPatch,
    logs: list[tuple[int, dict[str, Any]]],
    *,
    every: int = 1,
    screen: Screen | None = None,
    width: int | None = None,
    steps: int = 8,
) -> str:
    """What a summary prints of these logs, by step; `width` stands in COLUMNS."""
    screen = screen or Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.delenv("COLUMNS", raising=False)
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm-256color")
    summary = ConsoleSummary(every)
    summary.on_train_begin(None, state(0, steps), None)
    for step, log in logs:
        summary.on_step_begin(None, state(step, steps), None)
        summary.on_log(None, state(step, steps), None, logs=log)
    return screen.getvalue()


def columns(out: str) -> list[dict[str, str]]:
    """The rows of a plain summary by its header; no heading used here has two blanks in it."""
    header, *rows = [re.split(r" {2,}", line.strip()) for line in out.splitlines()]
    return [dict(zip(header, row, strict=False)) for row in rows]


# ---------------------------------------------------------------------------------------------- what is shown


def test_logs_are_averaged_without_nan_and_counters_are_not() -> None:
    logs = [
        {"reward": 1.0, "kl": math.nan, "num_tokens": 10.0, "rewards/a/mean": None},
        {"reward": 2.0, "kl": 0.5, "num_tokens": 30.0, "rewards/a/mean": None},
        {"reward": 6.0, "num_tokens": 60.0, "note": "text"},
    ]
    means = averaged(logs)
    assert (means["reward"], means["kl"], means["num_tokens"]) == (3.0, 0.5, 60.0)
    assert math.isnan(means["rewards/a/mean"])
    assert math.isnan(means["note"])


def test_every_reward_has_a_cell_once_there_are_two() -> None:
    log = {"reward": 0.25, "rewards/a/mean": 0.5, "entropy": 1.5, "clip_ratio/region_mean": 0.004}
    assert [(cell.name, cell.text) for cell in metric_cells(log)] == [
        ("reward", "0.250"),
        ("entropy", "1.500"),
        ("clip", "<1%"),
    ]
    two = {**log, "rewards/b/c/mean": math.nan}
    assert [(cell.name, cell.text) for cell in metric_cells(two)][:3] == [
        ("reward", "0.250"),
        ("a", "0.500"),
        ("b/c", "nan"),
    ]


def test_outcomes_that_need_attention_are_told_and_others_are_not() -> None:
    log = {
        "outcomes/gsm8k_accuracy/right": 0.5,
        "outcomes/gsm8k_accuracy/wrong": 0.4,
        "outcomes/gsm8k_accuracy/no_answer": 0.1,
        "outcomes/code/timeout": 0.001,
        "outcomes/code/died": 0.0,
        "rewards/judge/none": 0.25,
        "rewards/judge/nan": 0.0,
        "rewards/judge/mean": 0.25,
    }
    assert notable_outcomes(log) == ["gsm8k_accuracy: no_answer 10%", "code: timeout <1%", "judge: none 25%"]


def test_arrows_say_what_can_be_seen() -> None:
    marks = ("U", "D", "S")

    def of(value: float, before: float | None) -> str:
        (cell,) = metric_cells({"reward": value})
        return arrow(cell, {} if before is None else {"reward": before}, marks)

    assert [of(0.5, 0.4), of(0.4, 0.5), of(0.5001, 0.5004)] == ["U", "D", "S"]
    assert [of(0.5, None), of(math.nan, 0.5), of(0.5, math.nan)] == ["", "", ""]


def test_durations() -> None:
    seconds = [0, 42, 60, 187, 3600, 3729, math.nan, math.inf, -1]
    assert [duration(s) for s in seconds] == ["0 s", "42 s", "1:00", "3:07", "1:00:00", "1:02:09", "-", "-", "-"]


def test_names_of_strangers_cannot_move_the_cursor() -> None:
    assert printable_name(HOSTILE) == "a\\x1b[2Jb\\u202ec\\nd\\ud800"
    assert printable_name("x" * 100) == "x" * 39 + "~"


def test_a_summary_in_a_file_is_one_plain_line(monkeypatch: pytest.MonkeyPatch) -> None:
    logs = [
        (step, {"reward": step / 10, "rewards/a/mean": 0.5, "rewards/b/mean": -step / 10, "entropy": 2.0, "kl": 0.01})
        for step in range(1, 5)
    ]
    out = printed(monkeypatch, [*logs, (4, {"train_runtime": 3.0})], every=2, steps=4)
    assert "\x1b" not in out
    assert "\r" not in out
    first, second = columns(out)
    # Steps 1 and 2, then 3 and 4.
    assert {name: first[name] for name in ("step", "reward", "a", "b", "entropy", "KL")} == {
        "step": "2/4",
        "reward": "0.150",
        "a": "0.500",
        "b": "-0.150",
        "entropy": "2.000",
        "KL": "0.01",
    }
    assert [second[name] for name in ("step", "reward", "a", "b")] == ["4/4", "0.350↑", "0.500=", "-0.350↓"]


def test_steps_on_old_completions_wait_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    logs = [(1, {"loss": 0.0, "reward": 1.0, "entropy": 1.0}), (2, {"loss": 0.0, "entropy": 2.0})]
    logs += [(3, {"loss": 0.0, "reward": 2.0, "entropy": 6.0}), (4, {"loss": 0.0, "entropy": 2.0})]
    rows = columns(printed(monkeypatch, logs, steps=4))
    assert [(row["step"], row["reward"], row["entropy"]) for row in rows] == [
        ("1/4", "1.000", "1.000"),
        ("3/4", "2.000↑", "4.000"),
    ]


def test_the_last_step_is_shown_wherever_it_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    logs = [(step, {"reward": float(step)}) for step in range(1, 6)]
    rows = columns(printed(monkeypatch, logs, every=3, steps=5))
    assert [(row["step"], row["reward"]) for row in rows] == [("3/5", "2.000"), ("5/5", "4.500↑")]


def test_tokens_per_second_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("trl_grpo_ext.live.summary.time", SimpleNamespace(monotonic=lambda: now[0]))
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    summary = ConsoleSummary()
    resumed = TrainerState(global_step=10, max_steps=20, num_input_tokens_seen=1000)
    summary.on_train_begin(None, resumed, None)
    now[0] = 500.0  # an evaluation before the first step
    summary.on_step_begin(None, resumed, None)
    now[0] = 520.0
    summary.on_log(None, state(12, 20), None, logs={"reward": 1.0, "num_tokens": 5000.0})
    now[0] = 530.0
    summary.on_log(None, state(15, 20), None, logs={"reward": 1.0, "num_tokens": 6000.0})
    rows = columns(screen.getvalue())
    # 2 steps took 20 s, 8 are ahead; 4000 tokens in 20 s. Then 5 took 30 s, 5 ahead; 1000 in 10 s.
    assert [(row["left"], row["tokens/s"]) for row in rows] == [("1:20", "200"), ("30 s", "100")]


def test_an_evaluation_is_compared_with_the_evaluation_before(monkeypatch: pytest.MonkeyPatch) -> None:
    logs = [(0, {"eval_reward": 0.1}), (1, {"reward": 0.9}), (2, {"eval_reward": 0.3, "eval_loss": 1.0})]
    out = printed(monkeypatch, logs).splitlines()
    assert out[0] == "eval 0  reward 0.100"
    assert out[-1] == "eval 2  reward 0.300↑"


def test_other_processes_print_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    ConsoleSummary().on_log(None, state(1, main=False), None, logs={"reward": 1.0})
    assert screen.getvalue() == ""


def test_where_arrows_cannot_be_written_there_are_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    logs = [(1, {"reward": 1.0, "rewards/é/mean": 1.0, "rewards/b/mean": 1.0}), (2, {"reward": 2.0})]
    out = printed(monkeypatch, logs, screen=Screen(encoding="ascii"))
    assert out.isascii()
    assert "2.000+" in out
    assert "\\xe9" in out


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2"])
def test_a_summary_needs_a_number_of_steps(every: Any) -> None:
    with pytest.raises(ConfigurationError, match="every must be a number of steps"):
        ConsoleSummary(every)


VALUES = st.one_of(st.none(), st.floats(), st.text(max_size=5), st.integers(), st.just([1.0, 2.0]), st.booleans())
NAMES = st.one_of(
    st.sampled_from(["reward", "eval_reward", "kl", "entropy", "completions/mean_length", "num_tokens", "step"]),
    st.text(max_size=60).map(lambda name: f"rewards/{name}/mean"),
    st.text(max_size=60).map(lambda name: f"outcomes/{name}/timeout"),
    st.text(),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    logs=st.lists(st.dictionaries(NAMES, VALUES, max_size=12), max_size=4),
    width=st.none() | st.integers(20, 200),
    terminal=st.booleans(),
)
def test_whatever_is_logged_no_error_no_wide_line_and_no_control_character(
    monkeypatch: pytest.MonkeyPatch, logs: list[dict[str, Any]], width: int | None, terminal: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        out = printed(
            patch,
            [(step, {"reward": 1.0, **log}) for step, log in enumerate(logs, 1)],
            screen=Screen(terminal),
            width=width,
        )
    plain = without_escapes(out)
    assert terminal or plain == out
    for line in plain.split("\n"):
        assert width is None or cell_len(line) <= width, (width, line)
        assert all(character.isprintable() for character in line), ascii(line)
    assert out.count("\n") >= len(logs)


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_nothing_is_lost_where_there_is_little_room(
    monkeypatch: pytest.MonkeyPatch, width: int, terminal: bool
) -> None:
    log = {f"rewards/reward_number_{i}/mean": i + 0.125 for i in range(6)}
    log |= {"reward": 9.5, "entropy": 1.25, "kl": 0.75, "outcomes/reward_number_1/timeout": 0.5}
    plain = without_escapes(printed(monkeypatch, [(1, log)], screen=Screen(terminal), width=width))
    assert all(cell_len(line) <= width for line in plain.split("\n"))
    assert [value for value in range(6) if f"{value}.125" in plain and f"reward_number_{value}" in plain] == [*range(6)]
    assert all(text in plain for text in ("1/8", "9.500", "1.250", "0.75", "reward_number_1: timeout 50%"))


# ---------------------------------------------------------------------------------------------- real trainings


def test_summary_steps_puts_the_summary_in_place_of_the_trainers_lines(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tiny_model, tmp_path / "ours", summary_steps=2, max_steps=4)
    out = capsys.readouterr().out
    kinds = [type(callback) for callback in run.trainer.callback_handler.callbacks]
    assert kinds.count(ConsoleSummary) == 1
    assert PrinterCallback not in kinds
    assert ProgressCallback not in kinds
    rows = columns("\n".join(line for line in out.splitlines() if re.match(r" *(step|\d+/\d+) ", line)))
    assert [row["step"] for row in rows] == ["2/4", "4/4"]
    rewards = [log["reward"] for log in run.logs if "reward" in log]
    assert [row["reward"].rstrip("↑↓=") for row in rows] == [
        f"{(rewards[0] + rewards[1]) / 2:.3f}",
        f"{(rewards[2] + rewards[3]) / 2:.3f}",
    ]
    assert "'loss'" not in out
    train(tiny_model, tmp_path / "theirs", max_steps=1)
    assert "'loss'" in capsys.readouterr().out  # 0, the default: transformers' own


def test_the_callbacks_go_with_plain_trl(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callbacks: list[Any] = [ConsoleSummary(every=1), LiveLog()]
    run = train(tiny_model, tmp_path, GRPOTrainer, max_steps=2, trainer_arguments={"callbacks": callbacks})
    assert "2/2" in capsys.readouterr().out
    assert log_lines(tmp_path) == as_json(run.trainer.state.log_history)


@pytest.mark.parametrize("steps", [-1, 1.5, True, "1"])
def test_summary_steps_has_to_be_a_number(tmp_path: Path, steps: Any) -> None:
    from trl_grpo_ext import GRPOExtConfig

    with pytest.raises(ConfigurationError, match="summary_steps"):
        GRPOExtConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, summary_steps=steps)


def log_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LOG_FILE).read_text(encoding="utf-8").splitlines()]


def as_json(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in log.items()}
        for log in history
    ]


def test_the_live_log_is_the_history_at_every_step_and_after_a_resumption(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import TrainerCallback

    seen: list[tuple[int, bool]] = []

    class Look(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append((state.global_step, log_lines(tmp_path) == as_json(state.log_history)))

    def none_at_all(completions: list[str], **columns: Any) -> list[None]:
        return [None] * len(completions)  # its mean is None in the log

    settings: dict[str, Any] = {
        "reward_funcs": [length_reward, none_at_all],
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_on_start": True,
        "per_device_eval_batch_size": 8,
    }
    evaluated = {"eval_dataset": prompts(2)}
    first = train(tiny_model, tmp_path, max_steps=5, trainer_arguments={**evaluated, "callbacks": [Look()]}, **settings)
    assert seen == [(step, True) for step in range(5)]
    assert LOG == LOG_FILE
    assert log_lines(tmp_path) == as_json(first.trainer.state.log_history)
    assert load_run(tmp_path).last_step == 5

    from tests.support import scripted_rollout
    from trl_grpo_ext import GRPOExtTrainer

    again = GRPOExtTrainer(
        str(tiny_model),
        settings["reward_funcs"],
        first.trainer.args,
        train_dataset=prompts(4),
        rollout_func=scripted_rollout,
        **evaluated,
    )
    again.args.max_steps = 3
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    lines = log_lines(tmp_path)
    assert lines == as_json(again.state.log_history)
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]  # 3 anew; 4 and 5 are gone


def test_a_log_that_cannot_be_written_costs_the_log_alone(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / LOG_FILE).mkdir()
    with pytest.warns(UserWarning, match=f"{LOG_FILE} cannot be written"):
        run = train(tiny_model, tmp_path, max_steps=2)
    assert len(run.losses) == 2


# ---------------------------------------------------------------------------------------------- slow rewards


def test_a_reward_says_how_far_it_is_only_where_somebody_listens() -> None:
    scored(1, 2)
    heard: list[tuple[int, int]] = []
    with listening(lambda done, total: heard.append((done, total))):
        scored(3, 4)
        with listening(None):
            scored(5, 6)
        scored(7, 8)
    scored(9, 9)
    assert heard == [(3, 4), (7, 8)]


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


@pytest.fixture(scope="module")
def command(tiny_model: Path) -> list[str]:
    return [sys.executable, "-m", "tests.live_worker", str(tiny_model)]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    return {**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1"}


def test_in_a_terminal_a_slow_reward_has_a_bar_and_the_summary_a_table(command: list[str], tmp_path: Path) -> None:
    chosen = {"max_steps": 2, "seconds": 3.2, "steady": True, "summary_steps": 1, "disable_tqdm": False}
    done = _in_terminal([*command, str(tmp_path), json.dumps(chosen)], 70, environment(), ROOT, 120)
    assert done.status == 0, done.plain
    shown = re.findall(r"scoring with second_reward: (\d)/8 completions", done.plain)
    assert len(shown) >= 3
    assert [*map(int, shown)] != [int(shown[0])] * len(shown)
    assert "length_reward:" not in done.plain  # it took no time
    assert "training:" in done.plain  # transformers' bar, under its name
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


@pytest.mark.slow
def test_in_a_pipe_there_is_neither_bar_nor_control_sequence(command: list[str], tmp_path: Path) -> None:
    chosen = {"max_steps": 2, "seconds": 2.6, "summary_steps": 1, "disable_tqdm": False}
    done = subprocess.run(
        [*command, str(tmp_path), json.dumps(chosen)],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "scoring with" not in done.stderr
    assert "training:" not in done.stderr
    lines = [line for line in done.stdout.splitlines() if re.match(r" *(step|\d/2) ", line)]
    assert [line.split()[0] for line in lines] == ["step", "1/2", "2/2"]
    assert not any(character in done.stdout for character in "\x1b\r")


# ---------------------------------------------------------------------------------------------- watching


@pytest.fixture
def training(command: list[str], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    chosen = {
        "max_steps": 8,
        "seconds": 0.4,
        "token_records": 4,
        "log_completions": True,
        "num_completions_to_print": 0,
    }
    process = subprocess.Popen(
        [*command, str(tmp_path / "run"), json.dumps(chosen)],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    yield process
    process.kill()
    process.wait()


@pytest.mark.slow
def test_the_report_grows_while_another_process_trains(training: subprocess.Popen[bytes], tmp_path: Path) -> None:
    steps: list[int] = []
    stop, said = threading.Event(), list[str]()
    until = time.monotonic() + 90

    def write() -> None:
        run = load_run(tmp_path / "run")
        steps.append(run.last_step)
        if run.last_step == 8 or time.monotonic() > until:
            stop.set()

    assert watch([tmp_path / "run"], write, every=0.1, stop=stop, say=said.append) == 0
    assert training.wait(60) == 0
    assert steps == sorted(steps)
    assert steps[-1] == 8
    assert len(set(steps)) >= 4, steps  # it was there while it grew
    assert len(said) <= 1, said  # at first there was no run


def test_the_report_is_written_when_something_changed_and_only_then(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text("{}")
    looks = iter(range(100))
    writes: list[int] = []

    class Steps:
        """Stands for the time between two looks."""

        def wait(self, seconds: float) -> bool:
            look = next(looks)
            if look == 2:
                (tmp_path / LOG_FILE).write_text("{}\n")
            if look == 4:
                (tmp_path / "report.html").write_text("our own")
            if look == 5:
                (tmp_path / "token_records").mkdir()
                (tmp_path / "token_records" / "step_00001.parquet").write_bytes(b"half")
            return look == 8

    def write() -> None:
        writes.append(len(writes))
        if len(writes) == 2:
            raise OSError("disk full")

    said: list[str] = []
    assert watch([tmp_path], write, every=1, stop=Steps(), say=said.append) == 0  # type: ignore[arg-type]
    assert len(writes) == 4  # at first; the log, which failed; the log again; the records
    assert said == ["not written this time, will try again: disk full"]


@pytest.mark.parametrize("every", [0, -1, math.nan, math.inf, True, "5"])
def test_a_watch_needs_seconds(every: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="number of seconds"):
        watch([tmp_path], lambda: None, every=every)


def test_a_missing_folder_has_no_files(tmp_path: Path) -> None:
    assert signature([tmp_path / "nothing", tmp_path]) == {}


def test_control_c_ends_a_watch_with_0(tmp_path: Path) -> None:
    code = (
        "import sys; from trl_grpo_ext.report.watch import watch; "
        f"sys.exit(watch([{str(tmp_path)!r}], lambda: print('written', flush=True), every=60))"
    )
    with interruptible():
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), cwd=ROOT
        )
    assert process.stdout is not None
    assert process.stdout.readline() == b"written\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, b"")
