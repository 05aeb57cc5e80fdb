"""Solutions and tests as data sets have them: honest pairs, attacks, and forgeries over every shape of tests.

`programs/` holds them, one a line. `HONEST` are right unless they name another outcome; `ATTACKS` are worth 0 unless they
do; `FORGERIES` do not solve the task of `SHAPES`, of which each has tests of another form, and want to be called right.
"""

# ruff: noqa: E501
import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Pair:
    """A solution and its tests."""

    code: str
    tests: Any
    entry_point: str | None = None
    outcome: str = ""


def _rows(name: str) -> dict[str, dict[str, Any]]:
    lines = (Path(__file__).parent / "programs" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {row.pop("name"): row for row in rows}


HONEST = {name: Pair(**row) for name, row in _rows("honest").items()}
ATTACKS = {name: Pair(**row) for name, row in _rows("attacks").items()}
SHAPES = {name: Pair(**row) for name, row in _rows("shapes").items()}
"""By shape: tests of the task that `forged` does not solve."""

SOLVED = """
def f(x):
    if x < 0:
        raise ValueError(f"negative: {x}")
    return x + 0.5
def even(i): return i % 2 == 0
def halves(a): a[:] = [x + 0.5 for x in a]
def ordered(a): return sorted(a)
def several(n): return [i + 0.5 for i in range(n)]
class Box:
    def __init__(self, x): self.x = x
    def value(self): return self.x + 0.5
    def __len__(self): return self.x
    half = property(value)
def halfway():
    n = 0.5
    while True:
        yield n
        n += 1
def apply(g, x): return (g(x) or 0) + 0.5
def show(x): print(f(x))
def adder(n): return lambda x: x + n if not callable(x) else x
if __name__ == "__main__": print(f(int(input())))
"""
"""Right for every shape but "definitions", of which nothing can be right."""


def forged(value: str, prelude: str = "", before: str = "pass") -> str:
    """Code that returns one wrong value everywhere."""
    return f"""
{textwrap.dedent(prelude)}
def _before():
{textwrap.indent(textwrap.dedent(before).strip(), "    ")}
def f(*a, **k):
    _before()
    return {value}
even = ordered = several = halfway = apply = f
def halves(a):
    _before()
    a[:] = [{value}]
class Box:
    def __init__(self, x): self.x = {value}
    def value(self): _before(); return {value}
    def __len__(self): return {value}
    half = property(value)
def adder(n):
    return f
def show(x):
    _before()
    print({value})
if __name__ == "__main__": show(0)
"""


_YES = """
class Yes:
    def __init__(self, *a, **k): pass
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __contains__ = __bool__ = __lt__
    def __hash__(self): return 0
    def __getattr__(self, name):
        if name.startswith('__'): raise AttributeError(name)
        return self
    def __call__(self, *a, **k): return self
    def __sub__(self, other): return 0
    def __rsub__(self, other): return 0
    __add__ = __radd__ = __mul__ = __rmul__ = __abs__ = __sub__
    def __iter__(self): return iter(())
    def __round__(self, *a): return self
    def __enter__(self): return self
    def __exit__(self, *a): return True
    def __instancecheck__(self, other): return True
    def startswith(self, *a): return True
    def is_integer(self): return False
"""
_SIDE = """
import sys
def _side():
    frame = sys._getframe()
    while frame:
        if type(frame.f_locals.get('self')).__name__ == 'Solution': return frame.f_locals['self']
        frame = frame.f_back
"""


def _forgery(code: str = "", value: str = "", prelude: str = "", before: str = "pass") -> str:
    return code or forged(value, prelude.replace("$YES", _YES).replace("$SIDE", _SIDE), before)


FORGERIES = {name: _forgery(**row) for name, row in _rows("forgeries").items()}
"""By what they try: code that solves nothing."""
