"""`resample`: replace groups that a filter drops, until the batch is full or the rounds are used up.

A batch that is not full is filled up with dropped groups, whose tokens are masked: in no loss and no denominator.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils import gather_object

from ..credit.flow import group_verdicts, plugin_label, verdicts_by_group
from ..credit.parts import names_of
from ..credit.rollouts import ScoredRows
from ..errors import ConfigurationError
from ..types import FilterDeclaration, HookDeclaration, Rollout, implements, role_of
from .batch import PROMPT_KEYS, BatchKeys, counting_mask
from .config import ResampleSettings
from .prompts import Drawn, DrawnPrompts
from .sampled_batch import SampledBatch, read_rollout
from .selected import SelectedPlugins
from .upstream import acting, images
from .upstream.reading import Progress, RunFacts

_PAD: Mapping[str, float] = {
    "tool_mask": 1.0,
    "importance_sampling_ratio": 1.0,  # VESPO sums their logarithms without a mask
    "ref_per_token_logps": -1e4,  # TRL has exp(ref - logp) of padding too, before the mask: 0, and never infinite
}
"""Padding values of TRL's batch, where not 0."""

_SHAPED = ("rewards_B", "raw_rewards_B", "group_baselines_B", "token_rewards_B_T")
"""Entries of a rollout that shapers make, kept so that these need not run again."""

Row = dict[tuple[str, str], Any]
"""A completion by where its data are from and their name: `("batch", "completion_ids")`; on the CPU, unpadded."""

Group = list[Row]
Hooks = Callable[[SampledBatch], tuple[Rollout, Any, Any]]


@dataclass
class Resampling:
    """Fills generation batches with groups that a filter keeps."""

    settings: ResampleSettings
    filter: Any
    facts: RunFacts
    loss_counts_rows: bool

    def __post_init__(self) -> None:
        self.reads_advantages = "advantages" in FilterDeclaration.of(self.filter).needs
        self._reasons: set[str] = set()

    def fill(
        self, sample: Callable[[Drawn], SampledBatch], hooks: Hooks, prompts: DrawnPrompts, progress: Progress
    ) -> tuple[SampledBatch, dict[str, float]]:
        """Fill a batch with rounds of `sample`, after the `hooks` if the filter reads advantages; and its metrics."""
        kept = dict[int, Group]()
        others = dict[int, Group]()
        dropped = Counter[str]()
        rounds = wanted = 0
        while not rounds or (len(kept) < wanted and rounds < self.settings.max_rounds):
            if rounds and not prompts.look_ahead():
                break
            drawn = prompts.next_round()
            sampled = sample(drawn)
            seen = replace(sampled.rollout, advantages_B_T=None)
            if self.reads_advantages:
                seen, *_ = hooks(sampled)
            with self.facts.agreement.section():
                verdicts = group_verdicts(self.filter, seen)
            rounds += 1
            wanted = len(drawn.prompts)
            of_round = self._groups(sampled, verdicts)
            prompts.observe(drawn, sampled.rollout, {place: verdict for place, (_, verdict) in enumerate(of_round)})
            for prompt, (group, verdict) in zip(drawn.prompts, of_round, strict=True):
                if verdict is True and prompt not in kept:
                    kept[prompt] = group
                    continue
                others.setdefault(prompt, group)
                why = "prompt already in batch" if verdict is True else verdict or "dropped"
                dropped[why.replace("_", " ")] += 1  # as in a metric's name, where they would be one
        if not kept and self.facts.rank == 0:
            why = ", ".join(f"{reason} ({number})" for reason, number in dropped.most_common())
            none = f"{plugin_label(self.filter)!r} kept none of {rounds * wanted} groups in {rounds} rounds"
            warnings.warn(f"resample: the filter {none}: {why}. Look at the completions.", stacklevel=2)
        chosen = [*kept.values(), *(group for prompt, group in others.items() if prompt not in kept)][:wanted]
        counted = min(len(kept), wanted)
        self._reasons |= dropped.keys()  # once seen, a reason is logged even when it is 0
        metrics = {
            "groups/kept": counted / wanted,
            "groups/rounds": float(rounds),
            "groups/prompts_used": float(rounds * wanted),
            "groups/surplus": float(len(kept) - counted),
            **{f"groups/dropped/{why.replace(' ', '_')}": float(dropped[why]) for why in sorted(self._reasons)},
        }
        return self._join(chosen, counted, sampled, progress), metrics

    def _groups(self, sampled: SampledBatch, verdicts: Sequence[bool | str]) -> list[tuple[Group, bool | str]]:
        """The groups of all ranks and the filter's verdict on each; the same on every rank."""
        rows = _rows_of_batch(sampled)
        if self.facts.ranks > 1:
            rows = gather_object(rows)
            verdicts = gather_object(list(verdicts))
        size = sampled.rollout.num_generations
        by_group = verdicts_by_group(self.filter, verdicts, [row // size for row in range(len(rows))])
        groups = [rows[start : start + size] for start in range(0, len(rows), size)]
        return list(zip(groups, by_group.values(), strict=True))

    def _column(self, rows: Sequence[Row], source: str, name: str) -> torch.Tensor:
        like = "prompt_ids" if name in PROMPT_KEYS else "completion_ids"
        # A round without images has no types of tokens.
        tensors = [row.get((source, name), torch.zeros_like(row["batch", like])) for row in rows]
        lengths = [len(row["batch", like]) for row in rows]
        over_tokens = [tuple(tensor.shape[:1]) for tensor in tensors] == [(length,) for length in lengths]
        if not over_tokens and len({tensor.shape for tensor in tensors}) == 1:  # one number, or what a subclass adds
            return torch.stack(tensors).to(self.facts.device)
        value = self.facts.pad_id if name in ("prompt_ids", "completion_ids") else _PAD.get(name, 0)
        return acting.pad_rows(self.facts, tensors, value, "left" if name in PROMPT_KEYS else "right")

    def _columns(self, rows: Sequence[Row], source: str) -> dict[str, Any]:
        names = dict.fromkeys(name for row in rows for where, name in row if where == source)
        return {name: self._column(rows, source, name) for name in names}

    def _join(self, groups: Sequence[Group], counted: int, like: SampledBatch, progress: Progress) -> SampledBatch:
        """This rank's part of a batch of these groups, in their order; only the first `counted` are trained on."""
        everybody = [row for group in groups for row in group]
        trained = counted * len(groups[0])
        for row in everybody[trained:]:
            row["batch", "completion_mask"].zero_()
        count = len(everybody) // self.facts.ranks
        rows = everybody[self.facts.rank * count : (self.facts.rank + 1) * count]
        pictured = dict.fromkeys(name for row in everybody for where, name in row if where == "images")
        parts = {name: [row.get(("images", name)) for row in rows] for name in pictured}
        batch = images.joined({**self._columns(rows, "batch"), **parts})
        batch |= {key: value for key, value in like.batch.items() if key not in batch and not _by_row(value)}
        masks = ({name: value for (source, name), value in row.items() if source == "batch"} for row in everybody)
        tokens = sum(int(counting_mask(mask).sum()) for mask in masks)
        batch["num_items_in_batch"] = like.batch["num_items_in_batch"].new_tensor(tokens)
        if self.loss_counts_rows and 0 < counted < len(groups):
            batch[BatchKeys.masked_groups_factor] = torch.tensor(len(groups) / counted, device=self.facts.device)
        scored = self._join_scored(rows, everybody)
        logps = self._columns(rows, "logps")
        weights_K = like.rollout.reward_weights_K
        functions = len(self.facts.reward_names)
        with self.facts.agreement.section():
            raw = replace(scored, rewards_N_K=scored.rewards_N_K[:, :functions])
            numbers = [row["scored", "row_number"] for row in rows]
            rollout = read_rollout(self.facts, progress, batch, raw, logps, weights_K[:functions], numbers)
        rollout = replace(
            rollout,
            rewards_B_K=scored.rewards_N_K[rollout.local_rows],
            reward_names=like.rollout.reward_names,
            reward_weights_K=weights_K,
            totals=replace(rollout.totals, sequences=trained, prompts=counted),
            **self._columns(rows, "rollout"),
        )
        return SampledBatch(batch, scored, logps, rollout)

    def _join_scored(self, rows: Sequence[Row], everybody: Sequence[Row]) -> ScoredRows:
        columns = {name: [row["scored", name] for row in rows] for name in ("row", "prompt", "completion", "tool_mask")}

        def beside_scores(what: str, silent: Any) -> dict[str, list[Any]]:
            """What rewards returned beside their scores; not all do so in every round."""
            names = dict.fromkeys(name for row in everybody for name in row["scored", what])
            return {name: [row["scored", what].get(name, silent) for row in rows] for name in names}

        parts = [row["scored", "parts"] for row in everybody]
        rewards = dict.fromkeys(reward for of_row in parts for reward in of_row)
        return ScoredRows(
            rows=columns["row"],
            prompts=columns["prompt"],
            completions=columns["completion"],
            completion_ids=[row["batch", "completion_ids"].tolist() for row in rows],
            rewards_N_K=torch.stack([row["scored", "rewards"] for row in everybody]).to(self.facts.device),
            parts=beside_scores("parts", ()),
            part_names={reward: names_of([of_row.get(reward, ()) for of_row in parts]) for reward in rewards},
            outcomes=beside_scores("outcomes", None),
            tool_masks=None if None in columns["tool_mask"] else columns["tool_mask"],
        )


def _by_row(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _rows_of_batch(sampled: SampledBatch) -> list[Row]:
    scored = sampled.scored
    rollout = sampled.rollout
    batch = images.by_row(sampled.batch)
    parts_of_images = {name: batch[name] for name in images.Images.of(sampled.batch).parts}
    sources = {"batch": batch, "rollout": {name: getattr(rollout, name) for name in _SHAPED}, "logps": sampled.logps}
    columns = {
        (source, name): value.detach().cpu()
        for source, values in sources.items()
        for name, value in values.items()
        if _by_row(value)
    }
    prompts = columns["batch", "prompt_mask"].sum(dim=1).tolist()
    written = [len(ids) for ids in scored.completion_ids]
    rewards_B_K = scored.rewards_N_K[rollout.local_rows].cpu()
    masks: Sequence[Any] = scored.tool_masks or ()
    width = sampled.batch["completion_ids"].size(1)

    def cut(key: tuple[str, str], row: int) -> torch.Tensor:
        values: torch.Tensor = columns[key][row]
        if key[1] in PROMPT_KEYS:
            values = values[len(values) - prompts[row] :]
        elif values.dim() > 0 and len(values) == width:  # else it is not over tokens
            values = values[: written[row]]
        return values.clone()

    rows = []
    for row in range(len(written)):
        found: Row = {key: cut(key, row) for key in columns}
        for name, parts in parts_of_images.items():
            found["images", name] = parts[row].detach().cpu() if torch.is_tensor(parts[row]) else parts[row]
        seen = {
            "row": dict(scored.rows[row]),
            "row_number": (rollout.row_numbers or [])[row],
            "prompt": scored.prompts[row],
            "completion": scored.completions[row],
            "rewards": rewards_B_K[row].clone(),
            "parts": {name: parts[row] for name, parts in scored.parts.items()},
            "outcomes": {name: outcomes[row] for name, outcomes in scored.outcomes.items()},
            "tool_mask": masks[row] if len(masks) == len(written) else None,
        }
        rows.append(found | {("scored", name): value for name, value in seen.items()})
    return rows


def resampling_of(
    trainer: Any, facts: RunFacts, plugins: SelectedPlugins, *, loss_counts_rows: bool
) -> Resampling | None:
    """What fills the batches of a run; None without `resample`. Refuses what would not be exact over rounds."""
    if plugins.resample is None:
        return None
    made = Resampling(plugins.resample, plugins.group_filter, facts, loss_counts_rows)
    for hook in plugins.hooks:
        in_rounds = implements(hook, "on_rewards") or (implements(hook, "on_rollout") and made.reads_advantages)
        if in_rounds and not HookDeclaration.of(hook).independent:
            label = f"the advantage hook {plugin_label(hook)!r}"
            what = f"{label} runs in each round, for the filter {plugin_label(made.filter)!r} or as a shaper"
            why = "may look at the whole batch, which is not the one that is trained on"
            raise ConfigurationError(f"resample: {what}, and {why}. Declare independent=True if not, or remove it.")
    over_batch = {"normalize_then_sum", "batch"} & {trainer.multi_objective_aggregation, trainer.scale_rewards}
    if over_batch and not any(role_of(hook) == "estimator" for hook in plugins.hooks):
        what = f"with {min(over_batch)} TRL's advantages depend on a whole round, not the batch that is trained on"
        raise ConfigurationError(f"resample: {what}. Set scale_rewards to group or none, or select an estimator.")
    return made
