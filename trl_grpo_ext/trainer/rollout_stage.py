"""The first stage: TRL samples and scores a generation batch, and the plugins decide what it is trained with.

prompts ──TRL generates──▶ completions ──rewards, shapers──▶ rewards ──TRL, hooks──▶ advantages, weights
   └──────────── one round; `resample` draws several and keeps groups of them ────────┘
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils import gather

from ..credit import flow
from ..credit.chain import Change, refuse_normalised_shapers
from ..credit.parts import agreed_names, part_metrics
from ..credit.rollouts import ScoredRows
from ..credit.signal import groups_of, rewards_are_equal, signal_table, zero_variance_of
from ..errors import ConfigurationError, UpstreamError
from ..guard.reward_watch import RewardWatch, reward_limit
from ..types import Rollout, Totals, implements
from .batch import BatchKeys, row_entries
from .compact.sampling import sharing_of
from .logps import LogpsForHooks
from .prompts import Drawn, prompts_of
from .record_stage import RecordStage
from .reductions import DividesBy, Inherited
from .resampling import resampling_of
from .sampled_batch import HookLogps, SampledBatch, Sampling, batch_before_trls, read_rollout, rollout_of_shapers
from .selected import SelectedPlugins
from .token_losses import TokenLosses
from .upstream import acting, contract, reading
from .upstream.reading import Generated, Progress, RunFacts


@dataclass
class RolloutStage:
    """Makes the generation batches of a run. TRL's overrides call it in the order of its methods."""

    trainer: Any
    facts: RunFacts
    plugins: SelectedPlugins
    records: RecordStage
    token_losses: TokenLosses
    divides_by: DividesBy
    own_scoring: bool

    def __post_init__(self) -> None:
        plugins = self.plugins
        run = (self.trainer, self.facts, plugins)
        self._section = self.facts.agreement.section
        self._chain = plugins.chain
        share = plugins.settings.share_prompts
        self._hook_logps = LogpsForHooks(plugins.needing_logps, self.trainer, self.facts.tokenizer, share)
        self.prompts = prompts_of(*run, self.records.add_metrics)
        self._resampling = resampling_of(*run, loss_counts_rows=self.divides_by == "rows")
        self._sharing = sharing_of(self.trainer) if share else nullcontext
        self._shapes = self._chain.acts("on_rewards")
        refuse_normalised_shapers(plugins.hooks, self.trainer.multi_objective_aggregation)
        used = plugins.change_advantages or plugins.compact or plugins.reduces or self._resampling is not None
        self._zeroes_rounding = used and not self.own_scoring
        self._sampling = Sampling()
        self.totals: dict[int, Totals] = {}  # of the generation batch to train on, by its number
        self._batches = 0

    def generate_and_score(self, inherited: Inherited, inputs: Any) -> dict[str, Any]:
        """TRL's generation batch with the advantages, weights and entries that the plugins make."""
        if not self.plugins.read_rollouts:
            with self._watching() as sampling:
                batch: dict[str, Any] = inherited(inputs)
            if self._zeroes_rounding and sampling.scored:
                self._zero_rounding(batch, sampling.scored[-1], sampling.weights_K)
            return batch
        progress = reading.progress_of(self.trainer)
        if self.prompts is None or not progress.training:
            return self._finish(self._sample(inherited, Drawn(inputs), progress))
        if self._resampling is not None:
            one_round = functools.partial(self._sample, inherited, progress=progress)
            filled, metrics = self._resampling.fill(one_round, self._apply_rollout_hooks, self.prompts, progress)
            self.records.add_metrics(metrics)
            return self._finish(filled)
        drawn = self.prompts.next_round()
        sampled = self._sample(inherited, drawn, progress)
        self.prompts.observe(drawn, sampled.rollout, {})
        return self._finish(sampled)

    def generate(self, inherited: Inherited, prompts: Any) -> Any:
        with self._sharing():
            generated = inherited(prompts)
        self._sampling.generated = Generated.of(generated)
        self._sampling.passes = []
        return generated

    def pass_outside_losses(self, inherited: Inherited, model: Any, *arguments: Any, **keywords: Any) -> Any:
        result = inherited(model, *arguments, **keywords)
        if self._sampling.generated.completion_ids and not self._sampling.scored:
            self._sampling.passes.append(result[0])
        return result

    def calculate_rewards(
        self, inherited: Inherited, inputs: Any, prompts: Any, completions: Any, completion_ids: Any
    ) -> torch.Tensor:
        """The rewards of all ranks, `(N, K)`, with a column for each shaper that adds."""
        trl = self.trainer
        names = self.facts.reward_names
        timeout = reward_limit(self.plugins.settings.reward_timeout, float(trl.args.ddp_timeout), self.facts.ranks)
        watch = RewardWatch(timeout)
        failure = None
        shape = len(prompts), len(names)  # now: a reward may empty what it is given
        self._sampling.show_columns((), None)  # those of an earlier call in this batch are no functions
        functions = trl.reward_funcs
        watched = [watch.wrap(*pair) for pair in zip(functions, names, strict=True)]
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        timed = self.records.phases.during("rewards")
        try:
            with acting.lent(trl, reward_funcs=watched), timed, watch.time_limit():
                watch.start_scoring(functions, names, inputs, **given)
                rewards_N_K = inherited(inputs, prompts, completions, completion_ids)
        except BaseException as error:  # also SystemExit and Ctrl-C: the others wait in the one gather of this method
            failure = error
            self.facts.agreement.stand_in(error, gather, torch.full(shape, torch.nan, device=self.facts.device))
        with self._section():
            if failure is not None:
                raise failure
            watch.check_finite(rewards_N_K, names)
            part_names = agreed_names(watch.parts, self.facts.agreement.gather, self.facts.device)
            metrics = part_metrics(watch.parts, part_names, self.facts.agreement.gather, self.facts.device)
        self._sampling.weights_K = trl.reward_weights.clone()  # which a class may change in place
        self.records.pass_at_k.add(rewards_N_K)
        self.records.add_metrics(metrics | watch.counts(rewards_N_K, names, self.facts.gather))
        seen = (inputs, prompts, completions, completion_ids, rewards_N_K)
        masks = self._sampling.generated.tool_masks
        self._sampling.scored.append(ScoredRows(*seen, watch.parts, part_names, watch.outcomes, masks))
        return self._shape_rewards(rewards_N_K) if self._shapes else rewards_N_K

    @contextmanager
    def _watching(self) -> Iterator[Sampling]:
        """A context in which the other overrides note what they see of one round."""
        with acting.reward_columns(self.trainer) as show_columns:
            self._sampling = Sampling(show_columns)
            try:
                yield self._sampling
            finally:
                self._sampling = Sampling()

    def _sample(self, inherited: Inherited, drawn: Drawn, progress: Progress) -> SampledBatch:
        """Let TRL sample and score a batch, and make its rollout."""
        with self._watching() as sampling:
            sampling.row_numbers = drawn.row_numbers
            batch = inherited(drawn.rows)
        contract.check_batch(batch)
        if not sampling.scored:
            what = f"a base class of {self.facts.trainer_name} makes batches without the _calculate_rewards of plugins"
            raise UpstreamError(f"The rewards of this generation batch were never seen: {what}.")
        scored = sampling.scored[-1]
        logps = {} if self._shapes else self._compute_logps(batch, scored.rows, progress)
        with self._section():
            if self._shapes:
                rollout = rollout_of_shapers(self.facts, sampling, batch)
            else:
                weights_K = sampling.weights_K
                rollout = read_rollout(self.facts, progress, batch, scored, logps, weights_K, drawn.row_numbers)
            if self._zeroes_rounding:
                self._zero_rounding(batch, scored, rollout.reward_weights_K)
        batch[BatchKeys.row_id] = self.records.number_rows(rollout)
        return SampledBatch(batch, scored, logps, rollout)

    def _shape_rewards(self, rewards_N_K: torch.Tensor) -> torch.Tensor:
        sampling = self._sampling
        progress = reading.progress_of(self.trainer)
        batch = batch_before_trls(self.facts, sampling, has_reference=self.trainer.beta != 0.0)
        scored = sampling.scored[-1]
        row = scored.rows[0]
        has_images = sampling.generated.images is not None or row.get("image") or row.get("images")
        if has_images and (missing := self._hook_logps.missing(batch)):
            what = f"A hook that shapes rewards needs {' and '.join(missing)} of a batch with images"
            raise ConfigurationError(f"{what}. Set num_iterations above 1 (old policy), beta above 0 (reference).")
        logps = self._compute_logps(batch, scored.rows, progress)
        with self._section():
            weights_K = sampling.weights_K
            raw = read_rollout(self.facts, progress, batch, scored, logps, weights_K, sampling.row_numbers)
            rollout = self._chain.on_rewards(raw)
        sampling.shaped.append((batch, rollout))
        added = rollout.reward_names[len(raw.reward_names) :]
        sampling.show_columns(added, rollout.reward_weights_K)
        if not added:
            return rewards_N_K
        added_N_S = self.facts.gather(rollout.rewards_B_K[:, len(raw.reward_names) :])
        rewards_N_K = torch.cat([rewards_N_K, added_N_S], dim=1)
        sampling.scored.append(replace(scored, rewards_N_K=rewards_N_K))
        raw_N = self.facts.gather(rollout.raw_rewards_B)
        known_N = raw_N[~torch.isnan(raw_N)]
        self.records.add_metrics({"raw_reward": float(known_N.mean()), "raw_reward_std": float(known_N.std())})
        return rewards_N_K

    def _compute_logps(self, batch: dict[str, Any], rows: Sequence[Mapping[str, Any]], progress: Progress) -> HookLogps:
        with self._section():
            prompted = self._hook_logps.with_prompts(batch, rows)
        return self._hook_logps.compute(batch, prompted, self.facts.rows_at_once(progress.training))

    def _zero_rounding(self, batch: dict[str, Any], scored: ScoredRows, weights_K: torch.Tensor) -> None:
        """Set TRL's own advantages to exactly 0 if a group's rewards are equal, where rounding may leave a rest."""
        trl = self.trainer
        rewards_N_K = scored.rewards_N_K
        group_size = self.facts.group_size(reading.progress_of(trl).training)
        groups_N = torch.arange(len(rewards_N_K), device=rewards_N_K.device) // group_size
        how = trl.multi_objective_aggregation
        equal_N = rewards_are_equal(rewards_N_K, weights_K.to(rewards_N_K.device), groups_N, how)
        rows = len(scored.prompts)
        equal_B = equal_N[self.facts.rank * rows : (self.facts.rank + 1) * rows]
        batch["advantages"] = batch["advantages"].masked_fill(equal_B, 0.0)

    def _apply_rollout_hooks(self, sampled: SampledBatch) -> tuple[Rollout, list[Change], torch.Tensor | None]:
        """The rollout with the advantages, what each hook did, and the signs that its masks allow."""
        with self._section():
            advantages_B_T, changes = self._chain.on_rollout(sampled.batch["advantages"], sampled.rollout)
        with self._section():  # another, which gathers: so that a hook that gathers on one rank is found out
            allowed_signs_B_T = self._chain.allowed_signs(sampled.rollout)
            uninformative_B = self._chain.uninformative(sampled.rollout)
        rollout = replace(sampled.rollout, advantages_B_T=advantages_B_T, uninformative_B=uninformative_B)
        return rollout, changes, allowed_signs_B_T

    def _finish(self, sampled: SampledBatch) -> dict[str, Any]:
        """Finish the batch to train on: hooks, the aggregation's weights, entries of rows, records, metrics."""
        rollout, changes, allowed_signs_B_T = self._apply_rollout_hooks(sampled)
        batch = sampled.batch
        advantages_B_T = rollout.advantages_B_T
        assert advantages_B_T is not None
        signal_N_C = self.facts.gather(signal_table(rollout))
        batch |= row_entries(rollout, zero_variance_of(signal_N_C)[rollout.local_rows], allowed_signs_B_T)
        if self.plugins.aggregation is not None:
            # The loss finds the counts of its batch by this number.
            self._batches += 1
            self.totals.clear()
            self.totals[self._batches] = rollout.totals
            batch[BatchKeys.batch_number] = torch.full_like(batch[BatchKeys.row_id], self._batches)
            self.records.add_metrics({"groups/zero_variance": 1.0 - float(groups_of(signal_N_C).double().mean())})
        if implements(self.plugins.aggregation, "weights"):
            with self._section():
                weights_B_T = batch[BatchKeys.weights] = flow.token_weights(self.plugins.aggregation, rollout)
            self.records.saw_weights(weights_B_T, advantages_B_T, rollout.mask_B_T)
        self.token_losses.carry(batch, rollout)
        self.records.saw_batch(rollout, batch, changes, sampled.scored.outcomes)
        if changes:
            batch["advantages"] = advantages_B_T
        return batch
