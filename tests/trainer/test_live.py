"""The summary on the console: what it shows, where there is little room, and in a real training."""

import io
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PrinterCallback, ProgressCallback, TrainerState

from tests.support import prompts, train
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.trainer.live import Bars, ConsoleSummary, average, duration, metric_cells, notable_outcomes


class Screen(io.StringIO):
    """Something to print on, in some encoding."""

    encoding = "utf-8"  # type: ignore[assignment]


def state(step: int, steps: int = 8, main: bool = True) -> TrainerState:
    return TrainerState(global_step=step, max_steps=steps, is_world_process_zero=main, num_input_tokens_seen=0)


def printed(
    monkeypatch: pytest.MonkeyPatch,
    logs: list[tuple[int, dict[str, Any]]],
    *,
    every: int = 1,
    screen: Screen | None = None,
    steps: int = 8,
) -> str:
    """What a summary prints of these logs, by step."""
    screen = screen or Screen()
    monkeypatch.setattr(sys, "stdout", screen)
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


def test_what_is_shown_of_a_log() -> None:
    # Means without NaN; counters keep their last value.
    logs = [
        {"reward": 1.0, "kl": math.nan, "num_tokens": 10.0, "rewards/a/mean": None},
        {"reward": 2.0, "kl": 0.5, "num_tokens": 30.0, "rewards/a/mean": None},
        {"reward": 6.0, "num_tokens": 60.0, "note": "text"},
    ]
    means = average(logs)
    assert (means["reward"], means["kl"], means["num_tokens"]) == (3.0, 0.5, 60.0)
    assert math.isnan(means["rewards/a/mean"])
    assert math.isnan(means["note"])
    # Every reward has a cell once there are two.
    log = {"reward": 0.25, "rewards/a/mean": 0.5, "entropy": 1.5, "clip_ratio/region_mean": 0.004}
    one, two = metric_cells(log), metric_cells({**log, "rewards/b/c/mean": math.nan})
    assert [*one.items()] == [("reward", "0.250"), ("entropy", "1.500"), ("clip", "<1%")]
    assert [*two.items()][:3] == [("reward", "0.250"), ("a", "0.500"), ("b/c", "nan")]
    # Outcomes that need attention.
    outcomes = {"a/right": 0.5, "a/wrong": 0.4, "a/no_answer": 0.1, "code/timeout": 0.001, "code/died": 0.0}
    counted = {**{f"outcomes/{name}": share for name, share in outcomes.items()}, "rewards/judge/none": 0.25}
    noted = notable_outcomes({**counted, "rewards/judge/nan": 0.0, "rewards/judge/mean": 0.25})
    assert noted == ["a: no_answer 10%", "code: timeout <1%", "judge: none 25%"]


def test_durations() -> None:
    seconds = {0: "0 s", 60: "1:00", 187: "3:07", 3729: "1:02:09", math.nan: "-", math.inf: "-", -1: "-"}
    assert [duration(number) for number in seconds] == [*seconds.values()]


def test_summary_is_a_plain_line(monkeypatch: pytest.MonkeyPatch) -> None:
    logs = [
        (step, {"reward": step / 10, "rewards/a/mean": 0.5, "rewards/b/mean": -step / 10, "entropy": 2.0, "kl": 0.01})
        for step in range(1, 6)
    ]
    out = printed(monkeypatch, [*logs, (5, {"train_runtime": 3.0})], every=2, steps=5)
    assert {"\x1b", "\r"}.isdisjoint(out)
    # Steps 1 and 2, then 3 and 4, and the last one in any case.
    shown = ("step", "reward", "a", "b", "entropy", "KL")
    assert [[row[name] for name in shown] for row in columns(out)] == [
        ["2/5", "0.150", "0.500", "-0.150", "2.000", "0.01"],
        ["4/5", "0.350", "0.500", "-0.350", "2.000", "0.01"],
        ["5/5", "0.500", "0.500", "-0.500", "2.000", "0.01"],
    ]
    # It waits for new completions.
    steps = [{"reward": 1.0, "entropy": 1.0}, {"entropy": 2.0}, {"reward": 2.0, "entropy": 6.0}, {"entropy": 2.0}]
    rows = columns(printed(monkeypatch, [(n, {"loss": 0.0, **log}) for n, log in enumerate(steps, 1)], steps=4))
    waited = [(row["step"], row["reward"], row["entropy"]) for row in rows]
    assert waited == [("1/4", "1.000", "1.000"), ("3/4", "2.000", "4.000")]


def test_time_left_and_tokens_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, screen = [100.0], Screen()
    monkeypatch.setattr("trl_grpo_ext.trainer.live.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(sys, "stdout", screen)
    summary, resumed = ConsoleSummary(), TrainerState(global_step=10, max_steps=20, num_input_tokens_seen=1000)
    summary.on_train_begin(None, resumed, None)
    now[0] = 500.0  # an evaluation before the first step
    summary.on_step_begin(None, resumed, None)
    for second, step, tokens in ((520.0, 12, 5000.0), (530.0, 15, 6000.0)):
        now[0] = second
        summary.on_log(None, state(step, 20), None, logs={"reward": 1.0, "num_tokens": tokens})
    rows = columns(screen.getvalue())
    # 2 steps took 20 s, 8 are ahead; 4000 tokens in 20 s. Then 5 took 30 s, 5 ahead; 1000 in 10 s.
    assert [(row["left"], row["tokens/s"]) for row in rows] == [("1:20", "200"), ("30 s", "100")]


def test_an_evaluation_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    logs: list[tuple[int, dict[str, Any]]] = [
        (0, {"eval_reward": 0.1, "eval_pass@1": 1, "eval_pass@4/a": 0.2}),
        (1, {"reward": 0.9}),
        (2, {"eval_reward": 0.3, "eval_loss": 1.0, "eval_pass@1": 0, "eval_pass@4/a": 0.2}),
    ]
    out = printed(monkeypatch, logs).splitlines()
    assert out[0].split("  ")[:2] == ["eval 0", "reward 0.100"]
    assert out[-1] == "eval 2  reward 0.300  pass@1 0.000  pass@4/a 0.200"
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    ConsoleSummary().on_log(None, state(1, main=False), None, logs={"reward": 1.0})  # another process
    assert screen.getvalue() == ""


def test_summary_to_a_poor_or_closed_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ascii(Screen):
        encoding = "ascii"  # type: ignore[assignment]

    class Gone(Screen):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    logs = [(1, {"reward": 1.0, "rewards/é/mean": 1.0, "rewards/b/mean": 1.0}), (2, {"eval_reward": 2.0})]
    out = printed(monkeypatch, logs, screen=Ascii())
    assert out.isascii()
    assert "\\xe9" in out
    assert printed(monkeypatch, logs, screen=Gone()) == ""


VALUES = st.one_of(st.none(), st.floats(), st.text(max_size=5), st.integers(), st.just([1.0, 2.0]), st.booleans())
NAMES = st.one_of(
    st.sampled_from(["reward", "eval_reward", "kl", "entropy", "completions/mean_length", "num_tokens", "step"]),
    st.text(max_size=60).map(lambda name: f"rewards/{name}/mean"),
    st.text(max_size=60).map(lambda name: f"outcomes/{name}/timeout"),
    st.text(),
)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(logs=st.lists(st.dictionaries(NAMES, VALUES, max_size=12), max_size=4))
def test_whatever_is_logged_no_error_and_no_control_character(logs: list[dict[str, Any]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        out = printed(patch, [(step, {"reward": 1.0, **log}) for step, log in enumerate(logs, 1)])
    assert all(character.isprintable() for line in out.split("\n") for character in line), ascii(out)
    assert out.count("\n") >= len(logs)


def test_summary_replaces_lines(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tiny_model, tmp_path / "ours", summary_steps=2, max_steps=4)
    out = capsys.readouterr().out
    kinds = [type(callback) for callback in run.trainer.callback_handler.callbacks]
    assert kinds.count(ConsoleSummary) == 1
    assert {PrinterCallback, ProgressCallback}.isdisjoint(kinds)
    rows = columns("\n".join(line for line in out.splitlines() if re.match(r" *(step|\d+/\d+) ", line)))
    assert [row["step"] for row in rows] == ["2/4", "4/4"]
    rewards = [log["reward"] for log in run.logs if "reward" in log]
    means = [f"{(rewards[first] + rewards[first + 1]) / 2:.3f}" for first in (0, 2)]
    assert [row["reward"] for row in rows] == means
    assert "'loss'" not in out
    for every in (0, True, "2"):
        with pytest.raises(ConfigurationError, match=r"every .*whole number"):
            ConsoleSummary(every)  # type: ignore[arg-type]


@pytest.mark.slow
def test_bars_have_names(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"disable_tqdm": False, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
    train(tiny_model, tmp_path, callbacks=[Bars()], eval_dataset=prompts(4), **settings)
    shown = capsys.readouterr().err
    assert "training: " in shown
    assert "evaluation: " in shown
