"""Read a selection of plugins from a run's YAML; load and check its plugins."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from trl import GRPOConfig

from ...credit.flow import TRL_REDUCTIONS, plugin_label
from ...errors import ConfigurationError
from ...guard.calls import unique_names
from ...guard.untrusted import read_settings
from ...plugins.loading import load_advantage_hooks, load_loss_aggregation, load_rewards
from ...plugins.selection import Selection, parse_selection
from ...types import HookDeclaration, implements

_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "loss_type": tuple(TRL_REDUCTIONS),
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "mask_truncated_completions": (True, False),
}
_TRLS = {name: one.default for name, one in GRPOConfig.__dataclass_fields__.items()}
_DEFAULTS = {name: _TRLS[name] for name in (*_CHOICES, "max_completion_length", "reward_weights")}
_DEFAULTS["mask_truncated_completions"] = None  # as in the run
"""Settings read besides the plugins."""
_OF_ENTROPY = ("entropy_coef", "use_adaptive_entropy", "top_entropy_quantile")
_LEFT_OUT = ("beta", *_OF_ENTROPY, "off_policy_mask_threshold", "importance_sampling_level")
"""Settings that change a gradient in ways that are left out here; TRL's defaults have no effect."""
Given = str | Path | Mapping[str, Any]  # a file of a selection, or what it holds
Selections = Sequence[Given] | Mapping[str, Given]  # a mapping gives them names

_FROM_THE_POLICY = {"old_logps", "old_entropies", "entropies"}
_NOT_SAVED = {"ref_logps", "sampling_logps"}


class RewardSource(NamedTuple):
    """One reward of a selection; keys are equal for equal rewards, so that they are called once for all selections."""

    name: str
    weight: float
    function: Any
    key: str


@dataclass(frozen=True)
class LoadedSelection:
    """What one side of the comparison runs: loaded plugins, and settings with TRL's defaults."""

    name: str
    rewards: Sequence[RewardSource] | None  # None if the saved ones are used
    hooks: Sequence[Any]
    aggregation: Any
    settings: Mapping[str, Any]
    left_out: Mapping[str, Any] = field(default_factory=dict)  # settings that count for nothing here

    @property
    def needs(self) -> set[str]:
        """What the hooks declare a need for."""
        return {need for hook in self.hooks for need in HookDeclaration.of(hook).needs}


def named_selections(given: Selections) -> Mapping[str, Given]:
    """Selections by name: a file's is its stem."""
    if isinstance(given, Mapping):
        return given
    names = [Path(one).stem if isinstance(one, str | Path) else f"selection {n}" for n, one in enumerate(given, 1)]
    return dict(zip(unique_names(names), given, strict=True))


def load_selection(name: str, given: Given, run: Mapping[str, Any] | None = None) -> LoadedSelection:
    """Read and load one selection, given the run's settings. Unknown keys are ignored: a whole run's file will do."""
    mapping = selection_settings(given)
    if mapping.get("max_completion_length") is None and run:
        mapping = {**mapping, "max_completion_length": run.get("max_completion_length")}
    settings = {key: _setting(name, key, mapping.get(key)) for key in _DEFAULTS}
    skipped = {**{key: _TRLS[key] for key in _LEFT_OUT}, "token_losses": None}
    chosen, aggregation = (_several(mapping.get(key)) for key in ("rewards", "loss_aggregation"))
    hooks = load_advantage_hooks(_several(mapping.get("advantage_hooks")) or [])
    for hook in hooks:
        declared = HookDeclaration.of(hook)
        if lacking := [*declared.teachers, *({*declared.needs} & _NOT_SAVED)]:
            raise ConfigurationError(f"{name}: {plugin_label(hook)!r} needs {lacking[0]}, which nothing saves.")
    return LoadedSelection(
        name=name,
        rewards=None if chosen is None else _rewards(name, chosen, settings["reward_weights"]),
        hooks=hooks,
        aggregation=load_loss_aggregation(aggregation[0] if aggregation else TRL_REDUCTIONS[settings["loss_type"]]),
        settings=settings,
        left_out={key: mapping[key] for key, usual in skipped.items() if mapping.get(key, usual) not in (usual, None)},
    )


def selection_settings(given: Given) -> Mapping[str, Any]:
    """What a selection's file holds; nothing in an empty one."""
    return given if isinstance(given, Mapping) else read_settings(given, may_be_empty=True)


def reads_log_probabilities(hook: Any) -> bool:
    """Whether a hook acts at the loss forward, or declares a need for what is computed there."""
    return implements(hook, "on_forward") or bool({*HookDeclaration.of(hook).needs} & _FROM_THE_POLICY)


def _rewards(selection: str, chosen: Sequence[Any], weights: Sequence[float] | None) -> list[RewardSource]:
    parsed = [
        parse_selection("reward", item) if isinstance(item, str | Mapping | Selection) else None for item in chosen
    ]
    if weights is not None and any(read is not None and read.weight is not None for read in parsed):
        raise ConfigurationError(f"{selection}: reward weights are given twice, in rewards and in reward_weights.")
    loaded = load_rewards(chosen)
    weights = loaded.weights if weights is None else weights
    check_weights(selection, weights, loaded.names)
    sources = []
    for item, read, function, name, weight in zip(chosen, parsed, loaded, loaded.names, weights, strict=True):
        plain = None if read is None else replace(read, weight=None).plain()
        key = f"object {id(item)}" if plain is None else json.dumps(plain, sort_keys=True, default=repr)
        sources.append(RewardSource(name, float(weight), function, key))
    return sources


def check_weights(selection: str, weights: Sequence[float], names: Sequence[str]) -> None:
    if len(weights) != len(names):
        listed = ", ".join(names)
        raise ConfigurationError(f"{selection}: {len(weights)} reward_weights for {len(names)} rewards ({listed}).")


def _setting(selection: str, key: str, value: Any) -> Any:
    if key == "scale_rewards" and isinstance(value, bool | str):  # TRL takes true for group and false for none
        value = {"true": "group", "false": "none"}.get(str(value).lower(), value)
    elif _is_none(value):
        value = None
    if value is None:
        return _DEFAULTS[key]
    if key in _CHOICES and value not in _CHOICES[key]:
        expected = ", ".join(map(str, _CHOICES[key]))
        raise ConfigurationError(f"{selection}: {key} is {value!r}; it must be one of {expected}.")
    return value


def _several(value: Any) -> list[Any] | None:
    """A list of selections; None for what TRL's command line takes as not set."""
    if _is_none(value):
        return None
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_none(value: Any) -> bool:
    value = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
    return value is None or (isinstance(value, str) and value.lower() in ("none", "null"))
