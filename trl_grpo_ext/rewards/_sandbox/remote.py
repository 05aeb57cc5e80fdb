"""Objects of the solution, as the tests have them: their attributes, calls, items and iteration are requests.

An object of the solution's own class must not decide whether a test passes: its `==`, order, truth, membership and
arithmetic with the tests' values are never requested. Where a test made that object itself it cannot be judged
(`UnjudgedError`); where the solution handed it over instead of a value, it is wrong (`WrongError`).
"""

import builtins
import copy
import importlib
import types
from collections.abc import Callable, Mapping
from typing import Any

from .hostile import JUDGING, OPERATORS, UNARY, special_names
from .wire import ViolationError, may_be_data

_RESULT_TYPES: dict[str, type] = dict.fromkeys(special_names("str repr format"), str)
_RESULT_TYPES |= {"__len__": int, "__int__": int, "__index__": int, "__float__": float, "__complex__": complex}
_METHODS = {name for kind in (str, bytes, set, float) for name in dir(kind)}
_PREDICATES = {"startswith", "endswith"} | {name for name in _METHODS if name.startswith("is")}
"""Methods of built-in types that answer yes or no about their argument."""
_NAMES = special_names(
    "name qualname doc module dict wrapped annotations defaults kwdefaults self func members slots cause context notes "
    "version all author init code post_init new class_getitem"
)
_OF_EXCEPTIONS = ("__traceback__", "__context__", "__cause__", "__suppress_context__", "__notes__")
_IMMUTABLE = (str, bytes, int, float, complex, tuple, frozenset)
_APPARENT_CLASSES: dict[str, Any] = {
    str(kind.__name__): kind
    for kind in (
        *(types.GeneratorType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.CoroutineType),
        *(types.AsyncGeneratorType, list, dict, set, bytearray),
    )
}
SIDE: Any = None  # the conversation of this process (`tests_process.Side`)


class UnjudgedError(BaseException):
    """The test needs something that only the solution could say."""


class WrongError(BaseException):
    """The solution gave something with which no test can pass."""


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if name == "__call__":
            return SIDE.request("call", self, arguments, tuple(keywords.items()))
        if name == "__exit__":
            arguments = (*arguments[:2], None)
        parts = (self, *arguments)
        if name not in UNARY and not all(isinstance(part, Remote) for part in parts):
            raise SIDE.refused(f"it takes the result of the solution's own {name} with a value of the tests", *parts)
        result = SIDE.request("operate", self, name, arguments)
        if name in _RESULT_TYPES and type(result) is not _RESULT_TYPES[name]:
            raise TypeError(f"{name} of the solution returned {type(result).__name__}")
        return _mark_made(result) if name not in UNARY and any(map(is_made, parts)) else result

    def judge(self: Any, *arguments: Any) -> Any:
        if type(self)._remote_content and name != "__hash__":  # it extends `list`, `dict`, ...: what it holds decides
            parts = (self, *arguments)
            inner = [getattr(type(part), "_remote_content", None) for part in parts]
            held = [SIDE.request("content", part) if is_ else part for part, is_ in zip(parts, inner, strict=True)]
            return bool(held[0]) if name == "__bool__" else getattr(held[0], name)(*held[1:])
        raise SIDE.refused(f"it needs the {name} of the solution's own class {type(self).__name__}", self, *arguments)

    return judge if name in JUDGING else operate


def _attribute(value: Any, name: str) -> Any:
    if name.startswith("__") and name.endswith("__") and name not in _NAMES:
        raise AttributeError(f"{name} of an object of the solution")
    if name in _PREDICATES and not isinstance(value, type):
        raise SIDE.refused(f"it asks an object of the solution's own class for `{name}`", value)
    return SIDE.request("get", value, name)


def _delete(value: Any, name: str) -> None:
    SIDE.request("delete", value, name)


class RemoteType(type):
    _remote_number: int
    _remote_wanted: bool
    __getattr__ = _attribute
    __delattr__ = _delete

    def __new__(cls, name: str, bases: tuple[Any, ...], body: dict[str, Any]) -> Any:
        if "_remote_number" not in body:
            raise SIDE.unjudged("the tests derive a class from one of the solution's")
        return super().__new__(cls, name, bases, body)

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        made = SIDE.request("call", cls, arguments, tuple(keywords.items()))
        return _mark_made(made) if cls._remote_wanted else made

    def __setattr__(cls, name: str, value: Any) -> None:
        SIDE.request("set", cls, name, value)

    def __contains__(cls, value: Any) -> bool:
        return any(member is value for member in cls)

    def __bool__(cls) -> bool:
        return True

    __iter__, __len__, __getitem__ = map(_operator, ("__iter__", "__len__", "__getitem__"))


class Remote:
    __slots__ = ()
    __getattr__ = _attribute
    __delattr__ = _delete

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OF_EXCEPTIONS:
            object.__setattr__(self, name, value)
        else:
            SIDE.request("set", self, name, value)

    def __copy__(self) -> Any:
        return SIDE.request("call", copy.copy, (self,), ())

    def __deepcopy__(self, memo: Any) -> Any:
        return self if memo is SIDE.copies else SIDE.request("call", copy.deepcopy, (self,), ())

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise SIDE.refused("it pickles an object of the solution", self)

    def __dir__(self) -> Any:
        return []


class _Doc:  # of which each class here would have one of its own
    def __get__(self, value: Any, kind: Any) -> Any:
        return _attribute(kind if value is None else value, "__doc__")


class _Handle(Remote):
    __slots__ = ("__weakref__", "_remote_id", "_remote_made")


def number_of(value: Any) -> Any:
    return value._remote_number if isinstance(value, RemoteType) else object.__getattribute__(value, "_remote_id")


def _mark_made(value: Any) -> Any:
    if isinstance(value, _Handle):
        object.__setattr__(value, "_remote_made", True)
    return value


def is_made(value: Any) -> bool:
    return isinstance(value, _Handle) and bool(object.__getattribute__(value, "_remote_made"))


def _claims(kind: Any, wanted: Any) -> bool:
    """Whether a class of the solution says that it is this one, of which nothing that crosses as data is."""
    if not isinstance(kind, RemoteType) or not isinstance(wanted, type):
        return False
    if wanted.__module__.partition(".")[0] in ("builtins", "numpy", "tests") or may_be_data(wanted):
        return False
    names = [(base.__module__, base.__name__) for base in kind.__mro__ if isinstance(base, RemoteType)]
    return (wanted.__module__, wanted.__name__) in names


def is_of(question: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """`isinstance` or `issubclass` for the tests, which cannot know whether what the solution says is true.

    An assertion that fails by it cannot be judged; what else a test does with the answer can.
    """

    def ask(value: Any, kinds: Any) -> bool:
        holds = question(value, kinds)
        kind = value if isinstance(value, RemoteType) else type(value)
        if not holds and any(_claims(kind, wanted) for wanted in (kinds if isinstance(kinds, tuple) else (kinds,))):
            SIDE.doubt_class(f"it asks for the class {kind.__module__}.{kind.__name__} of what is no data")
        return holds

    return ask


def _of_solution(name: str) -> Any:
    """What the solution has by a name. The tests want a class if they write it as one, and may compare its objects."""
    value = SIDE.request("name", name)
    if isinstance(value, RemoteType) and name[:1].isupper():
        type.__setattr__(value, "_remote_wanted", True)
    return value


def remote_class(number: int, name: Any, module: Any, bases: list[Any], own: list[Any], content: Any) -> Any:
    if not (type(name) is str and type(module) is str and set(own) <= set(OPERATORS)):
        raise ViolationError("no class")
    held = (*_IMMUTABLE, BaseException)
    roots: list[Any] = [base for base in bases if isinstance(base, RemoteType)]
    rest = [base for base in bases if base not in roots]
    others: list[Any] = [base for base in rest if base in _IMMUTABLE or issubclass(base, BaseException)]
    body: dict[str, Any] = {"__module__": module, "_remote_number": number, "_remote_wanted": False}
    body |= {"_remote_content": bool(content), "__doc__": _Doc()}
    if any(issubclass(base, held) for base in (*roots, *others)):
        shown = ["__repr__", "__call__", *([] if any(issubclass(base, str) for base in bases) else ["__str__"])]
        body |= {operator: _operator(operator) for operator in shown if operator in own}
        roots = [root for root in roots if issubclass(root, held)] or [Remote]
    else:
        body |= {"__slots__": (), **{operator: _operator(operator) for operator in own}}
        if "__eq__" not in own:
            body["__hash__"] = object.__hash__
        if "__len__" in own:
            body["__bool__"] = _operator("__bool__")
        seen = _APPARENT_CLASSES.get(content or (name if module == "builtins" else ""))
        if seen is not None:
            body["__class__"] = property(lambda self: seen)
        if seen is types.FunctionType:  # as a method of a class of the tests
            body["__get__"] = lambda self, value, kind: self if value is None else types.MethodType(self, value)
        roots = roots or [_Handle]
        others = []
    try:
        return RemoteType(name, (*roots, *others), body)
    except TypeError:  # no order of the bases suits
        return RemoteType(name, (_Handle,), {**body, "__slots__": ()})


def remote_object(kind: Any, number: int, held: Any) -> Any:
    """An object of a remote class that is no exception; `held` is what an object of a built-in immutable type holds."""
    base: Any = next((base for base in _IMMUTABLE if issubclass(kind, base)), None)
    if base is not None and type(held) is not base:
        raise ViolationError("not what its class holds")
    value = object.__new__(kind) if base is None else base.__new__(kind, held)
    object.__setattr__(value, "_remote_id", number)
    object.__setattr__(value, "_remote_made", False)
    return value


class SolutionModule(types.ModuleType):
    __all__: tuple[str, ...] = ()  # the tests' free names are found in the solution anyway

    def __getattr__(self, name: str) -> Any:
        try:
            if not name.startswith("__"):
                return _of_solution(name)
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


class Names(dict[str, Any]):
    """What the tests find as built in: what they may patch is looked up, and other names are the solution's."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self.free = frozenset(plan["free"])
        self.modules = plan["modules"]
        super().__init__({k: v for k, v in vars(builtins).items() if k not in {"input", "print", "open", *self.free}})
        self.update({name: is_of(self[name]) for name in ("isinstance", "issubclass") if name in self})

    def __missing__(self, name: str) -> Any:
        if name in self.modules:
            return importlib.import_module(self.modules[name])
        if name not in self.free:
            return vars(builtins)[name]
        try:
            return _of_solution(name)
        except KeyError:
            raise NameError(f"name {name!r} is not defined") from None
