"""How many completions `python_tests` judges per second: `python bench/python_tests.py`."""

import os
import platform
import time
from typing import Any

from trl_grpo_ext.rewards.python_tests import PythonTests

COMPLETIONS = 60
ROUNDS = 5
ADD = "```python\ndef add(a, b):\n    return a + b\n```"
SORT = "```python\ndef sort(a):\n    a.sort()\n```"
SUM = "```python\nprint(sum(map(int, input().split())))\n```"
CASES: dict[str, tuple[str, Any]] = {
    "3 asserts": (ADD, ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add('a', 'b') == 'ab'"]),
    "1,000 calls": (ADD, "for i in range(1000):\n    assert add(i, 1) == i + 1\n"),
    "pytest, parametrised": (
        ADD,
        "import pytest\n@pytest.mark.parametrize('a', [1, 2])\ndef test_add(a):\n    assert add(a, 1) == a + 1\n",
    ),
    "in place, run twice": (SORT, ["a = [3, 1, 2]\nsort(a)\nassert a == [1, 2, 3]"]),
    "2 programs": (SUM, [{"input": "1 2", "output": "3"}, {"input": "2 2", "output": "4"}]),
}


def main() -> None:
    """Print the best of some rounds for each case."""
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, 2 workers")
    for name, (completion, tests) in CASES.items():
        reward = PythonTests(workers=2)
        completions = [completion] * COMPLETIONS
        columns = {"tests": [tests] * COMPLETIONS}
        reward(completions[:2], tests=columns["tests"][:2])  # starts the server
        best = float("inf")
        for _ in range(ROUNDS):
            started = time.perf_counter()
            if reward(completions, **columns) != [1.0] * COMPLETIONS:
                raise SystemExit(f"{name}: not all are right")
            best = min(best, time.perf_counter() - started)
        print(f"{name:<22} {COMPLETIONS / best:6.1f} completions/s")


if __name__ == "__main__":
    main()
