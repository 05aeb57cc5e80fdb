"""A line on the console every n steps: a table that grows in a terminal, plain text in a file or a pipe.

In a terminal what does not fit into the row stands below it, so nothing is lost in a narrow one. Anywhere else a
summary is one line under a header, without control sequences; where COLUMNS gives a width, it is laid out for that.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from ...errors import ConfigurationError
from ...records.cells import NO_SIGNAL, Cell, arrow, averaged, duration, metric_cells, notable_outcomes

_GAP = 2
_ROWS_PER_HEADER = 25
_MARKS, _ASCII_MARKS = ("↑", "↓", "="), ("+", "-", "=")


class ConsoleSummary(TrainerCallback):
    """Prints a summary of the training log, on the main process.

    A summary is the mean of the log entries since the one before: step, time left, reward and each reward function with
    an arrow for its change, length, entropy, KL, clipping, share of groups without signal, tokens per second, and the
    outcomes that are neither right nor wrong. What the log does not have is not shown. An evaluation is a row of its
    own, compared with the evaluation before.

    Args:
        every: Optimizer steps between summaries; the log has to have an entry by then (`logging_steps`), and
            completions have to have been generated since the one before. The last step is shown wherever it falls.

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
        """What came before the first step, an evaluation perhaps, is not the training's time."""
        if state.global_step == self._first_step:
            self._counted = self._started = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Show what has come together, where it is time."""
        if not state.is_world_process_zero or not logs:
            return
        if "eval_reward" in logs:
            found = {key.removeprefix("eval_"): value for key, value in logs.items() if key.startswith("eval_")}
            self._show("evaluation", averaged([found]), state, cells=[])
        elif "reward" in logs or "loss" in logs:
            self._waiting.append(dict(logs))
            generated = any("reward" in log for log in self._waiting)
            last = state.max_steps > 0 and state.global_step >= state.max_steps
            if generated and (last or state.global_step - self._last_step >= self.every):
                self._training_summary(state)

    def _training_summary(self, state: Any) -> None:
        metrics, now = averaged(self._waiting), time.monotonic()
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

    # ------------------------------------------------------------------ on the screen

    def _show(self, kind: str, metrics: Mapping[str, float], state: Any, cells: list[Cell]) -> None:
        stream = sys.stdout
        if stream is None:
            return
        arrows = "".join(_MARKS)
        marks = _MARKS if _written(stream, arrows) == arrows else _ASCII_MARKS
        step = f"{state.global_step}/{state.max_steps}" if state.max_steps > 0 else str(state.global_step)
        shown = [("step", step if kind == "training" else f"eval {state.global_step}")]
        self._widths["step"] = max(self._widths.get("step", 0), cell_len(f"{state.max_steps}/{state.max_steps}"))
        before = self._before.setdefault(kind, {})
        # Nothing is learnt from an evaluation, and groups of one completion never differ.
        values = [cell for cell in metric_cells(metrics) if kind == "training" or cell.name != NO_SIGNAL]
        for cell in [*values[:1], *cells[:1], *values[1:], *cells[1:]]:
            # The arrow has a place of its own, so that the numbers stay under one another.
            text = cell.text + (arrow(cell, before, marks) or " ") if cell.followed else cell.text
            shown.append((cell.name, text))
        before.update({cell.name: cell.value for cell in values})
        shown = [(_written(stream, name), _written(stream, text)) for name, text in shown]
        notes = [_written(stream, note) for note in notable_outcomes(metrics)]
        try:
            # The progress bar of the trainer steps aside while we write.
            with tqdm.external_write_mode(file=stream):
                if stream.isatty() or os.environ.get("COLUMNS", "").isdigit():
                    self._table(stream, shown, notes)
                else:
                    self._lines(stream, shown, notes)
                stream.flush()
        except (OSError, ValueError):  # nobody reads any more
            return

    def _width(self, name: str, text: str) -> int:
        return max(cell_len(name), cell_len(text), self._widths.get(name, 0))

    def _lines(self, stream: Any, shown: list[tuple[str, str]], notes: list[str]) -> None:
        """One line, under a header where the columns are others than before."""
        self._widths |= {name: self._width(name, text) for name, text in shown}
        header = tuple(name for name, _ in shown)
        lines = [[_padded(text, self._widths[name]) for name, text in shown]]
        if header != self._header and shown[0][1][:4] != "eval":
            self._header = header
            lines.insert(0, [_padded(name, self._widths[name]) for name in header])
        elif shown[0][1][:4] == "eval":  # it may lack columns, so it names its own
            lines = [[shown[0][1], *(f"{name} {text.strip()}" for name, text in shown[1:])]]
        if notes:
            lines[-1].append("; ".join(notes))
        for line in lines:
            stream.write((" " * _GAP).join(line).rstrip() + "\n")

    def _table(self, stream: Any, shown: list[tuple[str, str]], notes: list[str]) -> None:
        """A row as wide as the terminal; what does not fit stands below."""
        console = Console(file=stream, highlight=False, markup=False, emoji=False)
        room, row, rest = console.width, list[tuple[str, str]](), list[tuple[str, str]]()
        for name, text in shown:
            width = self._width(name, text) + (_GAP if row else 0)
            if rest or width > room:
                rest.append((name, text))
            else:
                self._widths[name] = self._width(name, text)
                room -= width
                row.append((name, text))
        header = tuple(name for name, _ in row)
        if header != self._header or self._rows % _ROWS_PER_HEADER == 0:
            self._header, self._rows = header, 0
            _print(console, Text((" " * _GAP).join(_padded(name, self._widths[name]) for name in header), "bold"))
        self._rows += 1
        line = Text((" " * _GAP).join(_padded(text, self._widths[name]) for name, text in row).rstrip())
        line.highlight_words(_MARKS[:1], "green")
        line.highlight_words(_MARKS[1:2], "red")
        _print(console, line)
        below = "   ".join(f"{name} {text.strip()}".replace(" ", "\N{NO-BREAK SPACE}") for name, text in rest)
        for text, style in ((below, "dim"), *((note, "yellow") for note in notes)):
            for part in Text(text, style).wrap(console, max(console.width - _GAP, 10), overflow="fold") if text else ():
                part.rstrip()
                part.pad_left(_GAP)
                part.plain = part.plain.replace("\N{NO-BREAK SPACE}", " ")
                _print(console, part)


class Bars(ProgressCallback):
    """The trainer's bars, named, and without its lines."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Name the bar of the training."""
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_description("training")

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Name the bar of an evaluation."""
        super().on_prediction_step(args, state, control, eval_dataloader=eval_dataloader, **kwargs)
        if self.prediction_bar is not None:
            self.prediction_bar.set_description("evaluating")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Leave the lines to `ConsoleSummary`."""


def use_console_summary(trainer: Trainer, every: int = 1) -> ConsoleSummary:
    """Put a `ConsoleSummary` in place of the trainer's own lines; bars only where somebody watches them.

    Args:
        trainer: Any trainer of transformers.
        every: Optimizer steps between summaries.

    Returns:
        The callback, which the trainer has by now.

    Raises:
        ConfigurationError: `every` is no number from 1 up.
    """
    summary = ConsoleSummary(every)
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(summary)
    if sys.stderr is not None and sys.stderr.isatty() and not trainer.args.disable_tqdm:
        trainer.add_callback(Bars())
    return summary


def _print(console: Console, line: Text) -> None:
    console.print(line, soft_wrap=True)


def _padded(text: str, width: int) -> str:
    return " " * (width - cell_len(text)) + text


def _written(stream: Any, text: str) -> str:
    """What the stream's encoding has no form for is written as an escape."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
