"""A generation batch on its way: what TRL's overrides see of it, and the `Rollout` read from TRL's batch.

Shapers run before TRL has made its batch: they give TRL other weights of rewards, or one more column each.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..credit.rollouts import RolloutFacts, RowTensors, ScoredRows, build_rollout
from ..errors import ConfigurationError, UpstreamError
from ..types import Rollout, Totals
from .batch import counting_mask
from .upstream.acting import pad_rows
from .upstream.reading import Generated, Progress, RunFacts

HookLogps = Mapping[str, torch.Tensor]
"""What hooks need and TRL has not computed for a batch, `(B, T)` by the name of the need or of the teacher."""


@dataclass(frozen=True)
class SampledBatch:
    """A generation batch of this rank, before the rollout hooks."""

    batch: dict[str, Any]  # TRL's, with `BatchKeys.row_id`
    scored: ScoredRows
    logps: HookLogps
    rollout: Rollout


@dataclass
class Sampling:
    """A generation batch while TRL samples and scores it: each override adds what it sees."""

    # shows TRL the columns that shapers add, and the weights of all; None for those of the run
    show_columns: Callable[[Sequence[str], torch.Tensor | None], None] = lambda names, weights_K: None
    row_numbers: Sequence[int] | None = None  # of this rank's completions in the training data, if they are known
    generated: Generated = field(default_factory=Generated)  # what `_generate` returned
    # Log-probabilities of the passes between that and the rewards: the old policy's, then the reference's.
    passes: list[torch.Tensor] = field(default_factory=list)
    weights_K: Any = None  # of the rewards, when they were scored
    scored: list[ScoredRows] = field(default_factory=list)  # what `_calculate_rewards` saw; the last one counts
    shaped: list[tuple[dict[str, Any], Rollout]] = field(default_factory=list)  # the batch as shapers saw it, and after


def read_rollout(
    facts: RunFacts,
    progress: Progress,
    batch: Mapping[str, Any],
    scored: ScoredRows,
    logps: HookLogps,
    reward_weights_K: torch.Tensor,
    row_numbers: Sequence[int] | None,
) -> Rollout:
    """The context of one generation batch, from TRL's batch and, in `logps`, what hooks need beyond it."""
    rows = zip(batch["completion_ids"].tolist(), scored.completion_ids, strict=False)
    others = [number for number, (row, ids) in enumerate(rows) if row[: len(ids)] != list(ids)]
    if others or len(batch["completion_ids"]) != len(scored.completion_ids):  # rewards and groups would be wrong
        what = f"returned other rows than were scored, from row {min(others, default=0)} on"
        owner = f"_generate_and_score_completions of a base class of {facts.trainer_name}"
        raise ConfigurationError(f"{owner} {what}. Set advantages to 0, or derive it from GRPOExtTrainer.")
    sequences = scored.rewards_N_K.size(0)
    group_size = facts.group_size(progress.training)
    tensors = RowTensors(
        prompt_ids_B_P=batch["prompt_ids"],
        prompt_mask_B_P=batch["prompt_mask"],
        completion_ids_B_T=batch["completion_ids"],
        mask_B_T=counting_mask(batch).to(progress.precision),
        tool_mask_B_T=batch.get("tool_mask"),
        logps_B_T={**logps, **{need: batch[key] for need, key in _COMPUTED.items() if key in batch}},
    )
    totals = Totals(
        tokens=int(batch["num_items_in_batch"]),
        sequences=sequences,
        prompts=sequences // group_size,
        max_completion_length=progress.max_completion_length,
        processes=facts.ranks,
        micro_batches=progress.steps_per_generation,
        optimizer_steps=progress.steps_per_generation / facts.accumulation if progress.training else 1.0,
    )
    made_with = RolloutFacts(
        tokenizer=facts.tokenizer,
        end_ids=facts.end_ids,
        reward_names=facts.reward_names,
        reward_weights_K=reward_weights_K,
        group_size=group_size,
        rank=facts.rank,
        async_tools=facts.async_tools,
    )
    when: dict[str, Any] = {"step": progress.step, "training": progress.training}
    return build_rollout(scored, tensors, made_with, totals, facts.agreement.gather, row_numbers=row_numbers, **when)


_COMPUTED = {
    "old_logps": "old_per_token_logps",
    "ref_logps": "ref_per_token_logps",
    "sampling_logps": "sampling_per_token_logps",
}
"""What TRL may have computed itself: hooks' names and those in its batch."""


def batch_before_trls(facts: RunFacts, sampling: Sampling, has_reference: bool) -> dict[str, Any]:
    """The batch that TRL will make of what was generated, as far as a `Rollout` needs it."""
    generated = sampling.generated
    if not generated.completion_ids:
        what = f"A base class of {facts.trainer_name} calls _calculate_rewards out of _generate_and_score_completions"
        raise UpstreamError(f"{what}, or not after _generate. Hooks that shape rewards need both.")
    padded = functools.partial(pad_rows, facts)
    made: dict[str, Any] = {
        "prompt_ids": padded(generated.prompt_ids, facts.pad_id, "left"),
        "prompt_mask": padded([[1] * len(ids) for ids in generated.prompt_ids], 0, "left"),
        "completion_ids": padded(generated.completion_ids, facts.pad_id),
        "completion_mask": padded([[1] * len(ids) for ids in generated.completion_ids], 0),
    }
    if generated.tool_masks is not None:
        made["tool_mask"] = padded(generated.tool_masks, 1)
    if generated.sampling_logps is not None:
        numbers = [[torch.nan if logp is None else logp for logp in row] for row in generated.sampling_logps]
        made["sampling_per_token_logps"] = padded(numbers, 0.0)
    if facts.masks_truncated:
        whole_B = torch.tensor([ids[-1] in facts.end_ids for ids in generated.completion_ids], device=facts.device)
        for key in {"completion_mask", "tool_mask"} & made.keys():
            made[key] = made[key] * whole_B.unsqueeze(1).int()
    made["num_items_in_batch"] = facts.gather(counting_mask(made).sum()).sum()
    if len(sampling.passes) > has_reference:
        made["old_per_token_logps"] = sampling.passes[0]
    if has_reference and sampling.passes:
        made["ref_per_token_logps"] = sampling.passes[-1]
    return made


def rollout_of_shapers(facts: RunFacts, sampling: Sampling, batch: dict[str, Any]) -> Rollout:
    """Check that TRL made the batch that the shapers saw, and return the rollout after the shapers."""
    before, rollout = sampling.shaped[-1]
    for key, seen in before.items():
        made = batch.get(key)
        if made is None or not torch.equal(seen.nan_to_num(), made.nan_to_num()):
            what = f"Hooks that shape rewards saw a different {key!r} than is in the batch of {facts.trainer_name}"
            raise UpstreamError(f"{what}. A base class changes the batch after the rewards, or this TRL is untested.")
    return rollout
