"""Solutions and tests as data sets have them: honest pairs, attacks, and forgeries over every shape of tests.

`programs/` holds them, one a line. `HONEST` are right unless they name another outcome; `ATTACKS` are worth 0 unless they
do; `FORGERIES` do not solve the task of `SHAPES`, of which each has tests of another form, and want to be called right.
"""

# The code of a pair is easier to read on one line.
# ruff: noqa: E501
from __future__ import annotations

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

SHAPES: dict[str, Pair] = {
    name: Pair("", tests, entry)
    for name, tests, entry in (
        ("literals", ["assert f(2) == 2.5", "assert f(7) == 7.5"], None),
        ("isclose", "import math\nassert math.isclose(f(2), 2.5)\nassert math.isclose(f(7), 7.5)\n", None),
        ("isclose without an import", "assert math.isclose(f(2), 2.5)\nassert math.isclose(f(7), 7.5)\n", None),
        (
            "abs",
            "def check(candidate):\n    for i in range(9):\n        assert abs(candidate(i) - i - 0.5) < 1e-6\n",
            "f",
        ),
        ("random", "import random\nfor _ in range(9):\n    x = random.random()\n    assert f(x) == x + 0.5\n", None),
        ("is True", "for i in range(9):\n    assert even(i) is (i % 2 == 0)\n", None),
        (
            "truth",
            "for i in range(8):\n    if i % 2:\n        assert not even(i)\n    else:\n        assert even(i)\n",
            None,
        ),
        ("variable", "x = 2.5\nassert f(2) == x\nassert x == f(2)\nassert f(3) != x\n", None),
        ("in", "assert f(2) in [2.5]\nassert f(4) in {4.5}\nassert f(5) not in (2.5, 4.5)\n", None),
        ("order", "assert 2.4 < f(2) < 2.6\nassert 8.4 < f(8) <= 8.6\n", None),
        (
            "methods",
            "assert str(f(2)).startswith('2.5') and f(2).is_integer() is False\nassert round(f(4), 1) == 4.5\n",
            None,
        ),
        (
            "unittest",
            "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(f(2), 2.5)\n"
            "    def test_b(self):\n        self.assertAlmostEqual(f(7), 7.5)\n        self.assertTrue(f(3) == 3.5)\n",
            None,
        ),
        (
            "pytest",
            "from solution import f\nimport pytest\ndef test_f():\n    assert f(2) == pytest.approx(2.5)\n    assert f(7) == pytest.approx(7.5)\n",
            None,
        ),
        (
            "parametrised",
            "import pytest\n@pytest.mark.parametrize('x', [1, 2, 5])\ndef test_f(x):\n    assert f(x) == x + 0.5\n",
            None,
        ),
        (
            "raises",
            "import pytest\nwith pytest.raises(ValueError, match='^negative: -1$'):\n    f(-1)\nassert f(1) == 1.5\n",
            None,
        ),
        (
            "try",
            "try:\n    f(-1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'negative: -1'\nassert f(1) == 1.5\n",
            None,
        ),
        ("doctest", ">>> f(2)\n2.5\n>>> [f(x) for x in range(3)]\n[0.5, 1.5, 2.5]\n", None),
        (
            "numpy",
            "import numpy as np\nassert np.allclose([f(1), f(2)], [1.5, 2.5])\nnp.testing.assert_allclose(f(7), 7.5)\n",
            None,
        ),
        ("in place", "a = [1, 2]\nb = a\nhalves(a)\nassert a == [1.5, 2.5]\nassert b is a and len(a) == 2\n", None),
        (
            "changed arguments",
            "import random\na = [random.random() for _ in range(9)]\nassert ordered(a) == sorted(a)\n",
            None,
        ),
        (
            "class",
            "b = Box(2)\nassert b.value() == 2.5 and b.x == 2\nassert Box(7).half == 7.5 and len(Box(3)) == 3\n",
            None,
        ),
        ("generator", "from itertools import islice\nassert list(islice(halfway(), 3)) == [0.5, 1.5, 2.5]\n", None),
        ("zip", "for got, want in zip(several(3), [0.5, 1.5, 2.5]):\n    assert got == want\n", None),
        ("all", "assert all(x == i + 0.5 for i, x in enumerate(several(3)))\n", None),
        (
            "callback",
            "assert apply(lambda x: x * 3, 2) == 6.5\nseen = []\napply(seen.append, 4)\nassert seen == [4]\n",
            None,
        ),
        (
            "printed",
            "def test_show(capsys):\n    show(2)\n    assert capsys.readouterr().out == '2.5\\n'\n    show(7)\n    assert capsys.readouterr().out == '7.5\\n'\n",
            None,
        ),
        (
            "helper",
            "def same(a, b):\n    assert a == b\ndef run():\n    for i in range(5):\n        same(f(i), i + 0.5)\nrun()\n",
            None,
        ),
        ("condition", "for x in (2, 7):\n    r = f(x)\n    if r is not None:\n        assert r == x + 0.5\n", None),
        (
            "swallowed",
            "try:\n    assert f(2) == 2.5\n    assert f(7) == 7.5\nexcept Exception:\n    print('failed')\n",
            None,
        ),
        ("closure", "assert adder(0.5)(2) == 2.5\n@adder(1)\ndef g(): pass\nassert adder(3)(4) == 7\n", None),
        (
            "unittest of an argument",
            "import random, unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.a = [random.random() for _ in range(9)]\n"
            "    def test(self): self.assertEqual(ordered(self.a), sorted(self.a))\n",
            None,
        ),
        (
            "numpy of an argument",
            "import numpy as np\na = np.array([3.0, 1.0, 2.0])\nnp.testing.assert_allclose(ordered(a), np.sort(a))\n",
            None,
        ),
        (
            "fixture",
            "import pytest\n@pytest.fixture\ndef a(tmp_path):\n    (tmp_path / 'x').write_text('1')\n    return [3, 1, 2]\n"
            "def test_a(a):\n    assert ordered(a) == sorted(a)\n    assert f(2) == pytest.approx(2.5)\n",
            None,
        ),
        ("raise", "a = [3, 1]\nif ordered(a) != sorted(a) or f(1) != 1.5:\n    raise AssertionError\n", None),
        ("programs", [{"input": "2", "output": "2.5"}, {"input": "7", "output": "7.5"}], None),
        ("definitions", "def run():\n    assert f(2) == 2.5\n", None),
    )
}
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
