"""Cheaper updates with the same gradient: rows in order of length, trimmed, and without those that have no signal.

TRL pads a whole generation batch to its longest completion and deals shuffled rows to the micro-batches, so one long
completion makes all of them pay, and rows whose advantages are zero run forward and backward for nothing. The loss of
an optimizer step is a sum over its tokens with weights that are fixed beforehand. So its rows may run in any order and
any number at a time, and rows that contribute nothing need not run. `Freedom` says how much of that is exact in a run.

`CompactUpdates` stands between `GRPOExtMixin` and TRL's trainer and wraps four of its methods:

| TRL calls | we add |
| --- | --- |
| `_prepare_inputs` | the buffered micro-batches, planned anew (`compact_plan`) |
| `compute_loss` | a micro-step of several parts: the gradient of each is accumulated |
| `_get_per_token_logps_and_entropies` | the old policy's and the reference's forward passes, in order of length too |
| `training_step` | its time |
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate.utils import gather_object

from ...errors import ConfigurationError
from ...types import implements
from .. import upstream
from .exchange import dealt_rows, exchanged, shown_rows
from .plan import Lengths, Plan, plan_block, saves_nothing, unmoved
from .rows import PARTS_KEY, Layout, counting_mask, in_order_of_length, joined, laid_out, row_table, trimmed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Freedom:
    """How much may be changed about a run's micro-batches without changing its gradient.

    Attributes:
        sort: Rows may move between the micro-batches of an optimizer window.
        drop: Rows whose advantages are all zero may be left out.
        any_count: Micro-batches may have any number of rows.
        trim_left: Padding in front of the prompts may be cut away; it moves the positions that a model sees.
        silent_placeholders: Tokens without an advantage count in the loss, or a hook may give them one, so placeholders
            may have none that counts.
        reasons: Why something may not.
    """

    sort: bool
    drop: bool
    any_count: bool
    trim_left: bool
    silent_placeholders: bool
    reasons: tuple[str, ...] = ()


def freedom_of(trainer: Any) -> Freedom:
    """What is exact in this run."""
    aggregation, hooks = trainer.loss_aggregation, trainer.advantage_hooks
    forward_hooks = [hook for hook in hooks if implements(hook, "on_forward")]
    by_weights = aggregation is not None and implements(aggregation, "weights")
    stuck = []  # why rows must stay where they are
    if trainer._entropy_bonus_enabled:
        stuck.append("the entropy bonus is a mean over each micro-batch")
    if trainer.aux_loss_enabled:
        stuck.append("the router's auxiliary loss is computed over each micro-batch")
    if trainer.top_entropy_quantile < 1.0:
        stuck.append("top_entropy_quantile is taken over each micro-batch")
    if aggregation is not None and not by_weights:
        stuck.append("the selected aggregation reduces each micro-batch")
    if any(not getattr(hook, "per_completion", False) for hook in forward_hooks):
        stuck.append("a forward hook may look at its whole micro-batch (it has no `per_completion = True`)")
    counts = not by_weights and trainer.loss_type not in upstream.GLOBAL_TOKEN_MEAN
    # What keeps the advantages from being multiplied by what a part's reduction divides by too much; see `_row_factor`.
    unscaled = "a KL penalty" if trainer.beta != 0.0 else "forward hooks" if forward_hooks else None
    if counts and unscaled and trainer.loss_type in upstream.LOCAL_TOKEN_MEAN:
        stuck.append(f"with {unscaled} {trainer.loss_type} is a mean over each micro-batch")
    kept = []  # why rows without signal must run
    if trainer.beta != 0.0:
        kept.append("the KL penalty acts on rows without signal too")
    if forward_hooks:
        kept.append("forward hooks may give rows without signal one")
    fixed = [f"with {unscaled} {trainer.loss_type} counts rows"] if counts and unscaled else []
    absolute = [] if positions_are_relative(trainer.model.config) else ["the model's positions are absolute"]
    return Freedom(
        sort=not stuck,
        drop=not stuck and not kept,
        any_count=not stuck and not fixed,
        trim_left=not absolute,
        silent_placeholders=unscaled is not None and not by_weights,
        reasons=(
            *(f"rows stay in their micro-batches: {reason}" for reason in stuck),
            *(f"rows without signal run: {reason}" for reason in kept),
            *(f"micro-batches keep their number of rows: {reason}" for reason in fixed),
            *(f"prompts keep their padding: {reason}" for reason in absolute),
        ),
    )


def positions_are_relative(config: Any) -> bool:
    """Whether attention sees distances alone, so that a row may move within its padding.

    True for rotary embeddings whose frequencies do not depend on the length, in models of nothing but attention. TRL
    passes no positions, so models count them from the first column, padding included.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = set(getattr(text, "layer_types", None) or ())
    if not layers <= {"full_attention", "sliding_attention", "chunked_attention"} or "chunked_attention" in layers:
        return False
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if rope is None:
        return getattr(text, "rope_theta", None) is not None
    nested = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    kinds = {value.get("rope_type", value.get("type", "default")) for value in nested}
    return kinds <= {"default", "linear", "llama3", "yarn"}


class CompactUpdates:
    """Plans the micro-batches of `compact_updates: exact` anew; with `off` every method is TRL's."""

    args: Any
    model: Any
    accelerator: Any
    _planned: list[dict[str, Any]] | None = None
    _freedom: Freedom | None = None
    _rollout_seconds = 0.0

    @property
    def _compact(self) -> bool:
        return bool(getattr(self.args, "compact_updates", "off") == "exact")

    def _check_compact(self) -> None:
        """At construction: refuse what cannot be exact, and say once what is not done."""
        if not self._compact:
            return
        if self.args.use_liger_kernel:
            raise ConfigurationError(
                "compact_updates: exact does not go with use_liger_kernel, whose loss counts the rows of each "
                "micro-batch. Switch one of them off."
            )
        self._freedom = freedom_of(self)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        budget = self.args.max_tokens_per_micro_batch
        if budget is not None and not self._freedom.any_count:
            raise ConfigurationError(
                f"max_tokens_per_micro_batch={budget} cannot be exact in this run: {'; '.join(self._freedom.reasons)}. "
                "Select a loss_aggregation by weights (seq_mean_token_mean is GRPO's), or take the budget out."
            )
        if self.args.balance_ranks:
            self._check_balance(self._freedom)
        for reason in self._freedom.reasons:
            logger.info("compact_updates: %s.", reason)

    def _check_balance(self, freedom: Freedom) -> None:
        trl: Any = self
        reasons = list(freedom.reasons) if not (freedom.any_count and freedom.trim_left) else []
        if trl.loss_aggregation is None and trl.loss_type in upstream.LOCAL_TOKEN_MEAN:
            reasons.append(f"{trl.loss_type} is a mean over the tokens of each rank's micro-batch")
        if getattr(self.args, "token_records", 0):
            reasons.append("token_records are kept on the rank that generated a row")
        if reasons:
            raise ConfigurationError(
                f"balance_ranks moves rows to other ranks, which cannot be done in this run: {'; '.join(reasons)}. "
                "Take it out, or what stands in its way."
            )

    # ------------------------------------------------------------------ once per generation batch

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        started = time.perf_counter()
        inputs = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        trl: Any = self
        if not self._compact or not self.model.training or trl._buffered_inputs is self._planned:
            return inputs
        self._rollout_seconds = time.perf_counter() - started  # planning is part of the update
        micro_batches = trl._buffered_inputs
        strangers = sorted(upstream.MULTIMODAL_KEYS & {key for key, value in inputs.items() if value is not None})
        if strangers:
            _say_once(f"multimodal inputs ({', '.join(strangers)}) run as TRL deals them")
            self._planned = micro_batches
        else:
            self._planned = trl._buffered_inputs = self._replanned(micro_batches)
        return self._planned[trl._step % len(self._planned)]

    def _replanned(self, micro_batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        assert self._freedom is not None
        freedom, count = self._freedom, len(micro_batches)
        # Wherever optimizer windows begin, this many micro-steps in a row are in one of them.
        block = math.gcd(int(self.args.gradient_accumulation_steps), count) if freedom.sort else 1
        rows = micro_batches[0]["completion_ids"].size(0)
        table_B_3 = torch.cat([row_table(batch) for batch in micro_batches])
        if not freedom.trim_left:  # what stays in front of a prompt is computed like the prompt
            table_B_3[:, 0] = micro_batches[0]["prompt_ids"].size(1)
        tables_N_3 = self.accelerator.gather(table_B_3).cpu().numpy()
        ranks = tables_N_3.reshape(self.accelerator.num_processes, count // block, block * rows, 3)
        layout = Layout(
            factor=self._row_factor,
            precision=torch.promote_types(torch.float32, self.model.dtype),
            trim_left=freedom.trim_left,
            silent_placeholders=freedom.silent_placeholders,
        )
        planned: list[dict[str, Any]] = []
        plans: list[Plan] = []
        for number in range(count // block):
            steps, table_R_B_3 = micro_batches[number * block : (number + 1) * block], ranks[:, number]
            made, own = self._planned_block(
                steps, table_R_B_3[:, :, :2], _has_to_run(table_R_B_3[:, :, 2], freedom), layout
            )
            plans += made
            planned += own
        self._log_plan(plans, rows_of_all=tables_N_3.shape[0])
        return planned

    def _planned_block(
        self, steps: Sequence[dict[str, Any]], lengths_R_B: Lengths, runs_R_B: npt.NDArray[np.bool_], layout: Layout
    ) -> tuple[list[Plan], list[dict[str, Any]]]:
        """The plans of all ranks for one block, and this rank's micro-steps."""
        assert self._freedom is not None
        rank, rows = self.accelerator.process_index, steps[0]["completion_ids"].size(0)
        if not self._freedom.sort:
            made = [unmoved(lengths) for lengths in lengths_R_B]
            return made, laid_out(steps, made[rank], lengths_R_B[rank], layout)
        numbers, blocks = None, list(zip(lengths_R_B, runs_R_B, strict=True))
        if self._balances:
            numbers, blocks = shown_rows(lengths_R_B, dealt_rows(lengths_R_B, runs_R_B))
        made = plan_block(
            blocks,
            len(steps),
            rows_per_part=None if self._freedom.any_count else rows,
            max_tokens=self.args.max_tokens_per_micro_batch,
        )
        if numbers is None and all(map(saves_nothing, made, lengths_R_B)):
            return made, [trimmed(step, lengths_R_B[rank], layout) for step in steps]
        if numbers is None:
            return made, laid_out(steps, made[rank], lengths_R_B[rank], layout)
        kept = exchanged(joined(steps), numbers[rank], self.accelerator.gather, gather_object)
        # What the rows' own micro-batches counted, their rows, is the same on every rank.
        return made, laid_out([kept], made[rank], blocks[rank][0], layout, came_from=[steps[0]] * len(numbers[rank]))

    @property
    def _balances(self) -> bool:
        """Whether rows move between ranks."""
        return bool(self.args.balance_ranks) and self.accelerator.num_processes > 1

    def _row_factor(self, before: dict[str, Any], part: dict[str, Any]) -> float | None:
        """By how much the rows of a micro-batch of TRL's count too little in a part.

        TRL's reduction divides by what is in the part. The loss is homogeneous in the advantages, so multiplying them
        puts back what it would have divided by. None where that is the same for any part.
        """
        trl: Any = self
        if trl.loss_aggregation is not None or trl.loss_type in upstream.GLOBAL_TOKEN_MEAN:
            return None
        if trl.loss_type in upstream.LOCAL_TOKEN_MEAN:
            return max(1.0, float(counting_mask(part).sum())) / max(1.0, float(counting_mask(before).sum()))
        rows = part["completion_ids"].size(0) / before["completion_ids"].size(0)
        return None if rows == 1.0 else rows

    def _log_plan(self, plans: Sequence[Plan], rows_of_all: int) -> None:
        live, computed = (sum(getattr(plan, name) for plan in plans) for name in ("live", "computed"))
        rows = sum(row >= 0 for plan in plans for step in plan.steps for part in step for row in part)
        self._compact_metrics(
            live_tokens=live,
            computed_tokens=computed,
            computed_to_live=computed / max(live, 1),
            rows_dropped=1.0 - rows / rows_of_all,
            micro_steps_skipped=sum(plan.idle for plan in plans),
        )

    def _compact_metrics(self, **values: float) -> None:
        trl: Any = self
        for name, value in values.items():
            trl._metrics["train"][f"compact/{name}"].append(float(value))

    # ------------------------------------------------------------------ at every micro-step

    def training_step(self, *arguments: Any, **keywords: Any) -> Any:
        """Do TRL's step, and log how long the update and the rollout in it took."""
        if not self._compact:
            return super().training_step(*arguments, **keywords)  # type: ignore[misc]
        self._rollout_seconds, started = 0.0, time.perf_counter()
        output = super().training_step(*arguments, **keywords)  # type: ignore[misc]
        self._seconds["rollout_seconds"] += self._rollout_seconds
        self._seconds["update_seconds"] += time.perf_counter() - started - self._rollout_seconds
        trl: Any = self
        if trl._step % trl.current_gradient_accumulation_steps == 0:  # as TRL's own `step_time`
            self._compact_metrics(**self._seconds)
            self._seconds.clear()
        return output

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        """Compute the loss of a micro-step; of one that has several parts, with the gradient of all but one done."""
        parts = inputs.get(PARTS_KEY) if isinstance(inputs, dict) else None
        if not parts:
            return super().compute_loss(model, inputs, *arguments, **keywords)  # type: ignore[misc]
        others = 0.0
        for part in parts:
            with self._accumulating(model):
                loss = super().compute_loss(model, part, *arguments, **keywords)  # type: ignore[misc]
                scale = {} if self.accelerator.distributed_type != "DEEPSPEED" else {"scale_wrt_gas": False}
                self.accelerator.backward(loss, **scale)
            others += loss.detach()
        own = {key: value for key, value in inputs.items() if key != PARTS_KEY}
        return super().compute_loss(model, own, *arguments, **keywords) + others  # type: ignore[misc]

    @contextmanager
    def _accumulating(self, model: Any) -> Iterator[None]:
        """A backward inside only adds to the gradients; whatever makes ranks meet or weights move waits."""
        state = self.accelerator.gradient_state
        synced = state.sync_gradients
        state._set_sync_gradients(False)
        try:
            with self.accelerator.no_sync(model):
                yield
        finally:
            state._set_sync_gradients(synced)

    def _get_per_token_logps_and_entropies(self, model: Any, *arguments: Any, **keywords: Any) -> Any:
        method = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        if not self._compact or torch.is_grad_enabled():
            return method(model, *arguments, **keywords)
        bound = inspect.signature(method).bind(model, *arguments, **keywords).arguments
        named = {**bound, **bound.pop("kwargs", {})}
        named |= dict(zip(_LOGPS_ARGUMENTS, named.pop("args", ()), strict=False))  # TRL 1.14 names fewer of them
        given = {name: value for name, value in named.items() if value is not None and value is not False}
        if not {"input_ids", "attention_mask", "logits_to_keep"} <= given.keys() <= {"model", *_LOGPS_ARGUMENTS}:
            return method(model, *arguments, **keywords)
        rows = given["input_ids"].size(0)
        chunk = given.get("batch_size") or rows
        if rows <= chunk:
            return method(model, *arguments, **keywords)
        assert self._freedom is not None
        return in_order_of_length(method, given, chunk, self._freedom.trim_left)


_LOGPS_ARGUMENTS = ("input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy")


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning("compact_updates: %s.", reason)


def _has_to_run(kind_B: npt.NDArray[np.int64], freedom: Freedom) -> npt.NDArray[np.bool_]:
    """Rows where nothing counts contribute nothing whatever the loss; rows without a signal where that is so."""
    least = 2 if freedom.drop else 1 if freedom.any_count else 0
    runs_B: npt.NDArray[np.bool_] = kind_B >= least
    return runs_B
