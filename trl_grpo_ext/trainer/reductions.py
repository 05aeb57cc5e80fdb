"""From TRL's scalar loss to the loss that is trained: taken apart into terms, and reduced again by an aggregation."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch

from ..credit import flow, terms
from ..credit.chain import Change
from ..credit.flow import plugin_label
from ..credit.terms import TakenApart, Term
from ..errors import ConfigurationError, SelfCheckError, UpstreamError
from ..types import AggregationDeclaration, Forward, HookDeclaration, implements
from .batch import BatchKeys, scaled_for_masked_groups
from .own_loss import LossOf, LossTrial
from .selected import SelectedPlugins
from .upstream import contract, reading
from .upstream.reading import LossSettings, Progress, RunFacts

DividesBy = Literal["nothing", "rows", "tokens", "losses"]
"""What of a micro-batch makes the denominator: nothing, its rows, its tokens, or the losses, which it sees."""

Inherited = Callable[..., Any]  # the method that an override replaces: TRL's, or that of a user's class in between


@dataclass(frozen=True)
class PolicyPass:
    """What the policy's forward pass inside a loss returned, and what the forward hooks changed after it."""

    logps_B_T: torch.Tensor
    entropies_B_T: torch.Tensor | None
    changes: Sequence[Change] = ()


@dataclass(frozen=True)
class LossForward:
    """One call of `_compute_loss`: its inputs, and the policy's forward passes inside it."""

    inputs: dict[str, Any]
    mask_B_T: torch.Tensor
    keep_graph: bool = True
    passes: list[PolicyPass] = field(default_factory=list)

    def policy(self) -> PolicyPass:
        """The pass that is trained; raises if there was none."""
        if not self.passes:
            what = "_compute_loss of a base class asks _get_per_token_logps_and_entropies for no pass of the policy"
            raise UpstreamError(f"{what} with a gradient that scores the batch's completions after its prompts.")
        return self.passes[-1]

    def context(
        self,
        logps_B_T: torch.Tensor,
        entropies_B_T: torch.Tensor,
        progress: Progress,
        gather: Callable[[torch.Tensor], torch.Tensor],
    ) -> Forward:
        inputs = self.inputs
        return Forward(
            logps_B_T=logps_B_T.detach(),
            entropies_B_T=entropies_B_T.detach(),
            old_logps_B_T=inputs.get("old_per_token_logps", logps_B_T.detach()),
            mask_B_T=self.mask_B_T,
            ref_logps_B_T=inputs.get("ref_per_token_logps"),
            completion_ids_B_T=inputs["completion_ids"],
            rewards_B=inputs[BatchKeys.reward],
            raw_rewards_B=inputs[BatchKeys.raw_reward],
            group_baselines_B=inputs[BatchKeys.baseline],
            zero_variance_B=inputs[BatchKeys.zero_variance],
            step=progress.step,
            training=progress.training,
            gather=gather,
        )


@dataclass(frozen=True)
class Reduced:
    """The loss of a micro-step, as TRL scales it: averaged over ranks, summed over a step's micro-steps."""

    loss: torch.Tensor
    weights_B_T: torch.Tensor | None  # of each token in the optimizer step's loss over all ranks; None if unknown


@dataclass(frozen=True)
class Computed:
    """What TRL's `_compute_loss` made of a micro-step, and the values of the token losses beside it."""

    trl_loss: torch.Tensor
    forward: LossForward
    settings: LossSettings
    progress: Progress
    facts: RunFacts
    further: Sequence[torch.Tensor] = ()  # the values of the token losses, `(B, T)`
    replaced: bool = False  # by one of them
    measured_B_T: torch.Tensor | None = None  # TRL's weights, if they were measured

    @property
    def trl_weights_B_T(self) -> torch.Tensor:
        if self.measured_B_T is not None:
            return self.measured_B_T
        tokens = self.forward.inputs["num_items_in_batch"]
        loss_type = self.settings.loss_type
        return reading.reduction_weights(loss_type, self.forward.mask_B_T, tokens, self.facts, self.progress)

    def pieces(self) -> TakenApart:
        settings = self.settings
        return terms.take_apart(
            self.trl_loss,
            self.forward.inputs["advantages"],
            self.trl_weights_B_T,
            self.forward.mask_B_T,
            self._kl_penalty() if settings.beta != 0.0 else None,
            settings.entropy_bonus or settings.auxiliary_loss,
            self.further,
            self.replaced,
        )

    def _kl_penalty(self) -> torch.Tensor:
        """TRL's KL penalty of each token: it does not depend on the advantages, but follows the same weights."""
        inputs = self.forward.inputs
        logps_B_T = self.forward.policy().logps_B_T
        ratio_B_T = None
        if self.settings.bias_correction_kl:
            old_logps_B_T = inputs.get("old_per_token_logps", logps_B_T.detach())
            level = self.settings.importance_sampling_level
            ratio_B_T = flow.importance_ratio(logps_B_T, old_logps_B_T, self.forward.mask_B_T, level)
        return self.settings.beta * flow.kl_k3(logps_B_T, inputs["ref_per_token_logps"], ratio_B_T)


class TRLsReduction:
    """No aggregation: TRL's own weights, and its scalar untouched, but for token losses and `resample`.

    Where it counts as rows the groups that `resample` has masked, its terms are scaled as if they were none. The
    entropy bonus and the auxiliary loss, which do not count rows, stay as they are.
    """

    by_weights = False

    def __init__(self, settings: LossSettings, *, knows_weights: bool, has_token_losses: bool, masks: bool) -> None:
        self._knows_weights = knows_weights and settings.loss_type in contract.LOSS_TYPES
        of_tokens: dict[str, DividesBy] = {"token_mean": "nothing", "token_mean_local": "tokens"}
        self.divides_by = of_tokens.get(flow.TRL_REDUCTIONS.get(settings.loss_type, ""), "rows")
        has_rest = settings.entropy_bonus or settings.auxiliary_loss
        keeps_rest = masks and has_rest and self.divides_by == "rows"
        self.takes_apart = has_token_losses or keeps_rest
        if keeps_rest and not self._knows_weights:
            what = "resample cannot find the entropy bonus or auxiliary loss in a _compute_loss that is not TRL's"
            raise ConfigurationError(f"{what}. Set loss_type: dapo, which counts no rows, or remove one of them.")

    def reduce(self, computed: Computed) -> Reduced:
        scaled = functools.partial(scaled_for_masked_groups, batch=computed.forward.inputs)
        if not self._knows_weights:
            return Reduced(scaled(computed.trl_loss), None)
        weights_B_T = computed.trl_weights_B_T
        loss = scaled(computed.trl_loss)
        if self.takes_apart:
            pieces = computed.pieces()
            loss = scaled((weights_B_T * pieces.loss_B_T).sum()) + pieces.rest
        return Reduced(loss, scaled(weights_B_T) / computed.facts.ranks)


@dataclass
class Weighted:
    """An aggregation by weights, which its generation batch carries."""

    aggregation: Any
    takes_apart = True
    by_weights = True
    divides_by: ClassVar[DividesBy] = "nothing"

    def reduce(self, computed: Computed) -> Reduced:
        pieces = computed.pieces()
        # The weights' sum spans the generation batch. Ranks are averaged by DDP, ZeRO and FSDP; and each optimizer
        # step takes `accumulation` of the batch's `steps_per_generation` micro-batches. Weights that are those of a
        # step already stay as they are: the last step of an epoch may be short, and a sum is not to grow by that.
        per_step = AggregationDeclaration.of(self.aggregation).per_step
        share = 1.0 if per_step else computed.progress.steps_per_generation / computed.progress.accumulation
        weights_B_T: torch.Tensor = computed.forward.inputs[BatchKeys.weights]
        loss = (weights_B_T * pieces.loss_B_T).sum() * (computed.facts.ranks * share) + pieces.rest
        return Reduced(loss, weights_B_T * share)


@dataclass
class Reducing:
    """An aggregation that reduces the losses of each micro-batch."""

    aggregation: Any
    takes_apart = True
    by_weights = False
    divides_by: ClassVar[DividesBy] = "losses"

    def reduce(self, computed: Computed) -> Reduced:
        pieces = computed.pieces()
        mask_B_T = computed.forward.mask_B_T
        accumulation = computed.progress.accumulation
        loss_B_T = pieces.loss_B_T
        if not loss_B_T.requires_grad:  # in evaluation, where the loss is linear in the advantages
            loss_B_T = loss_B_T.detach().requires_grad_()
        with computed.facts.agreement.section():
            totals = computed.forward.inputs[BatchKeys.totals]
            reduced = flow.reduced_loss(self.aggregation, loss_B_T, mask_B_T, totals)
            slope_B_T = flow.reduced_weights(self.aggregation, reduced, loss_B_T, mask_B_T)
        return Reduced(reduced / accumulation + pieces.rest, slope_B_T / (accumulation * computed.facts.ranks))


Reduction = TRLsReduction | Weighted | Reducing


def reduction_of(
    plugins: SelectedPlugins, facts: RunFacts, settings: LossSettings, *, knows_weights: bool
) -> Reduction:
    """The reduction of a run: the selected aggregation's, or TRL's own, whose weights may be unknown."""
    aggregation = plugins.aggregation
    if plugins.reduces or plugins.compact:
        contract.check_loss_type(settings.loss_type)
    if aggregation is None:
        has = {"has_token_losses": bool(plugins.token_losses), "masks": plugins.resample is not None}
        return TRLsReduction(settings, knows_weights=knows_weights, **has)
    if implements(aggregation, "weights"):
        return Weighted(aggregation)
    per_step = "step_totals" in AggregationDeclaration.of(aggregation).needs
    if per_step and facts.steps_per_generation % facts.accumulation:
        what = f"steps_per_generation={facts.steps_per_generation} is no multiple of the accumulation"
        label = f"The loss aggregation {plugin_label(aggregation)!r}"
        raise ConfigurationError(f"{label} needs the counts of each optimizer step, but {what}.")
    return Reducing(aggregation)


def terms_of(settings: LossSettings, forward_hooks: Sequence[Any], further: Sequence[Term]) -> list[Term]:
    """The terms of a run's loss, with what each of them allows. Forward hooks act in the policy's term."""
    alone = all(HookDeclaration.of(hook).independent for hook in forward_hooks)
    mixes = settings.top_entropy_quantile < 1.0 or not alone  # the quantile is of a micro-batch
    acts = bool(forward_hooks)  # which may give rows without signal one
    policy = Term(mixes_rows=mixes, acts_without_advantage=acts, unscaled=acts)
    are_there = (settings.beta != 0.0, settings.entropy_bonus, settings.auxiliary_loss)
    return [policy, *itertools.compress((terms.KL, terms.ENTROPY, terms.AUXILIARY), are_there), *further]


RELATIVE_TOLERANCE = 1e-3  # far above what rounding does to these sums, far below what a foreign term does


def self_check(
    loss_of: LossOf,
    inputs: dict[str, Any],
    mask_B_T: torch.Tensor,
    compares: bool,
    facts: RunFacts,
    settings: LossSettings,
    progress: Progress,
    slope_at_ratio_one: float,
) -> None:
    """Do our terms add up to TRL's loss, on shapes and masks of the real first batch and invented numbers?

    Compared are the weight of each token, by the slope in the advantages at ratio 1, then loss and gradient off it.
    """
    if not bool((mask_B_T > 0).any()):  # then all are made to count
        mask_B_T = torch.ones_like(mask_B_T)
    all_tokens = bool((mask_B_T > 0).all())
    without = replace(settings, entropy_bonus=False, auxiliary_loss=False)
    label = f"The loss of {facts.trainer_name} (loss_type={settings.loss_type!r})"
    remove = (
        "Turn compact_updates off, and remove the plugins or move your own term from _compute_loss to compute_loss."
    )

    def computed_in(trial: LossTrial, advantages_B_T: torch.Tensor) -> Computed:
        leaf_B_T = flow.expand_advantages(advantages_B_T, mask_B_T).clone().requires_grad_()
        loss = trial.loss(loss_of, advantages_B_T, leaf_B_T)
        forward = LossForward({**trial.batch, "advantages": leaf_B_T}, mask_B_T)
        forward.passes.append(PolicyPass(trial.logps_B_T, torch.ones_like(trial.logps_B_T)))
        return Computed(loss, forward, without, progress, facts)

    def compare(what: str, in_trl: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        largest = float((expected if scale is None else scale).detach().abs().max())
        gap = (in_trl.detach().double() - expected.detach().double()).abs()
        if not float(gap.max()) <= RELATIVE_TOLERANCE * largest:  # `not <=`, so that NaN is caught
            worst = int(gap.nan_to_num(nan=torch.inf).argmax())
            values = f"{in_trl.flatten()[worst].item():.6g}, the pieces' is {expected.flatten()[worst]:.6g}"
            raise SelfCheckError(f"{label} has other pieces than are known: its {what} is {values}. {remove}")

    with torch.enable_grad():
        at_one = LossTrial(inputs, at_ratio_one=True, all_tokens=all_tokens)
        near_one = LossTrial(inputs, all_tokens=all_tokens)
        computed_at_one = computed_in(at_one, torch.ones_like(at_one.logps_B_T))
        computed = computed_in(near_one, near_one.wave_B_T)
        loss = computed.trl_loss
        slope_B_T = None
        if computed_at_one.trl_loss.requires_grad:
            leaf_B_T = computed_at_one.forward.inputs["advantages"]
            (slope_B_T,) = torch.autograd.grad(computed_at_one.trl_loss, leaf_B_T, allow_unused=True)
        if slope_B_T is None:
            raise SelfCheckError(f"{label} does not depend on the advantages, or reads them too early. {remove}")
        if not compares:
            return
        weights_B_T = computed_at_one.trl_weights_B_T
        compare("weight of a token", slope_B_T.abs() / slope_at_ratio_one, weights_B_T)
        terms_B_T = weights_B_T * computed.pieces().loss_B_T
        (gradient_B_T,) = torch.autograd.grad(loss, near_one.logps_B_T, retain_graph=True)
        (gradient_of_terms_B_T,) = torch.autograd.grad(terms_B_T.sum(), near_one.logps_B_T)
        compare("gradient", gradient_B_T, gradient_of_terms_B_T)
        compare("loss", loss, terms_B_T.sum(), scale=terms_B_T.abs().sum())
