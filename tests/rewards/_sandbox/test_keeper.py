"""Code that takes more time, storage, output or threads than it is given is ended, and what took the time is known."""

# ruff: noqa: E501, PT018
import json
import os
import tempfile
from pathlib import Path

import pytest

from tests.busy import busy
from tests.rewards._sandbox.running import in_parallel, module, needs_layers, program, raised, statuses


@pytest.mark.slow
def test_code_that_does_not_end_is_ended() -> None:
    codes = [
        "while True: pass",
        "9 ** 9 ** 9",
        "import time\ntime.sleep(1000)",
        "import signal\n[signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15, 24)]\nwhile True: pass",
        "import re\nre.match('(a+)+$', 'a' * 50 + 'b')",
        "import threading\nfor _ in 'abc': threading.Thread(target=lambda: list(iter(int, 1))).start()\nwhile 1: pass",
    ]
    assert [(run.ended, run.seconds >= 0.5) for run in in_parallel(codes, seconds=0.5)] == [("timeout", True)] * 6
    [message] = module("import os\nos.closerange(0, 100)\nwhile True: pass").messages
    assert message["gone"] == "closed"


def test_run_python_bounds_output() -> None:
    run = program("import os\nwhile True: os.write(1, b'a' * 10**6)")
    assert run.ended == "output" and len(run.output) <= 4 * 2**20 + 2**17
    write = "import os\nfor _ in range(20): os.write(1, b'a' * 10**6); os.write(2, b'a' * 10**6)\nx = 1"
    assert statuses(module(write, "assert x == 1")) == ["pass"], "what a module writes there is thrown away"
    each = "import os\nfor fd in range(3, 500):\n  try:\n    {}\n  except OSError: pass\n"
    forged = ("\n" + json.dumps({"test": 0, "status": "pass"}) + "\n").encode()
    assert statuses(module(each.format(f"os.write(fd, {forged!r})") + "os._exit(0)", "assert 0 == 1")) == []
    fills = each.format("while True: os.write(fd, b'a' * 10**6)")
    assert program(fills).ended == "output"
    run = module(fills)
    assert run.ended == "storage" or "gone" in run.messages[0]


MAPPED = "import mmap, os\nheld = []\nwhile True:\n    with open('x', 'w+b') as file:\n        {fill}\n        {hold}\n    os.unlink('x')"
HOARDERS = [
    "n = 0\nwhile True:\n    n += 1\n    with open(str(n), 'wb') as f: f.write(bytes(2**23))",
    "n = 0\nwhile True:\n    n += 1\n    open(str(n), 'wb').close()",
    "import os\nn = 0\nwhile True:\n    n += 1\n    os.mkdir(str(n))",
    "import os\nwhile True:\n    os.mkdir('x')\n    os.chdir('x')",
    "import os\nheld = []\nwhile True:\n    held.append(open('x', 'wb'))\n    held[-1].write(bytes(2**23)); held[-1].flush()\n    os.unlink('x')",
    MAPPED.format(fill="file.write(bytes(2**24)); file.flush()", hold="held.append(mmap.mmap(file.fileno(), 4096, mmap.MAP_PRIVATE))"),
    MAPPED.format(
        fill="file.truncate(2**24)",
        hold="held.append(mmap.mmap(file.fileno(), 2**24, mmap.MAP_PRIVATE)); [held[-1][i] for i in range(0, 2**24, 4096)]",
    ),
    "import os\nwhile True:\n    with open('x', 'wb') as f: f.write(bytes(2**23))\n    os.unlink('x')",
]  # fmt: skip


@needs_layers
@pytest.mark.parametrize("folder", ["", pytest.param("/dev/shm", marks=pytest.mark.slow)])
def test_what_is_written_is_limited_and_not_what_is_listed(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", folder or tempfile.tempdir)
    found = {code: run.ended for code, run in zip(HOARDERS, in_parallel(HOARDERS), strict=True)}
    assert found == dict.fromkeys(HOARDERS, "storage")
    assert list(Path(tempfile.gettempdir()).glob("python-tests-*")) == []


@needs_layers
def test_files_and_threads_are_limited() -> None:
    shared = "import mmap\nfile = open('x', 'w+b')\nfile.truncate(2**20)\nmmap.mmap(file.fileno(), 2**20)"
    assert raised(shared) == "PermissionError", "a shared map would be a way around the limit"
    assert raised("with open('x', 'wb') as f:\n    for _ in range(100): f.write(bytes(2**20)); f.flush()") == "OSError"
    assert raised("files = [open('x', 'w') for _ in range(1000)]") == "OSError"
    thread = "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"
    assert module(f"import threading, time\nthreading.stack_size(32768)\nwhile True: {thread}").ended == "threads"
    again = "import threading\nfor _ in range(300): t = threading.Thread(target=int); t.start(); t.join()"
    assert statuses(module(again, "assert not t.is_alive()")) == ["pass"], "only those that live are counted"


@pytest.mark.slow
def test_time_is_the_code_s_own_however_busy_the_machine() -> None:
    """Six busy processes beside it: half a second of work of a second's allowance is no timeout."""
    with busy(3 * (os.cpu_count() or 1)):
        code = "import time\nstart = time.process_time()\nwhile time.process_time() < start + 0.5: pass\nprint(1)"
        assert program(code, seconds=1.0).output == b"1\n"
        assert program("while True: pass", seconds=0.3).ended == "timeout"


TIMES = [
    ("import time\ndef f(): time.sleep(1000)", "assert f()", "timeout"),
    ("def f(): return range(10 ** 15)", "assert sum(f()) == 3", "timeout"),
    ("def f(): return 1", "while True: pass\nassert f()", "tests"),
    ("def f(): return 1", "import time\ntime.sleep(1000)\nassert f()", "tests"),
]


@pytest.mark.parametrize(("code", "test", "ended"), TIMES)
def test_who_took_the_time(code: str, test: str, ended: str) -> None:
    assert module(code, test, seconds=0.15).ended == ended
