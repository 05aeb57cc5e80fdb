"""Checks before a run: environment, launch, memory and batch arithmetic, known bad combinations."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
"""error: the run will fail or differ from the request; warning: it runs, but not as meant; note: worth knowing."""


@dataclass(frozen=True)
class Problem:
    """One finding: about what (a key such as "launch" or "qlora+vllm"), what is wrong, and what to do."""

    severity: Severity
    subject: str
    message: str
    fix: str
