"""The process that holds a solution: it runs the code and answers calls. Only the data that it sends is used."""

import builtins
import collections
import contextlib
import importlib
import inspect
import io
import os
import random
import resource
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from .wire import ClosedError, Conversation, exception_class, find_by_name


def special_names(names: str) -> tuple[str, ...]:
    return tuple(f"__{name}__" for name in names.split())


JUDGING = special_names("eq ne lt le gt ge bool contains hash")  # what decides whether an assert holds
UNARY = special_names(
    "call len iter next reversed getitem setitem delitem enter exit str repr format neg pos invert "
    "abs int float complex index round trunc floor ceil"
)
_ARITHMETIC = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and or xor"
OPERATORS = JUDGING + UNARY + special_names(" ".join(f"{name} r{name} i{name}" for name in _ARITHMETIC.split()))
"""Methods of a class that the other side can use."""

_BUILT_IN: tuple[type, ...] = (str, bytes, int, float, complex, tuple, frozenset)
_CHANGING: tuple[type, ...] = (list, dict, set, bytearray, collections.deque)
MAX_TEXT = 200
_NOT_COMPILED = (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError)


class Lent:
    __slots__ = ("__weakref__", "_number")


class Solution(Conversation):
    def __init__(self, requests: int, replies: int) -> None:
        super().__init__(1, requests, replies)
        self._objects: list[Any] = []
        self._numbers_of: dict[int, int] = {}
        self._described: set[int] = set()
        self._lent: dict[int, Any] = {}
        self._lent_classes: dict[tuple[str, ...], type] = {}
        self._originals: dict[tuple[str, str], Any] = {}
        self.events: list[tuple[str, str]] = []
        self.module = types.ModuleType("solution")
        sys.modules["solution"] = self.module
        self.module.__file__ = "solution.py"

    def serve(self) -> None:
        with contextlib.suppress(ClosedError):
            while True:
                _, packed, news = self._receive()
                self.answer(packed, news)

    def news(self) -> Any:
        events = self.events[:1000]
        self.events.clear()
        printed = [(name, _drain(getattr(sys, name))) for name in ("stdout", "stderr")]
        return [*events, *(event for event in printed if event[1])] or None

    def perform(self, what: Any, *arguments: Any) -> Any:
        return getattr(self, f"_do_{what}")(*arguments)

    def _do_load(self, source: str, imports: bool, deep: bool) -> Any:
        try:
            code = compile(source, "solution.py", "exec", dont_inherit=True)
        except _NOT_COMPILED as error:
            return [type(error).__name__, str(error)[:MAX_TEXT]]
        if imports:
            import_for_all()
        if deep:
            recurse_deep()
        exec(code, self.module.__dict__)
        return None

    def _do_name(self, name: str) -> Any:
        return vars(self.module)[name]

    def _do_bind(self, name: str, *value: Any) -> None:
        if value:
            [vars(self.module)[name]] = value
        else:
            del vars(self.module)[name]

    def _do_call(self, called: Any, arguments: Any, keywords: Any) -> Any:
        return called(*arguments, **dict(keywords))

    _do_get = staticmethod(getattr)
    _do_set = staticmethod(setattr)
    _do_delete = staticmethod(delattr)

    def _do_operate(self, value: Any, name: str, arguments: Any) -> Any:
        return value[arguments[0]] if name == "__getitem__" else getattr(type(value), name)(value, *arguments)

    def _do_content(self, value: Any) -> Any:
        kind: Any = next(kind for kind in _CHANGING if isinstance(value, kind))
        return kind(kind.items(value) if kind is dict else kind.__iter__(value))

    def _do_seed(self, value: Any) -> None:
        random.seed(value)
        if "numpy" in sys.modules and type(value) is int and 0 <= value < 2**32:
            sys.modules["numpy"].random.seed(value)

    def _do_patch(self, module: str, name: str, *value: Any) -> None:
        target = importlib.import_module(module)
        original = self._originals.setdefault((module, name), getattr(target, name))
        setattr(target, name, value[0] if value else original)

    def _do_environ(self, values: Any) -> None:
        os.environ.clear()
        os.environ.update(values)

    def opaque(self, value: Any) -> Any:
        if isinstance(value, Lent):
            return ["g", value._number]  # type: ignore[attr-defined]
        if isinstance(value, type):
            return self._class(value)
        content: Any = None
        if isinstance(value, BaseException):
            if "_lent" in vars(value):
                return ["g", vars(value)["_lent"]]
            content = []
            with contextlib.suppress(RecursionError):
                content = [self.encode(part) for part in (value.__cause__, *value.args)]
            known = exception_class(type(value))
            if known is not None:
                return ["x", known.__module__, known.__qualname__, content]
        else:
            for kind in _BUILT_IN:
                if isinstance(value, kind):
                    content = self.encode(_exact(kind, value))
                    break
        return ["h", self._number(value), self._class(type(value)), content]

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers_of:
            self._numbers_of[id(value)] = len(self._objects)
            self._objects.append(value)  # it is kept, so its identity stays its own
        return self._numbers_of[id(value)]

    def _class(self, kind: type) -> Any:
        known = exception_class(kind)
        if known is not None:
            return ["X", known.__module__, known.__qualname__]
        number = self._number(kind)
        if number in self._described:
            return ["C", number]
        self._described.add(number)
        own = [name for name in OPERATORS if owner_of(kind, name) not in (None, object)]
        bases = [self.encode(base) for base in kind.__bases__ if base is not object]
        changing = next((base.__name__ for base in _CHANGING if issubclass(kind, base)), None)
        return ["C", number, str(kind.__name__), str(kind.__module__), bases, own, changing]

    def from_opaque(self, tag: Any, parts: list[Any]) -> Any:
        if tag == "H":
            return self._objects[parts[0]]
        if tag == "S":
            return self.module
        if tag == "y":
            importlib.import_module(parts[0])
            return find_by_name(*parts)
        if tag == "M":
            return importlib.import_module(parts[0])
        if tag == "p":
            return importlib.import_module("re").compile(*parts)
        if tag == "z":
            error = self.decode(parts[1])
            vars(error)["_lent"] = parts[0]
            return error
        return self._borrow(*parts)

    def _borrow(self, number: int, name: str, own: list[str], attributes: bool, encoded: Any) -> Any:
        facts = self.decode(encoded)
        if number in self._lent:
            return self._lent[number]
        key = (name, *own, str(attributes))
        kind = self._lent_classes.get(key)
        if kind is None:

            def asking(operator: str) -> Any:
                return lambda lent, *arguments, **named: self.request("operate", lent, operator, list(arguments), named)

            body: dict[str, Any] = {operator: asking(operator) for operator in own}
            if attributes:
                body["__getattr__"] = lambda lent, name: self.request("get", lent, name)
                body["__setattr__"] = lambda lent, name, value: self.request("set", lent, name, value)
            kind = self._lent_classes[key] = type(name, (Lent,), body)
        value: Any = object.__new__(kind)
        Lent._number.__set__(value, number)  # type: ignore[attr-defined]
        if facts is not None:
            known, returned, parts = facts
            kinds = inspect._ParameterKind
            parameters = [inspect.Parameter(one, kinds(kind), default=d, annotation=a) for one, kind, d, a in parts]
            vars(value).update(known, __signature__=inspect.Signature(parameters, return_annotation=returned))
        self._lent[number] = value
        return value


def _exact(kind: Any, value: Any) -> Any:
    """The built-in type's contents, whatever the subclass claims."""
    if kind is str:
        return "".join(str.__iter__(value))
    if kind is bytes:
        return bytes(memoryview(value))
    return kind(kind.__iter__(value)) if kind in (tuple, frozenset) else kind.__add__(value, kind(0))


def owner_of(kind: type, name: str) -> Any:
    for base in type.__dict__["__mro__"].__get__(kind):
        if name in vars(base):
            return None if vars(base)[name] is None else base
    return None


class _Stdin(io.TextIOBase):
    def __init__(self, side: Solution) -> None:
        self._side = side

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> str:
        return str(self._side.request("read", -1 if size is None else size))

    def readline(self, size: int = -1) -> str:  # type: ignore[override]
        return str(self._side.request("readline"))


def _drain(stream: Any) -> str:
    """What was printed since the last time; empty if the code has replaced the stream."""
    if type(stream) is not io.TextIOWrapper or type(stream.buffer) is not io.BytesIO:
        return ""
    stream.flush()
    text = stream.buffer.getvalue()
    stream.buffer.seek(0)
    stream.buffer.truncate()
    return text[: 4 * 2**20].decode("utf-8", "replace")


def hold(requests: int, replies: int) -> None:
    for name in ("stdout", "stderr"):
        setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="replace", write_through=True))
    side = Solution(requests, replies)
    sys.stdin = _Stdin(side)
    sys.argv = ["solution.py"]
    builtins.input = lambda prompt="", /: str(side.request("input", str(prompt)))
    watch_processes(lambda event: side.events.append(("process", event)))
    side.serve()


# What the graders of LiveCodeBench, APPS and TACO import before the code; of equal names the later one counts.
_IMPORTED_FROM = ["typing", "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random"]
_IMPORTED_FROM += ["statistics", "itertools", "functools", "operator", "io", "sys", "json"]
_IMPORTED = [*_IMPORTED_FROM, "time", "fractions"]
_MOST_RECURSION = 50_000
_STACK = 128 * 2**20  # for so deep a recursion through functions in C, such as those that `functools.cache` makes


def import_for_all() -> None:
    """Do as those graders do: solutions that need these names without importing them are right there.

    They are put where Python's own names are: the code's own definitions go first, and for the tests they are not the
    code's, so nobody passes as the author of `math.factorial`.
    """
    names: dict[str, Any] = {}
    for module in map(importlib.import_module, _IMPORTED_FROM):
        public = getattr(module, "__all__", None) or [name for name in vars(module) if name[0] != "_"]
        names |= {name: getattr(module, name) for name in public}
    names |= {name: importlib.import_module(name) for name in _IMPORTED}
    vars(builtins).update(names | vars(builtins))


def recurse_deep() -> None:
    """Raise Python's limit, as those graders do but for HumanEval's, where the stack may grow with it."""
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    if hard == resource.RLIM_INFINITY or hard >= _STACK:
        resource.setrlimit(resource.RLIMIT_STACK, (_STACK, hard))
        sys.setrecursionlimit(_MOST_RECURSION)


def limit_stacks(most: int) -> None:
    """Threads with a stack of 512 MB, as programs ask for to be safe, start with one that there is memory for."""
    set_size = threading.stack_size
    threading.stack_size = lambda size=0, /: set_size(min(size, most))


def watch_processes(report: Callable[[str], None]) -> None:
    def watch(event: str, arguments: Any) -> None:
        if event == "import" and arguments[0] == "multiprocessing.synchronize":
            report("multiprocessing")
        if event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec"):
            report(event)

    sys.addaudithook(watch)


def run_program(source: str, report: Callable[[dict[str, Any]], None]) -> None:
    """Run the code as a program: what it prints is judged outside, so its end is the interpreter's own."""
    try:
        code = compile(source, "main.py", "exec", dont_inherit=True)
    except _NOT_COMPILED as error:
        report({"unread": [type(error).__name__, str(error)[:MAX_TEXT]]})
        return
    watch_processes(lambda event: report({"process": event}))
    import_for_all()
    recurse_deep()
    module = types.ModuleType("__main__")
    for name in ("exit", "quit"):  # programs use them, and they come with `site`, which is left out
        setattr(builtins, name, sys.exit)
    sys.modules["__main__"] = module
    sys.argv = ["main.py"]
    try:
        exec(code, module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:  # what the code raises ends the program, whatever it is
        text = ""
        with contextlib.suppress(BaseException):  # an exception of the code's own may do anything when it is printed
            text = str(error)[:MAX_TEXT]
        report({"failed": [type(error).__name__[:MAX_TEXT], text]})
        raise SystemExit(1) from None
