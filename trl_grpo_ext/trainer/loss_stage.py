"""The second stage: from the micro-batches of a generation batch to the loss of each micro-step.

micro-batches ──compact──▶ micro-steps ──TRL's loss, forward hooks inside it──▶ its terms ──reduction──▶ loss
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..credit import flow
from ..errors import ConfigurationError, UpstreamError
from ..types import StepTotals, Totals
from .batch import BatchKeys, counting_mask, same_tokens, scaled_for_masked_groups
from .compact.packed import runs_policy
from .compact.updates import CompactUpdates
from .own_loss import ForwardPass, LossOf, OwnLoss
from .record_stage import RecordStage
from .reductions import Computed, Inherited, LossForward, PolicyPass, Reduction, self_check
from .selected import SelectedPlugins
from .token_losses import TokenLosses
from .upstream import acting, contract, reading
from .upstream.reading import Progress, RunFacts


@dataclass
class LossStage:
    """Computes the losses of a run."""

    trainer: Any
    facts: RunFacts
    plugins: SelectedPlugins
    records: RecordStage
    token_losses: TokenLosses
    pass_outside_losses: Inherited
    own_loss: OwnLoss
    reduction: Reduction
    updates: CompactUpdates | None

    def __post_init__(self) -> None:
        # Where the models' forward passes go: to whoever asked for them last, outside of losses to the first.
        self._handlers = [self.pass_outside_losses]
        self._section = self.facts.agreement.section
        self._hooks_act = bool(self.plugins.forward_hooks)
        self._acts = self.reduction.takes_apart or self._hooks_act
        # Compact updates move and scale rows by what TRL's reduction is known to be; a user's loss is compared with it.
        self._compares = self.reduction.takes_apart or (self.updates is not None and not self.own_loss.owners)
        # Without a loss of the user's, which is tried out, a loss that bypasses ours is found only by its absence.
        hooks_need_it = self.plugins.change_advantages and not self.own_loss.owners
        self._must_be_reached = self._acts or self._compares or hooks_need_it
        self._reached = 0  # losses that went through here
        self._unchecked = self._acts or self._compares

    def arrange(self, micro_batches: list[dict[str, Any]], totals: Mapping[int, Totals]) -> list[dict[str, Any]]:
        """The micro-batches of a generation batch as they are trained on, before a user's class sees any of them."""
        progress = reading.progress_of(self.trainer)
        if self.updates is not None:
            micro_batches = self.updates.plan(micro_batches, progress.precision)
        if BatchKeys.batch_number in micro_batches[0]:
            self._deal_totals(micro_batches, progress, totals)
        return micro_batches

    def prepare_inputs(
        self, inherited: Inherited, compute_loss: Inherited, generation_batch: Any, totals: Mapping[int, Totals]
    ) -> Any:
        """The micro-batch to train on; `compute_loss` is the inherited one, to be tried out."""
        with self.records.phases.during("generation"):
            inputs = inherited(generation_batch)
            progress = reading.progress_of(self.trainer)
            if BatchKeys.batch_number in inputs and BatchKeys.totals not in inputs:
                self._deal_totals([inputs], progress, totals)  # of an evaluation, which TRL does not buffer
            if self.own_loss.untried:
                trls_loss = functools.partial(acting.trls_policy_loss, self.trainer)
                with self._section(), acting.restore_after_trial(self.trainer):
                    self.own_loss.try_out(inputs, self._on_trial(compute_loss), self._on_trial(trls_loss))
            if not self.own_loss.per_token:
                with self._section():
                    mask_B_T = counting_mask(inputs).to(progress.precision)
                    inputs["advantages"] = self.own_loss.advantages(inputs["advantages"], mask_B_T)
            return inputs

    def training_step(self, inherited: Inherited, *arguments: Any, **keywords: Any) -> Any:
        tiles = nullcontext() if self.updates is None else acting.small_head_tiles(self.facts.device)
        with tiles, self._not_bypassed():  # also by a class above ours, which need not call our `compute_loss`
            return self.records.time_step(functools.partial(inherited, *arguments, **keywords))

    def compute_loss(self, inherited: Inherited, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        idle = isinstance(inputs, dict) and inputs.get(BatchKeys.idle, False)
        if idle and reading.backward_may_be_left_out(self.trainer):  # it would add zeros to all gradients
            self._reached += 1
            return torch.zeros((), device=self.facts.device, requires_grad=True)
        logged = acting.restore_after_trial(self.trainer) if idle else nullcontext()  # placeholders alone log nothing
        with logged, self._not_bypassed():
            return inherited(model, inputs, *arguments, **keywords)

    @contextmanager
    def _not_bypassed(self) -> Iterator[None]:
        before = self._reached
        yield
        if self._must_be_reached and self._reached == before:
            what = f"compute_loss of {self.facts.trainer_name} (or a patch, as Unsloth's) bypasses TRL's _compute_loss"
            raise UpstreamError(f"{what}, and with it the plugins. Put GRPOExtMixin in front of it, or remove either.")

    def policy_loss(self, inherited: Inherited, model: Any, inputs: Any) -> Any:
        """TRL's `_compute_loss`, with the selected reduction in place of its own."""
        is_trial = len(self._handlers) > 1
        self._reached += not is_trial
        progress = reading.progress_of(self.trainer)
        if self._unchecked and self.own_loss.per_token and progress.training and not is_trial:
            self._check_terms(inherited, inputs, progress)
        if is_trial or not (self._acts or self.records.records_tokens):
            loss = inherited(model, inputs)
            return loss if is_trial else scaled_for_masked_groups(loss, inputs)
        settings = reading.loss_settings_of(self.trainer)
        mask_B_T = counting_mask(inputs).to(progress.precision)
        forward = LossForward(dict(inputs), mask_B_T, torch.is_grad_enabled())
        handler = functools.partial(self._pass_in_loss, forward, _OfPolicy(self.trainer, model, forward.inputs))
        replaced = acting.without_policy_metrics(self.trainer) if self.token_losses.replaces else nullcontext()
        with torch.enable_grad():  # in evaluation too
            with replaced, self._handled_by(handler):
                trl_loss = inherited(model, forward.inputs)  # which the policy's pass inside it completes
            if self._acts:
                forward.policy()  # which must be there
            values, metrics = self.token_losses.values(forward, progress)
            self.records.add_metrics(metrics)
            with_terms = (self.facts, values, self.token_losses.replaces)
            reduced = self.reduction.reduce(Computed(trl_loss, forward, settings, progress, *with_terms))
        if self.reduction.divides_by == "losses" and reduced.weights_B_T is not None:
            self.records.saw_weights(reduced.weights_B_T, forward.inputs["advantages"], mask_B_T)
        if progress.training:
            self.records.saw_loss(forward, reduced)
        return reduced.loss if forward.keep_graph else reduced.loss.detach()

    def forward_pass(self, inherited: Inherited, model: Any, *arguments: Any, **keywords: Any) -> Any:
        """A pass of the policy or the reference: for a loss, for a trial of one, or at generation."""
        if self.updates is not None:
            inherited = functools.partial(self.updates.logps, inherited)
        return self._handlers[-1](inherited, model, *arguments, **keywords)

    @contextmanager
    def _handled_by(self, handler: Inherited) -> Iterator[None]:
        self._handlers.append(handler)
        try:
            yield
        finally:
            self._handlers.pop()

    def _pass_in_loss(
        self, forward: LossForward, of_policy: Any, inherited: Inherited, model: Any, *arguments: Any, **keywords: Any
    ) -> Any:
        """A forward pass inside a loss. TRL reads the advantages after the policy's, so they can still change there."""
        may_train = not forward.passes and of_policy.may_train(model)
        by_place = contract.LOGPS_ARGUMENTS[: len(arguments)]
        if may_train and (self._hooks_act or self.token_losses) and "compute_entropy" not in by_place:
            keywords["compute_entropy"] = True  # which a subclass's loss may not have asked for
        with torch.set_grad_enabled(forward.keep_graph and torch.is_grad_enabled()):
            result = inherited(model, *arguments, **keywords)
        trained = may_train and (result[0].requires_grad or not forward.keep_graph)
        if not trained or not of_policy.scores(arguments, keywords):
            return result
        logps_B_T, entropies_B_T = result[:2]
        changes = self._apply_forward_hooks(forward, logps_B_T, entropies_B_T) if self._hooks_act else []
        forward.passes.append(PolicyPass(logps_B_T, entropies_B_T, changes))
        if self.reduction.takes_apart:
            # In the precision of the log-probabilities, because the slope in the advantages has theirs.
            precision = torch.promote_types(torch.float32, logps_B_T.dtype)
            advantages_B_T = flow.expand_advantages(forward.inputs["advantages"], forward.mask_B_T)
            forward.inputs["advantages"] = advantages_B_T.detach().to(precision, copy=True).requires_grad_()
        return result

    def _apply_forward_hooks(
        self, forward: LossForward, logps_B_T: torch.Tensor, entropies_B_T: torch.Tensor
    ) -> Sequence[Any]:
        inputs = forward.inputs
        progress = reading.progress_of(self.trainer)
        with self._section():
            context = forward.context(logps_B_T, entropies_B_T, progress, self.facts.agreement.gather)
            allowed_signs_B_T = inputs.get(BatchKeys.allowed_signs)
            changed, changes = self.plugins.chain.on_forward(inputs["advantages"], context, allowed_signs_B_T)
            inputs["advantages"] = self.own_loss.advantages(changed, forward.mask_B_T)
        self.records.saw_forward(changes, inputs[BatchKeys.row_id], forward.mask_B_T)
        return changes

    def _check_terms(self, inherited: Inherited, inputs: Any, progress: Progress) -> None:
        settings = reading.loss_settings_of(self.trainer)
        when = (self.facts, settings, progress, reading.slope_at_ratio_one(self.trainer))
        with self._section(), acting.restore_after_trial(self.trainer):
            mask_B_T = counting_mask(inputs).to(progress.precision)
            self_check(self._on_trial(inherited), inputs, mask_B_T, self._compares, *when)
            self.token_losses.check(inputs, progress)
        self._unchecked = False

    def _on_trial(self, loss: Inherited) -> LossOf:
        """A loss that takes a replacement for the policy's forward pass."""

        def of(batch: dict[str, Any], forward_pass: ForwardPass) -> Any:
            of_policy = _OfPolicy(self.trainer, self.trainer.model, batch)

            def handler(inherited: Inherited, model: Any, *arguments: Any, **keywords: Any) -> Any:
                if of_policy.may_train(model) and of_policy.scores(arguments, keywords):
                    return forward_pass()
                return inherited(model, *arguments, **keywords)

            with self._handled_by(handler):
                return loss(self.trainer.model, batch)

        return of

    def _deal_totals(
        self, micro_batches: Sequence[dict[str, Any]], progress: Progress, known: Mapping[int, Totals]
    ) -> None:
        """Give every micro-batch the counts of its generation batch and, for `reduce`, of its optimizer step."""
        numbers = {int(number) for batch in micro_batches for number in batch[BatchKeys.batch_number].unique()}
        if not numbers <= known.keys():
            what = f"_generate_and_score_completions of {self.facts.trainer_name} makes one batch out of several"
            raise ConfigurationError(f"{what}, which a loss aggregation has weighted one by one. Call super() once.")
        (totals,) = (known[number] for number in numbers)
        for micro_batch in micro_batches:
            micro_batch[BatchKeys.totals] = totals
        length = self.facts.accumulation if progress.training else 1
        if self.reduction.by_weights or len(micro_batches) % length:  # or a step reaches beyond this batch
            return
        masks = [counting_mask(micro_batch) for micro_batch in micro_batches]
        counts_M_C = torch.tensor([[mask.sum(), len(mask)] for mask in masks], device=self.facts.device)
        counts_S_C = self.facts.sum_over_ranks(counts_M_C.double().view(-1, length, 2).sum(1)).tolist()
        for number, micro_batch in enumerate(micro_batches):
            tokens, sequences = map(round, counts_S_C[number // length])
            step = StepTotals(tokens=tokens, sequences=sequences, micro_batches=length)
            micro_batch[BatchKeys.totals] = replace(totals, step=step)


class _OfPolicy:
    """Knows the pass of a loss that trains the policy on its batch among others that a user's class may ask for.

    Those are of a teacher, of the adapter's base, or of the policy over other rows or after other prompts.
    """

    def __init__(self, trainer: Any, policy: Any, batch: Mapping[str, Any]) -> None:
        self._own = trainer.model
        self._policy = policy  # as the loss got it
        self._batch = batch
        self._adapter = reading.adapter_in_use(self._own)

    def may_train(self, model: Any) -> bool:
        if not torch.is_grad_enabled() or not (model is self._policy or runs_policy(model, self._own)):
            return False
        return bool(self._adapter == reading.adapter_in_use(self._own))

    def scores(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
        """Whether a pass with these arguments scores the batch's completions after its prompts, padded as they may be.

        What a class makes of a completion's mask is its own affair.
        """
        batch = self._batch
        given = {**dict(zip(contract.LOGPS_ARGUMENTS, arguments, strict=False)), **keywords}
        ids = given["input_ids"].to(batch["completion_ids"].device)
        rows, keep = batch["completion_ids"].shape
        if len(ids) != rows or given["logits_to_keep"] != keep:
            return False
        start = ids.size(1) - keep
        mask = given["attention_mask"][:, :start].to(ids.device)
        counts = batch["completion_mask"]
        seen, own = (entries.get("pixel_values") for entries in (given, batch))
        return (
            same_tokens(ids[:, :start], mask, batch["prompt_ids"], batch["prompt_mask"])
            and same_tokens(ids[:, start:], counts, batch["completion_ids"], counts)
            and (seen is own or (seen is not None and own is not None and torch.equal(seen, own)))
        )
