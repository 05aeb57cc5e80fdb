"""Check the rules of one plugin, here or in a process that can be stopped.

A plugin may sleep for ever, raise `SystemExit`, call `os._exit` or crash the interpreter. So it is loaded and tried in
a forked copy of this process (a plugin given as an object need not pickle), which reports each rule over a pipe. If a
rule takes longer than the limit, or the process ends, that rule is broken, and another copy continues with the next.
The limit counts the process's own time, not the time that it waits for a core on a busy machine.
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
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from .. import errors
from ..errors import BrokenPluginError, TRLGRPOExtError
from ..guard.outcomes import shown
from ..guard.worker_processes import queued_seconds
from .reports import Violation
from .rules import GATES, Broken, Checks, Finding, Rule, Unknown, describe_exception

LOADING_SECONDS = 120.0
"""Seconds for importing and building a plugin: some import frameworks, on slow disks."""

FIRST_CALL = 2.0
"""Factor on the limit for the rule `run`, whose first call may load a model."""

_MOST_ENDED, _POLL_SECONDS = 2, 0.5
_LONGEST_LINE, _LINES = 200, 5
_SET_PDEATHSIG = 1  # of Linux' prctl

Prepare = Callable[[], tuple[str, Checks]]
"""Loads the plugin and returns its name and checks. Runs in the process of the checks."""
Progress = Callable[[str, int, int], None]
"""Called with the rule's name, its number and the number of rules."""


@dataclass
class Results:
    """What came of the rules so far, as in `Report`, and the rules that are left."""

    left: list[Rule]
    name: str = ""
    passed: list[Rule] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    skipped: list[tuple[Rule, str]] = field(default_factory=list)
    because: dict[str, str] = field(default_factory=dict)
    measured: dict[str, float | str] = field(default_factory=dict)
    no_effect: str = ""
    printed: tuple[tuple[str, ...], int] = ((), 0)

    def add(self, rule: Rule, found: Finding) -> None:
        """Record what came of a rule; without a gate the rules that are left cannot be checked."""
        del self.left[: self.left.index(rule) + 1]
        if found is None:
            self.passed.append(rule)
        elif isinstance(found, Broken):
            self.violations.append(Violation(rule, found.message, found.example, found.cause))
            if rule.short in GATES:
                self.skip_rest(f"{rule.name} is broken")
        else:
            self.skipped.append((rule, str(found)))
            self.because[rule.name] = type(found).__name__

    def skip_rest(self, reason: str) -> None:
        """Record that the rules that are left are not checked."""
        while self.left:
            self.add(self.left[0], Unknown(reason))


def run_here(rules: Sequence[Rule], prepare: Prepare, progress: Progress | None = None) -> Results:
    """Check the rules in this process, which the plugin may stop or change."""
    results = Results([*rules])
    results.name, checks = prepare()
    for number, rule in enumerate(rules, 1):
        if rule in results.left:
            if progress is not None:
                progress(rule.name, number, len(rules))
            results.add(rule, checks.check(rule))
    results.measured, results.no_effect = checks.measured(), "" if results.violations else checks.no_effect()
    return results


def run_in_process(
    rules: Sequence[Rule], prepare: Prepare, timeout: float, progress: Progress | None = None
) -> Results:
    """Check the rules in forked processes, with so many seconds for each rule.

    Raises:
        TRLGRPOExtError: The plugin cannot be loaded, or not within `LOADING_SECONDS`.
    """
    results, ended = Results([*rules]), 0
    with tempfile.TemporaryFile() as output:
        while results.left:
            with _forked(results.left, prepare, output.fileno()) as child:
                went_on = _follow(child, results, rules, timeout, progress)
            if went_on:
                break
            ended += 1
            if ended == _MOST_ENDED:
                results.skip_rest(f"its process had to be ended {ended} times")
        results.printed = _printed(output)
    if results.violations:
        results.no_effect = ""
    return results


def _follow(child: _Child, results: Results, rules: Sequence[Rule], timeout: float, progress: Progress | None) -> bool:
    """Record a child's reports until it is done. False if it was lost in a rule, which is then broken."""
    rule: Rule | None = None
    example, limit = "", LOADING_SECONDS
    while True:
        try:
            report = child.next(limit)
        except _LostError as lost:
            if rule is None:
                what = f"{results.name or 'the plugin'} cannot be loaded: while it was imported and built, {lost}"
                raise BrokenPluginError(f"{what}.{child.last_line()}") from None
            results.add(rule, Broken(str(lost), example, f"lost: {lost}"))
            return False
        match report:
            case "error", kind, text:
                raise getattr(errors, kind, TRLGRPOExtError)(text)
            case "loaded", name, declared:
                results.name, timeout = name, declared or timeout
            case "rule", Rule() as rule:
                example, limit = "", timeout * (FIRST_CALL if rule.short == "run" else 1.0)
                if progress is not None:
                    progress(rule.name, list(rules).index(rule) + 1, len(rules))
            case "trying", str() as example:
                continue  # the clock of the rule runs on
            case "found", found:
                assert rule is not None
                results.add(rule, found)
            case "end", measured, no_effect:
                results.measured, results.no_effect = measured, no_effect
                return True
        child.restart_clock()


class _LostError(Exception):
    """A process ended or did not report in time; the message says which."""


class _Child:
    """A forked process that reports."""

    def __init__(self, process: Any, reports: Connection, output: int) -> None:
        self.process, self._reports, self._output = process, reports, output
        self.restart_clock()

    def restart_clock(self) -> None:
        """Count from now on."""
        self._began, self._queued = time.monotonic(), self._waited()

    def _waited(self) -> float:
        return queued_seconds(self.process.pid) or 0.0

    def next(self, limit: float) -> Any:
        """Its next report, within so many seconds of its own time; else `_LostError`."""
        while True:
            waited = max(self._waited() - self._queued, 0.0)
            left = limit - (time.monotonic() - self._began - waited)
            if left <= 0:
                raise _LostError(f"it did not return within {limit:g} s, and its process was ended")
            if self._reports.poll(min(max(left, 0.05), _POLL_SECONDS)):
                try:
                    return self._reports.recv()
                except (EOFError, OSError):  # it may end in the middle of a report
                    raise _LostError(self._how_it_ended()) from None

    def _how_it_ended(self) -> str:
        self.process.join()
        code = self.process.exitcode
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"it crashed the process ({signal.Signals(-code).name})"
        return f"it ended the process with exit status {code} (os._exit?)"

    def last_line(self) -> str:
        """What it printed last."""
        size = os.fstat(self._output).st_size
        text = os.pread(self._output, 1000, max(size - 1000, 0)).decode(errors="replace").strip()
        return f" It printed {shown(text.splitlines()[-1])}." if text else ""


@contextlib.contextmanager
def _forked(rules: Sequence[Rule], prepare: Prepare, output: int) -> Iterator[_Child]:
    """A process that checks rules; in the end it is killed, with everything that it started."""
    context = multiprocessing.get_context("fork")
    reports, pipe = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(pipe, reports, output, os.getpid(), rules, prepare))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # "multi-threaded": the threads hold nothing of ours
        process.start()
    pipe.close()
    try:
        yield _Child(process, reports, output)
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
            _report(pipe.send, rules, prepare)
            status = 0
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _report(send: Callable[[Any], None], rules: Sequence[Rule], prepare: Prepare) -> None:
    try:
        name, checks = prepare()
    except TRLGRPOExtError as error:
        send(("error", type(error).__name__, str(error)))
        return
    except BaseException as error:  # SystemExit too
        send(("error", "BrokenPluginError", f"while the plugin was imported and built {describe_exception(error)}"))
        return
    send(("loaded", name, checks.timeout))
    checks.trying = lambda example: send(("trying", example))
    for rule in rules:
        send(("rule", rule))
        found = checks.check(rule)
        send(("found", found))
        if isinstance(found, Broken) and rule.short in GATES:
            break
    send(("end", checks.measured(), checks.no_effect()))


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


def _printed(output: Any) -> tuple[tuple[str, ...], int]:
    """The first printed lines, and the total number."""
    output.seek(0)
    lines, count = [], 0
    for count, line in enumerate(output, 1):
        if count <= _LINES:
            text = line[: _LONGEST_LINE + 1].decode(errors="replace").rstrip("\n")
            lines.append(text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]}...")
    return tuple(lines), count
