"""A generation batch on its way: what TRL's overrides see of it, and the `Rollout` read from TRL's batch.

TRL shuffles a generation batch before it is trained on. What must stay with a row travels in the batch itself, under
`BatchKeys`.

TRL makes advantages from what its `_calculate_rewards` returns, inside the method that also makes the batch. So shapers
run there, and each gives TRL one more column of rewards, of weight 1, on which TRL's own estimator works. At that point
the batch does not exist yet. `batch_before_trls` puts it together, and `rollout_of_shapers` compares it with TRL's.
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
from .facts import Progress, RunFacts
from .upstream.acting import pad_rows
from .upstream.reading import Generated

HookLogps = Mapping[str, torch.Tensor]
"""Log-probabilities and entropies that hooks need and TRL has not computed for one generation batch, `(B, T)`.

They stand under the name of the need or of the teacher."""


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

    generated: Generated = field(default_factory=Generated)  # what `_generate` returned
    # Log-probabilities of the passes before the rewards: the old policy's, then the reference's.
    passes: list[torch.Tensor] = field(default_factory=list)
    scored: list[ScoredRows] = field(default_factory=list)  # what `_calculate_rewards` saw; the last one counts
    shaped: list[tuple[dict[str, Any], Rollout]] = field(default_factory=list)  # the batch as shapers saw it, and after
    row_numbers: Sequence[int] | None = None  # of this rank's completions in the training data, if they are known
    show_columns: Callable[[Sequence[str]], None] = lambda names: None  # shows TRL the columns that shapers add

    def saw_generated(self, returned: Sequence[Any]) -> None:
        """TRL has generated; the passes before that belong to nothing."""
        self.generated = Generated.of(returned)
        self.passes = []

    def saw_pass(self, logps_B_T: torch.Tensor) -> None:
        """TRL ran a model, over the batch if there is one that is not known yet."""
        if self.generated.completion_ids and not self.scored:
            self.passes.append(logps_B_T)

    def saw_rewards(self, scored: ScoredRows) -> None:
        """TRL has called the reward functions."""
        self.scored.append(scored)

    def saw_shaped(self, batch: dict[str, Any], rollout: Rollout, scored: ScoredRows) -> None:
        """The shapers have seen `batch` and made `rollout` of it."""
        self.shaped.append((batch, rollout))
        self.scored.append(scored)

    @property
    def has_images(self) -> bool:
        """Whether the prompts have images."""
        row = self.scored[-1].rows[0]
        return self.generated.images is not None or any(row.get(key) for key in ("image", "images"))


def read_rollout(
    facts: RunFacts,
    progress: Progress,
    batch: Mapping[str, Any],
    scored: ScoredRows,
    logps: HookLogps,
    reward_weights_K: torch.Tensor,
    row_numbers: Sequence[int] | None = None,
) -> Rollout:
    """The context of one generation batch, from TRL's batch and, in `logps`, what hooks need beyond it."""
    _check_rows(facts, batch, scored)
    sequences, group_size = scored.rewards_N_K.size(0), facts.group_size(progress.training)
    keys = {
        "old_logps": "old_per_token_logps",
        "ref_logps": "ref_per_token_logps",
        "sampling_logps": "sampling_per_token_logps",
    }
    tensors = RowTensors(
        prompt_ids_B_P=batch["prompt_ids"],
        prompt_mask_B_P=batch["prompt_mask"],
        completion_ids_B_T=batch["completion_ids"],
        mask_B_T=counting_mask(batch).to(progress.precision),
        tool_mask_B_T=batch.get("tool_mask"),
        logps_B_T={**logps, **{need: batch[key] for need, key in keys.items() if key in batch}},
    )
    totals = Totals(
        tokens=int(batch["num_items_in_batch"]),
        sequences=sequences,
        prompts=sequences // group_size,
        max_completion_length=facts.max_completion_length,
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
    return build_rollout(
        scored,
        tensors,
        made_with,
        totals,
        facts.agreement.gather,
        row_numbers=row_numbers,
        step=progress.step,
        training=progress.training,
    )


def _check_rows(facts: RunFacts, batch: Mapping[str, Any], scored: ScoredRows) -> None:
    """Refuse a batch whose rows are not those that were scored: rewards and groups would be wrong."""
    rows = batch["completion_ids"].tolist()
    same = [row[: len(ids)] == list(ids) for row, ids in zip(rows, scored.completion_ids, strict=False)]
    if len(rows) == len(scored.completion_ids) and all(same):
        return
    what = f"row {same.index(False)} is another" if False in same else f"{len(rows)} of {len(scored.completion_ids)}"
    raise ConfigurationError(
        f"_generate_and_score_completions of a base class of {facts.trainer} returned other rows than were scored "
        f"({what}). Let it keep all rows in order and set unwanted advantages to zero, or derive that class from "
        "GRPOExtTrainer, so that it runs after the hooks."
    )


_COMPARED = (
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "num_items_in_batch",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
)
"""Entries of TRL's batch that a `Rollout` is made of; ours must equal them."""


def batch_before_trls(facts: RunFacts, sampling: Sampling, has_reference: bool) -> dict[str, Any]:
    """The batch that TRL will make of what was generated, as far as a `Rollout` needs it."""
    generated = sampling.generated
    if not generated.completion_ids:
        raise UpstreamError(
            f"A base class of {facts.trainer} calls _calculate_rewards outside of _generate_and_score_completions, or "
            "does not generate with _generate. Hooks that shape rewards need to see both."
        )

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
    counting_B_T = made["completion_mask"] * made.get("tool_mask", 1)
    made["num_items_in_batch"] = facts.gather(counting_B_T.sum()).sum()
    if len(sampling.passes) > has_reference:
        made["old_per_token_logps"] = sampling.passes[0]
    if has_reference and sampling.passes:
        made["ref_per_token_logps"] = sampling.passes[-1]
    return made


def refuse_images(has_images: bool, missing: Sequence[str]) -> None:
    """Refuse log-probabilities, `missing` in TRL's batch, that need a pass with images."""
    if missing and has_images:
        raise ConfigurationError(
            f"A hook that shapes rewards needs {' and '.join(missing)} of a batch with images, which TRL computes "
            "where num_iterations is above 1 (old policy) or beta above 0 (reference). Set these, or remove the hook."
        )


def rollout_of_shapers(facts: RunFacts, sampling: Sampling, batch: dict[str, Any]) -> Rollout:
    """Check that TRL made the batch that the shapers saw, and return the rollout after the shapers."""
    before, rollout = sampling.shaped[-1]
    for key in _COMPARED:
        seen, made = before.get(key), batch.get(key)
        if seen is not made and (seen is None or made is None or not _same(seen, made)):
            raise UpstreamError(
                f"Hooks that shape rewards saw a different {key!r} than is in the batch that {facts.trainer} "
                f"made. A base class changes the batch after the rewards, or this TRL is untested."
            )
    return rollout


def _same(seen: torch.Tensor, made: torch.Tensor) -> bool:
    return seen.shape == made.shape and bool(((seen == made) | ((seen != seen) & (made != made))).all())
