"""A list of short trainings in one process or, under torchrun, in two; rank 0 saves what each one did.

    python -m torch.distributed.run --standalone --nproc_per_node 2 -m tests.trainer.two_process_worker JOBS MODEL OUT

JOBS is a JSON file, `{name: job}`, so that many trainings share one launch: importing costs more than all of them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from trl import GRPOTrainer

from tests.support import prompts, train
from trl_grpo_ext import GRPOExtTrainer, Rollout

Job = dict[str, Any]
"""Settings of `tests.support.train`; with `stock: true` TRL's own trainer runs them, with `evaluate: true` it also
evaluates on sixteen other prompts."""


class Watch:
    """Changes nothing and keeps what this rank saw of each generation batch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        self.seen.append(
            {
                "group_ids": rollout.group_ids_B.tolist(),
                "all_group_ids": rollout.gather(rollout.group_ids_B).tolist(),
                "local_rows": rollout.local_rows,
                "all_rewards": rollout.gather(rollout.rewards_B).tolist(),
                "totals": rollout.totals,
            }
        )
        return advantages_B_T


def run_job(model: Path, folder: Path, job: Job) -> dict[str, Any]:
    """Run one training and return plain values and tensors."""
    job = dict(job)
    trainer_class = GRPOTrainer if job.pop("stock", False) else GRPOExtTrainer
    trainer_arguments: dict[str, Any] = {}
    if job.pop("evaluate", False):
        trainer_arguments["eval_dataset"] = prompts(24).select(range(8, 24))
        job |= {"eval_strategy": "steps", "eval_steps": 1}
    watch = Watch()
    hooks = job.pop("hooks", None)
    if hooks is not None:
        trainer_arguments["advantage_hooks"] = [*hooks, watch]
    run = train(model, folder, trainer_class, trainer_arguments=trainer_arguments, **job)
    accelerator = run.trainer.accelerator
    return {
        "processes": accelerator.num_processes,
        "distributed_type": accelerator.distributed_type.value,
        "model_class": type(run.trainer.model_wrapped).__name__,
        "gradients": run.gradients,
        "weights": run.weights,
        "logs": run.logs,
        "advantages": list(run.trainer._logs["advantages"]),
        "rollouts": watch.seen,
    }


def main() -> None:
    jobs_file, model, out = (Path(argument) for argument in sys.argv[1:])
    results: dict[str, Any] = {}
    for number, (name, job) in enumerate(json.loads(jobs_file.read_text()).items()):
        results[name] = run_job(model, out / str(number), job)
        # A set-up that is not what it should be would pass for one process, silently.
        assert torch.distributed.get_world_size() == 2
        assert torch.distributed.get_backend() == "gloo"
        assert results[name]["processes"] == 2
        assert results[name]["model_class"] == "DistributedDataParallel"
    rank = torch.distributed.get_rank()
    torch.save(results, out / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
