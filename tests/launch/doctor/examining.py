"""Examine runs as the tests do, and read what is said."""

from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.launch.doctor.public_runs import RunFile, Script
from trl_grpo_ext.launch.doctor import Machine
from trl_grpo_ext.launch.doctor.command import Examination, render

ROOT = Path(__file__).parents[3]
MODEL = str(ROOT / "recipes" / "embedded" / "model")
EIGHT = Machine(gpus=8, gpu_bytes=80 * 1024**3)


def said(found: Examination) -> str:
    out = StringIO()
    render(found, Console(file=out, width=10_000))
    return out.getvalue()


def errors(found: Examination) -> list[str]:
    return [problem.message for problem in found.problems if problem.severity == "error"]


SLOW = pytest.mark.slow
QUICK = ("open-r1, recipes of early 2025", "TRL's scripts, QLoRA", "TRL's quick start and the HF course")


def cases(forms: Sequence[Any]) -> list[Any]:
    """One or two of a kind at once, the others as slow tests."""
    return [pytest.param(one, marks=[pytest.mark.slow] * (one.project not in QUICK), id=one.project) for one in forms]


def assert_says(found: Examination, form: RunFile | Script) -> None:
    text = said(found)
    assert [form.error in one for one in errors(found)] == [True] * bool(form.error), text
    assert [words for words in form.said if words not in text] == [], text
    assert [words for words in form.not_said if words in text] == [], text


SETTINGS_ALONE = ["-m", "trl_grpo_ext.launch.doctor.settings_alone", "--config", "run.yaml"]
SETTINGS = f"model_name_or_path: {MODEL}\nmax_completion_length: 64\n"
