"""What is relied on inside TRL's `AsyncGRPOTrainer`, and what is done to it. Releases that were not tested are refused."""

import copy
import queue
from collections import defaultdict
from collections.abc import Callable, Mapping
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
from packaging.version import Version
from trl.experimental.async_grpo import AsyncGRPOTrainer, async_rollout_worker

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
    async_rollout_worker._AsyncRolloutLoop: {"_push_metrics": ("self", "values"), "_score_group": ("self", "group")},
    async_rollout_worker.RolloutGroup: {
        "__init__": ("self", "prompts", "reward_kwargs", "completions", "completions_ids", "completions_sequences")
    },
    async_rollout_worker.RolloutSample: {
        "__init__": ("self", "prompt", "completion", "input_ids", "completion_mask", "old_log_probs", "advantage")
    },
}
"""Methods that we wrap or call, with their leading parameters, and the first fields of what is scored and made."""

ATTRIBUTES = (
    "_last_groups_trained",
    "_metrics",
    "_trained_groups",
    "aux_loss_enabled",
    "eos_token_ids",
    "rollout_queue",
    "rollout_worker",
    "vllm_client",
)
"""Attributes of a constructed trainer that we read or set."""

WORKER_ATTRIBUTES = ("_loop_cls", "_loop_kwargs", "_process")
"""Those of TRL's worker."""

BATCH_KEYS = ("advantages", "old_log_probs", "segment_id", "token_index")
"""Entries of a packed micro-batch that we read: a number for each term of the loss."""


def check() -> None:
    """Refuse a TRL whose asynchronous trainer was not tested, or differs from what the tables say."""
    installed = version("trl")
    if Version(installed).release[:2] != Version(TESTED).release:
        raise UpstreamError(
            f"trl {installed} is installed; AsyncGRPOExtTrainer works with {TESTED}.x alone, since TRL's asynchronous "
            f"trainer changes with every release. Run: pip install 'trl=={TESTED}.*'"
        )
    for owner, methods in METHODS.items():
        contract.check_class(owner, methods)


def install_loop(trainer: Any, loop: type, arguments: Mapping[str, Any], *, needed: bool) -> None:
    """Let TRL's worker, which one rank has, run our loop. Another worker cannot; if the loop is `needed`, refuse it."""
    contract.check_instance(trainer, ATTRIBUTES, ())
    worker, module = trainer.rollout_worker, async_rollout_worker
    if isinstance(worker, module.AsyncRolloutWorker) and worker._loop_cls is module._AsyncRolloutLoop:
        contract.check_instance(worker, WORKER_ATTRIBUTES, ())
        worker._loop_cls = loop
        worker._loop_kwargs.update(arguments)
        trainer.rollout_queue = Inbox(trainer)
    elif worker is not None and needed:
        raise ConfigurationError(
            "Plugins act where completions are scored, in the loop of TRL's own rollout worker, and this run has "
            f"{type(worker).__qualname__}: leave rollout_worker out, or the plugins and weights."
        )


def extend_collator(loader: Any, more: Callable[[list[Any], dict[str, Any]], None]) -> None:
    """Let `more` see the rows that TRL packs for each rank, and change the micro-batch."""
    collator = loader.collate_fn
    pack = collator.torch_call

    def packed(examples: list[Any]) -> dict[str, Any]:
        batch: dict[str, Any] = pack(examples)
        contract.require([f"batch entry {key!r} is gone" for key in BATCH_KEYS if key not in batch], type(collator))
        more(examples[0], batch)
        return batch

    collator.torch_call = packed


class LateAdvantages:
    """Advantages `(M,)` that may still change in the forward pass: before it TRL only takes them, by an index."""

    def __init__(self, values_M: torch.Tensor) -> None:
        self.values_M = values_M

    def __getitem__(self, selected: torch.Tensor) -> torch.Tensor:
        return self.values_M


def reduction_weights(trainer: Any, compute_loss: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The weight that TRL's reduction gives each term of a micro-batch, shaped as its advantages, by a trial.

    At log-probabilities of 0 every importance ratio is 1, and the slope of the loss in an advantage of 1 is minus the
    weight. What TRL counts and logs goes to a copy of the trainer.
    """
    ones = torch.ones_like(inputs["advantages"]).requires_grad_()
    trial = copy.copy(trainer)
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
        self._trainer, self._source = trainer, trainer.rollout_queue

    def qsize(self) -> int:
        """Samples that wait."""
        return int(self._source.qsize())

    def get(self, timeout: float | None = None) -> Any:
        """The next sample. Groups that the filter dropped before it count as done, or TRL would resume too early."""
        trainer, process = self._trainer, self._trainer.rollout_worker._process
        if process is not None:
            self._source._writer.close()  # so that the pipe ends, perhaps amid a sample, when the process does
        try:
            sample = self._source.get(timeout=timeout)
        except (queue.Empty, EOFError, OSError):
            self._check(process)
            raise
        dropped = getattr(sample.advantage, "dropped", {})
        trainer._trained_groups.update(dropped)
        trainer._last_groups_trained += len(dropped)  # which TRL subtracts for `batch/groups_per_step`
        for why in dropped.values():  # TRL sums what is called a total
            trainer._metrics["train"][f"groups/dropped/{why.replace(' ', '_')}_total"].append(1.0)
        return sample

    def _check(self, process: Any) -> None:
        worker = self._trainer.rollout_worker
        if process is None:
            return
        process.join(timeout=1.0)  # the pipe ends a moment before it
        try:
            worker.check_health(float("inf"))  # raises what the process said, if it could say anything
            if not process.is_alive():
                raise RuntimeError(
                    f"The process that samples and scores (pid {process.pid}) ended with exit code {process.exitcode}: "
                    "a negative one is the signal that killed it, -9 often for lack of memory. Its output may say more."
                )
        except RuntimeError:
            process.kill()
            process.join()
            worker._process = None  # else TRL's `stop` waits for ever until a process that is gone has woken up
            raise
        self._trainer.vllm_client.wait_for_server_ready()  # else the worker tries for minutes beyond the time limit
