"""Check the rules of one plugin in a process that can be stopped.

A plugin may sleep for ever, raise `SystemExit`, call `os._exit` or crash the interpreter. So it is loaded and tried in
a forked copy of this process, which reports each rule and its result over a pipe. If a rule takes longer than the
limit, or the process ends, that rule is broken, and another copy continues with the next rule.

The limit counts the process's own time, not the time that it waits for a core on a busy machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from .. import errors
from ..errors import BrokenPluginError, TRLGRPOExtError
from ..guard.outcomes import shown
from ..guard.worker_processes import queued_seconds
from .rules import GATES, Checks, Rule, Violation, describe_exception

LOADING_SECONDS = 120.0
"""Seconds for importing and building a plugin: some import frameworks, on slow disks."""

FIRST_CALL = 2.0
"""Factor on the limit for the rule `run`, whose first call may load a model."""

_MOST_HANGS = 2
_LOOKS = 0.05
_LONGEST_LINE, _LINES = 200, 5
_SET_PDEATHSIG = 1

Progress = Callable[[str, int, int], None]
"""Called with the rule's name, its number and the number of rules."""


@dataclass
class Outcome:
    """The results of the rules, as in `Report`."""

    name: str = ""
    passed: list[Rule] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    skipped: list[tuple[Rule, str]] = field(default_factory=list)
    measured: dict[str, float | str] = field(default_factory=dict)
    unshown: str = ""
    printed: tuple[tuple[str, ...], int] = ((), 0)

    def take(self, rule: Rule, found: dict[str, str]) -> None:
        """Record a result of `Checks.check`."""
        if "skipped" in found:
            self.skipped.append((rule, found["skipped"]))
        elif found:
            self.violations.append(Violation(rule, found["message"], found["example"], found["cause"]))
        else:
            self.passed.append(rule)

    def skip(self, rules: Sequence[Rule], reason: str) -> None:
        """Record rules that are not checked."""
        self.skipped += [(rule, reason) for rule in rules]

    def closed_by(self, rule: Rule) -> str:
        """Why the rules after this one are not checked; empty if they are."""
        gate = bool(self.violations) and self.violations[-1].rule is rule and rule.short in GATES
        return f"{rule.name} is broken" if gate else ""


Prepare = Callable[[], tuple[str, Checks]]
"""Loads the plugin and returns its name and checks. Runs in the process of the checks."""


def check_here(rules: Sequence[Rule], prepare: Prepare, progress: Progress | None = None) -> Outcome:
    """Check the rules in this process, which the plugin may stop or change."""
    name, checks = prepare()
    outcome = Outcome(name)
    for place, rule in enumerate(rules):
        if progress is not None:
            progress(rule.name, place + 1, len(rules))
        outcome.take(rule, checks.check(rule))
        if closed := outcome.closed_by(rule):
            outcome.skip(rules[place + 1 :], closed)
            break
    outcome.measured, outcome.unshown = checks.measured(), "" if outcome.violations else checks.unshown()
    return outcome


def check_apart(rules: Sequence[Rule], prepare: Prepare, timeout: float, progress: Progress | None = None) -> Outcome:
    """Check the rules in processes that can be stopped.

    Args:
        rules: The rules, in order.
        prepare: Loads the plugin.
        timeout: Seconds for each rule.
        progress: Called before each rule.

    Raises:
        TRLGRPOExtError: The plugin cannot be loaded, or not within `LOADING_SECONDS`.
    """
    outcome, left, hangs = Outcome(), list(rules), 0
    with tempfile.TemporaryFile() as output:
        while left:
            child = _Child(left, prepare, output.fileno())
            try:
                going = _follow(child, outcome, left, len(rules), timeout, progress)
            finally:
                child.end()
            if not going:
                break
            hangs += 1
            rule = outcome.violations[-1].rule
            del left[: left.index(rule) + 1]
            if closed := outcome.closed_by(rule):
                outcome.skip(left, closed)
                break
            if hangs == _MOST_HANGS:
                outcome.skip(left, f"its process had to be ended {hangs} times")
                break
        outcome.printed = _printed(output)
    if outcome.violations:
        outcome.unshown = ""
    return outcome


def _follow(
    child: _Child, outcome: Outcome, rules: Sequence[Rule], count: int, timeout: float, progress: Progress | None
) -> bool:
    """Read a child's reports until it is done. True if it was lost in a rule, which is then broken."""
    by_name, rule, trying = {rule.name: rule for rule in rules}, None, ""
    limit = LOADING_SECONDS
    while True:
        message = child.next(limit)
        if message is None:
            how = child.why(limit)
            if rule is None:
                what = f"{outcome.name or 'the plugin'} cannot be loaded: while it was imported and built, {how}"
                raise BrokenPluginError(f"{what}.{_last_line(child)}")
            outcome.violations.append(Violation(rule, how, trying, f"lost: {how}"))
            return True
        match message:
            case {"error": [kind, text]}:
                raise getattr(errors, kind, TRLGRPOExtError)(text)
            case {"name": name, "timeout": declared}:
                outcome.name, timeout = name, timeout if declared is None else declared
            case {"rule": name}:
                rule, trying = by_name[name], ""
                limit = timeout * (FIRST_CALL if rule.short == "run" else 1.0)
                if progress is not None:
                    progress(rule.name, count - len(rules) + rules.index(rule) + 1, count)
            case {"trying": example}:
                trying = example
                continue  # the clock of the rule runs on
            case {"found": found}:
                assert rule is not None
                outcome.take(rule, found)
            case {"closed": closed}:
                assert rule is not None
                outcome.skip(rules[rules.index(rule) + 1 :], closed)
            case {"measured": measured, "unshown": unshown}:
                outcome.measured, outcome.unshown = measured, unshown
                return False
        child.restart_clock()


class _Child:
    """A forked copy of this process that checks rules and reports."""

    def __init__(self, rules: Sequence[Rule], prepare: Prepare, output: int) -> None:
        self._read, write = os.pipe()
        self._rest = b""
        self._status: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # "multi-threaded": the threads hold nothing of ours
            self.pid = os.fork()
        if self.pid == 0:
            os.close(self._read)
            _be_child(write, output, parent, rules, prepare)
        os.close(write)
        with contextlib.suppress(OSError):  # the child does so too: whoever comes first
            os.setpgid(self.pid, self.pid)
        self.output = output
        self.restart_clock()

    def restart_clock(self) -> None:
        """Count from now on."""
        self._began, self._queued = time.monotonic(), queued_seconds(self.pid) or 0.0

    def _own_seconds(self) -> float:
        waited = (queued_seconds(self.pid) or self._queued) - self._queued
        return time.monotonic() - self._began - waited

    def next(self, limit: float) -> dict[str, Any] | None:
        """Its next report; None if it has ended, or reports nothing within this many seconds of its own time."""
        while b"\n" not in self._rest:
            left = limit - self._own_seconds()
            if left <= 0:
                return None
            if select.select([self._read], [], [], min(max(left, _LOOKS), 1.0))[0]:
                part = os.read(self._read, 65536)
                if not part:
                    self._status = os.waitpid(self.pid, 0)[1]
                    return None
                self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def why(self, limit: float) -> str:
        """Why it does not report."""
        if self._status is None:
            return f"it did not return within {limit:g} s, and its process was ended"
        code = os.waitstatus_to_exitcode(self._status)
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"it crashed the process ({signal.Signals(-code).name})"
        return f"it ended the process with exit status {code} (os._exit?)"

    def end(self) -> None:
        """Kill it, with everything that it started."""
        os.close(self._read)
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)
        if self._status is None:
            self._status = os.waitpid(self.pid, 0)[1]


def _be_child(write: int, output: int, parent: int, rules: Sequence[Rule], prepare: Prepare) -> NoReturn:
    """Check the rules and report. Never returns into the code that forked."""
    status = 1
    try:
        os.setpgid(0, 0)
        with contextlib.suppress(AttributeError, OSError):  # Linux alone has it
            ctypes.CDLL(None).prctl(_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:
            os._exit(1)
        _redirect(output)
        with os.fdopen(write, "w", encoding="utf-8", buffering=1) as pipe:

            def say(**message: Any) -> None:
                pipe.write(json.dumps(message) + "\n")

            _check(say, rules, prepare)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _redirect(output: int) -> None:
    """Read nothing, and print into a file."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
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


def _check(say: Callable[..., None], rules: Sequence[Rule], prepare: Prepare) -> None:
    try:
        name, checks = prepare()
    except TRLGRPOExtError as error:
        say(error=[type(error).__name__, str(error)])
        return
    except BaseException as error:  # SystemExit too
        say(error=["BrokenPluginError", f"while the plugin was imported and built {describe_exception(error)}"])
        return
    say(name=name, timeout=checks.timeout)
    last = ""

    def trying(example: str) -> None:
        nonlocal last
        if example != last:
            last = example
            say(trying=example)

    checks.trying = trying
    for rule in rules:
        say(rule=rule.name)
        found = checks.check(rule)
        say(found=found)
        if "message" in found and rule.short in GATES:
            say(closed=f"{rule.name} is broken")
            break
    say(measured=checks.measured(), unshown=checks.unshown())


def _printed(output: Any) -> tuple[tuple[str, ...], int]:
    """The first printed lines, and the total number."""
    output.seek(0)
    lines: list[str] = []
    count = 0
    for line in output:
        count += 1
        if len(lines) < _LINES:
            lines.append(line[: _LONGEST_LINE + 1].decode(errors="replace").rstrip("\n"))
    return tuple(line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..." for line in lines), count


def _last_line(child: _Child) -> str:
    size = os.fstat(child.output).st_size
    text = os.pread(child.output, 1000, max(size - 1000, 0)).decode(errors="replace").strip()
    return f" It printed {shown(text.splitlines()[-1])}." if text else ""
