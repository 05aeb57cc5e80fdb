"""The server and its runs: so many at once, in order; ended with the parent or by Ctrl-C, restarted after a kill."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.interrupts import interruptible
from tests.rewards._sandbox.running import module, program
from trl_grpo_ext.errors import RewardError
from trl_grpo_ext.rewards._sandbox import jobs as sandbox
from trl_grpo_ext.rewards._sandbox.jobs import Run, run_all


def test_runs_come_in_order_so_many_at_a_time_and_leave_nothing() -> None:
    module("pass")
    descriptors, threads = len(list(Path("/dev/fd").iterdir())), threading.active_count()
    tasks = [lambda stop: module("while True: pass", seconds=0.05, stop=stop), lambda stop: program("print(1)")] * 4
    assert [run.ended for run in run_all(tasks, workers=3)] == ["timeout", "exited"] * 4
    assert len(list(Path("/dev/fd").iterdir())) <= descriptors  # fewer where an earlier test's have just ended
    assert threading.active_count() <= threads


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


def test_an_interrupt_ends_all_runs() -> None:
    def forever(stop: threading.Event) -> Run:
        return module("while True: pass", seconds=1000, stop=stop)

    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    with interruptible():
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            run_all([forever, forever], workers=2)
    timer.join()
