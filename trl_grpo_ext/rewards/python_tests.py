"""Does the completion's Python code pass its tests? It runs in an unprivileged process, with limits."""

import functools
import re
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..errors import ConfigurationError
from ..guard.messages import completion_text
from ..guard.outcomes import Judgement, Outcome, shown
from ..guard.parameters import column as checked_column
from ..guard.parameters import flag, seconds, whole
from ..guard.workers import default_workers
from ..types import Part, Parts, RewardDeclaration
from ._judged import ABOUT_A_REFERENCE, Judged, too_long
from ._sandbox.forms_of_tests import Examples, Plan, UnreadableTestsError, read_tests, same_output
from ._sandbox.jobs import LAYERS, Run, isolation, run_all, run_python
from ._sandbox.wire import NO_THREAD
from ._text.fences import fences, without_indentation

_ENDED = "the process ended before its tests did"
_ENDINGS = {
    "timeout": (Outcome.TIMEOUT, "it takes too long"),
    "tests": (Outcome.UNPARSEABLE, "the tests themselves take too long"),
    "storage": (Outcome.DIED, "it stored too much"),
    "threads": (Outcome.DIED, "it started too many threads"),
    "output": (Outcome.WRONG, "it printed or handed over too much"),
}
_THOUGHT = re.compile(r"</think(?:ing)?>(?!['\"\\])")  # not in a string
_ANSWER = re.compile(r"\s*+<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)


class PythonTests(Judged):
    """Score 1.0 where the completion's code passes all its tests, 0.0 where it does not.

    The code is the completion's last fence marked python, else its last fence, else its whole text, after the thinking
    (`</think>`) if anything like it follows there. The dataset's column `tests` has, for each row, one of

    - a list of statements, `["assert add(1, 2) == 3", ...]` (MBPP): each is a test;
    - one source text (HumanEval, `test_*` functions, unittest): one test, for which `check(candidate)` is called with
      the row's value in the column `entry_point`;
    - a list of `{"input": ..., "output": ...}` (LiveCodeBench), or `{"inputs": [...], "outputs": [...]}` (APPS, TACO):
      the code is a program that reads and prints, or a function that is called (`testtype: functional`, `fn_name`).

    A program runs once per test, in its own process. Otherwise one process holds the code, and another runs the tests,
    in order and in one namespace, and gets values as data. docs/rewards.md ("Code and its tests") says what the code
    may do, and how its results are compared.

    The outcomes: `no_answer`, there is no code or it does not compile; `wrong`, a test failed, the code raised, or it
    ended the process before the tests were done; `died`, it crashed the interpreter, ran out of memory or stored too
    much; `timeout`; `refused`, the completion is too long, or failed and had tried to start a process; `scored`, with
    `partial`, some tests pass; `unparseable_reference`, the tests are in none of the forms, or cannot judge this code.

    Args:
        partial: Score the share of tests that pass. Each test is a part, `test_0` and so on; its place is the function
            of the code that it calls, if that is one, else all of the code.
        timeout: Seconds of processor time, and half of those asleep, that the code may take for all of its tests.
        memory_mb: Memory, in MiB, beyond the interpreter's own.
        workers: How many completions are tested at a time; None means the cores divided among the ranks, at most 8.
        max_characters: Longer completions are refused.
        require: Layers that must hold; by default all: "files", "network", "processes", "memory".
        outcomes: Values of outcomes, by name: a number, null or "raise".

    Raises:
        ConfigurationError: A parameter is invalid, or this machine lacks a required layer.
    """

    __name__ = "python_tests"
    can = (*ABOUT_A_REFERENCE, Outcome.SCORED, Outcome.TIMEOUT, Outcome.DIED, Outcome.REFUSED)
    reads = "the tests"
    declares = RewardDeclaration(
        conformance={
            "parameters": {"partial": True},
            "columns": {"tests": [["assert add(1, 2) == 3", "assert add(0, 0) == 0"]]},
            "completions": ["def add(a, b):\n    return a + b", "def add(a, b):\n    return a", "18"],
        }
    )

    partial: bool = flag(False)
    timeout: float = seconds(5.0)
    memory_mb: int = whole(512, lowest=1)
    workers: int | None = whole(None, lowest=1)
    max_characters: int = whole(100_000, lowest=1)
    require: Sequence[str] = LAYERS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.require, list | tuple) or not all(layer in LAYERS for layer in self.require):
            raise ConfigurationError(f"python_tests: require must be a list out of {LAYERS}, got {self.require!r}.")
        missing = [layer for layer in self.require if layer not in isolation(self.memory_mb)]
        if missing:
            raise ConfigurationError(
                f"python_tests: this machine cannot hold the layers {', '.join(missing)}. They need Landlock (Linux "
                "5.13) and seccomp (x86-64, aarch64); `require` may leave them out."
            )

    def judge(self, completions: Sequence[Any], **kwargs: Any) -> list[Judgement]:
        count = len(completions)
        advice = "Rename the column that holds the unit tests to 'tests'."
        tests = checked_column(self.__name__, "tests", kwargs, count, advice)
        points: Sequence[Any] = [None] * count
        if kwargs.get("entry_point") is not None:
            points = checked_column(self.__name__, "entry_point", kwargs, count)
        rows = zip(map(completion_text, completions), tests, points, strict=True)
        return run_all([functools.partial(self._judged, *row) for row in rows], self.workers or default_workers())

    def _judged(self, text: str, tests: Any, entry_point: Any, stop: threading.Event) -> Judgement:
        try:
            read = read_tests(tests, entry_point)
        except UnreadableTestsError as error:
            return Judgement(Outcome.UNPARSEABLE, str(error))
        if len(text) > self.max_characters:
            refused = Judgement(Outcome.REFUSED, too_long(len(text), self.max_characters))
            return self._in_parts(refused, set(), read, "")
        code = fenced_code(text)
        if not code.strip():
            return self._in_parts(Judgement(Outcome.NO_ANSWER, "no code"), set(), read, "")
        if isinstance(read, list):
            judgement, passed = self._try_examples(code, read, stop)
        else:
            judgement, passed = self._try_plan(code, read, stop)
        return self._in_parts(judgement, passed, read, text)

    def _in_parts(self, judgement: Judgement, passed: set[int], tests: Plan | Examples, text: str) -> Judgement:
        """With `partial`, the judgement with a part for each test; those of an empty text stand nowhere."""
        if not self.partial or judgement.outcome is Outcome.UNPARSEABLE:
            return judgement
        plan = tests if isinstance(tests, dict) else {"tests": [{"empty": False}] * len(tests), "free": []}
        start, end = code_span(text)
        found: dict[str, tuple[int, int] | None] = {}
        parts = []
        for number, test in enumerate(plan["tests"]):
            if test["empty"]:
                continue
            names = test.get("calls_of") or [name for name in plan["free"] if name != "Solution"]
            if len(names) == 1 and names[0] not in found:
                found[names[0]] = function_span(text, start, end, names[0])
            place = (len(names) == 1 and found[names[0]]) or (start, end)
            score = float(judgement.outcome is Outcome.RIGHT or number in passed)
            parts.append(Part(f"test_{number}", score, 1.0, place if text else None))
        return replace(judgement, score=Parts(parts, judgement.score or 0.0))

    def _try_plan(self, code: str, plan: Plan, stop: threading.Event) -> tuple[Judgement, set[int]]:
        plan = {**plan, "stop": not self.partial, "own_copies": True, "seen": {}}
        run = self._run(code, plan, self.timeout, b"", stop)
        passed = {message["test"] for message in run.messages if message.get("status") == "pass"}
        judgement = self._judgement(run, passed, plan)
        if judgement.outcome is not Outcome.RIGHT and run.changed:  # it may work in place
            seen: Any = next((message["seen"] for message in run.messages if "seen" in message), {})
            run = self._run(code, {**plan, "own_copies": False, "seen": seen}, self.timeout, b"", stop)
            judgement = self._judgement(run, passed, plan)
            passed |= {message["test"] for message in run.messages if message.get("status") == "pass"}
        return judgement, passed

    def _judgement(self, run: Run, passed: set[int], plan: Plan) -> Judgement:
        failure = _failure(run)
        if failure is not None and failure.outcome in (Outcome.TIMEOUT, Outcome.NO_ANSWER, Outcome.UNPARSEABLE):
            return failure
        reports = [message for message in run.messages if message.get("status", "setup") != "setup"]
        verdicts = [message["status"] == "pass" or message["test"] in passed for message in reports]
        open_ones = [message for message in reports if message["test"] not in passed]
        wrong = next((message for message in open_ones if message["status"] == "fail"), None)
        unjudged = next((message for message in open_ones if message["status"] == "unjudged"), None)
        if failure is None and wrong is not None:
            failure = Judgement(Outcome.WRONG, f"test {wrong['test']} failed: {shown(wrong['detail'])}")
        elif failure is None and unjudged is not None:
            failure = Judgement(Outcome.UNPARSEABLE, f"test {unjudged['test']}: {unjudged['detail']}")
        elif failure is None and not any("end" in message for message in run.messages):
            failure = Judgement(Outcome.WRONG, _ENDED)
        if failure is None:
            return Judgement(Outcome.RIGHT) if any(verdicts) else Judgement(Outcome.UNPARSEABLE, "no assert ran")
        count = sum(not test["empty"] for test in plan["tests"])
        return self._shared(verdicts + [False] * (count - len(verdicts)), _refused(run) or failure)

    def _try_examples(self, code: str, examples: Examples, stop: threading.Event) -> tuple[Judgement, set[int]]:
        passed: list[bool] = []
        first: Judgement | None = None
        left = self.timeout
        for given, wanted, near in examples:
            run = self._run(code, None, left, given.encode("utf-8", "replace"), stop)
            left -= run.seconds
            failure = _failure(run) or (Judgement(Outcome.TIMEOUT) if left <= 0 else None)
            failure = failure and (_refused(run) or failure)
            if failure is not None and failure.outcome in (Outcome.TIMEOUT, Outcome.NO_ANSWER):
                return failure, set()
            if failure is None and run.status != 0:
                failure = Judgement(Outcome.WRONG, f"it ended with status {run.status}")
            if failure is None and not same_output(run.output, wanted, near):
                failure = Judgement(Outcome.WRONG, f"test {len(passed)}: it printed {shown(run.output[:100])}")
            passed.append(failure is None)
            first = first or failure
            if first is not None and not self.partial:
                return first, set()
        judgement = self._shared(passed, first) if first is not None else Judgement(Outcome.RIGHT)
        return judgement, {number for number, is_right in enumerate(passed) if is_right}

    def _run(self, code: str, plan: dict[str, Any] | None, seconds: float, stdin: bytes, stop: threading.Event) -> Run:
        for _ in range(2):  # once more where somebody killed it: the machine ran out of memory, perhaps
            limits: Any = {"seconds": seconds, "memory_mb": self.memory_mb, "require": self.require}
            run = run_python(code, plan, **limits, stdin=stdin, stop=stop)
            if run.ended != "exited" or -signal.SIGKILL not in (run.status, run.judge):
                break
        return run

    def _shared(self, passed: Sequence[bool], failure: Judgement) -> Judgement:
        if not self.partial or not any(passed):
            return failure
        share = sum(passed) / len(passed)
        return Judgement(Outcome.SCORED, f"{sum(passed)} of {len(passed)} tests pass", share)


def fenced_code(text: str) -> str:
    """The code of a completion, as `code_span` finds it, without the indentation of a list around it."""
    return without_indentation(text[slice(*code_span(text))])


def code_span(text: str) -> tuple[int, int]:
    """Where the code stands: the last fence marked python, else the last fence, else what is no thinking and no tag.

    Fences in the thinking count only if all that follow it are of other languages. An unclosed fence counts.
    """
    blocks = fences(text)
    marked = [block for block in blocks if block[0] in ("python", "python3", "py")] or blocks
    if marked:
        return marked[-1][1:3]
    start = max((thought.end() for thought in _THOUGHT.finditer(text)), default=0)
    answer = _ANSWER.match(text, start)
    return answer.span(1) if answer else (start, len(text))


def function_span(text: str, start: int, end: int, name: str) -> tuple[int, int] | None:
    """Where the last function of a name stands in code, as its indentation says; the code itself is not parsed.

    Of several, the least indented ones count. A text of several lines in it may end it too early.
    """
    heads = [
        (len(match[1]), match.start())
        for match in re.finditer(rf"^([ \t]*+)(?:async[ \t]++)?def[ \t]++{re.escape(name)}\b", text, re.MULTILINE)
        if start <= match.start() and match.end() <= end
    ]
    if not heads:
        return None
    indent = min(heads)[0]
    begin = max(at for deep, at in heads if deep == indent)
    last = at = begin
    for number, line in enumerate(text[begin:end].split("\n")):
        code = line.strip()
        if number and code and len(line) - len(line.lstrip()) <= indent and code[0] not in ")]}#":
            break
        if code and code[0] != "#":
            last = at + len(line.rstrip())
        at += len(line) + 1
    return begin + indent, last


def _refused(run: Run) -> Judgement | None:
    started = next((message["process"] for message in run.messages if message.get("process")), None)
    return started and Judgement(Outcome.REFUSED, f"it starts a process ({shown(started)}), which is not allowed here")


def _failure(run: Run) -> Judgement | None:
    if run.ended in _ENDINGS:
        outcome, said = _ENDINGS[run.ended]
        return Judgement(outcome, f"{said} ({run.seconds:.1f} s)")
    unread = next((message["unread"] for message in run.messages if "unread" in message), None)
    if unread is not None:
        return Judgement(Outcome.NO_ANSWER, f"the code does not compile: {shown(unread)}")
    if run.status < 0:
        return Judgement(Outcome.DIED, f"ended by signal {-run.status}")
    raised = [message["failed"] for message in run.messages if message.get("failed")]
    short = any(one[0] == "MemoryError" or one == ["RuntimeError", NO_THREAD] for one in raised)
    if short or any(message.get("memory") for message in run.messages):
        return Judgement(Outcome.DIED, "out of memory")
    if any("MemoryError" in str(message.get("detail", ""))[:11] for message in run.messages):
        return Judgement(Outcome.DIED, "out of memory: what the code returned is too much for its tests")
    for message in run.messages:
        if gone := message.get("gone"):
            said = _ENDED if gone == "closed" else f"it answered with no valid value ({shown(gone)})"
            return Judgement(Outcome.WRONG, said)
        if "failed" in message:
            return Judgement(Outcome.WRONG, f"the code raised {shown(message['failed'])}")
    if run.judge is not None and run.judge < 0:
        outcome = Outcome.DIED if run.answered else Outcome.UNPARSEABLE
        return Judgement(outcome, f"the tests' process was ended by signal {-run.judge}")
    return None
