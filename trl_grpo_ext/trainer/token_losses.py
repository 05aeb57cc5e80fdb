"""The selected token losses in the adapter: what they see at each loss forward, and when one cannot be exact."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..credit import flow
from ..credit.terms import Term
from ..credit.token_losses import carried_values, check_declarations, measured, run_token_loss
from ..errors import ConfigurationError
from ..types import LossTerms, Rollout, TokenLossDeclaration
from .batch import BatchKeys, two_rows_of
from .own_loss import LossTrial
from .reductions import LossForward, PolicyPass
from .upstream.reading import Progress, RunFacts


class TokenLosses:
    """The token losses of a run, by name."""

    def __init__(self, losses: Mapping[str, Any], facts: RunFacts) -> None:
        self._losses = losses
        self._facts = facts
        self._section = facts.agreement.section
        self.replaces = bool(losses_that_replace(losses))
        self._need_reference = any("ref_logps" in TokenLossDeclaration.of(loss).needs for loss in losses.values())

    def __bool__(self) -> bool:
        return bool(self._losses)

    def terms(self) -> list[Term]:
        declared = map(TokenLossDeclaration.of, self._losses.values())
        return [
            Term(mixes_rows=not one.independent, acts_without_advantage=not one.needs_advantage) for one in declared
        ]

    def carry(self, batch: dict[str, Any], rollout: Rollout) -> None:
        """Let the rows take along what the losses want to find again, and what they need that TRL did not compute."""
        if self._need_reference and rollout.ref_logps_B_T is not None:
            batch[_REFERENCE] = rollout.ref_logps_B_T
        for number, loss in enumerate(self._losses.values()):
            with self._section():
                values = carried_values(loss, rollout)
            batch.update({_key(number, name): values_B_T for name, values_B_T in values.items()})

    def values(self, forward: LossForward, progress: Progress) -> tuple[list[torch.Tensor], dict[str, float]]:
        """Each loss's value of every token, `(B, T)`, and what is logged of them."""
        if not self._losses:
            return [], {}
        factor_B = forward.inputs.get(BatchKeys.part_factor)
        # Compact updates multiplied the advantages by it, to make up for another denominator: of TRL's loss alone.
        factor_B_1 = 1.0 if factor_B is None else factor_B.unsqueeze(1)
        values = list[torch.Tensor]()
        seen = dict[str, torch.Tensor]()
        for number, (name, loss) in enumerate(self._losses.items()):
            with self._section():
                terms = self._terms(number, forward, progress)
                value_B_T = run_token_loss(loss, terms)
                seen[f"token_loss/{name}/mean"] = value_B_T.detach()
                for what, measured_B_T in measured(loss, terms).items():
                    seen[f"token_loss/{name}/{what}"] = measured_B_T
            values.append(value_B_T * factor_B_1)
        mask_B_T = forward.mask_B_T
        sums_C = torch.stack([mask_B_T.sum(), *((seen_B_T * mask_B_T).sum() for seen_B_T in seen.values())])
        tokens, *sums = self._facts.sum_over_ranks(sums_C.double()).tolist()
        return values, {name: total / max(tokens, 1.0) for name, total in zip(seen, sums, strict=True)}

    def check(self, inputs: Mapping[str, Any], progress: Progress) -> None:
        """Check what the losses declare on rows of a real micro-batch with made-up numbers."""
        trial = LossTrial(two_rows_of(inputs), all_tokens=True)
        wave_B_T = trial.wave_B_T
        ones_B_T = torch.ones_like(wave_B_T)
        made_up = {**trial.batch, "advantages": wave_B_T, BatchKeys.reward: wave_B_T[:, 0]}
        made_up.pop(BatchKeys.part_factor, None)
        forward = LossForward(made_up, ones_B_T)
        forward.passes.append(PolicyPass(trial.logps_B_T, ones_B_T + 0.1 * wave_B_T))
        for number, loss in enumerate(self._losses.values()):
            terms = self._terms(number, forward, progress)
            declared = TokenLossDeclaration.of(loss)
            with self._section():
                check_declarations(loss, terms, rows_apart=declared.independent, vanishes=declared.needs_advantage)

    def _terms(self, number: int, forward: LossForward, progress: Progress) -> LossTerms:
        inputs = forward.inputs
        policy = forward.policy()
        assert policy.entropies_B_T is not None  # they are asked for
        advantages_B_T = flow.expand_advantages(inputs["advantages"].detach(), forward.mask_B_T)
        factor_B = inputs.get(BatchKeys.part_factor)
        prefix = _key(number, "")
        return LossTerms(
            logps_B_T=policy.logps_B_T,
            old_logps_B_T=inputs.get("old_per_token_logps", policy.logps_B_T.detach()),
            advantages_B_T=advantages_B_T if factor_B is None else advantages_B_T / factor_B.unsqueeze(1),
            mask_B_T=forward.mask_B_T,
            entropies_B_T=policy.entropies_B_T.detach(),
            ref_logps_B_T=inputs.get("ref_per_token_logps", inputs.get(_REFERENCE)),
            sampling_logps_B_T=inputs.get("sampling_per_token_logps"),
            completion_ids_B_T=inputs["completion_ids"],
            rewards_B=inputs[BatchKeys.reward],
            carried_B_T={key.removeprefix(prefix): inputs[key] for key in inputs if key.startswith(prefix)},
            step=progress.step,
            training=progress.training,
        )


_REFERENCE = f"{BatchKeys.carried}_reference"


def _key(number: int, name: str) -> str:
    """The entry of a batch that carries a value of the loss of this number."""
    return f"{BatchKeys.carried}_{number}_{name}"


def losses_that_replace(losses: Mapping[str, Any]) -> list[str]:
    """The token loss that takes the place of TRL's, by name, in a list; empty if there is none, and two are refused."""
    replacing = [name for name, loss in losses.items() if TokenLossDeclaration.of(loss).replaces]
    if len(replacing) > 1:
        raise ConfigurationError(f"The token losses {' and '.join(replacing)} both replace TRL's. Keep one of them.")
    return replacing


def refuse_token_losses(losses: Mapping[str, Any], trainer: Any, owners: Sequence[type]) -> None:
    """Refuse token losses where they cannot act, or would take away in silence what TRL does inside its own loss."""
    if not losses:
        return
    args = trainer.args
    first = next(iter(losses))
    if args.use_liger_kernel:
        raise ConfigurationError(f"The token loss {first!r} does not work with use_liger_kernel. Turn one of them off.")
    if owners:
        what = f"cannot be added to the loss of {owners[0].__qualname__}, whose terms are not known"
        raise ConfigurationError(f"The token loss {first!r} {what}. Remove one of them.")
    is_on = (  # in the order of INSIDE_TRLS
        trainer.importance_sampling_level != "token",
        trainer.top_entropy_quantile < 1.0,
        args.off_policy_mask_threshold is not None,
        args.delta is not None,
        trainer.use_vllm and args.vllm_importance_sampling_correction,
    )
    inside = [name for name, on in zip(TokenLossDeclaration.INSIDE_TRLS, is_on, strict=True) if on]
    for name in losses_that_replace(losses):
        if lost := [setting for setting in inside if setting not in TokenLossDeclaration.of(losses[name]).does_own]:
            what = f"takes the place of TRL's policy loss, which applies {lost[0]}"
            raise ConfigurationError(f"The token loss {name!r} {what}. Set that to its default, or remove the loss.")
