"""One rank of a training in which one of two is signalled or cannot write: `... MODEL FOLDER NAME`."""

import faulthandler
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from tests.launch.checkpoints.safe_checkpoint_worker import make
from trl_grpo_ext.errors import CheckpointError
from trl_grpo_ext.launch.checkpoints import exit_status

Job = dict[str, Any]
STEPS = 4
JOBS: dict[str, Job] = {
    "straight": {"save_total_limit": None},
    "one_rank": {"signalled": [1]},
    "one_rank_resumed": {"in": "one_rank", "resume": True},
    "rank_0_full": {"full": 0, "limit": 20_000, "save_steps": 1},
    "rank_1_full": {"full": 1, "limit": 1_000, "save_steps": 1},
    "best_stopped": {"metric": True, "save_steps": 1, "signalled": [0], "save_total_limit": 1},
    "shared": {"nodes": 2, "save_steps": 1},
    "apart": {"nodes": 2, "save_steps": 1, "apart": True, "save_on_each_node": True},
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
            os.kill(os.getpid(), signal.SIGTERM)
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

    before = signal.getsignal(signal.SIGTERM)
    trainer = make(model, output, **settings)
    trainer.add_callback(InSecondStep(job))
    result: dict[str, Any] = {"processes": trainer.accelerator.num_processes}
    try:
        trainer.train(resume_from_checkpoint=job.get("resume"))
    except CheckpointError as error:
        result["error"] = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    stopped_by = trainer.stopped_by_signal
    result["handler_is_back"] = signal.getsignal(signal.SIGTERM) == before
    result["status"] = 0 if stopped_by is None else exit_status(stopped_by)
    result["step"] = trainer.state.global_step
    result["evaluations"] = sum("eval_reward" in log for log in trainer.state.log_history)
    result["first"] = getattr(trainer, "_initial_global_step", None)
    torch.save({n: p.detach() for n, p in trainer.model.named_parameters()}, folder / f"weights-{rank}.pt")
    return result


def main() -> None:
    model, folder, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    faulthandler.dump_traceback_later(60, exit=True)  # a rank that hangs says where
    job = JOBS.get(name, {"wait_at": 2})
    place = folder / job.get("in", name)
    place.mkdir(exist_ok=True)
    result = run(model, place, job)
    (folder / f"{name}.{os.environ['RANK']}").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()
    time.sleep(0.2)  # as `leave` of the recipes does: gloo's threads may still hold tensors
    sys.exit(result["status"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
