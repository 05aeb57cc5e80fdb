"""Check in another process, so that a plugin that hangs, exits or crashes only breaks the rule that it does so in.

A forked copy of this process imports and builds the plugin and checks rule after rule. It reports events, the same that
come of checking here: `events`. If a rule takes longer than the limit, or the process ends, that rule is broken, and
those after it are not checked. The limit counts the process's own time, not the time that it waits for a core on a busy
machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from .. import errors
from ..errors import BrokenPluginError, TRLGRPOExtError
from ..guard.outcomes import shown
from ..guard.workers import queued_seconds
from .rules import GATES, Broken, Checks, Finding, NotChecked, Rule, describe_exception

LOADING_SECONDS = 120.0
"""Seconds for importing and building a plugin: some import frameworks, on slow disks."""

FIRST_CALL = 2.0
"""Factor on the limit for the rule `run`, whose first call may load a model."""

_POLL_SECONDS, _PRINTED = 0.5, 20_000
_SET_PDEATHSIG = 1  # of Linux' prctl

Prepare = Callable[[], Checks]
"""Loads the plugin and returns its checks. Runs in the process of the checks."""


def events(rules: Sequence[Rule], prepare: Prepare, trying: Callable[[str], object] = str) -> Iterator[tuple[Any, ...]]:
    """Load a plugin and check the rules; yields what happens, for `Results.take`."""
    checks = prepare()
    yield "loaded", checks.name, checks.timeout
    checks.trying = trying
    root_of: dict[str, str] = {}  # of each rule that is broken, or not checked for that: the broken one
    for rule in rules:
        yield "rule", rule
        root = next((root_of[short] for short in (*GATES, *rule.rests_on) if short in root_of), None)
        found = NotChecked(f"{root} is broken") if root else checks.check(rule)
        if root or isinstance(found, Broken):
            root_of[rule.short] = root or rule.name
        yield "found", found
    yield "end", checks.no_effect()


class Results:
    """What came of each rule so far."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self.name, self.example, self.limit = "", "", LOADING_SECONDS
        self.rule: Rule | None = None
        self.found: dict[Rule, Finding] = {}
        self.no_effect = ""
        self.printed: tuple[str, ...] = ()

    def take(self, event: tuple[Any, ...]) -> None:
        """Record an event; `limit` is then the time until the next."""
        match event:
            case "error", kind, text:
                raise getattr(errors, kind, TRLGRPOExtError)(text)
            case "loaded", name, declared:
                self.name, self._timeout = name, declared or self._timeout
            case "rule", Rule() as rule:
                self.rule, self.example = rule, ""
                self.limit = self._timeout * (FIRST_CALL if rule.short == "run" else 1.0)
            case "trying", str() as text:
                self.example = text
            case "found", found:
                assert self.rule is not None
                self.found[self.rule] = found
            case "end", no_effect:
                self.no_effect = no_effect


def run_here(rules: Sequence[Rule], prepare: Prepare) -> Results:
    """Check the rules in this process, which the plugin may stop or change."""
    results = Results(LOADING_SECONDS)
    for event in events(rules, prepare):
        results.take(event)
    return results


def run_in_process(rules: Sequence[Rule], prepare: Prepare, timeout: float) -> Results:
    """Check the rules in a forked process, with so many seconds for each rule."""
    results = Results(timeout)
    with tempfile.TemporaryFile() as output:
        with _forked(rules, prepare, output.fileno()) as (process, reports):
            lost = _follow(process, reports, results)
        results.printed = tuple(os.pread(output.fileno(), _PRINTED, 0).decode(errors="replace").splitlines())
    if lost and results.rule is None:
        last = f" It printed {shown(results.printed[-1])}." if results.printed else ""
        what = f"{results.name or 'the plugin'} cannot be loaded: while it was imported and built, {lost}"
        raise BrokenPluginError(f"{what}.{last}")
    if lost:
        left = [rule for rule in rules if rule not in results.found]
        results.found |= {rule: NotChecked("the process was lost before") for rule in left}
        results.found[left[0]] = Broken(lost, results.example)
    return results


def _follow(process: Any, reports: Connection, results: Results) -> str:
    """Record a process's events until it is done; how it was lost, in words, if it was."""

    def own_time() -> float:
        return time.monotonic() - (queued_seconds(process.pid) or 0.0)

    began, event = own_time(), ("",)
    while event[0] != "end":
        left = results.limit - (own_time() - began)
        if left <= 0:
            return f"it did not return within {results.limit:g} s, and its process was ended"
        if not reports.poll(min(max(left, 0.05), _POLL_SECONDS)):
            continue
        try:
            event = reports.recv()
        except (EOFError, OSError):  # it may end in the middle of a report
            process.join()
            code = process.exitcode
            with contextlib.suppress(ValueError):
                return f"it crashed the process ({signal.Signals(-code).name})"
            return f"it ended the process with exit status {code} (os._exit?)"
        results.take(event)
        if event[0] != "trying":  # during which the clock of the rule runs on
            began = own_time()
    return ""


@contextlib.contextmanager
def _forked(rules: Sequence[Rule], prepare: Prepare, output: int) -> Iterator[tuple[Any, Connection]]:
    """A process that checks rules; in the end it is killed, with everything that it started."""
    context = multiprocessing.get_context("fork")
    reports, pipe = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(pipe, reports, output, os.getpid(), rules, prepare))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # "multi-threaded": the threads hold nothing of ours
        process.start()
    pipe.close()
    try:
        yield process, reports
    finally:
        reports.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # there is no such group yet, or no more
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()


def _work(
    pipe: Connection, reports: Connection, output: int, parent: int, rules: Sequence[Rule], prepare: Prepare
) -> None:
    """Check the rules and report. Never returns into the code that forked."""
    status = 1
    try:
        reports.close()
        os.setpgid(0, 0)
        with contextlib.suppress(AttributeError, OSError):  # Linux alone has it
            ctypes.CDLL(None).prctl(_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() == parent:
            _redirect(output)
            try:
                for event in events(rules, prepare, lambda example: pipe.send(("trying", example))):
                    pipe.send(event)
            except TRLGRPOExtError as error:
                pipe.send(("error", type(error).__name__, str(error)))
            except BaseException as error:  # SystemExit too; rules catch what they provoke
                problem = f"while the plugin was imported and built {describe_exception(error)}"
                pipe.send(("error", "BrokenPluginError", problem))
            status = 0
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _redirect(output: int) -> None:
    """Read nothing, and print into a file."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (
        open(stream, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
        for stream in (1, 2)
    )
    if faulthandler.is_enabled():  # it would write past the redirection
        faulthandler.enable(sys.stderr)
    torch = sys.modules.get("torch")
    if torch is not None:  # what OpenMP had started is not in a forked copy
        torch.set_num_threads(1)
