"""Cheaper updates with the same gradient: rows in order of length, trimmed, and without those that have no signal.

TRL pads a whole generation batch to its longest completion and deals shuffled rows to the micro-batches. So one long
completion slows all of them, and rows with zero advantages run forward and backward for nothing. The loss of an
optimizer step is a sum over its tokens with weights that are fixed beforehand. So its rows may run in any order and in
batches of any size, and rows that contribute nothing can be left out. `Freedom` says how much of that is exact in a
run.

| TRL calls | `CompactUpdates` adds |
| --- | --- |
| `_prepare_inputs` | the buffered micro-batches, rearranged (`plan`, `rows`) |
| `compute_loss` | a micro-step of several parts: the gradient of each is accumulated |
| `_get_per_token_logps_and_entropies` | the old policy's and the reference's forward passes, in order of length too |
| the same | rows without padding and, with `share_prompts`, each prompt once, in all three passes (`packed`) |
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate.utils import gather_object

from ...errors import ConfigurationError
from ...types import implements
from .. import upstream
from ..batch import PROMPT_KEYS, BatchKeys, counting_mask, join_batches
from ..facts import LossSettings, RunFacts
from .packed import Groups, Lengths, Packing
from .plan import Plan, Runs, plan_block, plan_in_place
from .rows import (
    Layout,
    deal_rows,
    exchange_rows,
    logps_by_length,
    make_micro_steps,
    row_lengths_and_kinds,
    rows_to_plan,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Freedom:
    """What may change about a run's micro-batches without changing its gradient."""

    sort: bool  # rows may move between the micro-batches of an optimizer window
    drop: bool  # rows whose advantages are all zero may be left out
    any_count: bool  # micro-batches may have any number of rows
    trim_left: bool  # padding in front of the prompts may be cut away; it moves the positions that a model sees
    ratios_multiply: bool = False  # A row whose importance ratios to the sampler are all 0 has no signal
    reasons: tuple[str, ...] = ()  # why something may not change


def freedom_of(loss: LossSettings, aggregation: Any, hooks: Sequence[Any], config: Any) -> Freedom:
    """What is exact in a run, by TRL's loss, the selected aggregation, the advantage hooks and the model's config."""
    forward_hooks = [hook for hook in hooks if implements(hook, "on_forward")]
    by_weights = aggregation is not None and implements(aggregation, "weights")
    order_matters = []  # why rows stay in their micro-batches
    if loss.entropy_bonus:
        order_matters.append("the entropy bonus is a mean over each micro-batch")
    if loss.auxiliary_loss:
        order_matters.append("the router's auxiliary loss is computed over each micro-batch")
    if loss.top_entropy_quantile < 1.0:
        order_matters.append("top_entropy_quantile is taken over each micro-batch")
    if aggregation is not None and not by_weights:
        order_matters.append("the selected aggregation reduces each micro-batch by itself")
    if any(not getattr(hook, "per_completion", False) for hook in forward_hooks):
        order_matters.append("a forward hook may look at its whole micro-batch (it has no `per_completion = True`)")
    divides = not by_weights and loss.loss_type not in upstream.GLOBAL_TOKEN_MEAN
    # What forbids scaling the advantages to undo a part's different denominator; see `row_factor`.
    unscaled = "a KL penalty" if loss.beta != 0.0 else "forward hooks" if forward_hooks else None
    if divides and unscaled and loss.loss_type in upstream.LOCAL_TOKEN_MEAN:
        order_matters.append(f"with {unscaled} {loss.loss_type} is a mean over each micro-batch")
    all_rows_act = []  # why rows without signal run
    if loss.beta != 0.0:
        all_rows_act.append("the KL penalty acts on rows without signal too")
    if forward_hooks:
        all_rows_act.append("forward hooks may give rows without signal one")
    count_matters = [f"with {unscaled} {loss.loss_type} counts rows"] if divides and unscaled else []
    padding_matters = [] if positions_are_relative(config) else ["the model's positions are absolute"]
    return Freedom(
        sort=not order_matters,
        drop=not order_matters and not all_rows_act,
        any_count=not order_matters and not count_matters,
        trim_left=not padding_matters,
        ratios_multiply=loss.loss_type != "vespo",  # which takes their logarithm
        reasons=(
            *(f"rows stay in their micro-batches: {reason}" for reason in order_matters),
            *(f"rows without signal run: {reason}" for reason in all_rows_act),
            *(f"micro-batches keep their number of rows: {reason}" for reason in count_matters),
            *(f"prompts keep their padding: {reason}" for reason in padding_matters),
        ),
    )


def positions_are_relative(config: Any) -> bool:
    """Whether attention depends on distances alone, so that a row may move within its padding.

    True for rotary embeddings whose frequencies do not depend on the length, in models whose layers are all attention.
    TRL passes no positions, so models count them from the first column, padding included.
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
    """Plans the micro-batches of `compact_updates: exact`."""

    def __init__(
        self,
        freedom: Freedom,
        facts: RunFacts,
        *,
        loss_type: str | None,
        max_tokens: int | None = None,
        balance: bool = False,
        keeps_records: bool = False,
        packing: Packing | None = None,
        policy: Callable[[], tuple[Callable[..., Any], Any]] | None = None,
        log: Callable[[dict[str, float]], None],
    ) -> None:
        if max_tokens is not None and not freedom.any_count:
            raise ConfigurationError(
                f"max_tokens_per_micro_batch={max_tokens} cannot be exact in this run: {'; '.join(freedom.reasons)}. "
                "Select a loss_aggregation by weights (seq_mean_token_mean is GRPO's), or take the budget out."
            )
        if balance:
            _check_balance(freedom, loss_type, keeps_records)
        for reason in freedom.reasons:
            logger.info("compact_updates: %s.", reason)
        self.freedom, self._facts, self._loss_type = freedom, facts, loss_type
        self._max_tokens, self._balances, self._log = max_tokens, balance and facts.ranks > 1, log
        self._packing, self._policy = packing, policy
        self._planned: list[dict[str, Any]] | None = None

    # ------------------------------------------------------------------ once per generation batch

    def plan(self, micro_batches: list[dict[str, Any]], precision: torch.dtype) -> list[dict[str, Any]]:
        """Rearrange TRL's buffered micro-batches; those of an earlier call come back unchanged."""
        if micro_batches is self._planned:
            return micro_batches
        images = sorted(upstream.MULTIMODAL_KEYS & {key for key, v in micro_batches[0].items() if v is not None})
        if images:
            _warn_once(f"multimodal inputs ({', '.join(images)}) run as TRL deals them")
            self._planned = micro_batches
        else:
            self._planned = self._replan(micro_batches, precision)
        return self._planned

    def _replan(self, micro_batches: Sequence[dict[str, Any]], precision: torch.dtype) -> list[dict[str, Any]]:
        freedom, count = self.freedom, len(micro_batches)
        # Wherever optimizer windows begin, this many consecutive micro-steps lie in one.
        block = math.gcd(self._facts.accumulation, count) if freedom.sort else 1
        rows = micro_batches[0]["completion_ids"].size(0)
        table_B_3 = torch.cat([row_lengths_and_kinds(batch, freedom.ratios_multiply) for batch in micro_batches])
        if not freedom.trim_left:  # padding that stays in front of a prompt is computed too
            table_B_3[:, 0] = micro_batches[0]["prompt_ids"].size(1)
        packing = self._packing
        if packing is not None:
            prompts = join_batches([{key: batch[key] for key in PROMPT_KEYS} for batch in micro_batches])
            groups_B_1 = packing.groups(prompts["prompt_ids"], prompts["prompt_mask"])
        else:
            groups_B_1 = table_B_3[:, :1]
        tables_N_4 = self._facts.gather(torch.cat([table_B_3, groups_B_1], dim=1)).cpu().numpy()
        ranks = tables_N_4.reshape(self._facts.ranks, count // block, block * rows, 4)
        packs = packing is not None and packing.fits(ranks[..., :2].reshape(-1, 2)) and self._packs()
        layout = Layout(
            factor=functools.partial(row_factor, self._loss_type),
            precision=precision,
            trim_left=freedom.trim_left,
        )
        planned: list[dict[str, Any]] = []
        plans: list[Plan] = []
        for number in range(count // block):
            steps, table_R_B_4 = micro_batches[number * block : (number + 1) * block], ranks[:, number]
            lengths_R_B, runs_R_B = table_R_B_4[:, :, :2], _must_run(table_R_B_4[:, :, 2], freedom)
            groups_R_B = [*table_R_B_4[:, :, 3]] if packs else None
            made, own = self._plan_block(steps, lengths_R_B, runs_R_B, layout, groups_R_B)
            if (table_R_B_4[:, :, 2] == 0).all():  # no token counts: log zeros, as TRL does
                own = [{key: value for key, value in step.items() if key != BatchKeys.idle} for step in own]
            plans += made
            planned += own
        if packs and packing is not None and packing.share and all(plan.live == plan.distinct for plan in plans):
            packing.say_once("no two rows of a block have the same")
        self._log_plan(plans, all_rows=tables_N_4.shape[0])
        return planned

    def _packs(self) -> bool:
        assert self._packing is not None
        assert self._policy is not None
        return self._packing.check(*self._policy())

    def _plan_block(
        self,
        steps: Sequence[dict[str, Any]],
        lengths_R_B: Lengths,
        runs_R_B: Runs,
        layout: Layout,
        groups_R_B: Sequence[Groups] | None,
    ) -> tuple[list[Plan], list[dict[str, Any]]]:
        """The plans of all ranks for one block, and this rank's micro-steps."""
        rank, rows = self._facts.rank, steps[0]["completion_ids"].size(0)
        if not self.freedom.sort:
            groups = [None] * len(lengths_R_B) if groups_R_B is None else [*groups_R_B]
            made = list(map(plan_in_place, lengths_R_B, groups))
            return made, make_micro_steps(steps, made[rank], lengths_R_B[rank], layout)
        numbers, blocks = None, list(zip(lengths_R_B, runs_R_B, strict=True))
        if self._balances:
            numbers, blocks = rows_to_plan(lengths_R_B, deal_rows(lengths_R_B, runs_R_B))
            groups_R_B = None if groups_R_B is None else [np.arange(len(lengths)) for lengths, _ in blocks]
        made = plan_block(
            blocks,
            len(steps),
            rows_per_part=None if self.freedom.any_count else rows,
            max_tokens=self._max_tokens,
            groups=groups_R_B,
        )
        if numbers is None:
            return made, _mark_idle(make_micro_steps(steps, made[rank], lengths_R_B[rank], layout), made)
        kept = exchange_rows(join_batches(steps), numbers[rank], self._facts.gather, gather_object)
        # The rows' own micro-batches have the same number of rows on every rank.
        own = make_micro_steps([kept], made[rank], blocks[rank][0], layout, came_from=[steps[0]] * len(numbers[rank]))
        return made, _mark_idle(own, made)

    def _log_plan(self, plans: Sequence[Plan], all_rows: int) -> None:
        live, computed = (sum(getattr(plan, name) for plan in plans) for name in ("live", "computed"))
        rows = sum(row >= 0 for plan in plans for step in plan.steps for part in step for row in part)
        self._log(
            {
                "compact/live_tokens": float(live),
                "compact/computed_tokens": float(computed),
                "compact/computed_to_live": computed / max(live, 1),
                "compact/rows_dropped": 1.0 - rows / all_rows,
                "compact/micro_steps_skipped": float(sum(plan.idle for plan in plans)),
            }
        )
        if self._packing is not None and self._packing.share and (distinct := sum(plan.distinct for plan in plans)):
            self._log({"compact/distinct_tokens": float(distinct), "compact/computed_to_distinct": computed / distinct})

    # ------------------------------------------------------------------ at every forward pass

    def logps(self, method: Callable[..., Any], model: Any, *arguments: Any, **keywords: Any) -> Any:
        """TRL's log-probabilities of packed rows; rows are sorted by length in passes without a gradient."""
        packing, inferring = self._packing, not torch.is_grad_enabled()
        if packing is None and not inferring:
            return method(model, *arguments, **keywords)
        bound = inspect.signature(method).bind(model, *arguments, **keywords).arguments
        named = {**bound, **bound.pop("kwargs", {})}
        named |= dict(zip(_LOGPS_ARGUMENTS, named.pop("args", ()), strict=False))  # TRL 1.14 names fewer of them
        given = {name: value for name, value in named.items() if value is not None and value is not False}
        if not {"input_ids", "attention_mask", "logits_to_keep"} <= given.keys() <= {"model", *_LOGPS_ARGUMENTS}:
            if packing is not None:
                packing.say_once(f"a forward pass takes {', '.join(given)}")
            return method(model, *arguments, **keywords)
        rows, packed = given["input_ids"].size(0), None
        chunk = given.get("batch_size") or rows
        if packing is not None and inferring:
            packing.check(method, given["model"])
        if rows > chunk and inferring:
            return logps_by_length(method, given, chunk, self.freedom.trim_left, packing)
        if packing is not None and rows <= chunk:
            packed = packing.pack(given["input_ids"], given["attention_mask"], given["logits_to_keep"])
        if packing is None or packed is None:
            return method(model, *arguments, **keywords)
        return packing.logps(method, given, packed)


def row_factor(loss_type: str | None, before: dict[str, Any], part: dict[str, Any]) -> float | None:
    """The factor by which rows of TRL's micro-batch would count too little in a part; None if it is 1 for any part.

    TRL's reduction divides by a count over the part. The loss is homogeneous in the advantages, so multiplying them by
    this factor restores the original denominator.
    """
    if loss_type is None or loss_type in upstream.GLOBAL_TOKEN_MEAN:
        return None
    if loss_type in upstream.LOCAL_TOKEN_MEAN:
        return max(1.0, float(counting_mask(part).sum())) / max(1.0, float(counting_mask(before).sum()))
    rows = part["completion_ids"].size(0) / before["completion_ids"].size(0)
    return None if rows == 1.0 else rows


def loss_of_parts(compute: Callable[[dict[str, Any]], torch.Tensor], model: Any, inputs: Any, accelerator: Any) -> Any:
    """The loss of a micro-step, by `compute`; of its parts all but one have run their backward already."""
    parts = inputs.get(BatchKeys.parts) if isinstance(inputs, dict) else None
    if not parts:
        return compute(inputs)
    others: Any = 0.0
    for part in parts:
        with _accumulating(accelerator, model):
            loss = compute(part)
            scale = {} if accelerator.distributed_type != "DEEPSPEED" else {"scale_wrt_gas": False}
            accelerator.backward(loss, **scale)
        others += loss.detach()
    return compute({key: value for key, value in inputs.items() if key != BatchKeys.parts}) + others


@contextmanager
def _accumulating(accelerator: Any, model: Any) -> Iterator[None]:
    """Inside, a backward only adds to the gradients; synchronisation and optimizer steps wait.

    If the whole micro-step only accumulates, the trainer's own `no_sync` is active. Under FSDP2 a nested one would end
    it, because its `no_sync` resets a switch rather than restoring it, and each micro-step would exchange gradients.
    With `sync_each_batch`, which keeps FSDP's gradients sharded at all times, every part exchanges.
    """
    state = accelerator.gradient_state
    synced, always = state.sync_gradients, state.plugin_kwargs.get("sync_each_batch", False)
    left_alone = always or not (synced or accelerator.distributed_type == "DEEPSPEED")  # which has none around it
    state._set_sync_gradients(False)
    try:
        with nullcontext() if left_alone else accelerator.no_sync(model):
            yield
    finally:
        state._set_sync_gradients(synced)


def _check_balance(freedom: Freedom, loss_type: str | None, keeps_records: bool) -> None:
    reasons = list(freedom.reasons) if not (freedom.any_count and freedom.trim_left) else []
    if loss_type in upstream.LOCAL_TOKEN_MEAN:
        reasons.append(f"{loss_type} is a mean over the tokens of each rank's micro-batch")
    if keeps_records:
        reasons.append("token_records are kept on the rank that generated a row")
    if reasons:
        raise ConfigurationError(
            f"balance_ranks moves rows to other ranks, which cannot be done in this run: {'; '.join(reasons)}. "
            "Remove it, or what conflicts with it."
        )


_LOGPS_ARGUMENTS = ("input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy")


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("compact_updates: %s.", reason)


def _mark_idle(steps: list[dict[str, Any]], plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """Mark micro-steps with only placeholders on all ranks; they log nothing."""
    for step, of_ranks in zip(steps, zip(*(plan.steps for plan in plans), strict=True), strict=True):
        step[BatchKeys.idle] = all(row < 0 for parts in of_ranks for part in parts for row in part)
    return steps


def _must_run(kind_B: npt.NDArray[np.int64], freedom: Freedom) -> Runs:
    """Rows that must run: never those without live tokens; those without signal only under some losses."""
    least = 2 if freedom.drop else 1 if freedom.any_count else 0
    runs_B: Runs = kind_B >= least
    return runs_B
