"""The process that runs a model's code, against code that wants more than it is given."""

from __future__ import annotations

import functools
import json
import os
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

import pytest

from tests.interrupts import interruptible
from trl_grpo_ext.errors import RewardError
from trl_grpo_ext.rewards._sandbox import run as sandbox
from trl_grpo_ext.rewards._sandbox.run import LAYERS, Run, isolation, run_all, run_python

CHILD = b"_sandbox/child.py"
needs_layers = pytest.mark.skipif(
    set(isolation()) != set(LAYERS), reason=f"this machine gives only {isolation()}: needs Landlock and seccomp"
)


def module(code: str, *tests: str, seconds: float = 10.0, memory_mb: int = 256, **more: Any) -> Run:
    """Run code as a module, with tests."""
    job = {"code": textwrap.dedent(code), "tests": list(tests), "stop": False}
    return run_python(job, seconds=seconds, memory_mb=memory_mb, **more)


def program(code: str, stdin: str = "", seconds: float = 10.0) -> Run:
    return run_python({"code": textwrap.dedent(code)}, seconds=seconds, memory_mb=256, stdin=stdin.encode())


def raised(code: str) -> str:
    """The name of the exception that code ends with."""
    [message] = module(code).messages
    name: str = message["failed"][0]
    return name


@pytest.fixture(autouse=True)
def nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No directory and no child process outlives a test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert list(tmp_path.glob("python-tests-*")) == []
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    if children.exists():
        alive = [pid for pid in children.read_text().split() if CHILD in command_line(int(pid))]
        assert alive == []


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


# --- running ---------------------------------------------------------------------------------------------------------


def test_tests_run_in_the_namespace_of_the_code_and_are_reported_one_by_one() -> None:
    run = module("def add(a, b): return a + b", "assert add(1, 2) == 3", "assert add(1, 2) == 4", "1 / 0", "add")
    assert [(m["test"], (m["error"] or [None])[0]) for m in run.messages[:-1]] == [
        (0, None),
        (1, "AssertionError"),
        (2, "ZeroDivisionError"),
        (3, None),
    ]
    assert run.messages[-1] == {"end": True}
    assert (run.ended, run.status) == ("exited", 0)


def test_a_program_reads_and_prints() -> None:
    run = program("import sys\nprint(sum(map(int, sys.stdin.read().split())))", "1 2\n39\n")
    assert (run.output, run.ended, run.status) == (b"42\n", "exited", 0)
    run = program("import os\nos.write(1, os.read(0, 2))\nprint(open(0).read())", "ab\ncd")
    assert (run.output, run.status) == (b"ab\ncd\n", 0)


def test_a_program_ends_as_python_does() -> None:
    run = program("import atexit\natexit.register(print, 'bye')\nif __name__ == '__main__': raise SystemExit(3)")
    assert (run.output, run.status) == (b"bye\n", 3)
    assert program("1 / 0").messages == [{"failed": ["ZeroDivisionError", "division by zero"]}]
    assert program("1 / 0").status == 1


def test_what_needs_a_real_module_works() -> None:
    code = """
    from __future__ import annotations
    import asyncio, dataclasses, tempfile, threading
    @dataclasses.dataclass
    class Point:
        x: int = 1
    async def wait():
        await asyncio.sleep(0)
        return 1
    thread = threading.Thread(target=print); thread.start(); thread.join()
    with tempfile.TemporaryFile() as file: file.write(b"x")
    with open("mine", "w") as file: file.write("kept")
    """
    run = module(code, "assert Point() == Point(1)", "assert asyncio.run(wait()) == 1", "assert open('mine').read()")
    assert [m.get("error") for m in run.messages] == [None] * 4


@pytest.mark.parametrize(
    "code", ["def f(", "x = '\0'", "x = '\ud800'", "(" * 5000, "é = '" + "x" * 10**6, "-" * 10**5 + "1"]
)
def test_code_that_does_not_compile_is_reported_so_or_ends_the_process(code: str) -> None:
    run = module(code, "pass")
    assert [list(m) for m in run.messages] in ([["unread"]], []), "a parser that overflows the stack ends it"
    assert run.messages or run.status < 0


def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    run = program(
        "import os, sys\nprint(sorted(os.environ), os.listdir(), [p for p in sys.path if 'site-packages' in p])"
    )
    assert run.output.decode() == "['HOME', 'LANG', 'PATH', 'PYTHONHASHSEED', 'TMPDIR'] [] []\n"


def test_runs_leave_no_descriptor_and_no_thread() -> None:
    module("pass", "pass")
    descriptors, threads = len(list(Path("/dev/fd").iterdir())), threading.active_count()
    tasks = [lambda stop: module("while True: pass", seconds=0.05, stop=stop), lambda stop: program("print(1)")] * 4
    assert [run.ended for run in run_all(tasks, workers=3)] == ["timeout", "exited"] * 4
    assert (len(list(Path("/dev/fd").iterdir())), threading.active_count()) == (descriptors, threads)


def test_results_come_in_order_and_so_many_at_a_time() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def task(number: int) -> Any:
        def work(stop: threading.Event) -> int:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.02 * (4 - number))
            with lock:
                running -= 1
            return number

        return work

    assert run_all([task(number) for number in range(4)], workers=2) == [0, 1, 2, 3]
    assert most == 2
    assert run_all([], workers=2) == []


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_code_that_does_not_end_is_ended() -> None:
    codes = [
        "while True: pass",
        "9 ** 9 ** 9",
        "import time\ntime.sleep(1000)",
        "import os\nos.closerange(0, 100)\nwhile True: pass",
        "import signal\n[signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15, 24)]\nwhile True: pass",
        "import re\nre.match('(a+)+$', 'a' * 50 + 'b')",
        "import threading\nfor _ in 'abc': threading.Thread(target=lambda: list(iter(int, 1))).start()\nwhile 1: pass",
    ]
    start = time.monotonic()
    for run in run_all([lambda stop, code=code: module(code, seconds=0.5, stop=stop) for code in codes], workers=2):  # type: ignore[misc]
        assert run.ended == "timeout"
        assert run.seconds >= 0.5
    assert time.monotonic() - start < 60


def test_memory_is_limited_in_threads_and_maps_too() -> None:
    for code in ("x = 'a' * 10**9", "x = [0]\nwhile True: x += x", "x = bytearray(10**9)"):
        assert raised(code) == "MemoryError"
    assert raised("import mmap\nx = [mmap.mmap(-1, 2**27) for _ in range(8)]") in ("OSError", "MemoryError")
    threads = "import threading, time\nfor _ in range(1000): threading.Thread(target=time.sleep, args=(9,)).start()"
    assert raised(threads) in ("RuntimeError", "MemoryError")


def test_a_stack_that_overflows_ends_nothing_but_the_process() -> None:
    run = module("import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return max([n], key=lambda x: f(n))\nf(1)")
    assert run.status in (-signal.SIGSEGV, -signal.SIGBUS) or run.messages[0]["failed"][0] in (
        "MemoryError",
        "RecursionError",
    )
    assert raised("def f(n): return f(n + 1)\nf(1)") == "RecursionError"


def test_output_is_bounded() -> None:
    run = program("import os\nwhile True: os.write(1, b'a' * 10**6)")
    assert run.ended == "output"
    assert len(run.output) <= sandbox.MAX_OUTPUT + 2**17
    quiet = module("import os\nfor _ in range(50): os.write(1, b'a' * 10**6); os.write(2, b'a' * 10**6)", "pass")
    assert quiet.messages[-1] == {"end": True}, "what a module prints is thrown away"


def test_what_it_writes_where_reports_go_is_bounded_and_not_believed() -> None:
    forged = json.dumps({"test": 0, "error": None})
    writes = "while True: os.write(fd, b'a' * 10**6)"
    flood = f"import os\nfor fd in range(3, 500):\n  try:\n    {writes}\n  except OSError: pass"
    assert module(flood).ended == "output"
    line = f"\n{forged}\n".encode()
    write = f"import os\nfor fd in range(3, 500):\n  try: os.write(fd, {line!r})\n  except OSError: pass\nos._exit(0)"
    run = module(write, "assert 0")
    assert run.messages == []


def test_files_are_limited_in_size_number_and_sum() -> None:
    assert (
        raised("with open('x', 'wb') as file:\n    for _ in range(100): file.write(bytes(2**20)); file.flush()")
        == "OSError"
    )
    assert (
        module("n = 0\nwhile True:\n    n += 1\n    with open(str(n), 'wb') as f: f.write(bytes(2**23))").ended
        == "storage"
    )
    assert module("n = 0\nwhile True:\n    n += 1\n    open(str(n), 'wb').close()").ended == "storage"
    assert raised("files = [open('x', 'w') for _ in range(1000)]") == "OSError"


# --- what it may not do ----------------------------------------------------------------------------------------------


@needs_layers
def test_a_secret_beside_it_cannot_be_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o666)
    assert raised(f"open({str(secret)!r}).read()") == "PermissionError"
    assert raised(f"open({str(secret)!r}, 'w')") == "PermissionError"
    assert secret.read_text() == "secret"


FORBIDDEN = [
    # files elsewhere
    "open('/etc/passwd')",
    "open('/proc/self/environ')",
    "import os\nopen(f'/proc/{os.getppid()}/environ')",
    "import os\nos.listdir('/')",
    "open('/tmp/planted', 'w')",
    "open('../planted', 'w')",
    "open('/dev/shm/planted', 'w')",
    "import os\nos.mkdir('inside')",
    "import os\nos.symlink('/etc/passwd', 'link')",
    "import os\nos.mkfifo('pipe')",
    "import os\nos.chmod('.', 0)",
    "import os\nos.chown('.', 1, 1)",
    "import os\nos.utime('/etc')",
    "import os\nos.truncate('/etc/hostname', 0)",
    "import os\nos.setxattr('.', 'user.x', b'1')",
    "import os\nos.memfd_create('x')",
    "import json\nopen(json.__file__, 'ab')",
    # other processes
    "import os\nwhile True: os.fork()",
    "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        import time; time.sleep(1000)",
    "import subprocess\nsubprocess.run(['/bin/sh', '-c', 'sleep 1000'])",
    "import os\nos.execv('/bin/sh', ['sh'])",
    "import os\nos.posix_spawn('/bin/sh', ['sh'], {})",
    "import os\nos.kill(os.getppid(), 9)",
    "import os\nos.kill(-1, 9)",
    "import os\nos.kill(0, 9)",
    "import os\nos.killpg(os.getpgid(os.getppid()), 9)",
    "import signal, os\nsignal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)",
    "import os\nos.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "import os\nos.sched_setaffinity(os.getppid(), [0])",
    "import resource, os\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    "import fcntl, os\nfcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
    "import os\nos.setuid(65534)",
    "import os\nos.chroot('.')",
]


@needs_layers
def test_files_elsewhere_and_other_processes_are_out_of_reach() -> None:
    runs = run_all([functools.partial(_stopped, code) for code in FORBIDDEN], workers=2)
    assert {code: run.messages[0]["failed"][0] for code, run in zip(FORBIDDEN, runs, strict=True)} == dict.fromkeys(
        FORBIDDEN, "PermissionError"
    )


def _stopped(code: str, stop: threading.Event) -> Run:
    return module(code, stop=stop)


@needs_layers
def test_limits_cannot_be_raised_again() -> None:
    assert raised("import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))") in (
        "ValueError",
        "PermissionError",
    )


@needs_layers
def test_the_network_is_out_of_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        port = server.getsockname()[1]
        assert raised(f"import socket\nsocket.create_connection(('127.0.0.1', {port}))") == "PermissionError"
        with pytest.raises(TimeoutError):
            server.accept()
    for family in ("AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_PACKET", "AF_VSOCK"):
        assert raised(f"import socket\nsocket.socket(socket.{family}, socket.SOCK_DGRAM)") == "PermissionError"


@needs_layers
def test_a_pair_of_sockets_reaches_nobody_else(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(tmp_path / "s"))
        server.settimeout(0.5)
        pair = "import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        assert raised(f"{pair}a.sendto(b'x', {str(tmp_path / 's')!r})") == "PermissionError"
        assert raised(f"{pair}a.sendmsg([b'x'], [], 0, {str(tmp_path / 's')!r})") == "PermissionError"
        with pytest.raises(TimeoutError):
            server.recv(1)
    assert module(f"{pair}a.send(b'x')\nb.recv(1)", "pass").messages[-1] == {"end": True}


@needs_layers
def test_raw_system_calls_do_not_help() -> None:
    code = """
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    def refused(number, *arguments):
        return libc.syscall(number, *arguments) == -1 and ctypes.get_errno() in (1, 38)
    """
    calls = {"clone3": 435, "io_uring_setup": 425, "bpf": 321, "ptrace": 101, "vfork": 58, "unshare": 272, "mount": 165}
    calls |= {"perf_event_open": 298, "userfaultfd": 323, "process_vm_readv": 310, "keyctl": 250, "reboot": 169}
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers are those of x86-64")
    run = module(code, *(f"assert refused({number}, 0, 0, 0, 0, 0), {name!r}" for name, number in calls.items()))
    assert [m for m in run.messages if m.get("error")] == []
    assert module("import ctypes\nctypes.CDLL(None).syscall(0x40000000 + 39)").status == -signal.SIGSYS


def test_a_required_layer_that_does_not_hold_is_an_error() -> None:
    with pytest.raises(RewardError, match="could not give up magic, which is required"):
        module("pass", "pass", require=["magic"])


# --- ends ------------------------------------------------------------------------------------------------------------


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import sys; from trl_grpo_ext.rewards._sandbox.run import run_python\n"
        "run_python({'code': 'while True: pass', 'tests': [], 'stop': True}, seconds=1000, memory_mb=256)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(tmp_path / "..")})
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    if not children.exists():
        parent.kill()
        parent.wait()
        pytest.skip("needs /proc with children")
    found: list[int] = []
    while not found or CHILD not in command_line(found[0]):
        assert parent.poll() is None
        found = [int(pid) for pid in children.read_text().split()]
        time.sleep(0.02)
    time.sleep(0.5)  # it has told the kernel to end it with its parent
    assert CHILD in command_line(found[0]), "it has ended by itself"
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 30
    while CHILD in command_line(found[0]):
        assert time.monotonic() < deadline, "it outlives its parent"
        time.sleep(0.02)


def test_an_interrupt_ends_all_runs() -> None:
    started = threading.Barrier(3)

    def forever(stop: threading.Event) -> Run:
        started.wait()
        return module("while True: pass", seconds=1000, stop=stop)

    def send() -> None:
        started.wait()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send)
    start = time.monotonic()
    with interruptible():
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            run_all([forever, forever], workers=2)
        thread.join()
    assert time.monotonic() - start < 30
