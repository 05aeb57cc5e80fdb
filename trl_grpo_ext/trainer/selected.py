"""The plugins of one trainer, loaded: those given in Python and those selected in its config."""

from collections.abc import Mapping, Sequence
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
from .upstream import contract


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
        if trainer.args.reward_weights is None:
            positions = _reward_positions(self._chosen, trainer.reward_funcs, self.weights)
            trainer.reward_weights[positions] = torch.tensor(self.weights)


def _reward_positions(given: Sequence[Any], functions: Sequence[Any], weights: Sequence[float]) -> list[int]:
    """The positions of the given reward functions in the trainer: a subclass may put its own before them."""
    free, places = list(range(len(functions))), list[int]()
    for function, weight in zip(given, weights, strict=True):
        same = [place for place in free if functions[place] is function]
        if not same and places == list(range(len(places))):  # TRL made a model of an id, or a subclass wrapped it
            same = [place for place in free if place == len(places)]
        if not same:
            raise ConfigurationError(
                f"The reward function {function!r} of weight {weight} is not among the trainer's, {list(functions)!r}: "
                "a base class has replaced it. Give all of them their weights as reward_weights."
            )
        places.append(same[0])
        free.remove(same[0])
    return places


class SelectedPlugins:
    """The plugins of a run but its rewards, and the settings beside them. `given` are those given in Python."""

    def __init__(self, args: Any, given: Mapping[str, Any]) -> None:
        settings = self.settings = our_settings(args)
        selected = {name: _one_source(name, value, getattr(settings, name)) for name, value in given.items()}
        self.hooks: list[Any] = load_advantage_hooks(selected["advantage_hooks"] or [])
        self.token_losses: list[Any] = load_token_losses(selected["token_losses"] or [])
        self.resample = read_resample(selected["resample"])
        wanted: dict[Kind, Any] = {
            "loss_aggregation": selected["loss_aggregation"],
            "group_filter": None if self.resample is None else self.resample.filter,
            "prompt_sampler": selected["prompt_sampler"],
        }
        # Of the kinds of which a run has one at most.
        self.loaded = {kind: resolve(kind, one) for kind, one in wanted.items() if one is not None}
        objects = {kind: loaded.object for kind, loaded in self.loaded.items()}
        self.aggregation = objects.get("loss_aggregation")
        self.group_filter = objects.get("group_filter")
        self.prompt_sampler = objects.get("prompt_sampler")
        if self.aggregation is not None and args is not None:
            contract.check_loss_type(args.loss_type)
        self.chain = HookChain(self.hooks, self.aggregation)
        self.forward_hooks = [hook for hook in self.hooks if implements(hook, "on_forward")]
        self.change_advantages = bool(self.forward_hooks) or self.chain.acts("on_rollout")
        # Whether TRL's loss is taken apart.
        self.reduces = self.aggregation is not None or bool(self.token_losses)
        # The plugins that may need log-probabilities which TRL does not compute.
        self.needing_logps = [*self.hooks, *self.token_losses]
        if self.group_filter is not None:
            self.needing_logps.append(self.group_filter)

    @property
    def losses_by_name(self) -> dict[str, Any]:
        names = unique_names([plugin_label(loss) for loss in self.token_losses])
        return dict(zip(names, self.token_losses, strict=True))

    @property
    def compact(self) -> bool:
        return bool(self.settings.compact_updates == "exact")

    @property
    def read_rollouts(self) -> bool:
        records = self.settings.token_records > 0
        draws = self.resample is not None or self.prompt_sampler is not None
        return bool(self.hooks) or self.reduces or draws or records


def _one_source(name: str, in_python: Any, in_config: Any) -> Any:
    if in_python is not None and in_config is not None:
        raise ConfigurationError(
            f"{name} is given twice: {in_python!r} to the trainer and {in_config!r} in its config. Keep one of them."
        )
    return in_config if in_python is None else in_python
