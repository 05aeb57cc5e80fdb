"""Everything a plugin author meets: the two contexts, the totals, and the three protocols, on one page.

Dimensions: `B` completions on this rank, `N` completions of the generation batch on all ranks, `G` completions of one
prompt (a group), `Q` prompts, `K` reward functions, `P` prompt tokens, `T` completion tokens (padded on the right).

All tensors are detached, live on the training device, and must not be written to; a plugin returns new ones.
Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

CONTRACT_VERSION = 1
"""Raised when a field of `Rollout`, `Forward` or `Totals` changes its meaning; adding a field does not raise it."""


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Counts over one optimizer step: its part of the generation batch, on all ranks and micro-batches.

    Attributes:
        tokens: Completion tokens that count in the loss.
        sequences: Completions; those whose mask is empty count too.
        micro_batches: Loss forwards of one rank in this step.
    """

    tokens: int
    sequences: int
    micro_batches: int = 1


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Counts over one generation batch on all ranks: what an aggregation may divide by, however the batch is cut.

    Attributes:
        tokens: Completion tokens that count in the loss (on the loss mask), over all ranks.
        sequences: Completions over all ranks, `N`. Completions whose mask is empty count here too, as in TRL.
        prompts: Groups over all ranks, `Q = N / G`.
        max_completion_length: The generation limit, in tokens.
        processes: Number of ranks.
        micro_batches: Loss forwards that one rank cuts this generation batch into.
        optimizer_steps: Optimizer steps that one pass over this generation batch makes,
            `steps_per_generation / gradient_accumulation_steps`. A half where a step takes two generation batches.
        step: Counts of the optimizer step at hand, for `reduce`. None for `weights`, which runs before TRL shuffles the
            batch and deals its rows to the steps.
    """

    tokens: int
    sequences: int
    prompts: int
    max_completion_length: int
    processes: int = 1
    micro_batches: int = 1
    optimizer_steps: float = 1.0
    step: StepTotals | None = None


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One generation batch as this rank sees it: the context of `on_rollout` and of `weights`.

    Attributes:
        prompts: The `B` prompts as the dataset gives them (strings or lists of messages).
        completions: The `B` completions as reward functions get them (strings or lists of messages).
        columns: The dataset's other columns, each a list of `B` values.
        completion_ids_B_T: Completion tokens, padded on the right.
        mask_B_T: Loss mask as a float tensor, 1.0 where a token counts (completion, not written by a tool, not cut
            away by `mask_truncated_completions`) and 0.0 elsewhere.
        rewards_B_K: Each function's reward; NaN where the function returned None.
        reward_names: The `K` names.
        reward_weights_K: The `K` weights.
        rewards_B: Weighted sum over the functions that gave a value; NaN where none did.
        group_ids_B: Which group a row belongs to; the same number on every rank for the same group.
        num_generations: `G`.
        totals: Counts over all ranks.
        old_logps_B_T: Log-probabilities under the policy that generated, where TRL has computed them.
        ref_logps_B_T: Log-probabilities under the reference policy, where there is one.
        sampling_logps_B_T: Log-probabilities that the sampler (vLLM, a rollout function) reported.
        advantages_B_T: For an aggregation, the advantages after the rollout stage of the hooks, zero off the mask. None
            for a hook, which is handed them as its argument.
        step: Optimizer steps done so far.
        training: False in evaluation.
        tokenizer: The tokenizer of the policy.
        gather: Concatenates a tensor `(B,)` or `(B, T)` over all ranks to `(N,)` or `(N, T')`, in rank order; `T'` is
            the largest `T` of all ranks and what is added is zero. Every rank must call it equally often: the run
            stops with an error, and does not hang, where they don't.
        local_rows: Where this rank's rows stand in a gathered tensor.
    """

    prompts: Sequence[Any]
    completions: Sequence[Any]
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    completion_ids_B_T: torch.Tensor
    mask_B_T: torch.Tensor
    rewards_B_K: torch.Tensor
    reward_names: Sequence[str]
    reward_weights_K: torch.Tensor
    rewards_B: torch.Tensor
    group_ids_B: torch.Tensor
    num_generations: int
    totals: Totals
    old_logps_B_T: torch.Tensor | None = None
    ref_logps_B_T: torch.Tensor | None = None
    sampling_logps_B_T: torch.Tensor | None = None
    advantages_B_T: torch.Tensor | None = None
    step: int = 0
    training: bool = True
    tokenizer: Any = None
    gather: Callable[[torch.Tensor], torch.Tensor] = _identity
    local_rows: slice = field(default_factory=lambda: slice(None))

    @property
    def lengths_B(self) -> torch.Tensor:
        """Number of tokens that count, per completion, `(B,)`, as a float tensor."""
        return self.mask_B_T.sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class Forward:
    """One micro-batch at its loss forward: the context of `on_forward`. All tensors are `(B, T)` and detached.

    Attributes:
        logps_B_T: Log-probabilities under the policy being trained.
        entropies_B_T: Entropy of the policy's next-token distribution, in nats.
        old_logps_B_T: Log-probabilities under the policy that generated; `logps_B_T` itself when TRL has none, which
            means that the two policies are the same.
        ref_logps_B_T: Log-probabilities under the reference policy, where there is one.
        mask_B_T: Loss mask as a float tensor.
        step: Optimizer steps done so far.
        training: False in evaluation.
    """

    logps_B_T: torch.Tensor
    entropies_B_T: torch.Tensor
    old_logps_B_T: torch.Tensor
    mask_B_T: torch.Tensor
    ref_logps_B_T: torch.Tensor | None = None
    step: int = 0
    training: bool = True


@runtime_checkable
class Reward(Protocol):
    """How good is this completion? Exactly TRL's contract, so a reward also works in plain TRL.

    Called once per generation batch with keyword arguments only: `prompts`, `completions`, `completion_ids` and every
    other dataset column, plus TRL's `trainer_state`, `log_extra` and `log_metric`; take the rest as `**kwargs`.
    Returns one number per completion, or None where this reward has nothing to say.
    """

    def __call__(self, **columns: Any) -> Sequence[float | None]:
        """Return `B` rewards."""
        ...


class AdvantageHook(Protocol):
    """Which tokens deserve the credit? An object with one or both of these methods, run in the order selected.

    `on_rollout` runs once per generation batch, `on_forward` at each loss forward, after all `on_rollout`.
    Both take and return advantages `(B, T)`; values off the mask are ignored.
    """

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Return the new advantages `(B, T)`."""
        ...

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Return the new advantages `(B, T)`."""
        ...


class LossAggregation(Protocol):
    """How much does each token's loss count? An object with exactly one of these two methods.

    `weights` is the common form. It runs once per generation batch and returns non-negative weights, zero off the
    mask. The batch's loss is `Σ w·l` over all ranks and micro-batches, so it does not depend on how the batch is cut.

    `reduce` is for what needs the losses themselves. It runs at each loss forward on one micro-batch and returns a
    scalar; the trainer takes the mean over the step's micro-batches and ranks. So it depends on how the batch is cut,
    unless it divides by `totals.step`, as `token_mean_step` does. An object with `needs_step_totals = True` is refused
    at construction in runs whose optimizer steps don't lie within one generation batch, where these don't exist.
    """

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """Return weights `(B, T)`."""
        ...

    def reduce(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Totals) -> torch.Tensor:
        """Return a scalar that keeps the graph of `loss_B_T`."""
        ...


def implements(plugin: object, method: str) -> bool:
    """Whether a plugin really has a method: a stub inherited from one of the protocols above does not count."""
    try:
        found = getattr(plugin, method, None)
    except Exception:  # a property that raises is no method
        return False
    return callable(found) and getattr(found, "__module__", None) != __name__
