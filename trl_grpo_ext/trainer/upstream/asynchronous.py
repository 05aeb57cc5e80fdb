"""What is relied on inside TRL's `AsyncGRPOTrainer`: the tables, and what is done to it.

Its interface changes monthly, so other releases than those that were tested are refused.
"""

import queue
import threading
from collections.abc import Callable, Mapping
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
from packaging.version import Version
from trl.experimental.async_grpo import async_rollout_worker

from ...errors import ConfigurationError, UpstreamError
from . import contract

TESTED = ("1.16",)

METHODS: dict[str, tuple[str, ...]] = {
    "_save": ("self", "output_dir"),
    "compute_loss": ("self", "model", "inputs"),
    "get_batch_samples": ("self",),
    "get_train_dataloader": ("self",),
    "log": ("self", "logs"),
    "train": ("self", "resume_from_checkpoint"),
}
"""Methods of the trainer that we wrap, with their leading parameters."""

OF_WORKER: dict[str, dict[str, tuple[str, ...]]] = {
    "_AsyncRolloutLoop": {"_push_metrics": ("self", "values"), "_score_group": ("self", "group")},
    "RolloutGroup": {
        "__init__": ("self", "prompts", "reward_kwargs", "completions", "completions_ids", "completions_sequences")
    },
    "RolloutSample": {
        "__init__": ("self", "prompt", "completion", "input_ids", "completion_mask", "old_log_probs", "advantage")
    },
}
"""Methods of the rollout loop that we wrap or call, and the first fields of what it scores and makes."""

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


def check(trainer_class: type) -> None:
    """Refuse a TRL whose asynchronous trainer was not tested, or differs from what the tables say."""
    installed = version("trl")
    if ".".join(map(str, Version(installed).release[:2])) not in TESTED:
        raise UpstreamError(
            f"trl {installed} is installed; AsyncGRPOExtTrainer works with {', '.join(TESTED)}.x alone, since TRL's "
            f"asynchronous trainer changes with every release. Run: pip install 'trl=={TESTED[-1]}.*'"
        )
    contract.check_class(trainer_class, METHODS)
    for kind, methods in OF_WORKER.items():
        contract.check_class(getattr(async_rollout_worker, kind), methods)


def check_instance(trainer: Any) -> None:
    """Check that a constructed trainer and its worker have the attributes that we read."""
    problems = [f"attribute {name} is gone" for name in ATTRIBUTES if not hasattr(trainer, name)]
    worker = getattr(trainer, "rollout_worker", None)
    if isinstance(worker, async_rollout_worker.AsyncRolloutWorker):
        gone = [name for name in WORKER_ATTRIBUTES if not hasattr(worker, name)]
        problems += [f"attribute {name} of its worker is gone" for name in gone]
    contract.require(problems, type(trainer))


def install_loop(trainer: Any, loop: type, arguments: Mapping[str, Any], *, needed: bool) -> None:
    """Let TRL's worker, which one rank has, run our loop. Another worker cannot; if the loop is `needed`, refuse it."""
    worker, module = trainer.rollout_worker, async_rollout_worker
    if isinstance(worker, module.AsyncRolloutWorker) and worker._loop_cls is module._AsyncRolloutLoop:
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
    """The advantages `(M,)` of a micro-batch's terms, which may still change in the forward pass.

    TRL takes them out of the batch, by an index, before it calls the model.
    """

    def __init__(self, values_M: torch.Tensor) -> None:
        self.values_M = values_M

    def __getitem__(self, selected: torch.Tensor) -> torch.Tensor:
        return self.values_M


def reduction_weights(trainer: Any, compute_loss: Callable[..., Any], inputs: Mapping[str, Any]) -> torch.Tensor:
    """The weight that TRL's reduction gives each term of a micro-batch, shaped as its advantages, by a trial.

    At log-probabilities of 0 every importance ratio is 1, and the slope of the loss in an advantage of 1 is minus the
    weight. What the trial does to the trainer is undone.
    """
    ones = torch.ones_like(inputs["advantages"]).requires_grad_()
    before, metrics = dict(vars(trainer)), trainer._metrics["train"]
    counts = {name: len(values) for name, values in metrics.items()}

    def model(input_ids: torch.Tensor, **keywords: Any) -> Any:
        zeros = torch.zeros(input_ids.shape, device=ones.device)
        return SimpleNamespace(log_probs=zeros, entropy=zeros, aux_loss=zeros.sum())

    try:
        tried = {**inputs, "old_log_probs": torch.zeros_like(inputs["old_log_probs"]), "advantages": ones}
        (slope,) = torch.autograd.grad(compute_loss(model, tried), ones)
    finally:
        vars(trainer).update(before)
        for name, values in metrics.items():
            del values[counts.get(name, 0) :]
    return -slope


class Inbox(queue.Queue[Any]):
    """The queue of scored samples, as TRL reads it. It notices a worker that was killed and a server that has gone.

    A process that is killed while it writes leaves half a message in the pipe, and whoever reads that waits for ever.
    So a thread reads, never more than two samples ahead.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(maxsize=1)
        self._trainer, self._source = trainer, trainer.rollout_queue
        self._reader = threading.Thread(target=self._read_on, name="trl-grpo-ext-inbox", daemon=True)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next sample; `queue.Empty` if there is none in time."""
        if self._trainer.rollout_worker._process is None:
            return self._counted(self._source.get(timeout=timeout))
        if self._reader.ident is None:
            self._reader.start()
        try:
            return self._counted(super().get(block, timeout))
        except queue.Empty:
            self._check()
            raise

    def qsize(self) -> int:
        """Samples that wait."""
        return int(self._source.qsize()) + super().qsize()

    def _read_on(self) -> None:
        while self._trainer.rollout_worker._process is not None:  # until it is stopped
            try:
                self.put(self._source.get(timeout=1.0))
            except queue.Empty:
                continue

    def _counted(self, sample: Any) -> Any:
        """The sample; groups that the filter dropped before it count as done, or TRL would resume too early."""
        trainer, dropped = self._trainer, getattr(sample.advantage, "dropped", {})
        new = dropped.keys() - trainer._trained_groups
        trainer._trained_groups |= new
        trainer._last_groups_trained += len(new)  # which TRL subtracts for `batch/groups_per_step`
        for group in new:  # TRL sums what is called a total
            trainer._metrics["train"][f"groups/dropped/{dropped[group].replace(' ', '_')}_total"].append(1.0)
        return sample

    def _check(self) -> None:
        worker = self._trainer.rollout_worker
        process = worker._process
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
