"""What a reward leaves running does not keep a finished run alive, and is named; what others left is waited for."""

import subprocess
import sys
import time

import pytest

SCRIPT = """
import atexit, multiprocessing, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from trl_grpo_ext.guard import leftovers
from trl_grpo_ext.guard.reward_watch import RewardWatch

leftovers._PATIENCE = 0.5

def thread():
    threading.Thread(target=time.sleep, args=(1000,), name="poll").start()

def pool():
    ThreadPoolExecutor(1, "pool").submit(time.sleep, 1000)

def child():
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,), name="helper").start()

def short():
    threading.Thread(target=time.sleep, args=(1,), name="short").start()

def mine(completions, **columns):
    {case}()
    return [1.0] * len(completions)

def save():
    time.sleep(2)
    print("saved")

threading.Thread(target=save).start()
atexit.register(print, "at exit")
watch = RewardWatch()
with watch.time_limit():
    watch.wrap(mine, "mine")(completions=["a"])
{end}
"""
KEPT = {"thread": "the thread 'poll'", "pool": "the thread 'pool_0'", "child": "the process 'helper'", "short": ""}


@pytest.mark.parametrize("case", ["thread", *(pytest.param(c, marks=pytest.mark.slow) for c in KEPT if c != "thread")])
@pytest.mark.parametrize(("end", "status"), [("sys.exit(3)", 3), pytest.param("", 0, marks=pytest.mark.slow)])
def test_a_run_ends_with_its_status_and_names_what_a_reward_left(case: str, end: str, status: int) -> None:
    script = SCRIPT.replace("{case}", case).replace("{end}", end)
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status
    assert done.stdout == "saved\nat exit\n"
    if KEPT[case]:
        assert f"{KEPT[case]}, which began while the reward 'mine' ran" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == bool(KEPT[case])
    assert time.monotonic() - start < 50
