"""Run code in the sandbox, as its tests do."""

import textwrap
from typing import Any

import pytest

from trl_grpo_ext.rewards._sandbox.forms_of_tests import read_tests
from trl_grpo_ext.rewards._sandbox.jobs import LAYERS, Run, isolation, run_all, run_python

needs_layers = pytest.mark.skipif(
    set(isolation()) != set(LAYERS), reason=f"this machine gives only {isolation()}: needs Landlock and seccomp"
)


def module(code: str, *tests: str, seconds: float = 10.0, memory_mb: int = 256, **more: Any) -> Run:
    """Hold code in one process and run tests of it in another."""
    plan: Any = {**read_tests([*tests] or ["assert nothing"]), "stop": False, "own_copies": False, "seen": {}}  # type: ignore[dict-item]
    return run_python(textwrap.dedent(code), plan, seconds=seconds, memory_mb=memory_mb, **more)


def program(code: str, stdin: str = "", seconds: float = 10.0) -> Run:
    return run_python(textwrap.dedent(code), seconds=seconds, memory_mb=256, stdin=stdin.encode())


def in_parallel(codes: list[str], **limits: Any) -> list[Run]:
    return run_all([lambda stop, code=code: module(code, stop=stop, **limits) for code in codes], workers=2)  # type: ignore[misc]


def failure(run: Run) -> str:
    """The name of the exception that the code ended with."""
    return str(run.messages[0]["failed"][0])


def raised(code: str) -> str:
    return failure(module(code))


def statuses(run: Run) -> list[str]:
    return [message["status"] for message in run.messages if "status" in message]
