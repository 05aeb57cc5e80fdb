"""The process that runs a completion's code: gives up its rights, runs the code and its tests, reports, ends.

Run as a script, by `run`, in a fresh interpreter without the package and without installed packages.
"""

# Every completion waits for these imports, and pathlib is a slow one.
# ruff: noqa: PTH100, PTH109, PTH120, PTH123
from __future__ import annotations

import builtins
import importlib
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any

SEND = "__send_to_the_judge__"
"""The name by which a test hands over a value that is judged outside."""
_MAX_VALUE = 2**20
_MAX_ERROR = 200
_NOT_COMPILED = (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError)


def main() -> None:
    """Read the job from one descriptor, report on another: lines of JSON, each after the job's token."""
    with open(int(sys.argv[1]), "rb") as file:
        job = json.load(file)
    out, prefix = int(sys.argv[2]), job.pop("token").encode("ascii")
    dumps, write = json.dumps, os.write

    def report(**message: Any) -> None:
        line = dumps(message)
        if len(line) > _MAX_VALUE and "value" in message:
            line = dumps({**message, "value": None})
        data = prefix + line.encode("ascii") + b"\n"
        while data:
            data = data[write(out, data) :]

    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    isolate = importlib.import_module("layers").isolate
    sys.path.pop()
    del sys.modules["layers"]
    layers = isolate(os.getcwd(), job["memory_mb"], job["seconds"], job["parent"])
    report(layers=layers)
    if "code" not in job or not set(job["require"]) <= set(layers):
        return
    try:
        code = compile(job["code"], "<completion>", "exec", dont_inherit=True)
    except _NOT_COMPILED as error:
        report(unread=_described(error))
        return
    if "tests" in job:
        _run_tests(code, job["tests"], job["stop"], report)
    else:
        _run_script(code, report)


def _run_tests(code: types.CodeType, sources: list[str], stop: bool, report: Callable[..., None]) -> None:
    """Run the code as a module, then each test in its namespace. What ends the process before the end is no pass."""
    tests = [compile(source, f"<test {index}>", "exec", dont_inherit=True) for index, source in enumerate(sources)]
    run, leave, failures = exec, os._exit, BaseException  # the code may replace the built-in names
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    sys.argv = ["solution.py"]

    def send(slot: int, value: Any) -> None:
        try:
            encoded = encoded_value(value)
        except RecursionError:
            encoded = None
        report(slot=slot, value=encoded)

    try:
        run(code, module.__dict__)
    except failures as error:
        report(failed=_described(error))
        leave(0)
    for index, test in enumerate(tests):
        module.__dict__[SEND] = send
        try:
            run(test, module.__dict__)
        except failures as error:
            report(test=index, error=_described(error))
            if stop:
                break
        else:
            report(test=index, error=None)
    report(end=True)
    leave(0)  # no atexit hook, no thread of the code gets another turn


def _run_script(code: types.CodeType, report: Callable[..., None]) -> None:
    """Run the code as a program: what it prints is judged outside, so its end is the interpreter's own."""
    module = types.ModuleType("__main__")
    for name in ("exit", "quit"):  # programs use them, and they come with `site`, which is left out
        setattr(builtins, name, sys.exit)
    sys.modules["__main__"] = module
    sys.argv = ["main.py"]
    try:
        exec(code, module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        report(failed=_described(error))
        sys.exit(1)


def encoded_value(value: Any) -> Any:
    """Write a value of built-in types as JSON, with the types kept; subclasses count as what they extend.

    Raises:
        RecursionError: It is nested too deeply, or holds itself.
    """
    if value is None or value is True or value is False:
        return ["c", value]
    if isinstance(value, int):
        return ["i", int.__format__(value, "x")]
    if isinstance(value, float):
        return ["f", float.hex(value)]
    if isinstance(value, complex):
        return ["z", float.hex(value.real), float.hex(value.imag)]
    if isinstance(value, str):
        return ["s", str.__str__(value)]
    if isinstance(value, bytes | bytearray):
        return ["b", bytes(value).hex()]
    if isinstance(value, list):
        return ["l", [encoded_value(item) for item in list.__iter__(value)]]
    if isinstance(value, tuple):
        return ["t", [encoded_value(item) for item in tuple.__iter__(value)]]
    if isinstance(value, set | frozenset | type({}.keys()) | type({}.items())):
        return ["e", list(map(encoded_value, value))]
    if isinstance(value, dict):
        return ["d", [[encoded_value(key), encoded_value(item)] for key, item in dict.items(value)]]
    return ["?"]


def _described(error: BaseException) -> list[str]:
    name = type(error).__name__
    try:
        return [name[:_MAX_ERROR], str(error)[:_MAX_ERROR]]
    except BaseException:  # an exception of the code's own may do anything when it is printed
        return [name[:_MAX_ERROR], ""]


if __name__ == "__main__":
    main()
