"""Trainings in two processes of which one is signalled or cannot write; forked off a process that has the imports.

python -m tests.launch.stop_signal_worker MODEL FOLDER        # all of `JOBS`, results in FOLDER/NAME.rank
accelerate launch ... -m tests.launch.stop_signal_worker MODEL FOLDER NAME   # as one rank of one job
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.utils.logging import disable_progress_bar

from tests.launch.safe_checkpoint_worker import SafeTrainer, make
from trl_grpo_ext.errors import CheckpointError
from trl_grpo_ext.launch.checkpoints import exit_status

Job = dict[str, Any]
STEPS = 4
JOBS: dict[str, Job] = {
    "straight": {"save_total_limit": None},
    "one_rank": {"signalled": [1]},
    "one_rank_resumed": {"in": "one_rank", "resume": True},
    "twice": {"signalled": [0, 1], "times": 2, "with": "SIGUSR1", "stop_signals": ["SIGTERM", "SIGUSR1"]},
    "rank_0_full": {"full": 0, "limit": 20_000, "save_steps": 1},
    "rank_1_full": {"full": 1, "limit": 1_000, "save_steps": 1},
    "best_stopped": {"metric": True, "save_steps": 1, "signalled": [0], "save_total_limit": 1},
    "shared": {"nodes": 2, "save_steps": 1},
    "apart": {"nodes": 2, "save_steps": 1, "apart": True, "save_on_each_node": True},
    "apart_resumed": {"nodes": 2, "in": "apart", "apart": True, "save_on_each_node": True, "resume": True},
}
"""`signalled`: these ranks get a signal in the second step. `full`: from then on this rank writes no file longer than
`limit`. `nodes`: each process believes to be the first of its own machine; `apart`: with its own disk."""


class InSecondStep(TrainerCallback):
    """Something happens to this rank in the second step."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if state.global_step != 1:
            return
        if args.process_index in self.job.get("signalled", []):
            for _ in range(self.job.get("times", 1)):
                os.kill(os.getpid(), getattr(signal, self.job.get("with", "SIGTERM")))
        if self.job.get("full") == args.process_index:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.job["limit"], resource.RLIM_INFINITY))

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if self.job.get("wait_at") == state.global_step:
            (Path(args.output_dir) / f"reached-{args.process_index}").touch()
            time.sleep(3)


def run(model: Path, folder: Path, job: Job) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    output = folder / (f"output-{rank}" if job.get("apart") else "output")
    settings: Job = {"max_steps": STEPS, "per_device_train_batch_size": 4, "save_steps": 100}
    settings |= {name: job[name] for name in ("save_steps", "save_total_limit", "save_on_each_node") if name in job}
    if job.get("metric"):
        settings |= {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "reward"}
        settings |= {"greater_is_better": True, "load_best_model_at_end": True, "per_device_eval_batch_size": 4}

    class Trainer(SafeTrainer):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            names = job.get("stop_signals", ["SIGTERM"])
            if job.get("metric"):
                keywords["eval_dataset"] = keywords["train_dataset"]
            super().__init__(*arguments, stop_signals=[getattr(signal, name) for name in names], **keywords)

    before = signal.getsignal(signal.SIGTERM)
    trainer = make(model, output, Trainer, **settings)
    trainer.add_callback(InSecondStep(job))
    result: dict[str, Any] = {"processes": trainer.accelerator.num_processes}
    started = time.monotonic()
    try:
        trainer.train(resume_from_checkpoint=job.get("resume"))
    except CheckpointError as error:
        result["error"] = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    result["seconds"] = time.monotonic() - started
    result["handler_is_back"] = signal.getsignal(signal.SIGTERM) == before
    result["stopped_by"] = trainer.stopped_by_signal and trainer.stopped_by_signal.name
    result["step"] = trainer.state.global_step
    result["best"] = trainer.state.best_model_checkpoint
    result["evaluations"] = sum("eval_reward" in log for log in trainer.state.log_history)
    result["first"] = getattr(trainer, "_initial_global_step", None)
    result["status"] = 0 if trainer.stopped_by_signal is None else exit_status(trainer.stopped_by_signal)
    torch.save({n: p.detach() for n, p in trainer.model.named_parameters()}, folder / f"weights-{rank}.pt")
    return result


def as_rank(model: Path, folder: Path, name: str, job: Job) -> int:
    """One rank of one job, to its end."""
    place = folder / job.get("in", name)
    place.mkdir(exist_ok=True)
    result = run(model, place, job)
    (folder / f"{name}.{os.environ['RANK']}").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()
    time.sleep(0.2)  # as `leave` of the recipes does: gloo's threads may still hold tensors
    return int(result["status"])


def launch(model: Path, folder: Path, name: str, job: Job) -> None:
    """Fork the two ranks and wait."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            status = 1
            faulthandler.dump_traceback_later(60, exit=True)  # a rank that hangs says where
            local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if "nodes" in job else {"LOCAL_RANK": str(rank)}
            os.environ.update({"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", **local})
            os.environ["MASTER_PORT"] = str(port)
            try:
                status = as_rank(model, folder, name, job)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    (folder / f"{name}.statuses").write_text(json.dumps(statuses))


def main() -> None:
    model, folder = Path(sys.argv[1]), Path(sys.argv[2])
    if len(sys.argv) > 3:
        sys.exit(as_rank(model, folder, sys.argv[3], {"wait_at": 2, "save_steps": 100}))
    for name, job in JOBS.items():
        launch(model, folder, name, job)


if __name__ == "__main__":
    torch.set_num_threads(1)
    disable_progress_bar()
    gc.freeze()
    main()
