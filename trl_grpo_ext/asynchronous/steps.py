"""The training process: the rows of an optimizer step, the loss of each of its micro-batches, and what is recorded.

TRL packs samples into one row per rank and lists the terms of the loss, `M` of them. Plugins see `(B, T)`: `B` samples,
`T` completion tokens, the mask 1 at the tokens that have a term.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ..credit import flow
from ..credit.chain import Change, change_tables, metrics_of
from ..credit.metrics import row_table, weight_metrics
from ..credit.terms import FurtherTerms, take_apart
from ..errors import UpstreamError
from ..guard.agreement import Agreement
from ..records.token_records import TokenRecorder
from ..trainer.batch import BatchKeys
from ..trainer.facts import Progress
from ..trainer.loss_forward import LossForward, PolicyPass
from ..trainer.selected import SelectedPlugins
from ..trainer.token_losses import TokenLosses
from ..trainer.upstream import asynchronous as upstream
from ..types import Forward, Rollout, StepTotals, Totals, implements
from .rows import Row, as_bytes, from_bytes, padded, rollout_of

ROWS = "trl_grpo_ext_rows"
"""The entry of a micro-batch that holds a rank's rows: bytes on their way, then a `MicroBatch`."""


@dataclass
class MicroBatch:
    """A rank's rows of a micro-batch, and where each term of the loss belongs in `(B, T)`."""

    rows: Sequence[Row]
    row_M: torch.Tensor
    column_M: torch.Tensor
    numbers_B: torch.Tensor  # of the rows in their optimizer step
    of_step: Mapping[str, torch.Tensor] = field(default_factory=dict)  # `(B, T)`: weights, what token losses carry
    totals: Totals | None = None

    @classmethod
    def of(cls, inputs: Mapping[str, Any], first: int) -> MicroBatch:
        """Place the terms: TRL lists them by sample and token."""
        rows, device = from_bytes(inputs[ROWS]), inputs[ROWS].device
        columns = [np.flatnonzero(row.mask) for row in rows]
        row_M = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(one) for one in columns])).to(device)
        if not torch.equal(row_M, inputs["segment_id"][inputs["token_index"] >= 0]):
            raise UpstreamError("TRL lists the terms of the loss in another order than trl-grpo-ext knows.")
        return cls(rows, row_M, torch.as_tensor(np.concatenate(columns)).to(device), first + torch.arange(len(rows)))

    def spread(self, values_M: torch.Tensor) -> torch.Tensor:
        """Numbers of the terms as `(B, T)`, with 0 elsewhere, and with their graph."""
        shape = len(self.rows), max(len(row.completion_ids) for row in self.rows)
        return values_M.new_zeros(shape).index_put((self.row_M, self.column_M), values_M)

    def of_group(self, name: str) -> torch.Tensor:
        """A number of each row, `(B,)`."""
        return torch.tensor([row.of_group[name] for row in self.rows], device=self.row_M.device)


def pack_rows(packed: Sequence[Any], batch: dict[str, Any]) -> None:
    """On rank 0, for all ranks: the rows beside the micro-batch, and the advantage of each term."""
    rows = [[sample["advantage"].row for sample in one.samples] for one in packed]
    terms = [np.concatenate([row.advantages[row.mask > 0] for row in of_rank]) for of_rank in rows]
    batch["advantages"], batch[ROWS] = padded(terms).float(), padded([as_bytes(of_rank) for of_rank in rows])


class Steps:
    """Everything of ours that acts in the training process."""

    def __init__(
        self, trainer: Any, plugins: SelectedPlugins, agreement: Agreement, recorder: TokenRecorder, tools: Any
    ) -> None:
        self._trainer, self._plugins, self._agreement, self._recorder = trainer, plugins, agreement, recorder
        self._ranks, self._tools = trainer.accelerator.num_processes, tools
        facts: Any = SimpleNamespace(sum_over_ranks=lambda sums_C: trainer.accelerator.reduce(sums_C, reduction="sum"))
        self._token_losses = TokenLosses(plugins.losses_by_name, facts, agreement.section)
        self._hooks_act, self._records = bool(plugins.forward_hooks), plugins.settings.token_records > 0

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """All ranks' rows, of which each may have another number."""
        counts = self._agreement.gather(torch.tensor([len(values)], device=values.device)).tolist()
        missing = values.new_zeros(max(counts) - len(values), *values.shape[1:])
        both = self._agreement.gather(torch.cat([values, missing]))
        starts = range(0, len(both), max(counts))
        return torch.cat([both[start : start + count] for start, count in zip(starts, counts, strict=True)])

    # ------------------------------------------------------------------ once per optimizer step

    def prepare(self, micro_batches: Sequence[dict[str, Any]]) -> None:
        """Weigh and record an optimizer step, whose micro-batches are all here."""
        batches: list[MicroBatch] = []
        for inputs in micro_batches:
            if ROWS in inputs:
                inputs[ROWS] = MicroBatch.of(inputs, first=sum(len(one.rows) for one in batches))
                batches.append(inputs[ROWS])
        if not batches:
            return
        rows, aggregation = [row for one in batches for row in one.rows], self._plugins.aggregation
        of_step: dict[str, torch.Tensor] = {}
        with self._agreement.section():
            rollout = self._rollout(rows, len(batches), batches[0].row_M.device)
            if implements(aggregation, "weights"):
                of_step[BatchKeys.weights] = weights_B_T = flow.token_weights(aggregation, rollout)
                assert rollout.advantages_B_T is not None
                table_N_C = self.gather(row_table(weights_B_T, rollout.advantages_B_T, rollout.mask_B_T))
                self._log(weight_metrics(table_N_C))
        self._token_losses.carry(of_step, rollout)
        for one in batches:
            width = max(len(row.completion_ids) for row in one.rows)
            one.of_step = {
                name: values_B_T[one.numbers_B.to(values_B_T.device), :width] for name, values_B_T in of_step.items()
            }
            one.totals = rollout.totals
        names = [name for name, _ in rows[0].stages]
        stages = [
            padded([row.stages[number][1] for row in rows], rollout.mask_B_T.device) for number in range(len(names))
        ]
        self._saw_changes([Change(*one) for one in zip(names[1:], stages, stages[1:], strict=False)], rollout.mask_B_T)
        if self._records:
            outcomes = {name: [row.outcomes.get(name) for row in rows] for row in rows for name in row.outcomes}
            self._recorder.start(rollout, torch.arange(len(rows)), list(zip(names, stages, strict=True)), outcomes)

    def _rollout(self, rows: Sequence[Row], micro_batches: int, device: torch.device) -> Rollout:
        """The context of a step: its rows of this rank, with the counts and groups of all."""
        trl, rank = self._trainer, self._trainer.accelerator.process_index
        facts_N_C = self.gather(torch.tensor([[row.group, int(row.mask.sum()), rank] for row in rows], device=device))
        groups_Q, groups_N = torch.unique(facts_N_C[:, 0], return_inverse=True)
        tokens, first = int(facts_N_C[:, 1].sum()), int((facts_N_C[:, 2] < rank).sum())
        totals = Totals(
            tokens=tokens,
            sequences=len(groups_N),
            prompts=len(groups_Q),
            max_completion_length=trl.args.max_completion_length,
            processes=self._ranks,
            micro_batches=micro_batches,
            step=StepTotals(tokens=tokens, sequences=len(groups_N), micro_batches=micro_batches),
        )
        of_run = {"tokenizer": trl.processing_class, "end_ids": trl.eos_token_ids, "tools": self._tools}
        rollout = rollout_of(rows, totals, self.gather, step=trl.state.global_step, device=device, **of_run)
        local = slice(first, first + len(rows))
        return replace(
            rollout,
            num_generations=trl.args.num_generations,
            group_ids_B=groups_N[local],
            local_rows=local,
            advantages_B_T=padded([row.advantages for row in rows], device),
            old_logps_B_T=rollout.sampling_logps_B_T,  # TRL has no other old policy
        )

    def _saw_changes(self, changes: Sequence[Change], mask_B_T: torch.Tensor) -> None:
        if changes:
            tables_N_C = self.gather(change_tables(changes, mask_B_T))
            self._log(metrics_of(changes, tables_N_C))
            if self._trainer.accelerator.is_main_process:
                for sentence in self._plugins.chain.without_effect(
                    changes, tables_N_C, self._trainer.state.global_step
                ):
                    warnings.warn(sentence, stacklevel=2)

    def _log(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            upstream.add_metric(self._trainer, name, value)

    # ------------------------------------------------------------------ at every loss forward

    def compute_loss(self, inherited: Callable[..., Any], model: Any, inputs: dict[str, Any], *arguments: Any) -> Any:
        """The loss of a micro-batch: TRL's, with the forward hooks' advantages and the selected terms and weights."""
        batch, takes_apart = inputs.get(ROWS), self._plugins.reduces
        if not isinstance(batch, MicroBatch) or not (takes_apart or self._hooks_act or self._records):
            return inherited(model, inputs, *arguments)
        began = time.time()
        outputs = model(**upstream.model_arguments(inherited, inputs))
        upstream.count_forward_seconds(self._trainer, time.time() - began)
        selected = inputs["token_index"] >= 0
        terms_M = inputs["token_index"][selected]
        logps_B_T = batch.spread(outputs.log_probs.flatten()[terms_M].float())
        entropies_B_T = batch.spread(outputs.entropy.flatten()[terms_M].detach().float())
        forward = self._forward(batch, inputs, selected)
        changes = self._apply_hooks(forward, batch, logps_B_T, entropies_B_T) if self._hooks_act else []
        forward.passes.append(PolicyPass(logps_B_T, entropies_B_T, changes))
        leaf_B_T = forward.inputs["advantages"].detach().clone().requires_grad_(takes_apart)
        flat = torch.zeros_like(inputs["advantages"]).masked_scatter(selected, leaf_B_T[batch.row_M, batch.column_M])
        loss = inherited(lambda **keywords: outputs, {**inputs, "advantages": flat}, *arguments)
        weights_B_T = batch.spread(upstream.reduction_weights(self._trainer, inherited, inputs)[selected])
        used_B_T = weights_B_T / self._ranks
        if takes_apart:
            loss, used_B_T = self._reduced(loss, leaf_B_T, weights_B_T, forward, batch)
        if self._records:
            used = {"advantage": leaf_B_T, "weight": used_B_T, "logp": logps_B_T, "entropy": entropies_B_T}
            stages = [(change.name, change.after_B_T) for change in changes]
            self._recorder.add_trained(batch.numbers_B, stages, {name: one.detach() for name, one in used.items()})
        return loss

    def _forward(self, batch: MicroBatch, inputs: Mapping[str, Any], selected: torch.Tensor) -> LossForward:
        """The micro-batch `(B, T)`, with entries named as in TRL's synchronous trainer."""
        old_logps_B_T, device = batch.spread(inputs["old_log_probs"][selected]), selected.device
        entries = {
            "advantages": batch.spread(inputs["advantages"][selected]),
            "completion_ids": padded([row.completion_ids for row in batch.rows], device),
            "old_per_token_logps": old_logps_B_T,
            "sampling_per_token_logps": old_logps_B_T,
            BatchKeys.reward: batch.of_group("rewards_B"),
            **batch.of_step,
        }
        return LossForward(entries, batch.spread(torch.ones_like(inputs["advantages"][selected])))

    def _apply_hooks(
        self, forward: LossForward, batch: MicroBatch, logps_B_T: torch.Tensor, entropies_B_T: torch.Tensor
    ) -> Sequence[Change]:
        inputs, signs = forward.inputs, [row.allowed_signs for row in batch.rows]
        with self._agreement.section():
            context = Forward(
                logps_B_T=logps_B_T.detach(),
                entropies_B_T=entropies_B_T,
                old_logps_B_T=inputs["old_per_token_logps"],
                mask_B_T=forward.mask_B_T,
                completion_ids_B_T=inputs["completion_ids"],
                rewards_B=inputs[BatchKeys.reward],
                raw_rewards_B=batch.of_group("raw_rewards_B"),
                group_baselines_B=batch.of_group("group_baselines_B"),
                zero_variance_B=batch.of_group("zero_variance"),
                step=self._trainer.state.global_step,
                gather=self.gather,
            )
            signs_B_T = None if signs[0] is None else padded(signs, batch.row_M.device)
            inputs["advantages"], changes = self._plugins.chain.on_forward(inputs["advantages"], context, signs_B_T)
            self._saw_changes(changes, forward.mask_B_T)
        return changes

    def _reduced(
        self,
        trl_loss: torch.Tensor,
        leaf_B_T: torch.Tensor,
        weights_B_T: torch.Tensor,
        forward: LossForward,
        batch: MicroBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss under the selected weights, which DDP averages over ranks, and each token's weight in the step.

        What is no term of a token, such as a router's auxiliary loss, stays as TRL has it.
        """
        accumulation, aggregation = self._trainer.current_gradient_accumulation_steps, self._plugins.aggregation
        apart = take_apart(trl_loss, leaf_B_T, weights_B_T, forward.mask_B_T, None, has_rest=True)
        if self._token_losses:
            progress = Progress(training=True, step=self._trainer.state.global_step, accumulation=accumulation)
            values, metrics = self._token_losses.values(forward, progress)
            self._log(metrics)
            apart = apart.changed_by(FurtherTerms(values, bool(self._token_losses.replaced_by)))
        loss_B_T = apart.loss_B_T
        if aggregation is None:
            return (weights_B_T * loss_B_T).sum() + apart.rest, weights_B_T / self._ranks
        if BatchKeys.weights in batch.of_step:
            weights_B_T = batch.of_step[BatchKeys.weights]
            return (weights_B_T * loss_B_T).sum() * self._ranks + apart.rest, weights_B_T
        assert batch.totals is not None
        with self._agreement.section():
            reduced = flow.reduced_loss(aggregation, loss_B_T, forward.mask_B_T, batch.totals)
            slope_B_T = flow.reduced_weights(aggregation, reduced, loss_B_T, forward.mask_B_T)
        return reduced / accumulation + apart.rest, slope_B_T / (accumulation * self._ranks)
