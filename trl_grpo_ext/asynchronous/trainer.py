"""`AsyncGRPOExtTrainer`: the overrides of TRL's `AsyncGRPOTrainer`, none of them a copy.

| TRL calls | what is added |
| --- | --- |
| `_score_group`, in the worker | rewards with weights and guard, shapers, rollout hooks, the filter (`loop`) |
| `get_train_dataloader` | the rows travel beside each micro-batch (`rows`) |
| `get_batch_samples` | an optimizer step at a time: the aggregation's weights, metrics, records (`steps`) |
| `compute_loss` | forward hooks, token losses, the aggregation (`steps`) |
| `train`, `log`, `_save` | manifest and token records |

With no plugin selected the numbers are TRL's to the bit.
"""

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from trl.experimental.async_grpo import AsyncGRPOTrainer

from ..credit.flow import plugin_label
from ..errors import ConfigurationError
from ..guard.agreement import Agreement
from ..guard.calls import unique_names
from ..records.log import LiveLog
from ..records.manifest import Manifest
from ..records.settings import write_settings
from ..records.token_records import TokenRecorder
from ..trainer.hook_states import AdvantageHookStates, has_state
from ..trainer.plugin_records import PluginRecords
from ..trainer.selected import SelectedPlugins, SelectedRewards
from ..trainer.upstream import asynchronous as upstream
from ..types import FilterDeclaration, HookDeclaration, TokenLossDeclaration, role_of
from .loop import ExtRolloutLoop
from .steps import Steps, pack_rows

_Next: type = AsyncGRPOTrainer if TYPE_CHECKING else object


class AsyncGRPOExtMixin(_Next):
    """Plugins for any subclass of TRL's `AsyncGRPOTrainer`; put it first among the bases. Experimental.

    Takes `AsyncGRPOTrainer`'s arguments and these.

    Args:
        reward_funcs: As in TRL. A list from `load_rewards` brings its weights.
        rewards: Selections of further rewards.
        advantage_hooks: Selections or hook objects. Those that act before the loss must declare `independent=True`,
            since groups are scored one by one.
        loss_aggregation: A selection or an aggregation object.
        token_losses: Selections or token loss objects.
        group_filter: A selection or a group filter. Dropped groups are counted as `groups/dropped/<reason>_total`.
        token_records: Completions of each optimizer step to record token by token, in whole groups.
        reward_timeout: Wall-clock seconds that all reward functions together may take for one group.
        plugin_changes: `stop` or `warn`, as in `GRPOExtConfig`.

    Raises:
        UpstreamError: The installed TRL is not one that this was tested with.
        ConfigurationError: A plugin cannot act here.
        PluginError: A selected plugin does not load.
    """

    _trl_grpo_ext: SimpleNamespace

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        *arguments: Any,
        rewards: Any = None,
        advantage_hooks: Any = None,
        loss_aggregation: Any = None,
        token_losses: Any = None,
        group_filter: Any = None,
        token_records: int = 0,
        reward_timeout: float | None = 3600.0,
        plugin_changes: str = "stop",
        **keywords: Any,
    ) -> None:
        upstream.check(AsyncGRPOTrainer)
        given = {"advantage_hooks": advantage_hooks, "loss_aggregation": loss_aggregation, "token_losses": token_losses}
        resample = None if group_filter is None else {"filter": group_filter}
        plugins = SelectedPlugins(None, {**given, "resample": resample, "prompt_sampler": None})
        plugins.settings.token_records, plugins.settings.reward_timeout = token_records, reward_timeout
        refuse(plugins)
        ours = self._trl_grpo_ext = SimpleNamespace(plugins=plugins)
        chosen = SelectedRewards(reward_funcs, rewards, None)
        functions = chosen.functions if isinstance(chosen.functions, list) else [chosen.functions]
        functions = [] if chosen.functions is None else functions
        super().__init__(model, list(functions), *arguments, **keywords)
        upstream.check_instance(self)
        if upstream.has_trls_worker(self):
            of_loop = {"plugins": plugins, "reward_weights": chosen.weights, "updates": self.args.weight_sync_steps}
            upstream.install_loop(self, ExtRolloutLoop, of_loop)
            self.rollout_queue = upstream.Inbox(self)
        elif plugins.read_rollouts or {*chosen.weights} != {1.0}:
            upstream.refuse_foreign_worker(self)
        self.reward_funcs, self.reward_func_names = functions, unique_names([plugin_label(one) for one in functions])
        self.reward_weights, self.advantage_hooks = torch.tensor(chosen.weights), plugins.hooks
        self.loss_aggregation, self.group_filter = plugins.aggregation, plugins.group_filter
        self.token_losses = plugins.token_losses
        self.plugin_manifest = Manifest.of(self, plugins.loaded)
        self.add_callback(LiveLog())
        if any(map(has_state, plugins.hooks)):
            self.add_callback(AdvantageHookStates.of(hooks=plugins.hooks))
        place = self.accelerator.process_index, self.accelerator.num_processes
        agreement = Agreement(*place, self.accelerator.gather)
        ours.recorder = TokenRecorder(token_records, self.args.seed)
        ours.steps = Steps(self, plugins, agreement, ours.recorder, keywords.get("tools") or ())
        ours.records = PluginRecords(self.plugin_manifest, self.args, plugin_changes, agreement)

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **keywords: Any) -> Any:
        """Train as TRL does, after comparing the plugins with those of the checkpoint to resume from."""
        self._trl_grpo_ext.records.begin(resume_from_checkpoint, functools.partial(write_settings, self))
        return super().train(resume_from_checkpoint, *arguments, **keywords)

    def get_train_dataloader(self) -> Any:
        """Let the rows travel with TRL's micro-batches."""
        loader = super().get_train_dataloader()
        if self._trl_grpo_ext.plugins.read_rollouts:
            upstream.extend_collator(loader, pack_rows)
        return loader

    def get_batch_samples(self, *arguments: Any, **keywords: Any) -> Any:
        """Weigh and record the optimizer step whose micro-batches these are."""
        micro_batches, items = super().get_batch_samples(*arguments, **keywords)
        self._trl_grpo_ext.steps.prepare(micro_batches)
        return micro_batches, items

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        """Compute TRL's loss, with what the plugins make of it."""
        inherited = functools.partial(super().compute_loss, **keywords)
        return self._trl_grpo_ext.steps.compute_loss(inherited, model, inputs, *arguments)

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        """Log as TRL does, and write the token records beside it."""
        ours = self._trl_grpo_ext
        if ours.plugins.settings.token_records:
            records = gather_object(ours.recorder.records())
            if self.accelerator.is_main_process:
                ours.recorder.write(records, self.args.output_dir, self.state.global_step)
        super().log(logs, *arguments, **keywords)

    def _save(self, output_dir: str | None = None, *arguments: Any, **keywords: Any) -> None:
        super()._save(output_dir, *arguments, **keywords)
        self._trl_grpo_ext.records.write_beside_weights(output_dir)


class AsyncGRPOExtTrainer(AsyncGRPOExtMixin, AsyncGRPOTrainer):
    """TRL's `AsyncGRPOTrainer` with plugins. Experimental."""


_THERE = {"advantages", "entropies", "offsets", "sampling_logps", "several_updates"}
"""What plugins may need here."""


def refuse(plugins: SelectedPlugins) -> None:
    """Refuse what cannot act in the asynchronous trainer, each in one sentence."""
    needs = dict[str, set[str]]()
    for hook in plugins.hooks:
        declared, name = HookDeclaration.of(hook), f"The advantage hook {plugin_label(hook)!r}"
        needs[name] = {*declared.needs, *(f"the teacher {one}" for one in declared.teachers)}
        acts_early = role_of(hook) != "forward"
        if acts_early and not declared.independent:
            raise ConfigurationError(
                f"{name} may look beyond a group (it does not declare independent=True), and the asynchronous trainer "
                "scores groups one by one: declare it if it holds, or remove the hook."
            )
        if acts_early and has_state(hook):
            raise ConfigurationError(
                f"{name} has a state, which would be lost with the process that scores: remove it."
            )
    if plugins.group_filter is not None:
        of_filter = FilterDeclaration.of(plugins.group_filter)
        needs[f"The group filter {plugin_label(plugins.group_filter)!r}"] = {*of_filter.needs, *of_filter.teachers}
    of_losses = {name: TokenLossDeclaration.of(loss) for name, loss in plugins.losses_by_name.items()}
    for name, of_loss in of_losses.items():
        needs[f"The token loss {name!r}"] = {*of_loss.needs} - {"old_logps"}
    for name, needed in needs.items():
        if lacking := sorted(needed - _THERE):
            raise ConfigurationError(
                f"{name} needs {', '.join(lacking)}, which TRL's asynchronous trainer does not compute: remove it, or "
                "train with GRPOExtTrainer."
            )
    replacing = [name for name, of_loss in of_losses.items() if of_loss.replaces]
    if len(replacing) > 1:
        raise ConfigurationError(f"The token losses {replacing} all replace TRL's policy loss: keep one of them.")
