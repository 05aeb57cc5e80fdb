"""What the doctor found wrong: one record for every check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
"""error: the run will fail; warning: it will run but not as meant; note: worth knowing."""


@dataclass(frozen=True)
class Problem:
    """One finding.

    Attributes:
        severity: error (the run will fail), warning (it runs, but not as meant) or note.
        subject: A short key of what the finding is about, such as "batch" or "qlora+vllm".
        message: What is wrong, with the values.
        fix: What to do about it.
    """

    severity: Severity
    subject: str
    message: str
    fix: str
