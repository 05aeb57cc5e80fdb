"""Screens to print on, and what a summary prints on them."""

from __future__ import annotations

import io
import re
import sys
from typing import Any

import pytest
from transformers import TrainerState

from trl_grpo_ext.trainer.live import ConsoleSummary


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
