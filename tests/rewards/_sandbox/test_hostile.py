"""The process that runs the code: a program's input, output and end, and how much memory and stack it has."""

import signal

import pytest

from tests.rewards._sandbox.running import failure, module, program, raised

PROGRAMS = [  # code, what it reads, what it prints and how it ends
    ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", "1 2\n39\n", "42\n", 0),
    ("print(open('/dev/stdin').read(), open('/proc/self/fd/0', 'rb').read())", "ab", "ab b'ab'\n", 0),
    ("import os\nos.write(1, os.read(0, 2))\nprint(open(0).read())", "ab\ncd", "ab\ncd\n", 0),
    ("import atexit\natexit.register(print, 'bye')\nif __name__ == '__main__': raise SystemExit(3)", "", "bye\n", 3),
    ("import os\nprint(sorted(os.environ))", "", "['HOME', 'LANG', 'PATH', 'PYTHONHASHSEED', 'TMPDIR']\n", 0),
    ("import gc, os\nprint(os.listdir(), gc.isenabled())", "", "[] True\n", 0),
    ("1 / 0", "", "", 1),
]


def test_a_program_reads_prints_and_ends_as_python_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    for code, stdin, printed, status in PROGRAMS:
        run = program(code, stdin)
        assert (run.output.decode(), run.ended, run.status) == (printed, "exited", status)
    assert run.messages == [{"failed": ["ZeroDivisionError", "division by zero"]}]


def test_run_python_limits_memory_and_stack() -> None:
    assert raised("x = [0]\nwhile True: x += x") == "MemoryError"
    assert raised("import mmap\nx = [mmap.mmap(-1, 2**27) for _ in range(8)]") in ("OSError", "MemoryError")
    run = module("import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return max([n], key=lambda x: f(n))\nf(1)")
    assert run.status in (-signal.SIGSEGV, -signal.SIGBUS) or failure(run) in ("MemoryError", "RecursionError")
    assert raised("def f(n): return f(n + 1)\nf(1)") == "RecursionError"
