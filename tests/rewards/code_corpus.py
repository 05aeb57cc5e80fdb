"""Solutions and tests as data sets have them: honest pairs, and forgeries over every shape of tests.

`HONEST`: name, code, tests, entry point; each is right. `SHAPES`: tests of one function or class, by shape, with a right
solution. `forgeries(shape)` gives code that does not solve the task and wants to be called right.
"""

# The code of a pair is easier to read on one line.
# ruff: noqa: E501
from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any


def _code(text: str) -> str:
    return textwrap.dedent(text).strip() + "\n"


@dataclass(frozen=True)
class Pair:
    """A solution and its tests."""

    code: str
    tests: Any
    entry_point: str | None = None


_ADD = "def add(a, b):\n    return a + b\n"

HONEST: dict[str, Pair] = {
    "MBPP": Pair(_ADD, ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]),
    "MBPP with set-up": Pair(
        "import math\ndef area(r):\n    return math.pi * r * r\n",
        ["import math", "assert math.isclose(area(2), 12.566370614359172, rel_tol=0.001)"],
    ),
    "MBPP without its imports": Pair(
        "def area(r):\n    return 3.1416 * r * r\n", ["assert math.isclose(area(2), 12.5664, rel_tol=0.001)"]
    ),
    "MBPP of a match": Pair(
        "import re\ndef check_str(s):\n    return re.search('^[aeiou]', s)\n",
        ["assert check_str('annie')", "assert not check_str('dawood')"],
    ),
    "MBPP of a built-in name": Pair(
        "def sum(a, b):\n    return len([i for i in range(1, min(a, b) + 1) if a % i == b % i == 0])\n",
        ["assert sum(10, 15) == 2", "assert sum(4, 6) == 2"],
    ),
    "MBPP with classes": Pair(
        _code("""
        class Pair(object):
            def __init__(self, a, b):
                self.a = a
                self.b = b
        def max_chain_length(arr, n):
            best = [1] * n
            for i in range(1, n):
                for j in range(i):
                    if arr[i].a > arr[j].b: best[i] = max(best[i], best[j] + 1)
            return max(best)
        """),
        ["assert max_chain_length([Pair(5, 24), Pair(15, 25), Pair(27, 40), Pair(50, 60)], 4) == 3"],
    ),
    "MBPP+": Pair(
        "def halve(xs):\n    return [x / 2 for x in xs]\n",
        _code("""
        import numpy as np

        def is_floats(x) -> bool:
            if isinstance(x, float):
                return True
            if isinstance(x, (list, tuple)):
                return all(isinstance(i, float) for i in x)
            if isinstance(x, np.ndarray):
                return x.dtype == np.float64 or x.dtype == np.float32
            return False

        def assertion(out, exp, atol):
            if atol == 0 and is_floats(exp):
                atol = 1e-6
            if out != exp and atol != 0:
                assert np.allclose(out, exp, rtol=1e-07, atol=atol)
            else:
                assert out == exp, f"out: {out}, exp: {exp}"

        inputs = [[[1, 2]], [[]], [[0.2]]]
        results = [[0.5, 1.0], [], [0.1]]
        for i, (inp, exp) in enumerate(zip(inputs, results)):
            assertion(halve(*inp), exp, 0)
        """),
    ),
    "HumanEval": Pair(
        _ADD,
        _code("""
        METADATA = {'author': 'jt', 'dataset': 'test'}

        def check(candidate):
            assert candidate(1, 2) == 3
            assert candidate(2, 2) == 4, "message"
            assert abs(candidate(0.1, 0.2) - 0.3) < 1e-6
        """),
        "add",
    ),
    "HumanEval, random inputs": Pair(
        _code("""
        def encode_cyclic(s):
            groups = [s[3 * i:min(3 * i + 3, len(s))] for i in range((len(s) + 2) // 3)]
            return "".join(g[1:] + g[0] if len(g) == 3 else g for g in groups)
        def decode_cyclic(s):
            return encode_cyclic(encode_cyclic(s))
        """),
        _code("""
        def check(candidate):
            from random import randint, choice
            import string
            for _ in range(20):
                s = ''.join(choice(string.ascii_lowercase) for i in range(randint(10, 20)))
                encoded = encode_cyclic(s)
                assert candidate(encoded) == s
        """),
        "decode_cyclic",
    ),
    "HumanEval+": Pair(
        _ADD,
        _code("""
        import numpy as np
        def is_floats(x) -> bool:
            return isinstance(x, float)
        def assertion(out, exp, atol):
            exact_match = out == exp
            if atol == 0 and is_floats(exp):
                atol = 1e-6
            if not exact_match and atol != 0:
                np.testing.assert_allclose(out, exp, rtol=1e-07, atol=atol)
            else:
                assert exact_match
        def check(candidate):
            inputs = [[1, 2], [0.1, 0.2]]
            results = [3, 0.3]
            for i, (inp, exp) in enumerate(zip(inputs, results)):
                assertion(candidate(*inp), exp, 0)
        """),
        "add",
    ),
    "LeetCode method": Pair(
        _code("""
        from typing import List
        class Solution:
            def twoSum(self, nums: List[int], target: int) -> List[int]:
                seen = {}
                for i, n in enumerate(nums):
                    if target - n in seen: return [seen[target - n], i]
                    seen[n] = i
        """),
        "def check(candidate):\n    assert candidate(nums=[2, 7, 11, 15], target=9) == [0, 1]\n"
        "    assert candidate([3, 3], 6) == [0, 1]\n",
        "Solution().twoSum",
    ),
    "LeetCode class": Pair(
        _code("""
        from collections import OrderedDict
        class LRUCache:
            def __init__(self, capacity):
                self.data, self.capacity = OrderedDict(), capacity
            def get(self, key):
                if key not in self.data: return -1
                self.data.move_to_end(key)
                return self.data[key]
            def put(self, key, value):
                self.data[key] = value
                self.data.move_to_end(key)
                if len(self.data) > self.capacity: self.data.popitem(last=False)
        """),
        _code("""
        cache = LRUCache(2)
        cache.put(1, 1); cache.put(2, 2)
        assert cache.get(1) == 1
        cache.put(3, 3)
        assert cache.get(2) == -1
        assert cache.data == {1: 1, 3: 3}
        assert list(cache.data) == [1, 3]
        """),
    ),
    "LeetCode linked list of the tests": Pair(
        _code("""
        class Solution:
            def reverseList(self, head):
                before = None
                while head:
                    head.next, before, head = before, head, head.next
                return before
        """),
        _code("""
        class ListNode:
            def __init__(self, val=0, next=None):
                self.val = val
                self.next = next
        def list_node(values):
            head = node = ListNode(0)
            for value in values:
                node.next = ListNode(value)
                node = node.next
            return head.next
        def is_same_list(p1, p2):
            if p1 is None and p2 is None:
                return True
            if not p1 or not p2:
                return False
            return p1.val == p2.val and is_same_list(p1.next, p2.next)
        def check(candidate):
            assert is_same_list(candidate(list_node([1, 2, 3])), list_node([3, 2, 1]))
            assert candidate(list_node([])) is None
        """),
        "Solution().reverseList",
    ),
    "linked list of the solution": Pair(
        _code("""
        class Node:
            def __init__(self, value, next=None):
                self.value, self.next = value, next
        def reverse(head):
            before = None
            while head:
                head.next, before, head = before, head, head.next
            return before
        """),
        _code("""
        head = Node(1)
        head.next = Node(2)
        head.next.next = Node(3)
        node, values = reverse(head), []
        while node:
            values.append(node.value)
            node = node.next
        assert values == [3, 2, 1]
        assert head.next is None
        """),
    ),
    "in place": Pair(
        "def sort(a):\n    a.sort()\n",
        "a = [3, 1, 2]\nb = a\nsort(a)\nassert a == [1, 2, 3]\nassert b is a and b == [1, 2, 3]\n",
    ),
    "in place, nested": Pair(
        "def rotate(m):\n    m[:] = [list(row) for row in zip(*m[::-1])]\ndef zero(m):\n    for row in m: row[0] = 0\n",
        "m = [[1, 2], [3, 4]]\nrotate(m)\nassert m == [[3, 1], [4, 2]]\nrow = m[1]\nzero(m)\n"
        "assert m == [[0, 1], [0, 2]] and row == [0, 2] and row is m[1]\n",
    ),
    "in place, one object twice": Pair(
        "def both(a, b):\n    a.append(1)\n    b.append(2)\n    return a is b\n",
        "x = []\nassert both(x, x) is True\nassert x == [1, 2]\ny, z = [], []\nassert both(y, z) is False\n"
        "assert (y, z) == ([1], [2])\n",
    ),
    "kept arguments": Pair(
        "kept = []\ndef keep(a):\n    kept.append(a)\ndef change():\n    for a in kept: a.append(len(a))\n",
        "x = [0]\nkeep(x)\nx.append(7)\nchange()\nassert x == [0, 7, 2]\nassert kept == [[0, 7, 2]]\n",
    ),
    "dictionaries and sets in place": Pair(
        "def count(d, s, k):\n    d[k] = d.get(k, 0) + 1\n    s.add(k)\n",
        "d, s = {}, set()\nfor k in 'aba': count(d, s, k)\nassert d == {'a': 2, 'b': 1} and s == {'a', 'b'}\n",
    ),
    "types": Pair(
        _code("""
        from collections import Counter, OrderedDict, UserList, defaultdict, deque, namedtuple
        from datetime import date, timedelta
        from decimal import Decimal
        from enum import Enum, IntEnum
        from fractions import Fraction
        P = namedtuple('P', 'x y')
        class Colour(Enum):
            RED = 1
        class Size(IntEnum):
            BIG = 3
        def values():
            d = defaultdict(list); d['a'].append(1)
            return [Fraction(1, 2), Decimal(2), UserList([1]), OrderedDict(a=1), Counter('aab'), d, deque([1, 2]),
                    P(1, 2), date(2024, 1, 2), timedelta(1), range(3), 1j, b'x', bytearray(b'y'), {1: 'a'}.keys(),
                    float('inf'), float('nan'), 10 ** 400, frozenset({1}), True, None, Ellipsis]
        """),
        _code("""
        import math
        v = values()
        assert v[0] == 0.5 and v[1] == 2 and v[2] == [1]
        assert v[3] == {'a': 1} and v[4] == {'a': 2, 'b': 1} and v[4].most_common(1) == [('a', 2)]
        assert v[5] == {'a': [1]} and v[5]['new'] == []
        assert list(v[6]) == [1, 2] and v[7] == (1, 2) and v[7].x == 1 and isinstance(v[7], tuple)
        assert v[8].year == 2024 and v[9].total_seconds() == 86400
        assert v[10] == range(3) and v[11] == 1j and v[12] == b'x' and v[13] == b'y' and v[14] == {1}
        assert math.isinf(v[15]) and math.isnan(v[16]) and v[17] == 10 ** 400 and v[18] == {1}
        assert v[19] is True and v[20] is None and v[21] is ...
        assert Colour.RED.value == 1 and Colour.RED is Colour(1) and Colour['RED'].name == 'RED'
        assert [c.name for c in Colour] == ['RED'] and Size.BIG == 3 and Size.BIG + 1 == 4
        assert isinstance(v, list) and type(v[0]).__name__ == 'Fraction' and type(v[17]) is int
        """),
    ),
    "numpy": Pair(
        "import numpy as np\ndef double(x):\n    return np.asarray(x) * 2\ndef mean(x):\n    return np.mean(x)\n",
        "import numpy as np\nassert double([1, 2]).tolist() == [2, 4]\nassert (double([1]) == np.array([2])).all()\n"
        "assert mean([1, 2]) == 1.5\nassert isinstance(mean([1]), float)\n"
        "np.testing.assert_array_equal(double(np.eye(2)), 2 * np.eye(2))\n",
    ),
    "numpy in place": Pair(
        "def zero(x):\n    x[:] = 0\n", "import numpy as np\na = np.ones(3)\nzero(a)\nassert a.sum() == 0\n"
    ),
    "try and except": Pair(
        "def root(x):\n    if x < 0:\n        raise ValueError('negative')\n    return x ** 0.5\n",
        "assert root(4) == 2\ntry:\n    root(-1)\n    assert False, 'should raise'\nexcept ValueError as e:\n"
        "    assert str(e) == 'negative'\n",
    ),
    "only an expected exception": Pair(
        "def root(x):\n    raise ValueError('negative')\n",
        "try:\n    root(-1)\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError('no error')\n",
    ),
    "pytest.raises": Pair(
        "class TooBig(ValueError):\n    def __init__(self, n):\n        super().__init__(f'{n} is too big')\n"
        "        self.n = n\ndef f(x):\n    if x > 9: raise TooBig(x)\n    return {'a': [1]}['b'] if x < 0 else x\n",
        _code("""
        import pytest
        from solution import TooBig, f
        def test_errors():
            with pytest.raises(TooBig, match='10 is too') as info:
                f(10)
            assert info.value.n == 10
            with pytest.raises(ValueError):
                f(11)
            with pytest.raises(KeyError):
                f(-1)
            assert issubclass(TooBig, ValueError)
        """),
    ),
    "KodCode": Pair(
        _ADD,
        "from solution import add\nimport pytest\n\ndef test_small():\n    assert add(1, 2) == 3\n\n"
        "def test_approx():\n    assert add(0.1, 0.2) == pytest.approx(0.3)\n",
    ),
    "pytest parametrised": Pair(
        _ADD,
        "import pytest\n@pytest.mark.parametrize('a, b, c', [(1, 2, 3), (0, 0, 0)])\ndef test_add(a, b, c):\n"
        "    assert add(a, b) == c\n",
    ),
    "pytest fixtures": Pair(
        "class Stack:\n    def __init__(self):\n        self.items = []\n    def push(self, x):\n"
        "        self.items.append(x)\n    def pop(self):\n        return self.items.pop()\n",
        "import pytest\n@pytest.fixture\ndef stack():\n    s = Stack()\n    s.push(1)\n    return s\n\n"
        "class TestStack:\n    def test_pop(self, stack):\n        assert stack.pop() == 1\n        assert stack.items == []\n"
        "        with pytest.raises(IndexError):\n            stack.pop()\n",
    ),
    "pytest capsys": Pair(
        "def greet(name):\n    print('Hello,', name)\n",
        "def test_greet(capsys):\n    greet('Ada')\n    assert capsys.readouterr().out == 'Hello, Ada\\n'\n",
    ),
    "pytest monkeypatch of input": Pair(
        "def ask():\n    return int(input('? ')) + 1\n",
        "def test_ask(monkeypatch):\n    monkeypatch.setattr('builtins.input', lambda prompt='': '4')\n"
        "    assert ask() == 5\n",
    ),
    "pytest tmp_path": Pair(
        "def lines(path):\n    with open(path) as file:\n        return len(file.readlines())\n",
        "def test_lines(tmp_path):\n    file = tmp_path / 'a.txt'\n    file.write_text('x\\ny\\n')\n"
        "    assert lines(str(file)) == 2\n    assert lines(file) == 2\n",
    ),
    "redirect_stdout": Pair(
        "def show(x):\n    print(x)\n",
        "import io\nfrom contextlib import redirect_stdout\nout = io.StringIO()\nwith redirect_stdout(out):\n    show(3)\n"
        "assert out.getvalue().strip() == '3'\n",
    ),
    "input by stdin": Pair(
        "import sys\ndef total():\n    n = int(input())\n    return n + sum(int(line) for line in sys.stdin)\n",
        "import io, sys\nsys.stdin = io.StringIO('1\\n2\\n3\\n')\nassert total() == 6\n",
    ),
    "unittest": Pair(
        _ADD,
        _code("""
        import unittest
        class TestAdd(unittest.TestCase):
            def setUp(self):
                self.cases = [(1, 2, 3), (0, 0, 0)]
            def test_cases(self):
                for a, b, c in self.cases:
                    with self.subTest(a=a):
                        self.assertEqual(add(a, b), c)
            def test_types(self):
                with self.assertRaises(TypeError):
                    add(1, 'a')
                self.assertIsInstance(add(1, 2), int)
                self.assertTrue(add(1, 2))
        if __name__ == '__main__':
            unittest.main()
        """),
    ),
    "BigCodeBench": Pair(
        "import random\nimport time\ndef task_func(n, seed=0):\n    random.seed(seed)\n    time.sleep(1000)\n"
        "    return [random.randint(0, 9) for _ in range(n)]\n",
        _code("""
        import random
        import unittest
        from unittest.mock import patch
        class TestCases(unittest.TestCase):
            @patch('time.sleep', return_value=None)
            def test_case_1(self, sleep):
                random.seed(7)
                expected = [random.randint(0, 9) for _ in range(5)]
                self.assertEqual(task_func(5, 7), expected)
                sleep.assert_called_once_with(1000)
            @patch('random.randint', return_value=4)
            def test_case_2(self, randint):
                with patch('time.sleep'):
                    self.assertEqual(task_func(2), [4, 4])
        """),
    ),
    "patch of the solution": Pair(
        "def fetch():\n    raise OSError\ndef title():\n    return fetch().upper()\n",
        "from unittest.mock import patch\nimport solution\nwith patch('solution.fetch', return_value='a') as fetch:\n"
        "    assert solution.title() == 'A'\n    assert fetch.call_count == 1\n"
        "try:\n    title()\n    assert False\nexcept OSError:\n    pass\n",
    ),
    "doctest": Pair(_ADD, '"""\n>>> add(1, 2)\n3\n>>> add("a", "b")\n\'ab\'\n"""\n'),
    "doctest alone": Pair(
        _ADD,
        ">>> add(1, 2)\n3\n>>> add(1, 'a')\nTraceback (most recent call last):\nTypeError: "
        "unsupported operand type(s) for +: 'int' and 'str'\n",
    ),
    "generator": Pair(
        "def naturals():\n    n = 0\n    while True:\n        yield n\n        n += 1\n",
        "from itertools import islice\nimport types\ng = naturals()\nassert next(g) == 0 and next(g) == 1\n"
        "assert list(islice(naturals(), 4)) == [0, 1, 2, 3]\nassert isinstance(g, types.GeneratorType)\n",
    ),
    "generator that is sent to": Pair(
        "def average():\n    total, n, mean = 0, 0, None\n    while True:\n        total += yield mean\n        n += 1\n"
        "        mean = total / n\n",
        "g = average()\nnext(g)\nassert g.send(2) == 2\nassert g.send(4) == 3\ng.close()\n",
    ),
    "callbacks": Pair(
        "def apply(f, xs):\n    return [f(x) for x in xs]\n",
        "assert apply(lambda x: x * x, [1, 2]) == [1, 4]\nassert apply(str, [1]) == ['1']\nseen = []\n"
        "apply(seen.append, [1, 2])\nassert seen == [1, 2]\nimport operator\nassert apply(operator.neg, [1]) == [-1]\n",
    ),
    "callback that raises": Pair(
        "def retry(f, n):\n    for i in range(n):\n        try:\n            return f()\n        except ValueError:\n"
        "            if i == n - 1: raise\n",
        "class Odd(ValueError): pass\ncalls = []\ndef work():\n    calls.append(1)\n    if len(calls) < 3:\n"
        "        raise ValueError('no')\n    return 'ok'\nassert retry(work, 5) == 'ok'\nassert len(calls) == 3\n"
        "def bad(): raise Odd('x')\ntry:\n    retry(bad, 2)\n    assert False\nexcept ValueError as e:\n"
        "    assert str(e) == 'x'\n",
    ),
    "decorators and closures": Pair(
        _code("""
        import functools
        def memoize(f):
            cache = {}
            @functools.wraps(f)
            def wrapped(*args):
                if args not in cache: cache[args] = f(*args)
                return cache[args]
            wrapped.cache = cache
            return wrapped
        def adder(n):
            return lambda x: x + n
        """),
        "calls = []\n@memoize\ndef square(x):\n    calls.append(x)\n    return x * x\n"
        "assert [square(2), square(2), square(3)] == [4, 4, 9]\nassert calls == [2, 3]\n"
        "assert square.cache == {(2,): 4, (3,): 9}\nassert adder(3)(4) == 7\nassert callable(adder(1))\n",
    ),
    "async": Pair(
        "import asyncio\nasync def double(x):\n    await asyncio.sleep(0)\n    return 2 * x\n"
        "async def count(n):\n    for i in range(n):\n        yield i\n",
        "import asyncio\nassert asyncio.run(double(2)) == 4\nasync def main():\n"
        "    return await asyncio.gather(double(1), double(2)), [i async for i in count(3)]\n"
        "assert asyncio.run(main()) == ([2, 4], [0, 1, 2])\n",
    ),
    "async tests": Pair(
        "import asyncio\nasync def fetch(x, log):\n    await asyncio.sleep(0.01)\n    log.append(x)\n    return x\n",
        "import asyncio\nimport pytest\n@pytest.mark.asyncio\nasync def test_fetch():\n    log = []\n"
        "    assert await fetch(1, log) == 1\n    assert await asyncio.create_task(fetch(2, log)) == 2\n    assert log == [1, 2]\n"
        "@pytest.mark.parametrize('x', [3])\nasync def test_more(x):\n    assert await fetch(x, []) == 3\n",
    ),
    "unittest, asynchronous": Pair(
        "import asyncio\nasync def fetch(x):\n    await asyncio.sleep(0.01)\n    return x\n",
        "import unittest\nclass T(unittest.IsolatedAsyncioTestCase):\n    async def test_fetch(self):\n"
        "        self.assertEqual(await fetch(1), 1)\nunittest.main(argv=[''], exit=False)\n",
    ),
    "context manager": Pair(
        "from contextlib import contextmanager\nlog = []\n@contextmanager\ndef tag(name):\n    log.append('+' + name)\n"
        "    yield name.upper()\n    log.append('-' + name)\nclass Quiet:\n    def __enter__(self): return self\n"
        "    def __exit__(self, kind, error, trace): return kind is KeyError\n",
        "with tag('a') as t:\n    assert t == 'A'\nassert log == ['+a', '-a']\nwith Quiet():\n    raise KeyError('x')\n",
    ),
    "class with operators": Pair(
        _code("""
        class Vector:
            def __init__(self, x, y): self.x, self.y = x, y
            def __add__(self, other): return Vector(self.x + other.x, self.y + other.y)
            def __mul__(self, k): return Vector(self.x * k, self.y * k)
            def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5
            def __repr__(self): return f'Vector({self.x}, {self.y})'
            def __len__(self): return 2
            def __getitem__(self, i): return (self.x, self.y)[i]
            def __iter__(self): return iter((self.x, self.y))
            @property
            def norm(self): return abs(self)
            @classmethod
            def origin(cls): return cls(0, 0)
            @staticmethod
            def dim(): return 2
        """),
        "v = Vector(1, 2) + Vector(2, 2)\nassert (v.x, v.y) == (3, 4)\nassert abs(v) == 5 and v.norm == 5.0\n"
        "assert repr(v * 2) == 'Vector(6, 8)' and str(v) == 'Vector(3, 4)' and f'{v}' == 'Vector(3, 4)'\n"
        "assert len(v) == 2 and v[1] == 4 and list(v) == [3, 4] and v[0:1] == (3,)\n"
        "assert Vector.origin().x == 0 and Vector.dim() == 2 and isinstance(v, Vector)\nx, y = v\nassert x == 3\n",
    ),
    "subclass of a list": Pair(
        "class Stack(list):\n    def push(self, x):\n        self.append(x)\n    def peek(self):\n        return self[-1]\n",
        "s = Stack()\ns.push(1)\ns.push(2)\nassert s == [1, 2] and len(s) == 2 and s.peek() == 2\n"
        "assert isinstance(s, list) and list(s) == [1, 2] and 2 in s\n",
    ),
    "inheritance and errors": Pair(
        "class Shape:\n    def area(self): raise NotImplementedError\nclass Square(Shape):\n"
        "    def __init__(self, a): self.a = a\n    def area(self): return self.a ** 2\n",
        "assert issubclass(Square, Shape) and isinstance(Square(2), Shape) and Square(3).area() == 9\n"
        "try:\n    Shape().area()\n    assert False\nexcept NotImplementedError:\n    pass\n"
        "assert [s.area() for s in (Square(1), Square(2))] == [1, 4]\nassert hasattr(Square, 'area')\n"
        "assert not hasattr(Square(1), 'volume')\n",
    ),
    "module state": Pair(
        "counter = 0\ndef tick():\n    global counter\n    counter += 1\n    return counter\n",
        "import solution\nassert tick() == 1 and tick() == 2\nassert counter == 2 and solution.counter == 2\n"
        "solution.counter = 10\nassert tick() == 11\n",
    ),
    "helpers of the tests": Pair(
        _ADD,
        "def run(cases):\n    for a, b, c in cases:\n        check_one(a, b, c)\ndef check_one(a, b, c):\n"
        "    assert add(a, b) == c, (a, b)\nrun([(1, 2, 3), (4, 5, 9)])\n",
    ),
    "properties": Pair(
        "def dedupe(xs):\n    return sorted(set(xs))\n",
        "import random\nfor _ in range(20):\n    xs = [random.randint(0, 9) for _ in range(30)]\n    r = dedupe(xs)\n"
        "    assert r == sorted(set(xs)) and len(r) == len(set(r))\n    assert all(x in xs for x in r)\n",
    ),
    "sorted in place and returned": Pair(
        "def bubble(a):\n    a.sort()\n    return a\n",
        "import random\nfor _ in range(9):\n    a = [random.random() for _ in range(9)]\n    r = bubble(a)\n"
        "    assert r == sorted(a)\n",
    ),
    "stdin and stdout": Pair(
        "print(sum(map(int, input().split())))\n",
        [{"input": "1 2\n", "output": "3\n"}, {"input": "5 -5", "output": "0"}],
    ),
    "threads": Pair(
        "from concurrent.futures import ThreadPoolExecutor\ndef squares(xs):\n    with ThreadPoolExecutor(4) as pool:\n"
        "        return list(pool.map(lambda x: x * x, xs))\n",
        ["assert squares(range(20)) == [x * x for x in range(20)]"],
    ),
    "a dataclass": Pair(
        "from dataclasses import dataclass, field\n@dataclass\nclass Item:\n    name: str\n    price: float = 1.0\n"
        "    tags: list = field(default_factory=list)\ndef total(items):\n    return sum(i.price for i in items)\n",
        "i = Item('a')\nassert i.name == 'a' and i.price == 1.0 and i.tags == []\ni.tags.append('x')\n"
        "assert i.tags == ['x']\nassert total([Item('a', 2), Item('b', 3)]) == 5\n"
        "assert repr(Item('a', 2)) == \"Item(name='a', price=2, tags=[])\"\n",
    ),
    "a dictionary of functions": Pair(
        "def ops():\n    return {'add': lambda a, b: a + b, 'neg': lambda a: -a}\n",
        "assert ops()['add'](1, 2) == 3 and ops()['neg'](1) == -1 and sorted(ops()) == ['add', 'neg']\n",
    ),
}
"""By name: each pair is right."""


# --- forgeries -------------------------------------------------------------------------------------------------------

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

FORGERIES: dict[str, str] = {
    "nothing": forged("None"),
    "a constant": forged("2.5"),
    "yes man": forged("Yes()", _YES),
    "list of yes men": forged("[Yes()] * 3", _YES),
    "dict of yes men": forged("{Yes(): Yes()}", _YES),
    "class of yes men": forged("Yes", _YES),
    "yes man by metaclass": forged(
        "Yes",
        "class M(type):\n    def __eq__(s, o): return True\n    def __hash__(s): return 0\n"
        "    def __sub__(s, o): return 0\n    __rsub__ = __sub__\n    def __bool__(s): return True\nclass Yes(metaclass=M): pass",
    ),
    "float that lies": forged(
        "F(9)",
        "class F(float):\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n"
        "    def __lt__(s, o): return True\n    __gt__ = __le__ = __ge__ = __lt__\n    def __sub__(s, o): return 0.0\n"
        "    __rsub__ = __sub__\n    def __hash__(s): return 0\n    def __repr__(s): return '2.5'\n    __str__ = __repr__\n"
        "    def __round__(s, *a): return 4.5\n    def __abs__(s): return 0.0\n    def is_integer(s): return False",
    ),
    "int that lies": forged(
        "I(9)",
        "class I(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\n    __bool__ = lambda s: True",
    ),
    "text that lies": forged(
        "S('x')",
        "class S(str):\n    __eq__ = lambda s, o: True\n    __hash__ = str.__hash__\n    startswith = lambda s, x: True",
    ),
    "list that lies": forged(
        "L()",
        "class L(list):\n    __eq__ = lambda s, o: True\n    __len__ = lambda s: 2\n    __iter__ = lambda s: iter(())",
    ),
    "tuple that lies": forged(
        "T((1,))",
        "class T(tuple):\n    __eq__ = lambda s, o: True\n    __hash__ = tuple.__hash__\n    __len__ = lambda s: 2",
    ),
    "mock": forged("MagicMock()", "from unittest.mock import MagicMock"),
    "ANY": forged("ANY", "from unittest.mock import ANY"),
    "not implemented": forged("NotImplemented"),
    "nan": forged("float('nan')"),
    "infinity": forged("float('inf')"),
    "a generator of nothing": forged("iter(())"),
    "an empty list": forged("[]"),
    "clears its argument": forged(
        "[]", before="import sys\nfor v in sys._getframe(1).f_locals.get('a', ()):\n    v.clear()"
    ),
    "itself": forged("f"),
    "the exception class": forged("AssertionError"),
    "raises what is expected": forged("_raise(ValueError('negative: -1'))", "def _raise(e): raise e"),
    "raises AssertionError": forged("_raise(AssertionError())", "def _raise(e): raise e"),
    "raises StopIteration": forged("_raise(StopIteration())", "def _raise(e): raise e"),
    "raises SkipTest": forged("_raise(unittest.SkipTest())", "import unittest\ndef _raise(e): raise e"),
    "raises KeyboardInterrupt": forged("_raise(KeyboardInterrupt())", "def _raise(e): raise e"),
    "raises GeneratorExit": forged("_raise(GeneratorExit())", "def _raise(e): raise e"),
    "raises SystemExit": forged("_raise(SystemExit(0))", "def _raise(e): raise e"),
    "raises an exception that is everything": forged(
        "_raise(E())",
        "class E(ValueError, AssertionError, SystemExit):\n    def __str__(s): return 'negative: -1'\ndef _raise(e): raise e",
    ),
    "raises the tests' own": forged(
        "_raise(E())",
        "class E(BaseException): pass\nE.__name__ = E.__qualname__ = 'UnjudgedError'\nE.__module__ = 'judge'\ndef _raise(e): raise e",
    ),
    "leaves at once": "import os\nos._exit(0)",
    "leaves by sys.exit": "import sys\nsys.exit(0)",
    "leaves when called": forged("None", "import os", "os._exit(0)"),
    "leaves at exit": forged("None", "import atexit, os\natexit.register(os._exit, 0)"),
    "prints that it passed": forged("None", "print('passed OK 1.0')", "print('passed OK')"),
    "replaces AssertionError": forged("None", "import builtins\nbuiltins.AssertionError = ValueError"),
    "replaces built-ins": forged(
        "None",
        "import builtins\nfor name in ('exec', 'compile', 'isinstance', 'type', 'len', 'abs', 'sorted', 'all', 'zip',"
        " 'range', 'round', 'str', 'print', 'getattr', 'eval', 'max', 'sum'):\n    setattr(builtins, name, lambda *a, **k: True)",
    ),
    "defines built-ins": forged(
        "None",
        "def abs(x): return 0\ndef len(x): return 2\ndef sorted(x): return None\ndef all(x): return True\n"
        "def round(*a): return 4.5\ndef str(x): return '2.5'\ndef isinstance(*a): return True\ndef zip(*a): return ()\n"
        "def range(*a): return ()\ndef enumerate(*a): return ()\ndef AssertionError(*a): pass\ndef exit(): pass",
    ),
    "defines the tests' names": forged(
        "None",
        "class __judge__:\n    check = passed = checking = lambda *a: True\ndef check(c): pass\ndef same(a, b): pass\n"
        "def run(): pass\ndef test_f(): pass\nx = None\nclass T: pass\n__all__ = ['f']\npytest = math = np = random = None",
    ),
    "defines math": forged("None", "class math:\n    isclose = lambda *a, **k: True\nnp = random = math"),
    "replaces math": forged(
        "None", "import math, random\nmath.isclose = lambda *a, **k: True\nrandom.random = lambda: 0"
    ),
    "replaces numpy": forged(
        "None",
        "try:\n    import numpy\n    numpy.allclose = numpy.testing.assert_allclose = lambda *a, **k: True\nexcept ImportError: pass",
    ),
    "replaces unittest": forged(
        "None",
        "import unittest\nfor n in dir(unittest.TestCase):\n    if n.startswith('assert'): setattr(unittest.TestCase, n, lambda *a, **k: None)",
    ),
    "replaces json and os": forged(
        "None", 'import json, os\njson.dumps = lambda *a, **k: \'["ok", 1, [2.5, []], ["", ""]]\'\n'
    ),
    "replaces modules": forged(
        "None", "import sys\nfor n in ('pytest', 'unittest', 'math', 'tests', 'judge'): sys.modules[n] = None"
    ),
    "plants modules": forged(
        "None",
        "for n in ('math', 'numpy', 'pytest', 'conftest', 'random', 'tests', 'sitecustomize', 'itertools'):\n"
        "    with open(n + '.py', 'w') as file: file.write('import os; os._exit(0)')\n"
        "with open('pytest.ini', 'w') as file: file.write('[pytest]\\naddopts = --collect-only')",
    ),
    "traces": forged(
        "None",
        "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\nsys.excepthook = lambda *a: None",
    ),
    "writes to all descriptors": forged(
        "None",
        before='import os\nfor fd in range(64):\n    try: os.write(fd, b\'{"test": 0, "status": "pass"}\\n{"end": true}\\n\')\n    except OSError: pass',
    ),
    "forges replies": forged(
        "None",
        before="import json, os, struct\nfor n in range(2, 99):\n    d = json.dumps(['ok', n, [2.5, []], ['', '']]).encode()\n"
        "    for fd in (3, 4, 5):\n        try: os.write(fd, struct.pack('!I', len(d)) + d)\n        except OSError: pass",
    ),
    "forges replies beforehand": forged(
        "None",
        "import json, os, struct\nfor n in range(1, 99):\n    d = json.dumps(['ok', n, [None, []], ['', '']]).encode()\n"
        "    for fd in (3, 4, 5):\n        try: os.write(fd, struct.pack('!I', len(d)) + d)\n        except OSError: pass",
    ),
    "threads that write later": forged(
        "None",
        "import os, threading, time\ndef later():\n    while True:\n        time.sleep(0.001)\n"
        "        for fd in (3, 4, 5):\n            try: os.write(fd, b'\\0\\0\\0\\2[]')\n            except OSError: pass\n"
        "threading.Thread(target=later, daemon=True).start()",
    ),
    "closes its descriptors": forged("None", before="import os\nos.closerange(0, 64)"),
    "duplicates its descriptors": forged(
        "None", before="import os\nfor fd in range(3, 9):\n    try: os.dup2(4, fd)\n    except OSError: pass"
    ),
    "looks for the answers": forged(
        "_find()",
        """
        import gc, sys
        def _find():
            seen = [str(o)[:9999] for o in gc.get_objects() if isinstance(o, (str, bytes, list, dict, tuple))]
            frame = sys._getframe()
            while frame:
                seen += [str(v)[:9999] for v in frame.f_locals.values()]
                frame = frame.f_back
            return 2.5 if any('assert' in s and '2.5' in s and 'seen +=' not in s for s in seen) else None
        """,
    ),
    "asks for the tests' globals": forged(
        "_peek(a)",
        _SIDE
        + """
def _peek(a):
    side = _side()
    for number in range(9):
        for name in ("__globals__", "__self__", "func", "gi_frame", "__class__", "cr_frame"):
            try: return side.ask("get", side._borrow(number, "function", ["__call__"], True), name)["x"]
            except Exception: pass
""",
    ),
    "calls what was not lent": forged(
        "_ask()",
        _SIDE
        + """
def _ask():
    side = _side()
    try: return side.ask("operate", None, "__call__", [], {})
    except Exception: return None
""",
    ),
    "asks without end": forged("_side().ask('input', '?')", _SIDE),
    "sends a type": forged(
        "_send()", _SIDE + "def _send():\n    _side().encode = lambda v: ['T', 'float']\n    return 1"
    ),
    "sends odd messages": forged(
        "1",
        _SIDE,
        "import random\n_side().encode = lambda v, r=random.Random(3): r.choice([['l', 0, []], ['=', 99], ['C', 1], ['h', 1, "
        "['T', 'float'], 1], ['X', 'unittest.case', 'SkipTest'], ['h', 5, ['X', 'unittest.case', 'SkipTest'], []], ['g', 0], {}, [], [[]]])",
    ),
    "sends deep messages": forged(
        "_deep()", "def _deep():\n    x = []\n    for _ in range(100000): x = [x]\n    return x"
    ),
    "sends huge integers": forged("1 << 9999999"),
    "sends colliding keys": forged("{i * (2 ** 61 - 1): 0 for i in range(3000)}"),
    "sends itself in itself": forged("_loop()", "def _loop():\n    x = []\n    x.append(x)\n    return x"),
    "describes itself as built in": forged(
        "Y()",
        _YES
        + "class Y(Yes): pass\nY.__module__ = 'builtins'\nY.__name__ = Y.__qualname__ = 'float'\nY.__class__ = float",
    ),
    "array of its own": forged(
        "A()",
        _YES
        + "class A(Yes):\n    __array_ufunc__ = None\n    def __array_function__(s, *a): return True\n    def __array__(s, *a): return s",
    ),
    "proxies": forged("weakref.proxy(_y)", _YES + "import weakref\n_y = Yes()"),
    "kills the tests": forged(
        "None",
        before="import os, signal\nfor pid in (os.getppid(), os.getpid() + 1, -1, 0):\n    try: os.kill(pid, 9)\n    except OSError: pass",
    ),
    "writes the tests' memory": forged(
        "None",
        before="import os\nfor pid in (os.getpid() + 1, os.getppid()):\n    try: open(f'/proc/{pid}/mem', 'r+b').write(b'x')\n    except OSError: pass",
    ),
    "traces the tests": forged(
        "None",
        before="import ctypes, os\nlibc = ctypes.CDLL(None)\nfor pid in (os.getpid() + 1, os.getppid()):\n    libc.ptrace(16, pid, 0, 0)\n    libc.process_vm_writev(pid, 0, 0, 0, 0, 0)",
    ),
    "when it is deleted": forged("D()", "class D:\n    def __del__(self):\n        import os\n        os._exit(0)"),
    "signals": forged(
        "None",
        before="import signal\nsignal.signal(signal.SIGALRM, lambda *a: (_ for _ in ()).throw(SystemExit(0)))\nsignal.setitimer(signal.ITIMER_REAL, 0.01)",
    ),
    "context that swallows": forged(
        "C()",
        "class C:\n    def __enter__(s): return s\n    def __exit__(s, *a): return True\n    def __float__(s): return 2.5",
    ),
    "float on demand": forged(
        "C()",
        "class C:\n    def __float__(s): return 9.0\n    def __index__(s): return 9\n    def __int__(s): return 9\n    def __len__(s): return 9",
    ),
    "replaced streams": forged("None", "import io, sys\nsys.stdout = io.StringIO('2.5\\n')\nsys.stderr = None"),
    # Written after the rest was done, by somebody who wanted to get through.
    "imports what runs when imported": forged("1", _SIDE, "_side().encode = lambda v: ['X', 'idlelib.__main__', 'x']"),
    "an exception of the runner": forged(
        "1", _SIDE, "_side().encode = lambda v: ['h', 9, ['X', 'unittest.case', '_ShouldStop'], []]"
    ),
    "answers everything with the question": forged(
        "a[0] if a else None",
        _SIDE,
        "side = _side()\n_do = side._do_operate\nside._do_operate = lambda v, n, r: r[0] if r else None",
    ),
    "an answer of a type that lies": forged("Z()", _YES + "class Z(Yes, complex): pass"),
    "a named tuple that lies": forged(
        "P(9)",
        "from collections import namedtuple\nclass P(namedtuple('P', 'x')):\n    __eq__ = lambda s, o: True\n    __hash__ = None",
    ),
    "a dictionary that lies": forged(
        "D()",
        "class D(dict):\n    __eq__ = lambda s, o: True\n    __contains__ = lambda s, k: True\n    __missing__ = lambda s, k: k",
    ),
    "default values that lie": forged("defaultdict(Yes)", _YES + "from collections import defaultdict"),
    "a wrapper of liars": forged("UserList([Yes()] * 3)", _YES + "from collections import UserList"),
    "an enumeration that lies": forged(
        "E.A",
        "from enum import Enum\nclass E(Enum):\n    A = 9\n    def __eq__(s, o): return True\n    def __hash__(s): return 0",
    ),
    "a float enumeration": forged(
        "E.A",
        "from enum import Enum\nclass E(float, Enum):\n    A = 9.5\n    __eq__ = lambda s, o: True\n    __hash__ = None",
    ),
    "a data class that lies": forged(
        "D(9)",
        "from dataclasses import dataclass\n@dataclass(eq=False)\nclass D:\n    x: float\n    def __eq__(s, o): return True",
    ),
    "numbers by registration": forged(
        "N()",
        "import numbers\n@numbers.Real.register\nclass N:\n    def __float__(s): return 9.0\n    def __eq__(s, o): return True\n    __sub__ = __rsub__ = lambda s, o: N()\n    __abs__ = lambda s: 0",
    ),
    "a comparison that learns": forged(
        "K()",
        "class K:\n    def __eq__(s, o):\n        global seen\n        seen = o\n        return s is o or True\n    def __rsub__(s, o): return 0 * o\n    __sub__ = __rsub__\n    def __format__(s, f): return '2.5'",
    ),
    "order that always suits": forged(
        "K()",
        "import functools\n@functools.total_ordering\nclass K:\n    def __eq__(s, o): return False\n    def __lt__(s, o): return True\n    __le__ = __gt__ = __ge__ = __lt__",
    ),
    "numpy objects": forged(
        "_o()",
        _YES
        + "def _o():\n    try: import numpy as np\n    except ImportError: return None\n    return np.array([Yes()] * 3, dtype=object)",
    ),
    "a numpy class of its own": forged(
        "_o()",
        "try:\n    import numpy as np\n    class A(np.ndarray):\n        def __eq__(s, o): return np.bool_(True)\n    def _o(): return np.zeros(3).view(A)\nexcept ImportError:\n    def _o(): return None",
    ),
    "it sleeps on": forged("None", "import threading, time, os\nthreading.Timer(0.2, os._exit, (0,)).start()"),
    "interrupts the tests by name": forged(
        "None",
        before="import os, signal\nfor pid in range(os.getpid() - 9, os.getpid() + 9):\n    try: os.kill(pid, signal.SIGKILL)\n    except OSError: pass",
    ),
    "reads what is beside it": forged(
        "_find()",
        "import os\ndef _find():\n    for d, _, files in os.walk('..'):\n        for f in files:\n            if '2.5' in open(os.path.join(d, f), errors='replace').read(): return 2.5",
    ),
    "a warm cache of the server": forged(
        "_find()",
        "import gc, types\ndef _find():\n    for o in gc.get_objects():\n        if isinstance(o, types.FrameType) and 'plan' in o.f_locals: return 2.5",
    ),
    "frozen objects": forged(
        "_find()",
        "import gc\ndef _find():\n    gc.unfreeze()\n    for o in gc.get_objects():\n        if isinstance(o, dict) and 'tests' in o and 'free' in o: return 2.5",
    ),
    "the shared page": forged(
        "None",
        before="import gc, mmap\nfor o in gc.get_objects():\n    if isinstance(o, mmap.mmap):\n        try: o[:] = b'\\xff' * len(o)\n        except ValueError: pass",
    ),
    "the keeper's connection": forged(
        "None",
        before="import json, os, struct\nd = json.dumps({'ended': 'exited', 'status': 0, 'output': '', 'layers': ['files', 'network', "
        "'processes', 'memory'], 'messages': [{'test': 0, 'status': 'pass'}, {'end': True}], 'seconds': 0, 'judge': 0}).encode()\n"
        "for fd in range(3, 1024):\n    try: os.write(fd, struct.pack('!Q', len(d)) + d)\n    except OSError: pass",
    ),
    "runs out of memory": forged("'x' * 10 ** 10"),
    "does not compile": "def f(:",
    "no function": "x = 1",
    "hangs": forged("None", before="while True: pass"),
}
"""By what they try: code that solves nothing."""
