"""Checks before a run: its own script is run up to its trainer, and what is known then is examined."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
"""error: the run stops or differs from the request; warning: it runs, but not as meant; note: worth knowing."""


@dataclass(frozen=True)
class Problem:
    """One finding: about what (a key such as "launch" or "qlora+vllm"), what is wrong, and what to do."""

    severity: Severity
    subject: str
    message: str
    fix: str = ""


@dataclass(frozen=True)
class Machine:
    """The machine that a run is meant for, as far as it was described; None is as this one is."""

    gpus: int | None = None
    gpu_bytes: int | None = None  # of each
    machines: int | None = None
    assumed: bool = False  # the launch needs GPUs, and none is here
