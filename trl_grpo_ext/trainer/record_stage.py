"""The last stage: what a run logs and writes about its batches and losses."""

import functools
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers.trainer_utils import has_length

from ..credit import flow
from ..credit.chain import Change, change_tables, metrics_of
from ..records.manifest import Manifest
from ..records.settings import write_settings
from ..records.token_records import TokenRecorder
from ..types import Rollout
from .batch import BatchKeys
from .pass_at_k import PassAtK, pass_at_k_of
from .plugin_records import PluginRecords
from .reductions import LossForward, Reduced
from .selected import SelectedPlugins
from .upstream import acting, reading
from .upstream.reading import RunFacts


class RecordStage:
    """Metrics, warnings, TRL's table of completions, token records, pass@k, times of phases, and the manifest."""

    def __init__(self, trainer: Any, facts: RunFacts, plugins: SelectedPlugins, *, evaluates: bool) -> None:
        self._trainer = trainer
        self._facts = facts
        self._chain = plugins.chain
        settings = plugins.settings
        self.pass_at_k: PassAtK = pass_at_k_of(settings, facts, evaluates=evaluates)
        self._recorder = TokenRecorder(settings.token_records, trainer.args.seed)
        self.phases = PhaseClock(facts.device)
        self.manifest = Manifest.of(trainer, plugins.loaded)
        self._plugin_records = PluginRecords(self.manifest, trainer.args, settings.plugin_changes, facts.agreement)
        self.write_beside_weights = self._plugin_records.write_beside_weights
        rewards = any(record.selected or record.distribution == "trl-grpo-ext" for record in self.manifest.plugins)
        # A run without plugins logs what TRL logs, and how many completions have no reward: it must not go unseen.
        self._logs_more = rewards or plugins.read_rollouts or plugins.compact or bool(settings.pass_at_k)
        self.records_tokens = settings.token_records > 0
        self._row_count = 0

    def begin(self, resume_from_checkpoint: str | bool | None) -> None:
        self._plugin_records.begin(resume_from_checkpoint, functools.partial(write_settings, self._trainer))

    def evaluate(self, evaluation: Callable[[], Any], dataloader: Any, prefix: str) -> Any:
        if not self.pass_at_k.ks:
            return evaluation()
        with self.pass_at_k.evaluating():
            output = evaluation()
            problems = len(dataloader.dataset) if has_length(dataloader.dataset) else None
            metrics = self.pass_at_k.metrics(problems)
        output.metrics.update({f"{prefix}_{name}": value for name, value in metrics.items()})
        return output

    def number_rows(self, rollout: Rollout) -> torch.Tensor:
        """The running numbers of this rank's completions, `(B,)`, which are those of TRL's table."""
        numbers_N = torch.arange(rollout.totals.sequences, device=rollout.mask_B_T.device)
        row_ids_B = self._row_count + numbers_N[rollout.local_rows]
        self._row_count += rollout.totals.sequences
        return row_ids_B

    def saw_batch(
        self, rollout: Rollout, batch: Mapping[str, Any], changes: Sequence[Change], outcomes: Mapping[str, Any]
    ) -> None:
        """A generation batch is finished: record it with TRL's advantages and those after each hook."""
        if self.records_tokens and rollout.training:
            at_first_B_T = flow.expand_advantages(batch["advantages"], rollout.mask_B_T)
            stages = [("trl", at_first_B_T), *((change.name, change.after_B_T) for change in changes)]
            self._recorder.start(rollout, batch[BatchKeys.row_id], stages, outcomes)
        self.saw_changes(changes, batch[BatchKeys.row_id], rollout.mask_B_T)
        self.add_metrics(self._chain.metrics(forward=False))  # the others have yet to see this batch's losses

    def time_step(self, step: Callable[[], Any]) -> Any:
        if not self._logs_more:
            return step()
        with self.phases.during("update"):
            output = step()
        if reading.closes_step(self._trainer):
            self.add_metrics(self.phases.take())
        return output

    def saw_forward(self, changes: Sequence[Change], row_ids_B: torch.Tensor, mask_B_T: torch.Tensor) -> None:
        """The forward hooks have run for a micro-step."""
        self.saw_changes(changes, row_ids_B, mask_B_T)
        self.add_metrics(self._chain.metrics(forward=True))

    def saw_changes(self, changes: Sequence[Change], row_ids_B: torch.Tensor, mask_B_T: torch.Tensor) -> None:
        """Log what each hook did, and show each completion's mean advantage in TRL's table of completions."""
        if not changes:
            return
        means_B = changes[-1].after_B_T.sum(1) / mask_B_T.sum(1).clamp(min=1.0)
        row_ids_N = self._facts.gather(row_ids_B).tolist()
        tables_B_C = [means_B.float().unsqueeze(1), change_tables(changes, mask_B_T)]
        rows_N_C = self._facts.gather(torch.cat(tables_B_C, dim=1))
        self.add_metrics(metrics_of(changes, rows_N_C[:, 1:]))
        if self._trainer.model.training:
            for sentence in self._chain.without_effect(changes, rows_N_C[:, 1:], self._trainer.state.global_step):
                if self._facts.rank == 0:
                    warnings.warn(sentence, stacklevel=2)
        if self._row_count > 0:  # TRL's asynchronous trainer has no table
            acting.show_mean_advantages(self._trainer, row_ids_N, rows_N_C[:, 0].tolist(), self._row_count)

    def saw_weights(self, weights_B_T: torch.Tensor, advantages_B_T: torch.Tensor, mask_B_T: torch.Tensor) -> None:
        self.add_metrics(flow.weight_metrics(self._facts.gather(flow.row_table(weights_B_T, advantages_B_T, mask_B_T))))

    def saw_loss(self, forward: LossForward, reduced: Reduced) -> None:
        """Record what a training loss used, of the rows that are recorded."""
        inputs = forward.inputs
        weights_B_T = reduced.weights_B_T
        row_ids_B = inputs.get(BatchKeys.row_id)
        if row_ids_B is None or not self._recorder.wants(row_ids_B):
            return
        used = {"advantage": flow.expand_advantages(inputs["advantages"], forward.mask_B_T)}
        if (factor_B := inputs.get(BatchKeys.part_factor)) is not None and weights_B_T is not None:
            used["advantage"] = used["advantage"] / factor_B.unsqueeze(1)  # undo the factor of its part
            weights_B_T = weights_B_T * factor_B.unsqueeze(1)
        policy = forward.policy()
        seen = {"weight": weights_B_T, "logp": policy.logps_B_T, "entropy": policy.entropies_B_T}
        used |= {name: values_B_T.detach() for name, values_B_T in seen.items() if values_B_T is not None}
        stages = [(change.name, change.after_B_T) for change in policy.changes]
        self._recorder.add_trained(row_ids_B, stages, used)

    def before_log(self) -> None:
        """Write the token records, and take out metrics without a value."""
        trl = self._trainer
        if self.records_tokens and trl.model.training:
            records = gather_object(self._recorder.records())
            if trl.accelerator.is_main_process:
                self._recorder.write(records, trl.args.output_dir, trl.state.global_step)
        if self._logs_more:
            acting.drop_undefined_metrics(trl)

    def add_metrics(self, metrics: Mapping[str, float]) -> None:
        acting.add_metrics(self._trainer, metrics)


PHASES = ("generation", "rewards", "update")


class PhaseClock:
    """Assigns the seconds of training steps to phases; the update encloses the others."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.get_device_module(device)
        self._phase: str | None = None
        self._since = 0.0
        self._seconds = defaultdict[str, float](float)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count the time inside as this phase, not the enclosing one; outside of training steps as none."""
        outer = self._phase
        if outer is None and phase != "update":
            yield
            return
        if outer is None and not self._seconds:  # a step begins, and the last one's optimizer may still run on a GPU
            self._device.synchronize()
        self._turn_to(phase)
        try:
            yield
        finally:
            self._turn_to(outer)

    def take(self) -> dict[str, float]:
        """Wait for the device and return the seconds since the last call, by metric."""
        with self.during("update"):
            self._device.synchronize()
        seconds = {f"time/{phase}": self._seconds[phase] for phase in PHASES}
        self._seconds.clear()
        return seconds

    def _turn_to(self, phase: str | None) -> None:
        now = time.perf_counter()
        if self._phase is not None:
            self._seconds[self._phase] += now - self._since
        self._phase = phase
        self._since = now
