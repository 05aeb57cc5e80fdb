"""Watching a training while it runs: lines on the console, and a log that is always up to date."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from ..guard.parameters import checked_whole
from ..guard.untrusted import printable_name
from ..records.log import LOG_FILE, LiveLog, number

__all__ = ["LOG_FILE", "ConsoleSummary", "LiveLog", "use_console_summary"]

_GAP = "  "
_ROWS_PER_HEADER = 25
_ORDINARY = frozenset({"right", "wrong", "scored"})  # outcomes that need no attention


class ConsoleSummary(TrainerCallback):
    """Prints a summary of the training log, on the main process.

    A summary is the mean of the log entries since the one before: step, time left, reward and each reward function,
    length, entropy, KL, clipping, share of groups without signal, tokens per second, and the outcomes that are neither
    right nor wrong. Metrics missing from the log are left out. An evaluation has a line of its own, with its pass@k.

    Args:
        every: Optimizer steps between summaries. A summary waits for a log entry (`logging_steps`) and for completions
            generated since the last one. The last step is always shown.

    Raises:
        ConfigurationError: `every` is no number from 1 up.
    """

    def __init__(self, every: int = 1) -> None:
        self.every = checked_whole("ConsoleSummary: every", every, lowest=1)
        self._widths: dict[str, int] = {}
        self._header: tuple[str, ...] = ()
        self._rows = 0
        self._waiting: list[Mapping[str, Any]] = []
        self._last_step = self._first_step = 0
        self._tokens = math.nan
        self._counted = self._started = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clocks; a resumed run starts them at its checkpoint."""
        self._waiting = []
        self._last_step = self._first_step = int(state.global_step)
        self._tokens = float(state.num_input_tokens_seen or 0)
        self._counted = self._started = time.monotonic()

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
            found.pop("frac_reward_zero_std", None)  # it does not train, and groups of one completion never differ
            metrics = average([found])
            cells = [f"{name} {text}" for name, text in metric_cells(metrics).items()]  # few, so it names them
            self._print(_GAP.join([f"eval {state.global_step}", *cells]), metrics)
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
        tokens = metrics.get("num_tokens", math.nan)
        rate = (tokens - self._tokens) / max(now - self._counted, 1e-9)
        self._tokens, self._counted = tokens, now
        step = f"{state.global_step}/{state.max_steps}" if state.max_steps > 0 else f"{state.global_step}"
        cells = metric_cells(metrics)  # the reward is the first, and the time left stands after it
        shown = {"step": step, **dict([*cells.items()][:1]), "left": duration(left), **cells}
        if math.isfinite(rate) and rate >= 0:
            shown["tokens/s"] = f"{rate:,.0f}"
        self._print(self._row(shown), metrics)

    def _print(self, line: str, metrics: Mapping[str, float]) -> None:
        line = _GAP.join([line, *(["; ".join(notes)] if (notes := notable_outcomes(metrics)) else [])])
        stream = sys.stdout
        try:
            encoding = getattr(stream, "encoding", None) or "utf-8"
            # The trainer's progress bar steps aside while we print.
            with tqdm.external_write_mode(file=stream):
                stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
                stream.flush()
        except (AttributeError, OSError, ValueError):  # nobody reads
            return

    def _row(self, shown: Mapping[str, str]) -> str:
        """A row, under a header if the columns changed or the last one is far above."""
        for name, text in shown.items():
            self._widths[name] = max(len(name), len(text), self._widths.get(name, 0))
        again = tuple(shown) != self._header or self._rows % _ROWS_PER_HEADER == 0
        self._header, self._rows = tuple(shown), 1 if again else self._rows + 1
        lines = [[*shown], [*shown.values()]] if again else [[*shown.values()]]
        padded = [[text.rjust(self._widths[name]) for name, text in zip(shown, line, strict=True)] for line in lines]
        return "\n".join(_GAP.join(texts) for texts in padded)


class Bars(ProgressCallback):
    """The trainer's bars, with names and without its lines."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the bar of the training."""
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_description("training")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the bar of an evaluation."""
        super().on_prediction_step(args, state, control, **kwargs)
        if self.prediction_bar is not None and not self.prediction_bar.desc:
            self.prediction_bar.set_description("evaluation")

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


def average(logs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of every metric over several log entries, without NaN; counters keep their last value."""
    means = {}
    for name in dict.fromkeys(name for log in logs for name in log):
        values = [number(log[name]) for log in logs if name in log]
        known = [value for value in values if not math.isnan(value)]
        if name in ("num_tokens", "epoch", "step"):
            known = known[-1:]
        means[name] = math.fsum(known) / len(known) if known else math.nan
    return means


def metric_cells(metrics: Mapping[str, float]) -> dict[str, str]:
    """Reward, each function's, pass@k, length, entropy, KL, clipping, groups without signal: what is logged."""
    cells = {"reward": _decimal(metrics["reward"])} if "reward" in metrics else {}
    means = [name for name in metrics if name.startswith("rewards/") and name.endswith("/mean")]
    for name in means if len(means) > 1 else ():
        cells[printable_name(name.removeprefix("rewards/").removesuffix("/mean"))] = _decimal(metrics[name])
    cells |= {printable_name(n): _decimal(metrics[n]) for n in metrics if n.startswith("pass@")}
    for name, key, shown in _OTHERS:
        if key in metrics:
            cells.setdefault(name, shown(metrics[key]))
    return cells


def notable_outcomes(metrics: Mapping[str, float]) -> list[str]:
    """By reward, the shares of completions that were not judged right or wrong, nor simply scored."""
    by_reward: dict[str, list[str]] = {}
    for key, share in metrics.items():
        kind, _, rest = key.partition("/")
        reward, _, outcome = rest.rpartition("/")
        counted = kind == "outcomes" or (kind == "rewards" and outcome in ("none", "nan"))
        if counted and reward and outcome not in _ORDINARY and share > 0:
            by_reward.setdefault(printable_name(reward), []).append(f"{printable_name(outcome)} {_share(share)}")
    return [f"{reward}: {', '.join(shares)}" for reward, shares in by_reward.items()]


def duration(seconds: float) -> str:
    """`42 s`, `3:07`, `1:02:09`; `-` if unknown."""
    if not math.isfinite(seconds) or seconds < 0:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}" if minutes else f"{rest} s"


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
    ("no signal", "frac_reward_zero_std", _share),
    ("kept", "groups/kept", _share),
    ("rounds", "groups/rounds", lambda value: f"{value:.1f}"),
)
