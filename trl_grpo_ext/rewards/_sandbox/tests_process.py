"""The process that runs the tests of a solution, which another one holds: `keeper` forks both."""

# Beside the tests' own process, pathlib gives nothing here.
# ruff: noqa: PTH100, PTH109, PTH117, PTH123, SIM115
import builtins
import dataclasses
import functools
import importlib
import importlib.machinery
import inspect
import io
import os
import random
import sys
import types
import unittest
import unittest.mock
import warnings
from collections.abc import Callable
from typing import Any

from . import remote
from .checks import NOTHING, GoneError, Side, is_nothing
from .hostile import MAX_TEXT
from .remote import Remote, RemoteType, SolutionModule, WrongError
from .wire import SOLUTION_MODULES


def _run_tests(plan: dict[str, Any], report: Callable[[dict[str, Any]], None]) -> None:
    names: dict[str, Any] = {"__builtins__": remote.Names(plan), "__name__": "tests"}
    for number, test in enumerate(plan["tests"]):
        SIDE.fresh()
        status, detail = _verdict(number, test, names)
        known = {"memory": SIDE.memory, "gone": SIDE.gone, "process": SIDE.process}
        report({"test": number, "status": status, "detail": detail, **known})
        goes_on = SIDE.own_copies and SIDE.changed
        if SIDE.gone or (status == "fail" and plan["stop"] and not goes_on):
            return
    report({"end": True, "seen": SIDE.seen if SIDE.own_copies and SIDE.changed else {}})


def _verdict(number: int, test: dict[str, Any], names: dict[str, Any]) -> tuple[str, str]:
    try:
        error = _first_error(number, test, names)
    except BaseException as raised:  # what a test raises is its verdict, `SystemExit` too
        error = raised
    if SIDE.gone or isinstance(error, WrongError):
        return "fail", SIDE.gone or str(error)
    if SIDE.reason and error is not None:
        return "unjudged", SIDE.reason  # what followed from it says nothing
    if error is not None:
        own = not (SIDE.failure or isinstance(error, Remote) or any(raised is error for raised in SIDE.raised))
        if own and isinstance(error, ModuleNotFoundError):
            return "unjudged", f"the tests import {error.name}, which is not installed"
        return "fail", f"{type(error).__name__[:MAX_TEXT]}: {_text(error)}"
    if test["empty"] and not SIDE.failure:
        return "setup", ""
    status, detail = SIDE.verdict()
    if status == "pass" and SIDE.asked < 2:  # the first request loads the solution
        return "unjudged", "the tests never used the solution"
    return status, detail


def _first_error(number: int, test: dict[str, Any], names: dict[str, Any]) -> BaseException | None:
    for source in [test["source"], *test["calls"]]:
        exec(compile(source, f"<test {number}>", "exec", dont_inherit=True), names)
    for name in test["functions"]:
        names[name]()
    for name in test["classes"]:
        ran = _Result()
        unittest.defaultTestLoader.loadTestsFromTestCase(names[name]).run(ran)
        if ran.first is not None:
            return ran.first
    return None


class _Result(unittest.TestResult):
    first: BaseException | None = None

    def addFailure(self, test: Any, err: Any) -> None:
        self.first = self.first or err[1]

    addError = addFailure

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self.first = self.first or err[1]

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        SIDE.expected(err[1])

    def addUnexpectedSuccess(self, test: Any) -> None:
        self.first = self.first or AssertionError("an unexpected success")


def _text(error: BaseException) -> str:
    return (repr(error.args) if isinstance(error, Remote) else str(error))[:MAX_TEXT]


def _replace(module: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(module, name, make(getattr(module, name)))


def _run_by_solution(function: Any) -> Any:
    """Run a function of the standard library in the solution's process if it is about an object of the solution."""

    @functools.wraps(function)
    def call(value: Any, *arguments: Any, **keywords: Any) -> Any:
        if isinstance(value, Remote | RemoteType):
            return SIDE.request("call", call, (value, *arguments), tuple(keywords.items()))
        return function(value, *arguments, **keywords)

    return call


def _failing_on_nothing(first: int, otherwise: Any) -> Callable[[Any], Any]:
    """A comparison of numpy that fails where one side is empty and the other is not: `np.allclose([], 2.5)` holds."""

    def make(function: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if len({is_nothing(value) for value in arguments[first : first + 2]}) > 1:
                if otherwise is not None:
                    return otherwise
                raise AssertionError(NOTHING)
            return function(*arguments, **keywords)

        return call

    return make


def _watching(work: str) -> Callable[[str, tuple[Any, ...]], None]:
    """Tests run no code that lies where the solution may write or that it has pickled, and no process."""

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "pickle.find_class":
            raise SIDE.unjudged("it unpickles, which would run what the solution has written")
        if event in ("subprocess.Popen", "os.fork", "os.system", "os.exec", "os.posix_spawn"):
            raise SIDE.unjudged("the tests start a process")
        file = str(arguments[event == "import"]) if event in ("open", "import", "ctypes.dlopen") else ""
        if file.endswith((".py", ".pyc", ".so")) and os.path.abspath(file).startswith(work):
            raise SIDE.unjudged("the tests read code from a file")

    return watch


def _patched(change: Callable[..., None]) -> Callable[..., None]:
    """`setattr` for patches: what a module gets, the solution's process gets, too, and back what it had at first."""
    originals: dict[tuple[str, str], Any] = {}

    def patch(target: Any, name: str, *value: Any) -> None:
        module = isinstance(target, types.ModuleType) and not isinstance(target, SolutionModule)
        crosses = module and (target.__name__, name) not in _FORWARDED and target.__name__ != "tests"
        original = originals.setdefault((target.__name__, name), getattr(target, name, None)) if crosses else None
        change(target, name, *value)
        if crosses:
            SIDE.request("patch", target.__name__, name, *(new for new in value if new is not original))

    return patch


_FORWARDED = {("builtins", "input"), ("sys", "stdin"), ("sys", "stdout"), ("sys", "stderr")}
"""What a program reads and prints goes through this process anyway."""


def _prepare_modules() -> None:
    """Make the modules that tests use safe, and patches and seeds reach the solution's process, too."""
    for name in ("asdict", "astuple", "fields", "is_dataclass", "replace"):
        _replace(dataclasses, name, _run_by_solution)
    _replace(inspect, "signature", _run_by_solution)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        for name, otherwise in (("allclose", False), ("array_equiv", False), ("isclose", None)):
            _replace(numpy, name, _failing_on_nothing(0, otherwise))
        internals = importlib.import_module("numpy.testing._private.utils")
        _replace(internals, "assert_array_compare", _failing_on_nothing(1, None))
    setattr(unittest, "main", lambda *arguments, **keywords: None)  # noqa: B010  # test cases are run anyway
    vars(unittest.mock)["setattr"] = _patched(setattr)
    seed = random.seed

    def seeded(value: Any = None, *rest: Any) -> None:
        seed(value, *rest)
        if type(value) in (int, str, float, bytes):
            SIDE.request("seed", value)

    random.seed = seeded  # type: ignore[assignment]


def judge(job: dict[str, Any], requests: int, replies: int, shared: Any, report: Any) -> None:
    """Load the solution, run the plan's tests (`forms_of_tests`), and report on each."""
    global SIDE
    SIDE = remote.SIDE = Side(requests, replies, shared, job["own_copies"], job["seen"])
    vars(builtins)["__judge__"] = SIDE
    warnings.simplefilter("ignore")
    libraries = tuple(path for path in sys.path if os.path.isabs(path))
    find = importlib.machinery.FileFinder.path_hook(*_LOADERS)

    def only_libraries(path: str) -> Any:
        if not path.startswith(libraries):
            raise ImportError(path)  # whatever the tests make of `sys.path`
        return find(path)

    sys.path_hooks[:] = [only_libraries]
    sys.path_importer_cache.clear()
    sys.modules.update({name: SolutionModule(name) for name in SOLUTION_MODULES}, tests=types.ModuleType("tests"))
    sys.stdin = io.StringIO()
    sys.stdout, sys.stderr = open(os.devnull, "w", encoding="utf-8"), open(os.devnull, "w", encoding="utf-8")
    sys.argv = ["tests.py"]
    try:
        unread = SIDE.request("load", job["code"])
    except GoneError:
        report({"failed": ["GoneError", SIDE.gone], "gone": SIDE.gone})
        return
    except BaseException as error:  # what the code raises is the verdict, whatever it is
        failed = [type(error).__name__[:MAX_TEXT], _text(error)]
        report({"failed": failed, "memory": SIDE.memory, "process": SIDE.process})
        return
    if unread is not None:
        report({"unread": [str(part)[:MAX_TEXT] for part in unread]})
        return
    random.seed(0)
    _prepare_modules()
    sys.addaudithook(_watching(os.getcwd()))
    _run_tests(job, report)


SIDE: Side = None  # type: ignore[assignment]  # the one of this process
_LOADERS = (
    (importlib.machinery.ExtensionFileLoader, importlib.machinery.EXTENSION_SUFFIXES),
    (importlib.machinery.SourceFileLoader, importlib.machinery.SOURCE_SUFFIXES),
    (importlib.machinery.SourcelessFileLoader, importlib.machinery.BYTECODE_SUFFIXES),
)
