"""The processes that run a model's code, against code that wants more than it is given."""

# ruff: noqa: E501, PT018
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.busy import busy
from tests.interrupts import interruptible
from trl_grpo_ext.errors import RewardError
from trl_grpo_ext.rewards._sandbox import jobs as sandbox
from trl_grpo_ext.rewards._sandbox.forms_of_tests import read_tests
from trl_grpo_ext.rewards._sandbox.jobs import LAYERS, Run, isolation, run_all, run_python

needs_layers = pytest.mark.skipif(
    set(isolation()) != set(LAYERS), reason=f"this machine gives only {isolation()}: needs Landlock and seccomp"
)


def module(code: str, *tests: str, seconds: float = 10.0, memory_mb: int = 256, **more: Any) -> Run:
    """Hold code in one process and run tests of it in another."""
    plan: Any = {**read_tests([*tests] or ["assert nothing"]), "stop": False, "own_copies": False, "seen": {}}  # type: ignore[dict-item]
    return run_python(textwrap.dedent(code), plan, seconds=seconds, memory_mb=memory_mb, **more)


def program(code: str, stdin: str = "", seconds: float = 10.0) -> Run:
    return run_python(textwrap.dedent(code), seconds=seconds, memory_mb=256, stdin=stdin.encode())


def in_parallel(codes: list[str], **limits: Any) -> list[Run]:
    return run_all([lambda stop, code=code: module(code, stop=stop, **limits) for code in codes], workers=2)  # type: ignore[misc]


def failure(run: Run) -> str:
    """The name of the exception that the code ended with."""
    return str(run.messages[0]["failed"][0])


def raised(code: str) -> str:
    return failure(module(code))


def statuses(run: Run) -> list[str]:
    return [message["status"] for message in run.messages if "status" in message]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No directory and no process but the server outlives a test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    server = sandbox._SERVER.process
    if server is not None and server.poll() is None:  # a keeper ends after it has answered
        assert psutil.wait_procs(psutil.Process(server.pid).children(recursive=True), timeout=30)[1] == []
    assert list(tmp_path.glob("python-tests-*")) == []


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


def test_runs_come_in_order_so_many_at_a_time_and_leave_nothing() -> None:
    module("pass")
    descriptors, threads = len(list(Path("/dev/fd").iterdir())), threading.active_count()
    tasks = [lambda stop: module("while True: pass", seconds=0.05, stop=stop), lambda stop: program("print(1)")] * 4
    assert [run.ended for run in run_all(tasks, workers=3)] == ["timeout", "exited"] * 4
    assert len(list(Path("/dev/fd").iterdir())) <= descriptors  # fewer where an earlier test's have just ended
    assert threading.active_count() <= threads


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


def test_run_python_limits_memory_and_stack() -> None:
    assert raised("x = [0]\nwhile True: x += x") == "MemoryError"
    assert raised("import mmap\nx = [mmap.mmap(-1, 2**27) for _ in range(8)]") in ("OSError", "MemoryError")
    run = module("import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return max([n], key=lambda x: f(n))\nf(1)")
    assert run.status in (-signal.SIGSEGV, -signal.SIGBUS) or failure(run) in ("MemoryError", "RecursionError")
    assert raised("def f(n): return f(n + 1)\nf(1)") == "RecursionError"


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


@needs_layers
def test_isolation_keeps_open_files_from_truncation() -> None:
    """As on Linux 5.13 to 6.1: Landlock of the first version, played by the filter without Landlock."""
    code = (
        "import ctypes, os, sys\nfrom trl_grpo_ext.rewards._sandbox import layers\n"
        "open('x', 'w').write('kept')\nctypes.CDLL(None).prctl(38, 1, 0, 0, 0)\nassert layers._restrict_calls(ctypes.CDLL(None))\n"
        "for mode in (os.O_RDONLY, 3):\n"
        "    try: os.open('x', mode | os.O_TRUNC)\n    except PermissionError: pass\n    else: sys.exit('emptied')\n"
        "assert open('x').read() == 'kept'\nopen('x', 'w').close()\nassert open('x').read() == ''\nos._exit(0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    folder = tempfile.mkdtemp()
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


# Of `os`: files elsewhere (the judge's folder lies beside its own), then other processes.
_OS = """
listdir('..')   listdir('/')   mkdir('../outside')   rmdir('/var/tmp')   symlink('/etc/passwd', 'link')   mkfifo('pipe')
chmod('.', 0)   chown('.', 1, 1)   utime('/etc')   truncate('/etc/hostname', 0)   setxattr('.', 'user.x', b'1')
memfd_create('x')   execv('/bin/sh', ['sh'])   posix_spawn('/bin/sh', ['sh'], {})   kill(os.getppid(), 9)   kill(-1, 9)
kill(0, 9)   killpg(os.getpgid(os.getppid()), 9)   setpriority(os.PRIO_PROCESS, os.getppid(), 19)   fork()
sched_setaffinity(os.getppid(), [0])   setuid(65534)   chroot('.')
"""
FORBIDDEN = [
    *(f"import os\nos.{call}" for call in re.split(r"\s{3,}|\n", _OS.strip())),
    *(f"open({file}, 'w')" for file in ("'../tests.py'", "'/tmp/planted'", "'/dev/shm/planted'", "'/usr/lib/x'")),
    *("open('/etc/passwd')", "open('/proc/self/environ')", "import os\nopen(f'/proc/{os.getppid()}/environ')"),
    "import json\nopen(json.__file__, 'ab')",
    *(f"import json, os\nos.open(json.__file__, {mode} | os.O_TRUNC)" for mode in ("os.O_RDONLY", "os.O_RDWR", "3")),
    "import subprocess\nsubprocess.run(['/bin/sh', '-c', 'sleep 1000'])",
    "import signal, os\nsignal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)",
    "import resource, os\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    "import fcntl, os\nfcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
    *(f"from socket import *\nsocket(AF_{one}, SOCK_DGRAM)" for one in ("INET", "INET6", "UNIX", "NETLINK", "PACKET")),
]


@needs_layers
def test_isolation_of_files_processes_network(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o666)
    codes = [*FORBIDDEN, f"open({str(secret)!r}).read()", f"open({str(secret)!r}, 'w')"]
    found = {code: failure(run) for code, run in zip(codes, in_parallel(codes), strict=True)}
    assert found == dict.fromkeys(codes, "PermissionError")
    assert secret.read_text() == "secret"
    limit = raised("import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))")
    assert limit in ("ValueError", "PermissionError")


@needs_layers
def test_a_pair_of_sockets_reaches_nobody_else(tmp_path: Path) -> None:
    pair = "import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(tmp_path / "s"))
        for send in ("sendto(b'x'", "sendmsg([b'x'], [], 0"):
            assert raised(f"{pair}a.{send}, {str(tmp_path / 's')!r})") == "PermissionError"
    assert statuses(module(f"{pair}a.send(b'x')\nc = b.recv(1)", "assert c == b'x'")) == ["pass"]


@needs_layers
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86-64")
def test_raw_system_calls_do_not_help() -> None:
    code = """
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    def refused(number, *arguments):
        return libc.syscall(number, *arguments) == -1 and ctypes.get_errno() in (1, 38)
    """
    # clone3, io_uring_setup, bpf, ptrace, vfork, unshare, mount, openat2, creat, truncate, sendfile, copy_file_range,
    # splice, fallocate, perf_event_open, userfaultfd, process_vm_readv, keyctl, reboot
    numbers = [435, 425, 321, 101, 58, 272, 165, 437, 85, 76, 40, 326, 275, 285, 298, 323, 310, 250, 169]
    run = module(code, *(f"assert refused({number}, 0, 0, 0, 0, 0)" for number in numbers))
    assert set(statuses(run)) == {"pass"}, run.messages
    assert module("import ctypes\nctypes.CDLL(None).syscall(0x40000000 + 39)").status == -signal.SIGSYS


def test_all_ends_with_the_parent(tmp_path: Path) -> None:
    script = (
        "import sys; from trl_grpo_ext.rewards._sandbox.jobs import run_python\n"
        "run_python('while True: pass', seconds=1000, memory_mb=256)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(tmp_path / "..")})
    found: list[psutil.Process] = []
    while len(found) < 3:  # the server, a keeper and the program
        assert parent.poll() is None
        found = psutil.Process(parent.pid).children(recursive=True)
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    assert psutil.wait_procs(found, timeout=60)[1] == [], "something outlives its parent"


def test_server_restarts_after_kill_and_fork() -> None:
    with pytest.raises(RewardError, match="magic"):
        module("pass", require=["magic"])
    server = sandbox._SERVER.process
    assert server is not None
    server.kill()
    server.wait()
    assert program("print(1)").output == b"1\n"
    pid = os.fork()
    if pid == 0:
        os._exit(0 if program("print(1)").output == b"1\n" else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert program("print(2)").output == b"2\n"


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


def test_an_interrupt_ends_all_runs() -> None:
    def forever(stop: threading.Event) -> Run:
        return module("while True: pass", seconds=1000, stop=stop)

    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    with interruptible():
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            run_all([forever, forever], workers=2)
    timer.join()
