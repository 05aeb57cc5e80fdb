"""The process that runs the tests of a solution, which another one holds: `keeper` forks both.

Plain values arrive as data, so `==`, `len`, `sorted`, `isinstance` and asserts are Python's own here; anything else is
`remote`. `checks` knows which asserts ran, and what they compared.
"""

# Beside the tests' own process, pathlib gives nothing here.
# ruff: noqa: PTH100, PTH109, PTH117, PTH118, PTH123, SIM115
from __future__ import annotations

import asyncio
import builtins
import contextlib
import copy
import dataclasses
import doctest
import functools
import importlib
import importlib.machinery
import inspect
import io
import logging
import os
import random
import re
import sys
import types
import unittest
import unittest.mock
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from . import remote
from .checks import MAX_TEXT, NOTHING, Checks, is_nothing
from .hostile import JUDGING, OPERATORS, owner_of
from .remote import Remote, RemoteType, UnjudgedError, WrongError
from .wire import (
    MAX_MESSAGE,
    SOLUTION_MODULES,
    ClosedError,
    TooLongError,
    ViolationError,
    exception_class,
    find_by_name,
    made_exception,
)

_MOCKS_OWN = ("assert", "configure_mock", "attach_mock", "mock_add_spec", "reset_mock", "method_calls", "call")
"""How the attributes of a mock begin that are for the tests."""
_FUNCTIONS = types.FunctionType | types.BuiltinFunctionType | types.MethodDescriptorType | types.WrapperDescriptorType


class GoneError(BaseException):
    """The other process has ended, or sent something that is not a message."""


class Side(Checks):
    """The tests' side of the conversation, and what is known so far of the test that runs."""

    forgets = True
    fatal = (UnjudgedError, WrongError, GoneError, ViolationError, ClosedError)

    def __init__(self, requests: int, replies: int, shared: Any, own_copies: bool, seen: Mapping[str, Any]) -> None:
        super().__init__(requests, replies, own_copies, seen)
        self._shared = shared
        self._objects: dict[int, Any] = {}
        self._lent: list[tuple[Any, tuple[str, ...], bool]] = []
        self._lent_numbers: dict[int, int] = {}
        self._environ = dict(os.environ)
        self.raised: list[BaseException] = []  # by the solution
        self.copies: dict[int, Any] = {}
        self.gone = self.process = ""
        self.asked = 0
        self.memory = False

    def refused(self, reason: str, *values: Any) -> BaseException:
        """The test needs a behaviour of these objects: its own choice if it made one, else what the solution gave."""
        if any(remote.is_marked(value, "_made") for value in values) or (
            len(values) > 1 and all(isinstance(value, Remote) for value in values)
        ):
            return self.unjudged(reason)
        self.failure = self.failure or reason
        return WrongError(reason)

    def unjudged(self, reason: str) -> UnjudgedError:
        """Mark the test as impossible to judge, even if something catches the exception."""
        self.reason = self.reason or reason
        return UnjudgedError(reason)

    def checking(self, function: Any) -> Callable[..., Any]:
        if isinstance(function, Remote):
            raise self.refused("it calls an assertion that the tests do not define")
        return super().checking(function)

    # The conversation.

    def request(self, what: str, *arguments: Any) -> Any:
        if self.gone:
            raise GoneError(self.gone)
        if dict(os.environ) != self._environ:
            self._environ = dict(os.environ)
            self.request("environ", self._environ)
        self.asked += 1
        try:
            return super().request(what, *arguments)
        except TooLongError:
            reason = "an argument is too large to be handed over"
            if self.received > MAX_MESSAGE // 10:  # it may be made of what the solution has sent
                self.failure = self.failure or reason
                raise WrongError(reason) from None
            raise self.unjudged(reason) from None
        except (ClosedError, ViolationError) as error:
            self.gone = "closed" if isinstance(error, ClosedError) else f"violation: {error}"
            raise GoneError(str(error)) from None
        except StopIteration as error:
            if what == "operate" and arguments[1] == "__next__":
                raise
            raise RuntimeError("the code raised StopIteration") from error  # it would end a `map` of the tests
        except BaseException as error:  # what the solution raised goes on to the test
            self.memory = self.memory or isinstance(error, MemoryError)
            self.raised = [*self.raised[-50:], error]
            raise
        finally:
            self._shared[2] = self.changed

    def _receive(self) -> tuple[Any, Any, Any]:
        self._shared[0] = 1  # for `keeper`: from here on the other process takes the time
        try:
            message = super()._receive()
        finally:
            self._shared[0] = 0
            self._shared[8:16] = self.received.to_bytes(8, "little")
        self._shared[1] = self.asked > 1  # the first request loads the solution
        return message

    def unpack(self, message: Any) -> Any:
        waiting, self._shared[0] = self._shared[0], 1  # reading what the other process has sent is its time, too
        try:
            return super().unpack(message)
        finally:
            self._shared[0] = waiting

    def heed(self, news: Any) -> None:
        """Write what the solution has printed; warn and log as it did."""
        for what, kind, text in news or ():
            if type(text) is not str:
                raise ViolationError("no text")
            if what == "process":
                self.process = text[:MAX_TEXT]
            elif what in ("stdout", "stderr"):
                getattr(sys, what).write(text)
            elif what == "warn" and isinstance(kind, Warning):
                warnings.warn(kind, stacklevel=2)
            elif what == "log" and type(kind) is tuple and type(kind[0]) is str and type(kind[1]) is int:
                logger = logging.getLogger(kind[0])
                if logger.isEnabledFor(kind[1]):
                    logger.handle(logger.makeRecord(kind[0], kind[1], "solution.py", 0, text, (), None))

    def perform(self, what: Any, *arguments: Any) -> Any:
        """Do what the solution asks for, of an object that it was lent."""
        self.inside += 1
        try:
            if what in ("input", "read", "readline"):
                return {"input": input, "read": sys.stdin.read, "readline": sys.stdin.readline}[what](*arguments)
            return self._use(what, *arguments)
        finally:
            self.inside -= 1

    def _use(self, what: Any, value: Any, name: Any, *rest: Any) -> Any:
        number = self._lent_numbers.get(id(value), -1)
        if number < 0 or self._lent[number][0] is not value:
            raise ViolationError("nothing that was lent")
        _, own, attributes = self._lent[number]
        if what == "operate":
            positional, keywords = rest
            if name not in own:
                raise ViolationError("an operation that was not lent")
            bound = value if name == "__call__" else functools.partial(getattr(type(value), name), value)
            result = bound(*positional, **keywords)
            if isinstance(result, types.CoroutineType):
                result.close()
                raise self.unjudged("it hands the solution a coroutine")
            return result
        mock = isinstance(value, unittest.mock.NonCallableMock)
        if not attributes or type(name) is not str or name.startswith(("_", *_MOCKS_OWN) if mock else "_"):
            raise AttributeError(f"{type(value).__name__!r} object has no attribute {name!r}")
        if what == "get":
            return getattr(value, name)
        if what == "set" and type(value).__module__ == "tests":
            return setattr(value, name, *rest)
        raise ViolationError("an unknown question")

    # Values that are no data.

    def opaque(self, value: Any) -> Any:
        if isinstance(value, Remote | RemoteType):
            return ["H", remote.number_of(value)]
        if isinstance(value, _SolutionModule):
            return ["S"]
        if isinstance(value, types.ModuleType):
            return ["M", value.__name__]
        if isinstance(value, re.Pattern):
            return ["p", self.encode(value.pattern), value.flags]
        named = _named(value)
        if named is not None:
            return ["y", *named]
        if isinstance(value, BaseException):
            kind = next(base for base in type(value).__mro__ if exception_class(base) is not None)
            plain = [part if type(part) in (str, int, float, bool) else None for part in value.args]
            arguments = [self.encode(part) for part in plain]
            return ["z", self._lend(value, (), False), ["x", kind.__module__, kind.__qualname__, arguments]]
        own, attributes = _lendable(value)
        if type(value).__module__ == "tests" and attributes:
            self.changed = True  # its attributes are within reach
            if self.own_copies and id(value) not in self._lent_numbers:
                with contextlib.suppress(Exception):  # whatever a copy of the tests' own object raises: lent as it is
                    value = copy.deepcopy(value, self.copies)
        return ["g", self._lend(value, own, attributes), type(value).__name__, list(own), attributes]

    def _lend(self, value: Any, own: tuple[str, ...], attributes: bool) -> int:
        if id(value) not in self._lent_numbers:
            self._lent.append((value, own, attributes))
            self._lent_numbers[id(value)] = len(self._lent) - 1
        return self._lent_numbers[id(value)]

    def special(self, tag: Any, parts: list[Any]) -> Any:
        if tag == "g" and type(parts[0]) is int and 0 <= parts[0] < len(self._lent):
            return self._lent[parts[0]][0]
        if tag == "X":
            return type(self.decode(["x", *parts, []]))
        if tag not in ("h", "C") or type(parts[0]) is not int:
            raise ViolationError("an unknown kind of value")
        number, *description = parts
        if number not in self._objects:
            self._objects[number] = self._class(number, *description) if tag == "C" else self._object(*parts)
        return self._objects[number]

    def _class(self, number: int, name: Any, module: Any, bases: Any, own: Any, content: Any) -> Any:
        return remote.remote_class(number, name, module, [self.decode(base) for base in bases], own, content)

    def _object(self, number: int, encoded_class: Any, content: Any) -> Any:
        kind = self.decode(encoded_class)
        if not isinstance(kind, RemoteType):
            raise ViolationError("no class")
        if issubclass(kind, BaseException):
            value = made_exception(kind, [self.decode(part) for part in content or ()])
            object.__setattr__(value, "_number", number)
            return value
        return remote.remote_object(kind, number, self.decode(content))


def _named(value: Any) -> tuple[str, str] | None:
    """A function's or class's place in the standard library."""
    if not isinstance(value, type | _FUNCTIONS):
        return None
    module = getattr(value, "__module__", None) or getattr(getattr(value, "__objclass__", None), "__module__", None)
    name = getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    known = module.partition(".")[0] in {*sys.stdlib_module_names, "numpy"}
    return (module, name) if known and find_by_name(module, name) is value else None


def _lendable(value: Any) -> tuple[tuple[str, ...], bool]:
    """What the solution may do with an object of the tests: operators, and whether attributes."""
    kind = type(value)
    if isinstance(value, type):
        return ("__call__",), False
    if kind.__module__ == "tests":
        return tuple(n for n in OPERATORS if owner_of(kind, n) not in (None, object) and n != "__hash__"), True
    if isinstance(value, unittest.mock.NonCallableMock):
        return tuple(name for name in OPERATORS if hasattr(kind, name) and name not in JUDGING), True
    if isinstance(value, io.IOBase):
        return ("__iter__", "__next__", "__enter__", "__exit__"), True
    return tuple(n for n in ("__call__", "__iter__", "__next__", "__len__", "__getitem__") if hasattr(kind, n)), False


# --- the tests' names ------------------------------------------------------------------------------------------------


class _SolutionModule(types.ModuleType):
    """`import solution`."""

    __all__: tuple[str, ...] = ()  # the tests' free names are found in the solution anyway

    def __getattr__(self, name: str) -> Any:
        try:
            if not name.startswith("__"):
                return remote.named_by_tests(name, SIDE.request("name", name))
        except KeyError:
            pass
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            SIDE.request("bind", name, value)

    def __delattr__(self, name: str) -> None:
        try:
            SIDE.request("bind", name)
        except KeyError:
            raise AttributeError(name) from None


class Namespace(dict[str, Any]):
    """The tests' names. Names that are neither defined in the tests nor built in are the solution's."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        super().__init__(__builtins__=builtins, __name__="tests")
        self.free, self.modules = frozenset(plan["free"]), plan["modules"]

    def __missing__(self, name: str) -> Any:
        if name in self.modules:
            return importlib.import_module(self.modules[name])
        if name not in self.free:
            raise KeyError(name)
        try:
            return remote.named_by_tests(name, SIDE.request("name", name))
        except KeyError:
            raise NameError(f"name {name!r} is not defined") from None


# --- running the tests -----------------------------------------------------------------------------------------------


class _Judging:
    """Runs the tests of a plan, one after the other."""

    def __init__(self, plan: dict[str, Any], folder: str) -> None:
        self.plan, self.folder, self.names = plan, folder, Namespace(plan)

    def run(self, report: Callable[[dict[str, Any]], None]) -> None:
        for number, test in enumerate(self.plan["tests"]):
            SIDE.fresh()
            status, detail = self._run(number, test)
            known = {"memory": SIDE.memory, "gone": SIDE.gone, "process": SIDE.process}
            report({"test": number, "status": status, "detail": detail, **known})
            goes_on = SIDE.own_copies and SIDE.changed
            if SIDE.gone or (status == "fail" and self.plan["stop"] and not goes_on):
                return
        report({"end": True, "seen": SIDE.seen if SIDE.own_copies and SIDE.changed else {}})

    def _run(self, number: int, test: dict[str, Any]) -> tuple[str, str]:
        try:
            error = self._errors(number, test)
        except BaseException as raised:  # what a test raises is its verdict, `SystemExit` too
            error = raised
        if SIDE.gone or isinstance(error, WrongError):
            return "fail", SIDE.gone or str(error)
        if SIDE.reason and error is not None:
            return "unjudged", SIDE.reason  # what followed from it says nothing
        if error is not None:
            if not isinstance(error, Remote) and not any(raised is error for raised in SIDE.raised):
                if isinstance(error, ModuleNotFoundError):
                    return "unjudged", f"the tests import {error.name}, which is not installed"
                if type(error).__name__ in ("SkipTest", "Skipped"):
                    return "unjudged", "a test was skipped"
            return "fail", f"{type(error).__name__[:MAX_TEXT]}: {_text(error)}"
        if test["empty"] and not SIDE.failure:
            return "setup", ""
        status, detail = SIDE.verdict()
        if status == "pass" and SIDE.asked < 2:  # the first request loads the solution
            return "unjudged", "the tests never used the solution"
        return status, detail

    def _errors(self, number: int, test: dict[str, Any]) -> BaseException | None:
        for source in [test["source"], *test["calls"]]:
            exec(compile(source, f"<test {number}>", "exec", dont_inherit=True), self.names)
        if test["pytest"]:
            return self._pytest(test)
        for name in test["functions"]:
            _finish(self.names[name]())
        for name in test["classes"]:
            kind = self.names[name]
            if isinstance(kind, type) and issubclass(kind, unittest.TestCase):
                error = self._cases(kind)
            else:
                error = self._methods(kind)
            if error is not None:
                return error
        for examples in test["doctests"]:
            error = self._doctest(examples)
            if error is not None:
                return error
        if test["main"] and not SIDE.ran:
            exec(compile(test["main"], f"<test {number}>", "exec", dont_inherit=True), self.names)
        return None

    def _cases(self, kind: type[unittest.TestCase]) -> BaseException | None:
        result = _Result()
        unittest.defaultTestLoader.loadTestsFromTestCase(kind).run(result)
        if result.skipped:
            SIDE.unjudged("a test was skipped")
        return result.first

    def _methods(self, kind: Any) -> BaseException | None:
        for name in [name for name in vars(kind) if name.startswith("test")]:
            instance = kind()
            hooks = [hook for hook in ("setup_method", "setUp", "setup") if hasattr(instance, hook)]
            if hooks:
                getattr(instance, hooks[0])()
            _finish(getattr(instance, name)())
        return None

    def _doctest(self, examples: list[list[Any]]) -> BaseException | None:
        made = [doctest.Example(source, want, message) for source, want, message in examples]
        test = doctest.DocTest(made, {}, "tests", None, 0, None)
        runner, said = doctest.DocTestRunner(), io.StringIO()
        test.globs = self.names  # not a copy, which would know only what is there
        runner.run(test, out=said.write, clear_globs=False)
        SIDE.ran += sum(1 for example in made if example.want or example.exc_msg)
        return AssertionError("a doctest failed") if runner.summarize(verbose=False).failed else None

    def _pytest(self, test: dict[str, Any]) -> BaseException | None:
        """Let pytest run it: all that it reads lies in a folder out of the solution's reach."""
        import pytest

        names, failures, work = self.names, list[str](), os.getcwd()
        wanted = {*test["functions"], *test["classes"]}
        module = types.ModuleType("tests")
        for name in [name for name in dict.keys(names) if name != "__builtins__"]:
            if not name.startswith(("test", "Test")) or name in wanted:
                setattr(module, name, names[name])

        class Tests(pytest.Module):
            def _getobj(self) -> Any:
                return module

        class Plugin:
            def pytest_collect_file(self, file_path: Any, parent: Any) -> Any:
                return Tests.from_parent(parent, path=file_path)

            def pytest_runtest_logreport(self, report: Any) -> None:
                if report.failed:
                    failures.append(str(report.longrepr)[-MAX_TEXT:])
                elif report.skipped:
                    SIDE.unjudged("a test was skipped")

            @pytest.hookimpl(tryfirst=True)
            def pytest_runtest_setup(self, item: Any) -> None:
                os.chdir(work)

            @pytest.hookimpl(tryfirst=True)
            def pytest_pyfunc_call(self, pyfuncitem: Any) -> Any:
                if not inspect.iscoroutinefunction(pyfuncitem.obj):
                    return None
                wanted = pyfuncitem._fixtureinfo.argnames
                asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
                return True

            pytest_collectreport = pytest_runtest_logreport

        vars(sys.modules["_pytest.monkeypatch"])["setattr"] = _patched(setattr)
        off = ("cacheprovider", "assertion", "faulthandler", "threadexception", "unraisableexception")
        options = ["-q", "--capture=sys", "-c", os.devnull, "--noconftest", "--import-mode", "importlib"]
        options += [*(f"-pno:{name}" for name in off), f"--rootdir={self.folder}", f"--confcutdir={self.folder}"]
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        os.chdir(self.folder)
        file = os.path.join(self.folder, "tests.py")
        with open(file, "w", encoding="ascii"):  # pytest wants a file to name; the tests are not in it
            pass
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            status = pytest.main([*options, file], plugins=[Plugin()])
        os.chdir(work)
        if failures:
            return AssertionError(failures[0])
        if status == 2:
            return KeyboardInterrupt("pytest was interrupted")
        if status not in (0, 1, 5):
            SIDE.unjudged(f"pytest ended with status {status}")
        return None


def _finish(result: Any) -> None:
    """Run a test that is a coroutine."""
    if isinstance(result, types.CoroutineType):
        asyncio.run(result)


class _Result(unittest.TestResult):
    """Keeps the first thing that went wrong."""

    first: BaseException | None = None

    def addFailure(self, test: Any, err: Any) -> None:
        self.first = self.first or err[1]

    addError = addFailure

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self.first = self.first or err[1]

    def addUnexpectedSuccess(self, test: Any) -> None:
        self.first = self.first or AssertionError("an unexpected success")


def _text(error: BaseException) -> str:
    return (repr(error.args) if isinstance(error, Remote) else str(error))[:MAX_TEXT]


# --- the modules that tests use --------------------------------------------------------------------------------------


def _replace(module: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(module, name, make(getattr(module, name)))


def _there(function: Any) -> Any:
    """Run a function of the standard library in the solution's process if it is about an object of the solution."""

    @functools.wraps(function)
    def call(value: Any, *arguments: Any, **keywords: Any) -> Any:
        if isinstance(value, Remote | RemoteType):
            return SIDE.request("call", call, (value, *arguments), tuple(keywords.items()))
        return function(value, *arguments, **keywords)

    return call


def _of_something(first: int, otherwise: Any) -> Callable[[Any], Any]:
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
        module = isinstance(target, types.ModuleType) and not isinstance(target, _SolutionModule)
        crosses = module and (target.__name__, name) not in _OWN_WAY and target.__name__ != "tests"
        original = originals.setdefault((target.__name__, name), getattr(target, name, None)) if crosses else None
        change(target, name, *value)
        if crosses:
            SIDE.request("patch", target.__name__, name, *(new for new in value if new is not original))

    return patch


_OWN_WAY = {("builtins", "input"), ("builtins", "print"), ("sys", "stdin"), ("sys", "stdout"), ("sys", "stderr")}
"""What a program reads and prints goes through this process anyway."""


def _prepare_modules() -> None:
    """Make the modules that tests use safe, and patches and seeds reach the solution's process, too."""
    for function in (dataclasses.asdict, dataclasses.astuple, dataclasses.fields, dataclasses.is_dataclass):
        _replace(dataclasses, function.__name__, _there)
    _replace(dataclasses, "replace", _there)
    _replace(inspect, "signature", _there)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        for name, otherwise in (("allclose", False), ("array_equiv", False), ("isclose", None)):
            _replace(numpy, name, _of_something(0, otherwise))
        _replace(
            importlib.import_module("numpy.testing._private.utils"), "assert_array_compare", _of_something(1, None)
        )
    setattr(unittest, "main", lambda *arguments, **keywords: None)  # noqa: B010  # test cases are run anyway
    vars(unittest.mock)["setattr"] = _patched(setattr)
    seed = random.seed

    def seeded(value: Any = None, *rest: Any) -> None:
        seed(value, *rest)
        if type(value) in (int, str, float, bytes) and not SIDE.inside:
            SIDE.request("seed", value)

    random.seed = seeded  # type: ignore[assignment]


def judge(job: dict[str, Any], requests: int, replies: int, shared: Any, folder: str, report: Any) -> None:
    """Load the solution, run the plan's tests (`test_forms`), and report on each; `folder` is out of its reach."""
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
    sys.modules.update({name: _SolutionModule(name) for name in SOLUTION_MODULES}, tests=types.ModuleType("tests"))
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
    _Judging(job, folder).run(report)


SIDE: Side = None  # type: ignore[assignment]  # the one of this process
_LOADERS = (
    (importlib.machinery.ExtensionFileLoader, importlib.machinery.EXTENSION_SUFFIXES),
    (importlib.machinery.SourceFileLoader, importlib.machinery.SOURCE_SUFFIXES),
    (importlib.machinery.SourcelessFileLoader, importlib.machinery.BYTECODE_SUFFIXES),
)
