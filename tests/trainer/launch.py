"""Real processes (gloo, DDP) that run one list of trainings after the other, and stay for the files that come after."""

import atexit
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests import forking
from tests.trainer.process_worker import Job, run_jobs

ROOT = Path(__file__).parents[2]
Results = dict[str, dict[str, Any]]


class Ranks:
    """Processes that wait for functions to call, all of them the same one."""

    def __init__(self, processes: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ranks"))
        self.calls = 0
        world = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1"}
        common = {**os.environ, **world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(forking.free_port())}
        ranks = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
        worker = "tests.trainer.process_worker"
        self.processes = [forking.start(worker, [], cwd=ROOT, env=env, piped=True) for env in ranks]

    @property
    def alive(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def call(
        self, function: Callable[..., Any], *arguments: Any, timeout: float, survivors: Sequence[int] | None = None
    ) -> list[Any]:
        """What the function returns on each rank, or on those that survive it."""
        self.calls += 1
        answers = [self.folder / f"call{self.calls}_rank{rank}.pt" for rank in range(len(self.processes))]
        for process, answer in zip(self.processes, answers, strict=True):
            assert process.stdin is not None
            name = f"{function.__module__}:{function.__qualname__}"
            process.stdin.write(json.dumps([name, [*map(_plain, arguments)], str(answer)]) + "\n")
            process.stdin.flush()
        deadline = time.monotonic() + timeout
        answers = answers if survivors is None else [answers[rank] for rank in survivors]
        while not all(answer.exists() for answer in answers):
            if (survivors is None and not self.alive) or time.monotonic() > deadline:
                self.end()
                raise AssertionError("\n".join((p.out + p.err)[-6000:] for p in self.processes))
            time.sleep(0.02)
        return [torch.load(answer, weights_only=False) for answer in answers]

    def end(self) -> None:
        """Close the input, which ends them; whoever hangs is killed."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()


_ranks: Ranks | None = None


def on_two_ranks(function: Callable[..., Any], *arguments: Any, timeout: float = 300) -> list[Any]:
    """Call a function, with arguments that JSON has, on two ranks; its results in rank order."""
    global _ranks
    if _ranks is None or not _ranks.alive:
        _ranks = Ranks(2)
        atexit.register(_ranks.end)
    return _ranks.call(function, *arguments, timeout=timeout)


def launch(jobs: dict[str, Job], model: Path, folder: Path, processes: int = 2, timeout: float = 300) -> list[Results]:
    """Run every job once on so many ranks and return each rank's results, in rank order."""
    if processes == 2:
        results: list[Results] = on_two_ranks(run_jobs, jobs, model, folder, timeout=timeout)
    else:
        ranks = Ranks(processes)
        results = ranks.call(run_jobs, jobs, model, folder, timeout=timeout)
        ranks.end()
    assert all(result.keys() == jobs.keys() for result in results)
    return results


def _plain(argument: Any) -> Any:
    return str(argument) if isinstance(argument, Path) else argument
