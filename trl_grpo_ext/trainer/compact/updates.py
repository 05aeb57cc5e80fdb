"""Cheaper updates with the same gradient: rows in order of length, trimmed, and without those that have no signal."""

import functools
import inspect
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...credit.flow import TRL_REDUCTIONS
from ...credit.terms import Term
from ...errors import ConfigurationError
from ..batch import BatchKeys, counting_mask, join_batches, whole_rows
from ..selected import SelectedPlugins
from ..upstream import contract, images, reading
from ..upstream.images import Images
from ..upstream.reading import RunFacts
from .packed import Lengths, Packing, image_token_of, in_completions, packing_of, same_model
from .plan import Plan, plan_block
from .rows import logps_by_length, make_micro_steps, row_lengths, row_lengths_and_kinds
from .trials import NOTHING, Exact, Policy, Rows, Span, Trials

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Freedom:
    """What may change about a run's micro-batches without changing its gradient."""

    sort: bool  # rows may move between the micro-batches of an optimizer window
    drop: bool  # rows whose advantages are all zero may be left out
    any_count: bool  # micro-batches may have any number of rows


def freedom_of(terms: Sequence[Term], divides_by: str, *, own_batches: bool) -> Freedom:
    """What is exact in a run, by the terms of its loss and what of a micro-batch their reduction divides by.

    With `own_batches` a class of the user's may do to a micro-batch what depends on all of its rows.
    """
    # What forbids scaling the advantages to undo a part's different denominator; see `row_factor`.
    unscaled = any(term.unscaled for term in terms)
    together = divides_by == "losses" or (divides_by == "tokens" and unscaled)
    sort = not own_batches and not together and not any(term.mixes_rows for term in terms)
    drop = not any(term.acts_without_advantage for term in terms)
    counts = divides_by != "nothing" and unscaled
    return Freedom(sort=sort, drop=sort and drop, any_count=sort and not counts)


@dataclass
class CompactUpdates:
    """Plans the micro-batches of `compact_updates: exact`."""

    freedom: Callable[[], Freedom]  # read at each plan, because callbacks may change the loss
    facts: RunFacts
    loss_type: str | None  # None if the reduction is not TRL's
    packing: Packing | None
    policy: Policy
    log: Callable[[dict[str, float]], None]

    def __post_init__(self) -> None:
        logger.info("compact_updates: %s", self.freedom())
        self._image_token = image_token_of(self.policy()[1])
        self._trials = Trials(self.packing, self.policy, self.facts)

    def _tables(self, micro_batches: Sequence[dict[str, Any]]) -> tuple[npt.NDArray[np.int64], Exact]:
        """Of all ranks `(R, N, 7)`: rows with two lengths, kind, group, two widths, images of tools; what is exact."""
        packing = self.packing
        table_B_3 = torch.cat([row_lengths_and_kinds(batch) for batch in micro_batches])
        keys = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        dealt = [{key: batch[key] for key in keys} | reading.images_of(batch) for batch in micro_batches]
        joined = images.joined(join_batches([*map(images.by_row, dealt)]))
        seen = Images.of(joined)
        groups_B_1 = torch.arange(len(table_B_3), device=table_B_3.device).unsqueeze(1)
        if packing is not None:
            groups_B_1 = packing.groups(joined["prompt_ids"], joined["prompt_mask"], seen)
        inside = in_completions(joined["completion_ids"], self._image_token, seen)
        widths = [joined["prompt_ids"].size(1), joined["completion_ids"].size(1), int(inside)]
        widths_B_3 = table_B_3.new_tensor([widths]).expand(len(table_B_3), 3)
        table_B_7 = torch.cat([table_B_3, groups_B_1, widths_B_3], dim=1)
        tables_R_N_7 = self.facts.gather(table_B_7).cpu().numpy().reshape(self.facts.ranks, -1, 7)
        fits = packing is not None and packing.fits(tables_R_N_7[..., :2].reshape(-1, 2))
        if tables_R_N_7[..., 6].any():
            if packing is not None:
                packing.say_once("completions have images of their own, as tools return them")
            return tables_R_N_7, NOTHING
        own = tables_R_N_7[self.facts.rank]
        spans = [_span(table[:, :2], int(table[0, 4:6].sum())) for table in tables_R_N_7 if table[:, 1].any()]
        rows = Rows(*whole_rows(joined), joined["completion_ids"].size(1), own[:, :2], own[:, 3], seen)
        exact = self._trials.of(rows, spans, fits=fits)
        return tables_R_N_7, replace(exact, packed=exact.packed and fits)

    def plan(self, micro_batches: Sequence[dict[str, Any]], precision: torch.dtype) -> list[dict[str, Any]]:
        """Rearrange TRL's micro-batches."""
        freedom = self.freedom()
        rank = self.facts.rank
        count = len(micro_batches)
        # Wherever optimizer windows begin, this many consecutive micro-steps lie in one.
        block = math.gcd(self.facts.accumulation, count) if freedom.sort else 1
        rows = micro_batches[0]["completion_ids"].size(0)
        tables_R_N_7, exact = self._tables(micro_batches)
        runs = np.where([exact.left, exact.right], tables_R_N_7[..., :2], tables_R_N_7[..., 4:6])
        stay = np.where([exact.left, exact.right], 1, tables_R_N_7[rank, 0, 4:6]).tolist()
        tables_R_N_9 = np.concatenate([tables_R_N_7, runs], axis=2).reshape(-1, count // block, block * rows, 9)
        # Rows that must run: never those without live tokens; those without signal only under some losses.
        least = 2 if freedom.drop else 1 if freedom.any_count else 0
        planned: list[dict[str, Any]] = []
        plans: list[Plan] = []
        live = 0
        for number in range(count // block):
            table_R_B_9 = tables_R_N_9[:, number]
            made = plan_block(
                [(table_B_9[:, 7:], table_B_9[:, 2] >= least) for table_B_9 in table_R_B_9],
                block,
                rows_per_step=None if freedom.any_count else rows,
                groups=[*table_R_B_9[:, :, 3]] if exact.packed else None,
            )
            dealt = micro_batches[number * block : (number + 1) * block]
            factor = functools.partial(row_factor, self.loss_type)
            steps = make_micro_steps(dealt, made[rank], table_R_B_9[rank, :, 7:], factor, precision, stay)
            if (table_R_B_9[:, :, 2] != 0).any():  # else no token counts: log zeros, as TRL does
                for step, of_ranks in zip(steps, zip(*(plan.steps for plan in made), strict=True), strict=True):
                    step[BatchKeys.idle] = all(max(rows) < 0 for rows in of_ranks)
            plans += made
            planned += steps
            for plan, table_B_9 in zip(made, table_R_B_9, strict=True):
                live += int(table_B_9[[row for part in plan.steps for row in part if row >= 0], :2].sum())
        self._log_plans(plans, live, tables_R_N_7[..., 0].size, packs=exact.packed)
        return planned

    def _log_plans(self, plans: Sequence[Plan], live: int, rows: int, *, packs: bool) -> None:
        computed = sum(plan.computed for plan in plans)
        distinct = sum(plan.distinct for plan in plans)
        metrics = {
            "compact/live_tokens": float(live),
            "compact/computed_tokens": float(computed),
            "compact/computed_to_live": computed / max(live, 1),
            "compact/rows_dropped": sum(plan.dropped for plan in plans) / rows,
            "compact/micro_steps_skipped": float(sum(plan.idle for plan in plans)),
        }
        if self.packing is not None and self.packing.share and distinct:
            metrics |= {"compact/distinct_tokens": float(distinct), "compact/computed_to_distinct": computed / distinct}
            if packs and live == distinct:
                self.packing.say_once("no two rows of a block have the same")
        self.log(metrics)

    def logps(self, method: Callable[..., Any], model: Any, *arguments: Any, **keywords: Any) -> Any:
        packing = self.packing
        as_before = functools.partial(method, model, *arguments, **keywords)
        if not isinstance(model, torch.nn.Module):  # a user's function, which has no backbone to be seen
            return as_before()
        inferring = not (torch.is_grad_enabled() and same_model(model, self.policy()[1]))
        if packing is None and not inferring:
            return as_before()
        bound = inspect.signature(method).bind(model, *arguments, **keywords).arguments
        named = {**bound, **bound.pop("kwargs", {})}
        named |= zip(contract.LOGPS_ARGUMENTS, named.pop("args", ()), strict=False)  # a user's class may not name them
        given = {name: value for name, value in named.items() if value is not None and value is not False}
        known = {"model", *contract.LOGPS_ARGUMENTS, *contract.MULTIMODAL_KEYS}
        if not {"input_ids", "attention_mask", "logits_to_keep"} <= given.keys() <= known:
            if packing is not None:
                packing.say_once(f"a forward pass takes {', '.join(given)}")
            return as_before()
        ids = given["input_ids"]
        mask = given["attention_mask"]
        keep = given["logits_to_keep"]
        start = ids.size(1) - keep
        chunk = given.get("batch_size") or len(ids)
        exact = self._trials.exact
        seen = Images.of(given)
        if not exact.packed or in_completions(ids[:, start:], self._image_token, seen):
            packing = None
        if inferring:  # of rows that no update has tried yet, or of another model
            widths = row_lengths(mask[:, :start], mask[:, start:]).cpu().numpy()
            if exact == NOTHING or not (self._trials.takes(model) and self._trials.covers(_span(widths, ids.size(1)))):
                return as_before()
            if len(ids) > chunk:
                widths = np.where([exact.left, exact.right], widths, [start, keep])
                return logps_by_length(method, given, chunk, widths, packing)
        packed = packing.pack(ids, mask, keep, seen) if packing is not None and len(ids) <= chunk else None
        if packing is None or packed is None:
            return as_before()
        return packing.logps(method, given, packed)


def _span(lengths: Lengths, width: int) -> Span:
    scored = lengths[lengths[:, 1] > 0]
    return (int(scored.sum(axis=1).min()) if len(scored) else width), width


def updates_of(
    trainer: Any,
    facts: RunFacts,
    plugins: SelectedPlugins,
    freedom: Callable[[], Freedom],
    policy_logps: Callable[..., Any],
    log: Callable[[dict[str, float]], None],
    *,
    own_passes: bool,
) -> CompactUpdates | None:
    """What plans the updates of a run; with `own_passes` a class of the user's runs the models in its own way."""
    if not plugins.compact:
        return None
    if trainer.args.use_liger_kernel:
        raise ConfigurationError("compact_updates: exact does not work with use_liger_kernel. Turn one of them off.")
    loss = reading.loss_settings_of(trainer)
    compiled = trainer.args.torch_compile
    share = plugins.settings.share_prompts
    packing = packing_of(trainer.model, loss, share=share, compiled=compiled, overridden=own_passes)
    loss_type = loss.loss_type if plugins.aggregation is None else None
    return CompactUpdates(freedom, facts, loss_type, packing, lambda: (policy_logps, trainer.model), log)


def row_factor(loss_type: str | None, before: dict[str, Any], part: dict[str, Any]) -> float | None:
    """What to multiply the advantages of a part by, so that they count as under TRL's denominator; None for 1."""
    reduction = None if loss_type is None else TRL_REDUCTIONS.get(loss_type)
    if loss_type is None or reduction == "token_mean":
        return None
    if reduction == "token_mean_local":
        return max(1.0, float(counting_mask(part).sum())) / max(1.0, float(counting_mask(before).sum()))
    rows = part["completion_ids"].size(0) / before["completion_ids"].size(0)  # masked ones included
    return None if rows == 1.0 else rows
