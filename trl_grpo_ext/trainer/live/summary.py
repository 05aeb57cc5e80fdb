"""A console summary every n steps: one line under a header, in a terminal as in a file or a pipe.

In a terminal, or where COLUMNS is set, what does not fit into the line stands below it.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.cells import cell_len, chop_cells
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from ...errors import ConfigurationError
from ...guard.untrusted import printable_name
from ...records.log import number

_GAP = "  "
_ROWS_PER_HEADER = 25
_UNLIMITED = 100_000  # columns of a file
_MARKS, _ASCII_MARKS = ("↑", "↓", "="), ("+", "-", "=")
_NO_SIGNAL = "no signal"

ORDINARY = frozenset({"right", "wrong", "scored"})
"""Outcomes that need no attention."""


class ConsoleSummary(TrainerCallback):
    """Prints a summary of the training log, on the main process.

    A summary is the mean of the log entries since the one before: step, time left, reward and each reward function with
    an arrow for its change, length, entropy, KL, clipping, share of groups without signal, tokens per second, and the
    outcomes that are neither right nor wrong. Metrics missing from the log are left out. An evaluation has a row of its
    own, with its pass@k, compared with the previous evaluation.

    Args:
        every: Optimizer steps between summaries. A summary waits for a log entry (`logging_steps`) and for completions
            generated since the last one. The last step is always shown.

    Raises:
        ConfigurationError: `every` is no number from 1 up.
    """

    def __init__(self, every: int = 1) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigurationError(f"ConsoleSummary: every must be a number of steps from 1 up, got {every!r}.")
        self.every = every
        self._header: tuple[str, ...] = ()
        self._widths: dict[str, int] = {}
        self._rows = 0
        self._before: dict[str, dict[str, float]] = {}
        self._begin(None)

    def _begin(self, state: Any) -> None:
        self._waiting: list[Mapping[str, Any]] = []
        self._last_step = self._first_step = 0 if state is None else int(state.global_step)
        self._tokens = math.nan if state is None else float(state.num_input_tokens_seen or 0)
        self._counted = self._started = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clocks; a resumed run starts them at its checkpoint."""
        self._begin(state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restart the clock: time before the first step, such as an evaluation, does not count."""
        if state.global_step == self._first_step:
            self._counted = self._started = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Print a summary if one is due."""
        if not state.is_world_process_zero or not logs:
            return
        if "eval_reward" in logs:
            found = {key.removeprefix("eval_"): value for key, value in logs.items() if key.startswith("eval_")}
            self._show("evaluation", average([found]), state, cells=[])
        elif "reward" in logs or "loss" in logs:
            self._waiting.append(dict(logs))
            generated = any("reward" in log for log in self._waiting)
            last = state.max_steps > 0 and state.global_step >= state.max_steps
            if generated and (last or state.global_step - self._last_step >= self.every):
                self._training_summary(state)

    def _training_summary(self, state: Any) -> None:
        metrics, now = average(self._waiting), time.monotonic()
        self._waiting, self._last_step = [], int(state.global_step)
        done, ahead = state.global_step - self._first_step, state.max_steps - state.global_step
        left = (now - self._started) / done * ahead if done > 0 and ahead >= 0 else math.nan
        cells = [Cell("left", left, duration(left))]
        tokens = metrics.get("num_tokens", math.nan)
        rate = (tokens - self._tokens) / max(now - self._counted, 1e-9)
        self._tokens, self._counted = tokens, now
        if math.isfinite(rate) and rate >= 0:
            cells.append(Cell("tokens/s", rate, f"{rate:,.0f}"))
        self._show("training", metrics, state, cells)

    def _show(self, kind: str, metrics: Mapping[str, float], state: Any, cells: list[Cell]) -> None:
        stream = sys.stdout
        if stream is None:
            return
        marks = _MARKS if _encodable(stream, "".join(_MARKS)) == "".join(_MARKS) else _ASCII_MARKS
        before = self._before.setdefault(kind, {})
        # Evaluations do not train, and groups of one completion never differ.
        values = [cell for cell in metric_cells(metrics) if kind == "training" or cell.name != _NO_SIGNAL]
        shown: dict[str, str] = {}
        for cell in [*values[:1], *cells[:1], *values[1:], *cells[1:]]:
            # The mark has a column of its own, so that the numbers stay aligned.
            mark = (arrow(cell, before, marks) or " ") if cell.followed else ""
            shown[_encodable(stream, cell.name)] = _encodable(stream, cell.text) + mark
        before.update({cell.name: cell.value for cell in values})
        notes = [_encodable(stream, note) for note in notable_outcomes(metrics)]
        laid_out = stream.isatty() or os.environ.get("COLUMNS", "").isdigit()
        width = shutil.get_terminal_size().columns if laid_out else _UNLIMITED
        if kind == "evaluation":  # it has few columns, so it names them
            lines = _beside([f"eval {state.global_step}", *_named(shown)], width)
        else:
            step = f"{state.global_step}/{state.max_steps}" if state.max_steps > 0 else f"{state.global_step}"
            self._widths["step"] = max(self._widths.get("step", 0), 2 * len(str(state.max_steps)) + 1)
            lines = self._row({"step": step, **shown}, width, repeats=stream.isatty())
        if laid_out:
            lines += [line for note in notes for line in _beside([note], width)]
        elif notes:
            lines[-1] += _GAP + "; ".join(notes)
        try:
            # The trainer's progress bar steps aside while we print.
            with tqdm.external_write_mode(file=stream):
                stream.write("".join(f"{line}\n" for line in lines))
                stream.flush()
        except (OSError, ValueError):  # the reader is gone
            return

    def _row(self, shown: Mapping[str, str], width: int, repeats: bool) -> list[str]:
        """A row as wide as the terminal, under a header if the columns changed, and below it what did not fit."""
        room, row = width, dict[str, str]()
        for name, text in shown.items():
            size = max(cell_len(name), cell_len(text), self._widths.get(name, 0))
            room -= size + (len(_GAP) if row else 0)
            if room < 0 and row:
                break
            self._widths[name], row[name] = size, text
        again = tuple(row) != self._header or (repeats and self._rows % _ROWS_PER_HEADER == 0)
        self._header, self._rows = tuple(row), 1 if again else self._rows + 1
        lines = [
            _GAP.join(" " * (self._widths[name] - cell_len(text)) + text for name, text in zip(row, texts, strict=True))
            for texts in ([[*row]] if again else []) + [[*row.values()]]
        ]
        rest = _named({name: text for name, text in shown.items() if name not in row})
        return lines + [_GAP + line for line in _beside(rest, width - len(_GAP))]


class Bars(ProgressCallback):
    """The trainer's bars, without its lines."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Leave the lines to `ConsoleSummary`."""


def use_console_summary(trainer: Trainer, every: int = 1) -> ConsoleSummary:
    """Put a `ConsoleSummary` in place of the trainer's own lines; with bars only in a terminal.

    Args:
        trainer: Any trainer of transformers.
        every: Optimizer steps between summaries.

    Returns:
        The callback, already added to the trainer.
    """
    summary = ConsoleSummary(every)
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(summary)
    if sys.stderr is not None and sys.stderr.isatty() and not trainer.args.disable_tqdm:
        trainer.add_callback(Bars())
    return summary


def _named(shown: Mapping[str, str]) -> list[str]:
    return [f"{name} {text.strip()}" for name, text in shown.items()]


def _beside(texts: Sequence[str], width: int) -> list[str]:
    """Texts side by side, on as many lines as they need."""
    lines: list[str] = []
    for text in (piece for whole in texts for piece in chop_cells(whole, width)):
        if lines and cell_len(lines[-1]) + len(_GAP) + cell_len(text) <= width:
            lines[-1] += _GAP + text
        else:
            lines.append(text)
    return lines


def _encodable(stream: Any, text: str) -> str:
    """Escape what the stream's encoding cannot represent."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


# ---------------------------------------------------------------------------------------------- what is shown


class Cell(NamedTuple):
    """One number of a summary: NaN if it is logged without a value; `followed` if its change is shown."""

    name: str
    value: float
    text: str
    followed: bool = False


def average(logs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of every metric over several log entries, without NaN; counters keep their last value."""
    values: dict[str, list[float]] = {}
    for log in logs:
        for name, value in log.items():
            values.setdefault(name, []).append(number(value))
    means = {}
    for name, found in values.items():
        known = [value for value in found if not math.isnan(value)]
        last = name in ("num_tokens", "epoch", "step")
        means[name] = math.nan if not known else known[-1] if last else math.fsum(known) / len(known)
    return means


def metric_cells(metrics: Mapping[str, float]) -> list[Cell]:
    """Reward, each function's, pass@k, length, entropy, KL, clipping, groups without signal: what is logged."""
    cells = [_reward("reward", metrics["reward"])] if "reward" in metrics else []
    means = {name: value for name, value in metrics.items() if name.startswith("rewards/") and name.endswith("/mean")}
    if len(means) > 1:
        names = (printable_name(name.removeprefix("rewards/").removesuffix("/mean")) for name in means)
        cells += [_reward(name, value) for name, value in zip(names, means.values(), strict=True)]
    at_k = [name for name in metrics if name.startswith(("pass@", "mean@"))]
    cells += [_reward(printable_name(name), metrics[name]) for name in at_k]
    for name, key, shown in _OTHERS:
        if key in metrics and all(cell.name != name for cell in cells):
            cells.append(Cell(name, metrics[key], shown(metrics[key])))
    return cells


def notable_outcomes(metrics: Mapping[str, float]) -> list[str]:
    """By reward, the shares of completions that were not judged right or wrong, nor simply scored."""
    by_reward: dict[str, list[str]] = {}
    for key, share in metrics.items():
        kind, _, rest = key.partition("/")
        reward, _, outcome = rest.rpartition("/")
        counted = kind == "outcomes" or (kind == "rewards" and outcome in ("none", "nan"))
        if counted and reward and outcome not in ORDINARY and share > 0:
            by_reward.setdefault(printable_name(reward), []).append(f"{printable_name(outcome)} {_share(share)}")
    return [f"{reward}: {', '.join(shares)}" for reward, shares in by_reward.items()]


def arrow(cell: Cell, before: Mapping[str, float], marks: Sequence[str]) -> str:
    """A mark for up, down or no visible change; empty if there is nothing to compare."""
    last = before.get(cell.name, math.nan)
    if not cell.followed or math.isnan(cell.value) or math.isnan(last):
        return ""
    up, down, same = marks
    return same if _decimal(last) == cell.text else up if cell.value > last else down


def duration(seconds: float) -> str:
    """`42 s`, `3:07`, `1:02:09`; `-` if unknown."""
    if not math.isfinite(seconds) or seconds < 0:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}" if minutes else f"{rest} s"


def _reward(name: str, value: float) -> Cell:
    return Cell(name, value, _decimal(value), followed=True)


def _decimal(value: float) -> str:
    return f"{value:.3f}" if not abs(value) >= 1e5 else f"{value:.3g}"


def _share(value: float) -> str:
    return f"{value:.0%}" if not 0 < value < 0.005 else "<1%"


_OTHERS = (
    ("length", "completions/mean_length", lambda value: f"{value:.1f}"),
    ("cut off", "completions/clipped_ratio", _share),
    ("entropy", "entropy", _decimal),
    ("KL", "kl", lambda value: f"{value:.3g}"),
    ("clip", "clip_ratio/region_mean", _share),
    ("clip", "cispo_clip_ratio", _share),
    (_NO_SIGNAL, "frac_reward_zero_std", _share),
    ("kept", "groups/kept", _share),
    ("rounds", "groups/rounds", lambda value: f"{value:.1f}"),
)
