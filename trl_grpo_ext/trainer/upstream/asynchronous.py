"""What is relied on inside TRL's `AsyncGRPOTrainer`, and what is done to it. Untested releases are refused."""

import copy
import pickle
import queue
from collections import defaultdict
from collections.abc import Mapping
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from packaging.version import Version
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop

from ...credit.rollouts import padded
from ...errors import ConfigurationError, UpstreamError
from . import contract

TESTED = "1.16"

METHODS: dict[type, dict[str, tuple[str, ...]]] = {
    AsyncGRPOTrainer: {
        "_save": ("self", "output_dir"),
        "compute_loss": ("self", "model", "inputs"),
        "get_batch_samples": ("self",),
        "get_train_dataloader": ("self",),
        "log": ("self", "logs"),
        "train": ("self", "resume_from_checkpoint"),
    },
    _AsyncRolloutLoop: {"_push_metrics": ("self", "values"), "_score_group": ("self", "group")},
}
ATTRIBUTES = ("_last_groups_trained", "_metrics", "_trained_groups", "rollout_queue", "rollout_worker", "vllm_client")
WORKER_ATTRIBUTES = ("_loop_cls", "_loop_kwargs", "_process")


def check() -> None:
    """Refuse a TRL whose asynchronous trainer was not tested, or differs from what the tables say."""
    installed = version("trl")
    if Version(installed).release[:2] != Version(TESTED).release:
        run = f"Run: pip install 'trl=={TESTED}.*'"
        raise UpstreamError(f"trl {installed} is installed; AsyncGRPOExtTrainer works with {TESTED}.x alone. {run}")
    for owner, methods in METHODS.items():
        contract.check_class(owner, methods)


def install_loop(trainer: Any, loop: type, arguments: Mapping[str, Any], *, needed: bool) -> None:
    """Let TRL's worker, which one rank has, run our loop. Another worker cannot; if the loop is `needed`, refuse it."""
    contract.check_instance(trainer, ATTRIBUTES, ())
    worker = trainer.rollout_worker
    if isinstance(worker, AsyncRolloutWorker) and worker._loop_cls is _AsyncRolloutLoop:
        contract.check_instance(worker, WORKER_ATTRIBUTES, ())
        worker._loop_cls = loop
        worker._loop_kwargs.update(arguments)
        trainer.rollout_queue = Inbox(trainer)
    elif worker is not None and needed:
        what = f"this run has {type(worker).__qualname__}"
        raise ConfigurationError(f"Plugins and weights act in TRL's own rollout worker, and {what}.")


def extend_collator(loader: Any, name: str) -> None:
    """Add to each micro-batch the advantages of the samples of each rank, as bytes: TRL deals tensors alone."""
    pack = loader.collate_fn.torch_call

    def packed(examples: list[Any]) -> dict[str, Any]:
        rows = [pickle.dumps([sample["advantage"] for sample in row.samples]) for row in examples[0]]
        return {**pack(examples), name: padded([np.frombuffer(bytearray(row), dtype=np.uint8) for row in rows])}

    loader.collate_fn.torch_call = packed


def reduction_weights(trainer: Any, compute_loss: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The weight of each term of a micro-batch in TRL's reduction: minus the slope in its advantage, at ratios of 1."""
    ones = torch.ones_like(inputs["advantages"]).requires_grad_()
    trial = copy.copy(trainer)  # which counts and logs it
    trial._metrics = {"train": defaultdict(list)}

    def model(input_ids: torch.Tensor, **keywords: Any) -> Any:
        zeros = torch.zeros(input_ids.shape, device=ones.device)
        return SimpleNamespace(log_probs=zeros, entropy=zeros, aux_loss=zeros.sum())

    tried = {**inputs, "old_log_probs": torch.zeros_like(inputs["old_log_probs"]), "advantages": ones}
    (slope,) = torch.autograd.grad(compute_loss.__func__(trial, model, tried), ones)
    return -slope


class Inbox:
    """The queue of scored samples, as TRL reads it. It notices a process that was killed and a server that has gone."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._source = trainer.rollout_queue
        self.qsize = self._source.qsize

    def get(self, timeout: float) -> Any:
        """The next sample. Groups that the filter dropped before it count as done, or TRL would resume too early."""
        trainer = self._trainer
        process = trainer.rollout_worker._process
        if process is not None:
            self._source._writer.close()  # so that the pipe ends, perhaps amid a sample, when the process does
        try:
            sample = self._source.get(timeout=timeout)
        except (queue.Empty, EOFError, OSError):
            if process is not None:
                self._check(trainer.rollout_worker, process)
            raise
        dropped = getattr(sample.advantage, "dropped", {})
        trainer._trained_groups.update(dropped)
        trainer._last_groups_trained += len(dropped)  # which TRL subtracts for `batch/groups_per_step`
        for why in dropped.values():  # TRL sums what is called a total
            trainer._metrics["train"][f"groups/dropped/{why.replace(' ', '_')}_total"].append(1.0)
        return sample

    def _check(self, worker: Any, process: Any) -> None:
        process.join(timeout=1.0)  # the pipe ends a moment before the process
        try:
            worker.check_health(float("inf"))  # raises what the process said, if it could say anything
            if not process.is_alive():
                raise RuntimeError(f"The process that samples and scores ended with exit code {process.exitcode}.")
        except RuntimeError:
            process.kill()
            process.join()
            worker._process = None  # else TRL's `stop` waits for ever until a process that is gone has woken up
            raise
        self._trainer.vllm_client.wait_for_server_ready()  # else the worker tries for minutes beyond the time limit
