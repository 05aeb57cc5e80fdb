"""Processes without the imports: forked off one that has torch, transformers, TRL and this package already."""

import atexit
import functools
import importlib
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
IMPORTS = ["accelerate.commands.launch", "bitsandbytes", "datasets", "matplotlib.figure", "peft", "rich.table"]
IMPORTS += ["tests.support", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama"]
IMPORTS += ["transformers.trainer", "trl.trainer.grpo_trainer", "trl_grpo_ext.launch.checkpoints"]
IMPORTS += ["trl_grpo_ext.launch.engine", "trl_grpo_ext.trainer.mixin", "trl_grpo_ext.plugins.loading"]


class Process:
    """A fork at work; what it writes is in `folder`."""

    def __init__(self, folder: Path, stdin: IO[str] | None) -> None:
        self.folder = folder
        self.stdin = stdin

    @functools.cached_property
    def pid(self) -> int:
        return int(_wait_for(self.folder / "pid", 60))

    def poll(self) -> int | None:
        status = self.folder / "status"
        return int(status.read_text()) if status.exists() else None

    def wait(self, timeout: float) -> int:
        """Its status; after `timeout` seconds it is killed, and a `subprocess.TimeoutExpired` says what it wrote."""
        try:
            return int(_wait_for(self.folder / "status", timeout))
        except TimeoutError:
            self.kill()
            raise subprocess.TimeoutExpired(str(self.folder), timeout, self.out, self.err) from None

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()


def start(
    target: str | Path, words: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None = None, piped: bool = False
) -> Process:
    """Run a script (a path) or a module (its name) as `__main__`; with `piped` its input can be written to."""
    folder = Path(tempfile.mkdtemp(dir=_folder()))
    for name in ("out", "err"):
        (folder / name).touch()
    stdin = None
    if piped:
        os.mkfifo(folder / "in")
        stdin = os.fdopen(os.open(folder / "in", os.O_RDWR), "w")  # waits for no reader, and is the only writer
    job = {"target": str(target), "script": isinstance(target, Path), "words": [*words], "cwd": str(cwd)}
    job |= {"env": dict(os.environ if env is None else env), "folder": str(folder), "piped": piped}
    parent = _parent()
    assert parent.stdin is not None
    parent.stdin.write(json.dumps(job) + "\n")
    parent.stdin.flush()
    return Process(folder, stdin)


def run(
    target: str | Path, words: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 850
) -> subprocess.CompletedProcess[str]:
    """The same to its end."""
    process = start(target, words, cwd=cwd, env=env)
    status = process.wait(timeout)
    return subprocess.CompletedProcess([str(target), *words], status, process.out, process.err)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _wait_for(file: Path, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(str(file))
        time.sleep(0.02)
    return file.read_text()


@functools.cache
def _folder() -> str:
    """What all forks of this process write is here until its end."""
    folder = tempfile.mkdtemp(prefix="forks")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def _parent() -> subprocess.Popen[str]:
    """Libraries read some variables when they are imported: no network, no cache, one thread, no GPU."""
    fixed = {"HF_HUB_OFFLINE": "1", "HF_HOME": tempfile.mkdtemp(dir=_folder()), "OMP_NUM_THREADS": "1"}
    fixed |= {"OMP_WAIT_POLICY": "passive", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.forking"]
    parent = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **fixed}, stdin=subprocess.PIPE, text=True)
    assert parent.stdin is not None
    atexit.register(parent.stdin.close)  # which ends it
    return parent


def serve() -> None:
    """Fork for each line of the input; between this process and each fork is one that waits for its end."""
    for name in IMPORTS:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    importlib.import_module("transformers.utils.logging").disable_progress_bar()  # its threads may hold locks in a fork
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        job = json.loads(line)
        if os.fork():
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        child = os.fork()
        if child == 0:
            become(job)
            return  # as a script ends, with what runs at exit
        put(job, "pid", child)
        put(job, "status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os._exit(0)


def put(job: Mapping[str, Any], name: str, number: int) -> None:
    file = Path(job["folder"], name)
    file.with_suffix(".part").write_text(str(number))
    file.with_suffix(".part").rename(file)


def become(job: Mapping[str, Any]) -> None:
    """Be the process that the job describes."""
    folder = Path(job["folder"])
    target = job["target"]
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    os.dup2(os.open(folder / "in" if job["piped"] else os.devnull, os.O_RDONLY), 0)
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.path[0] = str(Path(target).parent) if job["script"] else job["cwd"]
    sys.path[1:1] = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    sys.argv = [target, *job["words"]]
    # A fork makes torch's pool of threads anew at first use, and that use must not be two threads' (transformers loads
    # weights in four): one of them then finds no pool, "Invalid thread pool!".
    torch = importlib.import_module("torch")
    torch.set_num_threads(torch.get_num_threads())
    if job["script"]:
        runpy.run_path(target, run_name="__main__")
    else:
        runpy.run_module(target, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve()
