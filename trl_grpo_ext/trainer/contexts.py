"""Make the `Rollout`, which hooks and aggregations see.

TRL shuffles a generation batch before it is trained on. What must stay with a row travels in the batch itself, under
`BatchKeys`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..credit.alignment import token_offsets
from ..credit.groups import group_mean, weighted_rewards
from ..credit.turns import place_spans, read_turns, scores_turns, turn_values
from ..errors import ConfigurationError
from ..types import NEEDS, Rollout, Span, Totals, Turn, TurnSpan, turn_numbers
from .batch import counting_mask
from .facts import Progress, RunFacts
from .logps import Scores
from .upstream import parsing_of


@dataclass
class ScoredBatch:
    """One generation batch as `_calculate_rewards` saw it; rewards are those of all ranks."""

    rows: Sequence[dict[str, Any]]
    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    rewards_N_K: torch.Tensor
    spans: Mapping[str, Sequence[Sequence[Span | TurnSpan] | None]] = field(default_factory=dict)
    outcomes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    tool_masks: Sequence[Sequence[int]] | None = None
    by_turns: frozenset[str] = frozenset()  # functions that gave values by turn on any rank, once agreed

    def agreed(self, facts: RunFacts) -> ScoredBatch:
        """Make all ranks agree on which functions returned spans; a function may return none on this rank."""
        names = facts.reward_names
        of_turns = [any(map(scores_turns, self.spans.get(name, ()))) for name in names]
        found_1_2K = torch.tensor([[*(name in self.spans for name in names), *of_turns]], device=facts.device)
        with_spans_K, by_turns_K = facts.gather(found_1_2K.int()).any(dim=0).view(2, -1).tolist()
        first = facts.rank * len(self.prompts)
        unscored_B_K = torch.isnan(self.rewards_N_K[first : first + len(self.prompts)]).tolist()
        spans = {
            name: self.spans.get(name, [None if unscored[column] else () for unscored in unscored_B_K])
            for column, (name, with_spans) in enumerate(zip(names, with_spans_K, strict=True))
            if with_spans
        }
        by_turns = frozenset(name for name, turns in zip(names, by_turns_K, strict=True) if turns)
        return replace(self, spans=spans, by_turns=by_turns)

    def written_by_model(self, batch: dict[str, Any], is_token_B_T: torch.Tensor) -> torch.Tensor:
        """The tokens that the model and no tool wrote, `(B, T)`, before truncated completions were masked."""
        lengths = [len(ids) for ids in self.completion_ids]
        if self.tool_masks is None or [len(mask) for mask in self.tool_masks] != lengths:
            return is_token_B_T if batch.get("tool_mask") is None else is_token_B_T & (batch["tool_mask"] > 0)
        written_B_T = torch.zeros_like(is_token_B_T, device="cpu")
        for row, mask in enumerate(self.tool_masks):
            written_B_T[row, : len(mask)] = torch.tensor(mask, dtype=torch.bool)
        return written_B_T.to(is_token_B_T.device)


@dataclass(frozen=True)
class SampledBatch:
    """A generation batch of this rank, before the rollout hooks."""

    batch: dict[str, Any]  # TRL's, with `BatchKeys.row_id`
    scored: ScoredBatch
    scores: Scores
    rollout: Rollout


@dataclass
class Sampling:
    """A generation batch while TRL samples and scores it: every override adds what it sees."""

    generated: Sequence[Any] | None = None  # what `_generate` returned
    # Log-probabilities of the passes before the rewards: the old policy's, then the reference's.
    passes: list[torch.Tensor] = field(default_factory=list)
    scored: ScoredBatch | None = None  # what `_calculate_rewards` saw
    show_columns: Callable[[Sequence[str]], None] | None = None  # shows TRL the columns of rewards that shapers add
    tensors: dict[str, Any] = field(default_factory=dict)  # the batch that TRL will make, as shapers see it
    rollout: Rollout | None = None  # after the shapers

    @property
    def tool_masks(self) -> Sequence[Sequence[int]] | None:
        """Which tokens the model wrote, by completion; None without tools."""
        return self.generated[2] if self.generated is not None and len(self.generated) > 2 else None


class ByReward(Mapping[str, Any]):
    """Values by reward function, made when they are read: if that fails, only a run whose hooks need them stops."""

    def __init__(self, names: Iterable[str], read: Callable[[str], Any]) -> None:
        self._names, self._read = tuple(names), functools.cache(read)

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def make_rollout(
    facts: RunFacts,
    progress: Progress,
    batch: dict[str, Any],
    scored: ScoredBatch,
    scores: Scores,
    reward_weights_K: torch.Tensor,
    gather: Callable[[torch.Tensor], torch.Tensor],
) -> Rollout:
    """The context of one generation batch, with TRL's tensors and, in `scores`, what hooks need beyond them."""
    _check_rows(facts, batch, scored)
    rows, sequences = len(scored.prompts), scored.rewards_N_K.size(0)
    first = facts.rank * rows
    local = slice(first, first + rows)
    group_size = facts.group_size(progress.training)
    weights_K = reward_weights_K.to(scored.rewards_N_K.device)
    rewards_N = weighted_rewards(scored.rewards_N_K, weights_K)
    groups_N = torch.arange(sequences, device=rewards_N.device) // group_size
    mask_B_T = counting_mask(batch).to(progress.precision)
    written_B = torch.tensor([len(ids) for ids in scored.completion_ids], device=mask_B_T.device)
    columns_T = torch.arange(mask_B_T.size(1), device=mask_B_T.device)
    texts = [  # which TRL has decoded already unless the completion is a list of messages
        completion if isinstance(completion, str) else str(facts.tokenizer.decode(ids, skip_special_tokens=True))
        for completion, ids in zip(scored.completions, scored.completion_ids, strict=True)
    ]
    is_token_B_T = columns_T < written_B.unsqueeze(1)
    turns_B_T = turn_numbers(scored.written_by_model(batch, is_token_B_T))
    counts = (turns_B_T.amax(dim=1) + 1).tolist()
    offsets = functools.cache(lambda row: token_offsets(facts.tokenizer, scored.completion_ids[row], texts[row]))
    prompt_mask_B_P = batch["prompt_mask"]

    @functools.cache
    def turns(row: int) -> Sequence[Turn]:
        prompt_ids = batch["prompt_ids"][row][prompt_mask_B_P[row] > 0].tolist()
        ids = scored.completion_ids[row]
        written = [number >= 0 for number in turns_B_T[row, : len(ids)].tolist()]
        seen = (ids, written, scored.completions[row], texts[row], offsets(row))
        return read_turns(facts.tokenizer, *seen, prompt_ids, facts.async_tools, parsing_of(facts.tokenizer))

    def spans_of(name: str) -> Sequence[Sequence[Span] | None]:
        read = zip(scored.spans[name], scored.completions, texts, strict=True)
        return [
            None if spans is None else place_spans(spans, functools.partial(turns, row), completion, text, row)
            for row, (spans, completion, text) in enumerate(read)
        ]

    def turns_of(name: str) -> Sequence[Sequence[float] | None]:
        read = enumerate(zip(scored.spans[name], counts, strict=True))
        return [turn_values(spans, count, name, row) for row, (spans, count) in read]

    return Rollout(
        prompts=scored.prompts,
        completions=scored.completions,
        columns={key: [row[key] for row in scored.rows] for key in scored.rows[0] if key != "prompt"},
        texts=texts,
        prompt_ids_B_P=batch["prompt_ids"],
        prompt_mask_B_P=prompt_mask_B_P.to(mask_B_T.dtype),
        completion_ids_B_T=batch["completion_ids"],
        mask_B_T=mask_B_T,
        completion_mask_B_T=is_token_B_T.to(mask_B_T.dtype),
        tool_mask_B_T=batch["tool_mask"].to(mask_B_T.dtype) if "tool_mask" in batch else None,
        turns_B_T=turns_B_T,
        turns=turns,
        truncated_B=torch.tensor(
            [ids[-1] not in facts.end_ids for ids in scored.completion_ids], device=mask_B_T.device
        ),
        rewards_B_K=scored.rewards_N_K[local],
        reward_names=facts.reward_names,
        reward_weights_K=weights_K,
        rewards_B=rewards_N[local],
        reward_spans=ByReward(scored.spans, spans_of),
        reward_turns=ByReward([name for name in scored.spans if name in scored.by_turns], turns_of),
        group_ids_B=groups_N[local],
        group_baselines_B=group_mean(rewards_N, groups_N)[local],
        num_generations=group_size,
        totals=Totals(
            tokens=int(batch["num_items_in_batch"]),
            sequences=sequences,
            prompts=sequences // group_size,
            max_completion_length=facts.max_completion_length,
            processes=facts.ranks,
            micro_batches=progress.steps_per_generation,
            optimizer_steps=progress.steps_per_generation / facts.accumulation if progress.training else 1.0,
        ),
        old_logps_B_T=batch.get("old_per_token_logps", scores.get("old_logps")),
        old_entropies_B_T=scores.get("old_entropies"),
        ref_logps_B_T=batch.get("ref_per_token_logps", scores.get("ref_logps")),
        sampling_logps_B_T=batch.get("sampling_per_token_logps"),
        teacher_logps_B_T={name: logps_B_T for name, logps_B_T in scores.items() if name not in NEEDS},
        step=progress.step,
        training=progress.training,
        tokenizer=facts.tokenizer,
        gather=gather,
        local_rows=local,
        offsets=offsets,
    )


def _check_rows(facts: RunFacts, batch: dict[str, Any], scored: ScoredBatch) -> None:
    """Refuse a batch whose rows are not those that were scored: rewards and groups would be wrong."""
    rows = batch["completion_ids"].tolist()
    same = [row[: len(ids)] == list(ids) for row, ids in zip(rows, scored.completion_ids, strict=False)]
    if len(rows) == len(scored.completion_ids) and all(same):
        return
    what = f"row {same.index(False)} is another" if False in same else f"{len(rows)} of {len(scored.completion_ids)}"
    raise ConfigurationError(
        f"_generate_and_score_completions of a base class of {facts.trainer} returned other rows than were scored "
        f"({what}), so advantage hooks and loss aggregations would see wrong rewards and groups. Let it keep all "
        f"rows in order and set unwanted advantages to zero, or derive that class from GRPOExtTrainer, so that it "
        f"runs after the hooks."
    )
