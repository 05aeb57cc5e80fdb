"""The process that runs the tests of a solution, which another one holds: `keeper` forks both.

`Side` is its end of the conversation, and `__judge__`, which rewritten tests call (`forms_of_tests`). First the tests
run with copies of their own (`own_copies`), which no change of the solution reaches. Where they fail so and it has
changed something, they run once more with the changes, as functions that work in place need it; there a comparison
counts only if one of its sides is the same in both runs.
"""

# Beside the tests' own process, pathlib gives nothing here.
# ruff: noqa: PTH100, PTH109, PTH117, PTH123, SIM115
import builtins
import contextlib
import copy
import dataclasses
import functools
import hashlib
import importlib
import inspect
import io
import json
import os
import random
import re
import sys
import types
import unittest
import unittest.mock
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from . import remote, wire
from .hostile import JUDGING, MAX_TEXT, OPERATORS, owner_of
from .remote import Remote, RemoteType, SolutionModule, UnjudgedError, WrongError

# How the attributes of a mock begin that are for the tests.
_MOCKS_OWN = ("assert", "configure_mock", "attach_mock", "mock_add_spec", "reset_mock", "method_calls", "call")
_FUNCTIONS = types.FunctionType | types.BuiltinFunctionType | types.MethodDescriptorType | types.WrapperDescriptorType
_NOTHING = "it compares nothing: an array is empty"


class _Printer(wire.Codec):
    def opaque(self, value: Any) -> Any:
        if isinstance(value, Remote | RemoteType) or not hasattr(value, "__dict__"):
            raise ValueError("it cannot be written down")
        if isinstance(value, type | types.FunctionType | types.ModuleType):
            return [value.__name__]
        return [type(value).__name__, self.encode(vars(value))]


def _printed(value: Any) -> str | None:
    """A value written down, to see whether it is the same in the other run."""
    try:
        text = json.dumps(_Printer(0).pack(value))
        return hashlib.blake2b(text.encode("ascii"), digest_size=16).hexdigest()
    except (RecursionError, ValueError):
        return None


def _is_nothing(value: Any) -> bool:
    """Whether it is an array of nothing, such as `[[]]`, which compared with a number says nothing."""
    numpy: Any = sys.modules["numpy"]
    value = getattr(value, "expected", value) if type(value).__name__.startswith("Approx") else value
    try:
        return type(value) in (list, tuple, numpy.ndarray) and bool(numpy.size(value) == 0)
    except ValueError:  # rows of different lengths
        return False


def _has_nan(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        return value.dtype.kind in "fc" and bool(numpy.isnan(value).any())
    return type(value) is float and value != value


def _says_nothing(*sides: tuple[str, Any]) -> str:
    values = [value for _, value in sides]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and numpy.ndarray in map(type, values) and len(set(map(_is_nothing, values))) > 1:
        return _NOTHING
    given, own = ([value for kind, value in sides if (kind[0] == "S") is theirs] for theirs in (True, False))
    if sides[0][0].endswith("<") and own and any(map(_has_nan, given)) and not any(map(_has_nan, own)):
        return "it compares nan with a number"
    return ""


class GoneError(BaseException):
    """The other process has ended, or sent something that is not a message."""


class Side(wire.Conversation):
    """The tests' side, and the bookkeeping of the test that runs."""

    forgets = True
    fatal = (UnjudgedError, WrongError, GoneError, wire.ViolationError, wire.ClosedError)

    def __init__(self, requests: int, replies: int, shared: Any, own_copies: bool, seen: Mapping[str, Any]) -> None:
        super().__init__(0, replies, requests)
        self.own_copies = own_copies
        self.seen: dict[str, list[str]] = dict(seen)
        self.raised: list[BaseException] = []  # by the solution
        self.copies: dict[int, Any] = {}
        self._known = {"tests", *wire.SOLUTION_MODULES, *sys.stdlib_module_names}
        self._known |= {name.partition(".")[0] for name in sys.modules}
        self.gone = ""
        self.process = ""
        self.asked = 0
        self.memory = False
        self._shared = shared
        self._objects: dict[int, Any] = {}
        self._lent: list[tuple[Any, tuple[str, ...], bool]] = []
        self._lent_numbers: dict[int, int] = {}
        self._environ = dict(os.environ)
        self._counts: dict[str, int] = {}
        self._open: list[tuple[dict[str, list[tuple[str, Any]]], list[str], int]] = []
        self.fresh()

    def fresh(self) -> None:
        self.ran = 0  # asserts
        self.empty = 0  # loops and comparisons of nothing
        self.failure = self.reason = self.doubt = self.stand_in = ""
        self.unsure = ""  # why the assertion at hand says nothing if it fails
        self.failed: list[BaseException] = []  # asserts that nobody expects to fail: they count whoever catches them
        self.sites: dict[str, bool] = {}
        self._first: dict[str, tuple[str, Any]] = {}
        self._open.clear()

    def run(self, plan: dict[str, Any], report: Callable[[dict[str, Any]], None]) -> None:
        names: dict[str, Any] = {"__builtins__": remote.Names(plan), "__name__": "tests"}
        for number, test in enumerate(plan["tests"]):
            self.fresh()
            status, detail = self._judged(number, test, names)
            known = {"memory": self.memory, "gone": self.gone, "process": self.process}
            report({"test": number, "status": status, "detail": detail, **known})
            goes_on = self.own_copies and self.changed
            if self.gone or (status == "fail" and plan["stop"] and not goes_on):
                return
        report({"end": True, "seen": self.seen if self.own_copies and self.changed else {}})

    def _judged(self, number: int, test: dict[str, Any], names: dict[str, Any]) -> tuple[str, str]:
        try:
            error = _first_error(number, test, names)
        except BaseException as raised:  # what a test raises is its verdict, `SystemExit` too
            error = raised
        if self.gone or isinstance(error, WrongError):
            return "fail", self.gone or str(error)
        if self.reason and error is not None:
            return "unjudged", self.reason  # what followed from it says nothing
        if error is not None:
            own = not (self.failure or isinstance(error, Remote) or any(raised is error for raised in self.raised))
            if own and isinstance(error, ModuleNotFoundError):
                return "unjudged", f"the tests import {error.name}, which is not installed"
            if self.stand_in:
                return "unjudged", f"the code gets a stand-in for the tests' {self.stand_in}"
            return "fail", f"{type(error).__name__[:MAX_TEXT]}: {_text(error)}"
        if test["empty"] and not self.failure:
            return "setup", ""
        if not all(self.sites.values()):
            self.doubt = self.doubt or "an assert sits in a loop whose length the solution decides, and it ran not once"
        if self.failure or self.failed:
            return "fail", self.failure or "an assert failed, and its exception was caught"
        if self.reason:
            return "unjudged", self.reason
        if self.stand_in:  # whoever ignores it may pass
            return "unjudged", f"the code gets a stand-in for the tests' {self.stand_in}"
        if not self.ran and (self.empty or self.doubt):
            return "fail", "what the code returned kept all asserts from running"
        if self.doubt or not self.ran:
            return "unjudged", self.doubt or "no assert ran"
        if self.asked < 2:  # the first request loads the solution
            return "unjudged", "the tests never used the solution"
        return "pass", ""

    def given(self, value: Any) -> bool:
        """Whether a value is the solution's, whatever name the tests have for it."""
        return isinstance(value, Remote | RemoteType) or self._numbers.get(id(value), 0) % 2 == 1

    def package_of(self, thing: Any) -> str:
        """The library that the tests themselves import and this class or function is of, or says that it is; or ""."""
        name = str(getattr(thing, "__module__", "")).partition(".")[0]
        return name if name in sys.modules and name not in self._known else ""

    def refused(self, reason: str, *values: Any) -> BaseException:
        """The test needs a behaviour of these objects: its own choice if it made one, else what the solution gave."""
        if any(map(remote.is_made, values)) or (len(values) > 1 and all(isinstance(value, Remote) for value in values)):
            return self.unjudged(reason)
        self.failure = self.failure or reason
        return WrongError(reason)

    def unjudged(self, reason: str) -> UnjudgedError:
        """Mark the test as impossible to judge, even if something catches the exception."""
        self.reason = self.reason or reason
        return UnjudgedError(reason)

    def begin(self) -> int:
        """Begin an assertion: the sides of its comparisons, what is wrong with them, the empty loops so far."""
        if not self._open:
            self.unsure = ""
        self._open.append(({}, [], self.empty))
        return len(self._open) - 1

    def op(self, site: str, position: int, kind: str, value: Any) -> Any:
        """A side: the solution's ("s"), the tests' own ("o") or a constant ("c").

        It is a capital where an array may be empty, and has a "<" where a nan says nothing.
        """
        if kind[0].isupper():
            if position == 0:
                self._first[site] = kind, value
            self.failure = self.failure or _says_nothing(self._first.get(site, (kind, value)), (kind, value))
        if self._open:
            comparisons, faults, _ = self._open[-1]
            if position == 0:
                faults.append(self._fault(site, comparisons.pop(site, [])))
            comparisons.setdefault(site, []).append((kind, value))
        return value

    def _holds(self, token: int) -> bool:
        [(comparisons, faults, empty), *_] = self._open[token:] or [({}, [], self.empty)]
        faults += [self._fault(site, sides) for site, sides in comparisons.items()]
        del self._open[token:]
        fault = next(filter(None, faults), "")
        self.failure = self.failure or fault
        self.ran += self.empty == empty
        return not fault

    def _fault(self, site: str, sides: list[tuple[str, Any]]) -> str:
        if len(sides) < 2:
            return ""
        count = self._counts[site] = self._counts.get(site, 0) + 1
        if not self.changed or any(kind[0] in "cC" for kind, _ in sides):
            return ""
        own = [_printed(value) for kind, value in sides if kind[0] in "oO" and not self.given(value)]
        known = [text for text in own if text is not None]
        key = f"{site}:{count}"
        if self.own_copies:
            if len(self.seen) < 20_000:
                self.seen[key] = known
        elif not set(known) & set(self.seen.get(key, ())):
            return "what it expects depends on an argument that the code has changed"
        return ""

    def check(self, token: int, value: Any) -> bool:
        held = bool(value)
        if not held:
            self.reason = self.reason or self.unsure
        return (self._holds(token) and held) or self._goes_on("an assert failed")

    def doubt_class(self, reason: str) -> None:
        """An assertion asks whether an object of the solution is of a class, of which only the solution could know."""
        if self._open:
            self.unsure = reason

    def value(self, token: int, value: Any) -> Any:
        self._holds(token)
        return value

    def _goes_on(self, failure: str) -> bool:
        """With copies of their own, tests go on after a failure: the other run needs to know what they expect."""
        goes_on = self.own_copies and self.changed
        self.failure = self.failure or (failure if goes_on else "")
        return goes_on

    def checking(self, function: Any) -> Callable[..., Any]:
        if isinstance(function, Remote):
            raise self.refused("it calls an assertion that the tests do not define")
        token = self.begin()

        def call(*arguments: Any, **keywords: Any) -> Any:
            result = None
            before = len(self.failed)
            package = self.package_of(function)
            theirs = [one for one in (*arguments, *keywords.values()) if isinstance(one, Remote)]
            if package and package in [self.package_of(type(one)) for one in theirs]:
                raise self.unjudged(f"an assertion of {package} gets an object that is no data")
            try:
                result = function(*arguments, **keywords)
                if arguments and arguments[0] is AssertionError:  # `assertRaises`
                    del self.failed[before:]
            except BaseException as error:
                if not isinstance(error, AssertionError) and type(error).__name__ != "Failed":  # pytest's
                    raise
                self.failing(error)
                self.reason = self.reason or self.unsure
                if not self._goes_on(str(error)[:MAX_TEXT]):
                    raise
            self._holds(token)
            return result

        return call

    def failing(self, error: Any) -> Any:
        self.failed.append(error)
        return error

    def expected(self, *errors: Any) -> None:
        errors = errors or (sys.exc_info()[1],)
        self.failed = [one for one in self.failed if not any(one is error for error in errors)]

    def passed(self) -> None:
        self.ran += 1

    def swallowed(self) -> None:
        self.failure = self.failure or ("" if self.reason else "what the code did keeps an assert from running")

    def several(self, site: str, values: Any) -> Iterator[Any]:
        """Iterate over what the solution decides the length of."""
        self.sites.setdefault(site, False)
        for value in values:
            self.sites[site] = True
            yield value
        self.empty += not self.sites[site]

    def mapped(self, given: list[int], function: Any, *values: Any) -> Iterator[Any]:
        """`map`, which a StopIteration of the function does not end."""
        for parts in self.zipped(given, *values):
            yield function(*parts)

    def zipped(self, given: list[int], *values: Any, **keywords: Any) -> Iterator[Any]:
        """`zip`: what the solution has given may be too short for the tests' own."""
        sized = [len(v) if type(v) in (list, tuple, str, dict, set) else None for v in values]
        own = [size for n, size in enumerate(sized) if given and n not in given and size is not None]
        count = 0
        for parts in zip(*values, **keywords):  # noqa: B905  # it is the tests' own
            count += 1
            yield parts
        if own and count < min(own):
            self.failure = self.failure or "what it returned is too short to be compared with what is expected"

    def request(self, what: str, *arguments: Any) -> Any:
        if self.gone:
            raise GoneError(self.gone)
        if dict(os.environ) != self._environ:
            self._environ = dict(os.environ)
            self.request("environ", self._environ)
        self.asked += 1
        try:
            return super().request(what, *arguments)
        except wire.TooLongError:
            reason = "an argument is too large to be handed over"
            if self.received > wire.MAX_MESSAGE // 10:  # it may be made of what the solution has sent
                self.failure = self.failure or reason
                raise WrongError(reason) from None
            raise self.unjudged(reason) from None
        except (wire.ClosedError, wire.ViolationError) as error:
            self.gone = "closed" if isinstance(error, wire.ClosedError) else f"violation: {error}"
            raise GoneError(self.gone) from None
        except StopIteration as error:
            if what == "operate" and arguments[1] == "__next__":
                raise
            raise RuntimeError("the code raised StopIteration") from error  # it would end a `map` of the tests
        except BaseException as error:  # what the solution raised goes on to the test
            self.memory = self.memory or wire.wants_memory(error)
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
        waiting = self._shared[0]
        self._shared[0] = 1  # reading what the other process has sent is its time, too
        try:
            return super().unpack(message)
        finally:
            self._shared[0] = waiting

    def take_note(self, news: Any) -> None:
        for what, written in news or ():
            text = wire.text_of(written)
            if what == "process":
                self.process = text[:MAX_TEXT]
            elif what in ("stdout", "stderr"):
                getattr(sys, what).write(text)

    def perform(self, what: Any, *arguments: Any) -> Any:
        if what in ("input", "read", "readline"):
            return {"input": input, "read": sys.stdin.read, "readline": sys.stdin.readline}[what](*arguments)
        value, name, *rest = arguments
        number = self._lent_numbers.get(id(value), -1)
        if number < 0 or self._lent[number][0] is not value:
            raise wire.ViolationError("nothing that was lent")
        _, own, attributes = self._lent[number]
        if what == "operate":
            positional, keywords = rest
            if name not in own:
                raise wire.ViolationError("an operation that was not lent")
            bound = value if name == "__call__" else functools.partial(getattr(type(value), name), value)
            return bound(*positional, **keywords)
        mock = isinstance(value, unittest.mock.NonCallableMock)
        if not attributes or type(name) is not str or name.startswith(("_", *_MOCKS_OWN) if mock else "_"):
            raise AttributeError(f"{type(value).__name__!r} object has no attribute {name!r}")
        if what == "get":
            return getattr(value, name)
        if what == "set" and type(value).__module__ == "tests":
            return setattr(value, name, *rest)
        raise wire.ViolationError("an unknown question")

    def opaque(self, value: Any) -> Any:
        if isinstance(value, Remote | RemoteType):
            return ["H", remote.number_of(value)]
        if isinstance(value, SolutionModule):
            return ["S"]
        if isinstance(value, types.ModuleType):
            return ["M", value.__name__]
        if isinstance(value, re.Pattern):
            return ["p", self.encode(value.pattern), value.flags]
        if isinstance(value, type | _FUNCTIONS) and (named := _named(value)):
            return ["y", *named]
        if isinstance(value, BaseException):
            kind = next(base for base in type(value).__mro__ if wire.exception_class(base) is not None)
            plain = [part if type(part) in (str, int, float, bool) else None for part in value.args]
            arguments = [self.encode(part) for part in (None, *plain)]
            return ["z", self._lend(value, (), False), ["x", kind.__module__, kind.__qualname__, arguments]]
        own, attributes = _lendable(value)
        if self.package_of(type(value)):
            self.stand_in = type(value).__name__
        if type(value).__module__ == "tests" and attributes:
            self.changed = True  # its attributes are within reach
            if self.own_copies and id(value) not in self._lent_numbers:
                with contextlib.suppress(Exception):  # whatever a copy of the tests' own object raises: lent as it is
                    value = copy.deepcopy(value, self.copies)
        facts = self.encode(_described(value) if isinstance(value, types.FunctionType) else None)
        return ["g", self._lend(value, own, attributes), type(value).__name__, list(own), attributes, facts]

    def _lend(self, value: Any, own: tuple[str, ...], attributes: bool) -> int:
        if id(value) not in self._lent_numbers:
            self._lent.append((value, own, attributes))
            self._lent_numbers[id(value)] = len(self._lent) - 1
        return self._lent_numbers[id(value)]

    def from_opaque(self, tag: Any, parts: list[Any]) -> Any:
        if tag == "g" and type(parts[0]) is int and 0 <= parts[0] < len(self._lent):
            return self._lent[parts[0]][0]
        if tag == "X":
            return type(self.decode(["x", *parts, []]))
        if tag not in ("h", "C") or type(parts[0]) is not int:
            raise wire.ViolationError("an unknown kind of value")
        number, *description = parts
        if number not in self._objects and tag == "C":
            name, module, bases, *more = description
            bases = [self.decode(base) for base in bases]
            self._objects[number] = remote.remote_class(number, name, module, bases, *more)
        elif number not in self._objects:
            self._objects[number] = self._object(number, *description)
        return self._objects[number]

    def _object(self, number: int, encoded_class: Any, content: Any) -> Any:
        kind = self.decode(encoded_class)
        if not isinstance(kind, RemoteType):
            raise wire.ViolationError("no class")
        if issubclass(kind, BaseException):
            value = wire.made_exception(kind, [self.decode(part) for part in content or ()])
            object.__setattr__(value, "_remote_id", number)
            return value
        return remote.remote_object(kind, number, self.decode(content))


def _named(value: Any) -> tuple[str, str] | None:
    module = getattr(value, "__module__", None) or getattr(getattr(value, "__objclass__", None), "__module__", None)
    if not isinstance(module, str) or module.partition(".")[0] not in {*sys.stdlib_module_names, "numpy"}:
        return None
    return (module, value.__qualname__) if wire.find_by_name(module, value.__qualname__) is value else None


def _described(function: types.FunctionType) -> tuple[Any, ...]:
    known = {name: getattr(function, name) for name in (*functools.WRAPPER_ASSIGNMENTS[:4], "__annotations__")}
    signature = inspect.signature(function, follow_wrapped=False)
    parts = [(one.name, int(one.kind), one.default, one.annotation) for one in signature.parameters.values()]
    return known, signature.return_annotation, parts


def _lendable(value: Any) -> tuple[tuple[str, ...], bool]:
    kind = type(value)
    if isinstance(value, type):
        return ("__call__",), value.__module__ == "tests"
    if kind.__module__ == "tests":
        return tuple(n for n in OPERATORS if owner_of(kind, n) not in (None, object) and n != "__hash__"), True
    if isinstance(value, unittest.mock.NonCallableMock):
        return tuple(name for name in OPERATORS if hasattr(kind, name) and name not in JUDGING), True
    if isinstance(value, io.IOBase):
        return ("__iter__", "__next__", "__enter__", "__exit__"), True
    return tuple(n for n in ("__call__", "__iter__", "__next__", "__len__", "__getitem__") if hasattr(kind, n)), False


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

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self.first = self.first or err[1]

    def addFailure(self, test: Any, err: Any) -> None:
        self.addSubTest(test, None, err)

    addError = addFailure

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        remote.SIDE.expected(err[1])

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
            return remote.SIDE.request("call", call, (value, *arguments), tuple(keywords.items()))
        return function(value, *arguments, **keywords)

    return call


def _failing_on_nothing(first: int, otherwise: Any) -> Callable[[Any], Any]:
    """A comparison of numpy that fails where one side is empty and the other is not: `np.allclose([], 2.5)` holds."""

    def make(function: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if len({_is_nothing(value) for value in arguments[first : first + 2]}) > 1:
                if otherwise is not None:
                    return otherwise
                raise AssertionError(_NOTHING)
            return function(*arguments, **keywords)

        return call

    return make


def _watching(work: str) -> Callable[[str, tuple[Any, ...]], None]:
    """Tests run no code that lies where the solution may write or that it has pickled, and no process."""

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "pickle.find_class":
            raise remote.SIDE.unjudged("it unpickles, which would run what the solution has written")
        if event in ("subprocess.Popen", "os.fork", "os.system", "os.exec", "os.posix_spawn"):
            raise remote.SIDE.unjudged("the tests start a process")
        file = str(arguments[event == "import"]) if event in ("open", "import", "ctypes.dlopen") else ""
        if file.endswith((".py", ".pyc", ".so")) and os.path.abspath(file).startswith(work):
            raise remote.SIDE.unjudged("the tests read code from a file")

    return watch


def _patch(target: Any, name: str, value: Any) -> None:
    """`setattr` for patches: what a module gets, the solution's process gets, too, and back what it had at first."""
    module = isinstance(target, types.ModuleType) and not isinstance(target, SolutionModule)
    crosses = module and (target.__name__, name) not in _FORWARDED and target.__name__ != "tests"
    original = _ORIGINALS.setdefault((target.__name__, name), getattr(target, name, None)) if crosses else None
    setattr(target, name, value)
    if crosses:
        remote.SIDE.request("patch", target.__name__, name, *([] if value is original else [value]))


_ORIGINALS: dict[tuple[str, str], Any] = {}
# What a program reads and prints goes through this process anyway.
_FORWARDED = {("builtins", "input"), ("sys", "stdin"), ("sys", "stdout"), ("sys", "stderr")}


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
    vars(unittest.mock)["setattr"] = _patch
    vars(unittest.case)["isinstance"] = remote.is_of(isinstance)
    seed = random.seed

    def seeded(value: Any = None, *rest: Any) -> None:
        seed(value, *rest)
        if type(value) in (int, str, float, bytes):
            remote.SIDE.request("seed", value)

    random.seed = seeded  # type: ignore[assignment]


def judge(job: dict[str, Any], requests: int, replies: int, shared: Any, report: Any) -> None:
    side = remote.SIDE = Side(requests, replies, shared, job["own_copies"], job["seen"])
    vars(builtins)["__judge__"] = side
    warnings.simplefilter("ignore")
    libraries = tuple(path for path in sys.path if os.path.isabs(path))
    find = sys.path_hooks[-1]  # that of files

    def only_libraries(path: str) -> Any:
        if not path.startswith(libraries):
            raise ImportError(path)  # whatever the tests make of `sys.path`
        return find(path)

    sys.path_hooks[:] = [only_libraries]
    sys.path_importer_cache.clear()
    sys.modules.update({name: SolutionModule(name) for name in wire.SOLUTION_MODULES}, tests=types.ModuleType("tests"))
    sys.stdin = io.StringIO()
    sys.stdout = open(os.devnull, "w", encoding="utf-8")
    sys.stderr = open(os.devnull, "w", encoding="utf-8")
    sys.argv = ["tests.py"]
    try:
        unread = side.request("load", job["code"], job["imports"], job["deep"])
    except BaseException as error:  # what the code raises is the verdict, whatever it is
        known = {"gone": side.gone} if side.gone else {"memory": side.memory, "process": side.process}
        report({"failed": [type(error).__name__[:MAX_TEXT], _text(error)], **known})
        return
    if unread is not None:
        report({"unread": [str(part)[:MAX_TEXT] for part in unread]})
        return
    random.seed(0)
    _prepare_modules()
    sys.addaudithook(_watching(os.getcwd()))
    side.run(job, report)
