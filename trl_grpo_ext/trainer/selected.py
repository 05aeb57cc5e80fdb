"""The plugins of one trainer, loaded: those given in Python and those selected in its config."""

from collections.abc import Mapping
from typing import Any

import torch

from ..credit.chain import HookChain
from ..credit.flow import plugin_label
from ..errors import ConfigurationError
from ..guard.calls import unique_names
from ..plugins.loading import (
    Kind,
    LoadedList,
    RewardList,
    load_advantage_hooks,
    load_rewards,
    load_token_losses,
    resolve,
)
from ..types import implements
from .config import our_settings, read_resample


class SelectedRewards:
    """The reward functions given in Python, then those selected in the config, with their weights."""

    def __init__(self, given: Any, selections: Any, processing_classes: Any) -> None:
        listed = [] if given is None else given if isinstance(given, list) else [given]
        selected = load_rewards(selections or [])
        self.functions: Any = LoadedList.join(listed, selected) if selected else given
        weights = listed.weights if isinstance(listed, RewardList) else ()
        if len(weights) != len(listed):  # another list, or one that something was added to
            weights = [getattr(one, "trl_grpo_ext_weight", 1.0) for one in listed]
        self.weights = [*weights, *selected.weights]
        self.processing_classes = processing_classes
        if selected and processing_classes is not None:
            classes = processing_classes if isinstance(processing_classes, list) else [processing_classes]
            self.processing_classes = [*classes, *([None] * len(selected))]
        self._chosen = [*listed, *selected]  # now, since TRL adds an environment's to the list

    def set_weights(self, trainer: Any) -> None:
        """Put the weights where the trainer keeps them, unless the config has some."""
        if trainer.args.reward_weights is not None or all(weight == 1.0 for weight in self.weights):
            return  # a base class may have set others
        functions = trainer.reward_funcs
        count = len(self._chosen)
        for start in range(len(functions) - count + 1):  # a subclass may have put others first
            pairs = zip(self._chosen, functions[start : start + count], strict=True)
            if all(given is function or isinstance(given, str) for given, function in pairs):  # TRL loads an id's model
                weights_K = trainer.reward_weights[start : start + count]
                if (weights_K != 1.0).any():
                    set_before = [round(float(weight), 6) for weight in weights_K]
                    what = f"The rewards have the weights {self.weights}, and a base class has set {set_before}"
                    raise ConfigurationError(f"{what}. Keep one of them.")
                weights_K[:] = torch.tensor(self.weights)
                return
        what = f"The reward functions of the weights {self.weights} are not among {list(functions)!r}"
        raise ConfigurationError(f"{what}: a base class has replaced some. Set reward_weights of all.")


class SelectedPlugins:
    """All plugins of a run except its rewards, and its settings. `given` are selections passed in Python, by name."""

    def __init__(self, args: Any, given: Mapping[str, Any]) -> None:
        settings = self.settings = our_settings(args)
        self._selections = ("rewards", *given)
        selected = {name: _one_source(name, value, getattr(settings, name)) for name, value in given.items()}
        self.hooks: list[Any] = load_advantage_hooks(selected["advantage_hooks"] or [])
        self.token_losses: list[Any] = load_token_losses(selected["token_losses"] or [])
        self.resample = read_resample(selected["resample"])
        singles: tuple[Kind, Kind] = ("loss_aggregation", "prompt_sampler")  # of which a run has one at most
        wanted: dict[Kind, Any] = {kind: selected[kind] for kind in singles}
        wanted["group_filter"] = None if self.resample is None else self.resample.filter
        self.loaded = {kind: resolve(kind, one) for kind, one in wanted.items() if one is not None}
        found = {kind: self.loaded[kind].object if kind in self.loaded else None for kind in wanted}
        self.aggregation = found["loss_aggregation"]
        self.group_filter = found["group_filter"]
        self.prompt_sampler = found["prompt_sampler"]
        self.chain = HookChain(self.hooks, self.aggregation)
        self.forward_hooks = [hook for hook in self.hooks if implements(hook, "on_forward")]
        self.change_advantages = bool(self.forward_hooks) or self.chain.acts("on_rollout")
        self.reduces = self.aggregation is not None or bool(self.token_losses)  # whether TRL's loss is taken apart
        singly = [one for one in (self.group_filter, self.aggregation) if one is not None]
        self.needing_logps = [*self.hooks, *self.token_losses, *singly]  # which may need what TRL does not compute
        names = unique_names([plugin_label(loss) for loss in self.token_losses])
        self.losses_by_name = dict(zip(names, self.token_losses, strict=True))

    def reread(self, args: Any) -> None:
        """Take the settings of a config that a base class has made or changed; it may not select other plugins."""
        settings = our_settings(args)
        for name in self._selections:
            if getattr(settings, name) != getattr(self.settings, name):
                what = f"A base class of the trainer has set args.{name} to {getattr(settings, name)!r}, unseen"
                raise ConfigurationError(f"{what}. Set it in the config that the trainer is given.")
        self.settings = settings

    @property
    def compact(self) -> bool:
        return bool(self.settings.compact_updates == "exact")

    @property
    def read_rollouts(self) -> bool:
        """Whether anything needs the `Rollout` of each generation batch."""
        draws = self.resample is not None or self.prompt_sampler is not None
        return bool(self.hooks) or self.reduces or draws or self.settings.token_records > 0


def _one_source(name: str, in_python: Any, in_config: Any) -> Any:
    if in_python is not None and in_config is not None:
        both = f"{in_python!r} to the trainer and {in_config!r} in its config"
        raise ConfigurationError(f"{name} is given twice: {both}. Keep one of them.")
    return in_config if in_python is None else in_python
