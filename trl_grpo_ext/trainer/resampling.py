"""`resample`: replace groups that a filter drops, until the batch is full or the rounds are used up.

One round is one call of TRL's own `_generate_and_score_completions`, for as many prompts as a generation batch has. So
generation (vLLM, tools, environments, `rollout_func`), rewards, shapers, TRL's metrics and its table of completions see
each completion once, when it is sampled. What is trained on is put together afterwards:

    round ──filter──▶ kept groups ──▶ the batch, carried groups first ──▶ hooks, aggregation, records, update
                 └──▶ dropped, counted by reason

- A batch that is not full after `max_rounds` is filled up with dropped groups of its first round, as they were sampled.
- Groups that are kept beyond the batch are the first of the next one (`keep_surplus`), one generation batch old. Their
  old log-probabilities are taken before the update, so their importance ratios are right; fresh rows beside them get
  theirs too, since TRL has one column for all.
- Prompts come from TRL's own sampler, in its order, one generation batch of them for each round: no prompt is drawn
  again before all have been. An epoch is as many updates as without `resample`, and the data is passed faster.
- Hooks run on the batch that is trained on, once. Where the filter reads advantages they have to run before, in each
  round, which is the same only if each of them looks at every group by itself (`per_group`). Shapers always run in the
  round. What cannot be exact is refused when the trainer is constructed.
- Which prompts were drawn and the groups carried over are in the checkpoint, as `STATE_FILE`.
"""

from __future__ import annotations

import io
import itertools
import pickle
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from ..credit.chain import Change
from ..credit.flow import group_verdicts, plugin_label, verdicts_by_group
from ..credit.turns import scores_turns
from ..errors import ConfigurationError
from ..guard.agreement import Agreement
from ..guard.parameters import checked_flag, checked_whole
from ..types import Rollout, implements, role_of
from . import upstream
from .batch import PROMPT_KEYS, counting_mask
from .contexts import ScoredBatch, make_rollout
from .facts import Moment, RunFacts
from .logps import Scores

STATE_FILE = "trl_grpo_ext_resample.pt"
"""In a checkpoint: the number of batches drawn, and the groups carried over."""

_PAD: Mapping[str, float] = {
    "tool_mask": 1.0,
    "importance_sampling_ratio": 1.0,  # VESPO sums their logarithms without a mask
    "ref_per_token_logps": -1e4,  # TRL has exp(ref - logp) of padding too, before the mask: 0, and never infinite
}
"""Padding values of TRL's batch, where not 0."""


@dataclass(frozen=True)
class ResampleSettings:
    """The mapping `resample`, read.

    Attributes:
        filter: A selection of a group filter, or one.
        max_rounds: Most generations for one batch.
        keep_surplus: Whether groups kept beyond the batch go into the next one.
    """

    filter: Any
    max_rounds: int = 4
    keep_surplus: bool = True


def read_resample(value: Any) -> ResampleSettings | None:
    """Read the setting: None, a filter's name, or a mapping of `filter`, `max_rounds` and `keep_surplus`.

    Raises:
        ConfigurationError: It is none of these.
    """
    if value is None:
        return None
    if isinstance(value, str):
        value = {"filter": value}
    how = "Write a filter's name, or {filter: signal, max_rounds: 4, keep_surplus: true}."
    if not isinstance(value, Mapping) or value.get("filter") is None:
        raise ConfigurationError(f"resample: {value!r} does not say which groups to keep. {how}")
    if unknown := [key for key in value if key not in ResampleSettings.__dataclass_fields__]:
        raise ConfigurationError(f"resample has no {unknown[0]!r}. {how}")
    settings = ResampleSettings(**value)
    checked_whole("resample: max_rounds", settings.max_rounds, lowest=1)
    checked_flag("resample: keep_surplus", settings.keep_surplus)
    return settings


@dataclass(frozen=True)
class SampledBatch:
    """A generation batch of this rank, from TRL's batch to the output of the rollout hooks.

    Attributes:
        batch: TRL's.
        scored: What `_calculate_rewards` saw of it.
        scores: Log-probabilities that hooks need.
        rollout: With the advantages, once the hooks have run.
        places_B: Running numbers of the completions in TRL's table.
        changes: What each hook did; None before they have run.
        held_signs_B_T: Of `HookChain.held_signs`.
    """

    batch: dict[str, Any]
    scored: ScoredBatch
    scores: Scores
    rollout: Rollout
    places_B: torch.Tensor
    changes: list[Change] | None = None
    held_signs_B_T: torch.Tensor | None = None


@dataclass(frozen=True)
class SampledRow:
    """One completion with all its data, without padding, on the CPU, so that it can move to any rank.

    Attributes:
        tensors: By name, of no dimension or one.
        values: What is no tensor.
    """

    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]


Group = list[SampledRow]


@dataclass
class Counts:
    """Counts of groups on the way to one batch."""

    rounds: int = 0
    drawn: int = 0
    carried: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


class Prompts:
    """The training prompts in the order of TRL's sampler, one generation batch after the other.

    Args:
        trainer: TRL's.
        facts: Of the run.

    Attributes:
        drawn: Generation batches drawn since the training began.
    """

    def __init__(self, trainer: Any, facts: RunFacts) -> None:
        self._trainer, self._facts = trainer, facts
        self._left: Iterator[list[int]] | None = None
        self._data: upstream.TrainingData | None = None
        self.drawn = 0

    def start_at(self, drawn: int) -> None:
        """Continue after this many generation batches."""
        self.drawn, self._left, self._data = drawn, None, None

    @property
    def passes(self) -> float:
        """Passes over the data so far."""
        return self.drawn / self.data.batches

    @property
    def data(self) -> upstream.TrainingData:
        """Read off the trainer when a training begins: callers may still change its data after construction."""
        if self._data is None:
            self._data = upstream.training_data_of(self._trainer)
        return self._data

    def draw(self) -> list[Any]:
        """This rank's rows of the next generation batch, each prompt as often as it is sampled."""
        data = self.data
        if self._left is None:
            self._left = itertools.islice(self._all(data), self.drawn, None)
        indices = next(self._left)
        self.drawn += 1
        rows = len(indices) // self._facts.ranks
        mine = indices[self._facts.rank * rows : (self._facts.rank + 1) * rows]
        return list(data.collate([data.rows[index] for index in mine]))

    def _all(self, data: upstream.TrainingData) -> Iterator[list[int]]:
        """The sampler repeats each generation batch for every step that uses it; take it once."""
        sampler = data.sampler()
        while True:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.drawn // data.batches)
            indices = iter(sampler)
            for _ in range(data.batches):
                yield list(itertools.islice(indices, data.batch_size))
                deque(itertools.islice(indices, data.batch_size * (data.repeats - 1)), maxlen=0)


class Resampling:
    """Fills generation batches with groups that a filter keeps.

    Args:
        settings: `resample`.
        group_filter: The filter.
        facts: Of the run.
        shape: How TRL makes tensors of tokens.
        prompts: To draw from.
        agreement: Of the ranks.
        old_logps: The policy's log-probabilities of a batch, `(B, T)`, now.
    """

    def __init__(
        self,
        settings: ResampleSettings,
        group_filter: Any,
        facts: RunFacts,
        shape: upstream.BatchShape,
        prompts: Prompts,
        agreement: Agreement,
        old_logps: Callable[[dict[str, Any]], torch.Tensor],
    ) -> None:
        self.settings, self.filter, self.prompts = settings, group_filter, prompts
        self.reads_advantages = bool(getattr(group_filter, "reads_advantages", False))
        self._facts, self._shape, self._agreement, self._old_logps = facts, shape, agreement, old_logps
        self._carried: list[Group] = []
        self._before: tuple[int, list[Group]] = (0, [])
        self._reasons: set[str] = set()

    def restart(self) -> None:
        """Begin a training: from the first prompt, with nothing carried over."""
        self.prompts.start_at(0)
        self._carried, self._before = [], (0, [])

    # ------------------------------------------------------------------ once per generation batch

    def fill(
        self, sample: Callable[[list[Any]], SampledBatch], moment: Moment, reward_weights_K: torch.Tensor
    ) -> tuple[SampledBatch, dict[str, float]]:
        """Sample rounds until the batch is full; this rank's rows of it, and metrics.

        Args:
            sample: One round: from this rank's rows of the data to the sampled batch, with the hooks' output if the
                filter reads advantages.
            moment: Now.
            reward_weights_K: Weights of the reward functions.
        """
        self._before = (self.prompts.drawn, self._carried)
        kept, others, counts = list(self._carried), list[Group](), Counts(carried=len(self._carried))
        wanted = 0
        while not counts.rounds or (len(kept) < wanted and counts.rounds < self.settings.max_rounds):
            with self._agreement.section():
                rows = self.prompts.draw()
            sampled = sample(rows)
            _refuse_images(sampled.batch)
            with self._agreement.section():
                verdicts = group_verdicts(self.filter, self._filter_view(sampled.rollout))
            groups, said = self._gather_groups(sampled, verdicts)
            self._check_carried(groups[0][0])
            wanted = len(groups)
            counts.rounds += 1
            counts.drawn += wanted
            for group, verdict in zip(groups, said, strict=True):
                if verdict is True:
                    kept.append(group)
                else:
                    others.append(group)
                    counts.dropped[verdict or "dropped"] += 1
        counts.kept = len(kept) - counts.carried
        self._warn_if_none_kept(counts)
        chosen = [*kept, *others][:wanted]
        surplus = kept[wanted:] if self.settings.keep_surplus else []
        if self._carried:
            chosen = self._with_old_logps(chosen, sampled)
        surplus = self._with_old_logps(surplus, sampled)
        self._carried = surplus
        return self._join(chosen, sampled, moment, reward_weights_K), self._count_metrics(counts, wanted, len(kept))

    def _filter_view(self, rollout: Rollout) -> Rollout:
        return rollout if self.reads_advantages else replace(rollout, advantages_B_T=None)

    def _gather_groups(
        self, sampled: SampledBatch, verdicts: Sequence[bool | str]
    ) -> tuple[list[Group], list[bool | str]]:
        """The groups of all ranks and the filter's verdict on each; the same on every rank."""
        rows = _rows_of(sampled)
        if self._facts.ranks > 1:
            rows, verdicts = gather_object(rows), gather_object(list(verdicts))
        size = sampled.rollout.num_generations
        said = verdicts_by_group(self.filter, verdicts, [row // size for row in range(len(rows))])
        return [rows[start : start + size] for start in range(0, len(rows), size)], list(said.values())

    def _check_carried(self, fresh: SampledRow) -> None:
        """Refuse groups that a checkpoint carried over from a run with other settings."""
        for row in (group[0] for group in self._carried):
            if other := (row.tensors.keys() ^ fresh.tensors.keys()) - {"old_per_token_logps"}:
                raise ConfigurationError(
                    f"resample: the groups carried over in the checkpoint and those sampled now differ in "
                    f"{', '.join(sorted(other))}: they were sampled with other settings or plugins. Resume with the "
                    f"same, or delete {STATE_FILE} from the checkpoint to sample new ones."
                )

    def _warn_if_none_kept(self, counts: Counts) -> None:
        if counts.kept or self._facts.rank:
            return
        why = ", ".join(f"{reason} ({number})" for reason, number in counts.dropped.most_common())
        warnings.warn(
            f"resample: the filter {plugin_label(self.filter)!r} kept none of {counts.drawn} groups in {counts.rounds} "
            f"rounds: {why}. The run trains on the batch as sampled. If this persists, the prompts are too easy or "
            "too hard for the policy, or a reward is broken: look at the completions (log_completions), or change "
            "the data (prompt_weights), num_generations, the temperature or the filter.",
            stacklevel=2,
        )

    def _count_metrics(self, counts: Counts, wanted: int, kept: int) -> dict[str, float]:
        self._reasons |= counts.dropped.keys()  # once seen, a reason is logged even when it is 0
        return {
            "groups/kept": min(kept, wanted) / wanted,
            "groups/rounds": float(counts.rounds),
            "groups/prompts_used": float(counts.drawn),
            "groups/carried": float(counts.carried),
            "groups/surplus": float(max(kept - wanted, 0)),
            "groups/data_passes": self.prompts.passes,
            **{f"groups/dropped/{why.replace(' ', '_')}": float(counts.dropped[why]) for why in sorted(self._reasons)},
        }

    def _with_old_logps(self, groups: list[Group], like: SampledBatch) -> list[Group]:
        """Add the sampling policy's log-probabilities to groups that lack them; those carried over have them.

        Every rank scores the same number of rows, since a sharded model needs all ranks.
        """
        rows = [row for group in groups for row in group]
        missing = [row for row in rows if "old_per_token_logps" not in row.tensors]
        if not missing:
            return groups
        ranks, size = self._facts.ranks, -(-len(missing) // self._facts.ranks)
        first = self._facts.rank * size
        mine = [missing[(first + number) % len(missing)] for number in range(size)]
        logps_B_T = self._old_logps(self._batch_of(mine, like)).cpu()
        made = [logps_B_T[row, : len(one.tensors["completion_ids"])].clone() for row, one in enumerate(mine)]
        if ranks > 1:
            made = gather_object(made)
        logps = {id(row): values for row, values in zip(missing, made, strict=False)}
        return [
            [
                replace(row, tensors={**row.tensors, "old_per_token_logps": logps[id(row)]})
                if id(row) in logps
                else row
                for row in group
            ]
            for group in groups
        ]

    # ------------------------------------------------------------------ rows put together

    def _batch_of(self, rows: Sequence[SampledRow], like: SampledBatch) -> dict[str, Any]:
        """TRL's batch of some rows, padded as TRL would have."""
        names = [name for name in rows[0].tensors if not name.startswith(_OURS)]
        batch: dict[str, Any] = {name: self._column(rows, name) for name in names}
        batch |= {key: value for key, value in like.batch.items() if key not in batch and not _by_row(value)}
        return batch

    def _column(self, rows: Sequence[SampledRow], name: str, value: float | None = None) -> torch.Tensor:
        tensors = [row.tensors[name] for row in rows]
        device = self._facts.device
        if all(tensor.dim() == 0 for tensor in tensors) or all(tensor.numel() == 1 for tensor in tensors):
            return torch.stack(tensors).to(device)
        if value is None:
            is_ids = name.removeprefix(_OURS) in ("prompt_ids", "completion_ids")
            value = self._shape.pad_id if is_ids else _PAD.get(name, 0)
        return upstream.pad_rows(tensors, self._shape, value, "left" if name in PROMPT_KEYS else "right", device)

    def _join(
        self, groups: Sequence[Group], like: SampledBatch, moment: Moment, reward_weights_K: torch.Tensor
    ) -> SampledBatch:
        """This rank's part of a batch of these groups, in their order."""
        everybody = [row for group in groups for row in group]
        count = len(everybody) // self._facts.ranks
        rows = everybody[self._facts.rank * count : (self._facts.rank + 1) * count]
        batch = self._batch_of(rows, like)
        batch["num_items_in_batch"] = sum(
            (counting_mask(row.tensors).sum() for row in everybody), torch.zeros((), dtype=torch.long)
        ).to(like.batch["num_items_in_batch"])
        scored = self._join_scored(rows, everybody)
        scored_B_T = {
            name: self._column(rows, f"{_SCORES}{name}")
            for name, value in vars(like.scores).items()
            if isinstance(value, torch.Tensor)
        }
        teachers = {name: self._column(rows, f"{_TEACHERS}{name}") for name in like.scores.teachers}
        scores = replace(like.scores, **scored_B_T, teachers=teachers)
        functions = len(reward_weights_K)
        with self._agreement.section():
            raw = replace(scored, rewards_N_K=scored.rewards_N_K[:, :functions])
            gather = self._agreement.gather
            rollout = make_rollout(self._facts, moment, batch, raw, scores, reward_weights_K, gather)
        shaped: dict[str, Any] = {"rewards_B_K": scored.rewards_N_K[rollout.local_rows]}
        shaped |= {name: self._column(rows, key) for name in _SHAPED if (key := f"{_ROLLOUT}{name}") in rows[0].tensors}
        shaped |= {name: getattr(like.rollout, name) for name in ("reward_names", "reward_weights_K")}
        rollout = replace(rollout, **shaped)
        joined = SampledBatch(batch, scored, scores, rollout, self._column(rows, _PLACE))
        if like.changes is None:
            return joined
        advantages_B_T = self._column(rows, _AFTER)
        changes = [
            Change(change.name, self._column(rows, f"{_BEFORE}{n}"), self._column(rows, f"{_AFTER}{n}"))
            for n, change in enumerate(like.changes)
        ]
        held = None if like.held_signs_B_T is None else self._column(rows, _HELD)
        rollout = replace(rollout, advantages_B_T=advantages_B_T)
        return replace(joined, rollout=rollout, changes=changes, held_signs_B_T=held)

    def _join_scored(self, rows: Sequence[SampledRow], everybody: Sequence[SampledRow]) -> ScoredBatch:
        values = [row.values for row in rows]

        def beside(what: str, silent: Callable[[SampledRow, str], Any]) -> dict[str, list[Any]]:
            """What rewards returned beside their scores; not all do so in every round."""
            names = dict.fromkeys(name for row in everybody for name in row.values[what])
            return {
                name: [row.values[what][name] if name in row.values[what] else silent(row, name) for row in rows]
                for name in names
            }

        def no_spans(row: SampledRow, name: str) -> Any:
            column = self._facts.reward_names.index(name)
            return None if bool(row.tensors[_REWARDS][column].isnan()) else ()

        masks = [one["tool_mask"] for one in values]
        return ScoredBatch(
            rows=[one["row"] for one in values],
            prompts=[one["prompt"] for one in values],
            completions=[one["completion"] for one in values],
            completion_ids=[row.tensors["completion_ids"].tolist() for row in rows],
            rewards_N_K=torch.stack([row.tensors[_REWARDS] for row in everybody]).to(self._facts.device),
            spans=beside("spans", no_spans),
            outcomes=beside("outcomes", lambda row, name: None),
            tool_masks=None if any(mask is None for mask in masks) else masks,
            by_turns=frozenset(
                n for row in everybody for n, spans in row.values["spans"].items() if scores_turns(spans)
            ),
        )

    # ------------------------------------------------------------------ checkpoints

    def state(self, between_batches: bool) -> dict[str, Any]:
        """What a checkpoint needs for the run to continue as if it had not stopped.

        Args:
            between_batches: Whether the next step generates. Otherwise TRL generates the current batch again, so the
                state before it is saved.
        """
        drawn, carried = (self.prompts.drawn, self._carried) if between_batches else self._before
        return {"drawn": drawn, "carried": [[vars(row) for row in group] for group in carried]}

    def save(self, folder: str, between_batches: bool, writes: bool) -> None:
        """Write the state into a checkpoint. All ranks call it with the same state.

        Args:
            folder: The checkpoint.
            between_batches: As `state`.
            writes: Whether this rank does.

        Raises:
            ConfigurationError: A column of the data holds values that cannot be read back safely.
        """
        content = io.BytesIO()
        torch.save(self.state(between_batches), content)
        try:
            torch.load(io.BytesIO(content.getvalue()), weights_only=True)
        except pickle.UnpicklingError as error:
            raise ConfigurationError(
                "resample: the groups carried over cannot be saved safely: the data or a reward has values other "
                "than numbers, texts, tensors, and lists and mappings of these "
                f"({error}). Remove that column, or set keep_surplus: false."
            ) from error
        if writes:
            (Path(folder) / STATE_FILE).write_bytes(content.getvalue())

    def load(self, folder: str, batches_done: int) -> None:
        """Restore the state of a checkpoint; a checkpoint without one comes from a run without `resample`.

        Args:
            folder: The checkpoint.
            batches_done: Generation batches that a run without `resample` would have drawn by now.

        Raises:
            ConfigurationError: Its groups have another size.
        """
        path = Path(folder) / STATE_FILE
        if not path.is_file():
            self.prompts.start_at(batches_done)
            return
        state = torch.load(path, weights_only=True, map_location="cpu")
        self.prompts.start_at(state["drawn"])
        carried = [[SampledRow(**row) for row in group] for group in state["carried"]]
        if any(len(group) != self._facts.num_generations for group in carried):
            raise ConfigurationError(
                f"{path} holds groups of {len(carried[0])} completions, and num_generations is now "
                f"{self._facts.num_generations}. Resume with the same, or delete that file to sample new ones."
            )
        for number, row in enumerate(row for group in carried for row in group):
            row.tensors[_PLACE] = torch.tensor(-1 - number)  # its table is gone
        self._carried = carried if self.settings.keep_surplus else []


# ---------------------------------------------------------------------- rows cut out

_OURS = "trl_grpo_ext."
"""Prefix of a row's entries that come neither from TRL nor from `BatchKeys`."""
_ROLLOUT, _SCORES, _TEACHERS = f"{_OURS}rollout.", f"{_OURS}scores.", f"{_OURS}teachers."
_REWARDS, _PLACE, _HELD = f"{_OURS}rewards", f"{_OURS}place", f"{_OURS}held"
_BEFORE, _AFTER = f"{_OURS}before", f"{_OURS}after"
_SHAPED = ("rewards_B", "raw_rewards_B", "group_baselines_B", "token_rewards_B_T")
"""Entries of a rollout that shapers make, kept so that shapers need not run again."""


def _as_text(outcome: Any) -> str | None:
    return None if outcome is None else str(outcome)


def _by_row(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _rows_of(sampled: SampledBatch) -> list[SampledRow]:
    """The rows of a batch, each with all its data."""
    batch, scored, rollout, scores = sampled.batch, sampled.scored, sampled.rollout, sampled.scores
    count = len(scored.prompts)
    columns: dict[str, torch.Tensor] = {key: value for key, value in batch.items() if _by_row(value)}
    columns |= {f"{_ROLLOUT}{name}": value for name in _SHAPED if (value := getattr(rollout, name)) is not None}
    columns |= {f"{_SCORES}{name}": value for name, value in vars(scores).items() if isinstance(value, torch.Tensor)}
    columns |= {f"{_TEACHERS}{name}": value for name, value in scores.teachers.items()}
    columns |= {_REWARDS: scored.rewards_N_K[rollout.local_rows], _PLACE: sampled.places_B}
    if sampled.changes is not None:
        assert rollout.advantages_B_T is not None
        columns[_AFTER] = rollout.advantages_B_T
        for number, change in enumerate(sampled.changes):
            columns |= {f"{_BEFORE}{number}": change.before_B_T, f"{_AFTER}{number}": change.after_B_T}
        if sampled.held_signs_B_T is not None:
            columns[_HELD] = sampled.held_signs_B_T
    columns = {name: value.detach().cpu() for name, value in columns.items()}
    prompts = columns["prompt_mask"].sum(dim=1).tolist()
    written = [len(ids) for ids in scored.completion_ids]

    def cut(name: str, row: int) -> torch.Tensor:
        values = columns[name][row]
        if values.dim() == 0 or name == _REWARDS:
            return values.clone()
        if name in PROMPT_KEYS:
            return values[values.numel() - prompts[row] :].clone()
        return values[: written[row]].clone()

    masks = scored.tool_masks if scored.tool_masks is not None and len(scored.tool_masks) == count else None
    return [
        SampledRow(
            {name: cut(name, row) for name in columns},
            {
                "row": dict(scored.rows[row]),
                "prompt": scored.prompts[row],
                "completion": scored.completions[row],
                "spans": {name: spans[row] for name, spans in scored.spans.items()},
                "outcomes": {name: _as_text(outcomes[row]) for name, outcomes in scored.outcomes.items()},
                "tool_mask": None if masks is None else [int(counts) for counts in masks[row]],
            },
        )
        for row in range(count)
    ]


# ---------------------------------------------------------------------- what is refused


def _refuse_images(batch: Mapping[str, Any]) -> None:
    if images := sorted(upstream.MULTIMODAL_KEYS & {key for key, value in batch.items() if value is not None}):
        raise ConfigurationError(
            f"resample combines several batches, and this one has images ({', '.join(images)}), whose entries cannot "
            f"be assigned to rows. Remove resample."
        )


def refuse_inexact(
    settings: ResampleSettings, group_filter: Any, hooks: Sequence[Any], trls_batch_statistics: str | None
) -> None:
    """Refuse what would not be exact over rounds.

    Args:
        settings: `resample`.
        group_filter: The filter.
        hooks: Advantage hooks.
        trls_batch_statistics: The setting by which TRL's own advantages depend on the whole batch, or None.

    Raises:
        ConfigurationError: Names it, and what to do.
    """
    label = plugin_label(group_filter)
    whole = [hook for hook in hooks if not getattr(hook, "per_group", False)]
    say = "If it looks at each group by itself and remembers nothing, write per_group = True in its class"
    for hook in whole:
        if implements(hook, "on_rewards"):
            raise ConfigurationError(
                f"resample: the shaper {plugin_label(hook)!r} runs in each round and may look at the whole batch, "
                f"but the batch of a round is not the one that is trained on. {say}; otherwise remove it, or resample."
            )
        if implements(hook, "on_rollout") and getattr(group_filter, "reads_advantages", False):
            raise ConfigurationError(
                f"resample: the filter {label!r} reads advantages, so the hooks run in each round, and "
                f"{plugin_label(hook)!r} may look at the whole batch, which is incomplete then. {say}; otherwise "
                f"select a filter that does not read advantages, such as accuracy_between."
            )
    if trls_batch_statistics is not None and not any(role_of(hook) == "estimator" for hook in hooks):
        raise ConfigurationError(
            f"resample: with {trls_batch_statistics} TRL's advantages depend on everything sampled in a round, which "
            f"is not the batch that is trained on. Set scale_rewards to group or none, or select an estimator "
            "(batch_whitening divides by the standard deviation of the batch that is trained on)."
        )
