"""Read a selection of plugins from a run's YAML; load and check its plugins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...credit.flow import TRL_REDUCTIONS, plugin_label
from ...errors import ConfigurationError
from ...guard.calls import unique_names
from ...guard.untrusted import read_settings, read_values
from ...plugins.loading import load_advantage_hooks, load_loss_aggregation, load_rewards
from ...plugins.selection import Selection, parse_selection
from ...types import implements
from .saved import SavedBatch
from .tokens import Tokens

SAVED = "saved"
"""`saved:NAME` among the rewards of a selection uses the values saved under that name."""

DEFAULTS: Mapping[str, Any] = {
    "loss_type": "dapo",
    "scale_rewards": "group",
    "multi_objective_aggregation": "sum_then_normalize",
    "max_completion_length": 512,
    "mask_truncated_completions": False,
    "num_generations": None,
    "reward_weights": None,
}
"""Settings read besides the plugins, with TRL's defaults (`num_generations` comes from the files)."""

LEFT_OUT: Mapping[str, Any] = {
    "beta": 0.0,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "importance_sampling_level": "token",
}
"""Settings that change a gradient in ways that are not replayed, with the values that have no effect."""

_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "loss_type": tuple(TRL_REDUCTIONS),
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
}
Selections = Sequence[str | Path | Mapping[str, Any]] | Mapping[str, str | Path | Mapping[str, Any]]
"""Files of selections, or what they hold; a mapping gives them names."""

_FROM_THE_POLICY = {"old_logps", "old_entropies", "entropies"}
_NOT_SAVED = {"ref_logps": "log-probabilities under a reference", "sampling_logps": "the sampler's log-probabilities"}


@dataclass(frozen=True)
class RewardSource:
    """One reward of a selection: a function to call, or the name under which its values were saved."""

    name: str
    weight: float
    function: Any = None
    saved: str | None = None
    key: str = ""
    """Equal for equal rewards, so that they are called once for all selections."""


@dataclass(frozen=True)
class ReplaySelection:
    """What one side of the comparison runs: loaded plugins, and settings with TRL's defaults.

    `rewards` is None if the saved ones are used; `left_out` has settings that are not replayed.
    """

    name: str
    rewards: Sequence[RewardSource] | None
    hooks: Sequence[Any]
    aggregation: Any
    own_aggregation: bool
    settings: Mapping[str, Any]
    left_out: Mapping[str, Any] = field(default_factory=dict)

    @property
    def needs(self) -> set[str]:
        """What the hooks declare a need for."""
        return {need for hook in self.hooks for need in getattr(hook, "needs", ())}

    @property
    def at_forward(self) -> list[str]:
        """The hooks that act at the loss forward."""
        return [plugin_label(hook) for hook in self.hooks if implements(hook, "on_forward")]

    @property
    def reads_log_probabilities(self) -> bool:
        """Whether a hook acts at the loss forward, or declares a need for what is computed there."""
        return bool(self.at_forward or self.needs & _FROM_THE_POLICY)


def read_selections(given: Selections) -> list[ReplaySelection]:
    """Read, load and name selections.

    Raises:
        ConfigurationError: A file is not there or no mapping, or a setting in it cannot work.
        PluginError: A plugin does not load.
    """
    return [load_selection(name, item) for name, item in named_selections(given).items()]


def named_selections(given: Selections) -> Mapping[str, str | Path | Mapping[str, Any]]:
    """Selections by name: a file's is its stem, or its path if two have that stem."""
    if isinstance(given, Mapping):
        return given
    paths = [str(item) if isinstance(item, str | Path) else None for item in given]
    stems = [Path(path).stem if path else f"selection {number}" for number, path in enumerate(paths, start=1)]
    names = [path if path and stems.count(stem) > 1 else stem for path, stem in zip(paths, stems, strict=True)]
    return dict(zip(unique_names(names), given, strict=True))


def load_selection(name: str, given: str | Path | Mapping[str, Any]) -> ReplaySelection:
    """Read and load one selection. Unknown keys are ignored, so the file of a whole run will do."""
    mapping = selection_settings(given)
    settings = {key: _setting(name, key, mapping.get(key), default) for key, default in DEFAULTS.items()}
    chosen = _several(mapping.get("rewards"))
    aggregation = mapping.get("loss_aggregation")
    aggregation = None if _is_none(aggregation) else aggregation
    return ReplaySelection(
        name=name,
        rewards=None if chosen is None else _rewards(name, chosen, settings["reward_weights"]),
        hooks=load_advantage_hooks(_several(mapping.get("advantage_hooks")) or []),
        aggregation=load_loss_aggregation(
            TRL_REDUCTIONS[settings["loss_type"]] if aggregation is None else aggregation
        ),
        own_aggregation=aggregation is not None,
        settings=settings,
        left_out={key: mapping[key] for key, usual in LEFT_OUT.items() if mapping.get(key, usual) not in (usual, None)},
    )


def selection_settings(given: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """What a selection's file holds; nothing in an empty one."""
    if isinstance(given, Mapping):
        return given
    return {} if read_values(given) is None else read_settings(given)


def check_replayable(selection: ReplaySelection, batch: SavedBatch, tokens: Tokens) -> None:
    """Refuse a selection that needs data that were not saved; the message names the hook."""
    for hook in selection.hooks:
        label = f"{selection.name}: the advantage hook {plugin_label(hook)!r}"
        needs = set(getattr(hook, "needs", ()))
        if teachers := tuple(getattr(hook, "teachers", ())):
            raise ConfigurationError(f"{label} needs the model {teachers[0]!r}, but a replay runs no model.")
        for need in needs & _NOT_SAVED.keys():
            raise ConfigurationError(f"{label} needs {_NOT_SAVED[need]}, which nothing saves.")
        at_forward = implements(hook, "on_forward")
        if (at_forward or needs & _FROM_THE_POLICY) and tokens.logps_B_T is None:
            does = "acts at the loss forward" if at_forward else "reads the old policy"
            why = (
                f"which {tokens.without_logps} of the {len(batch.texts)} completions of {batch.where} lack: they "
                f"were not trained on yet when the file was written, or were dropped by a compact update."
                if batch.tokens is not None
                else f"which only token records have (token_records: 64 in a run), not {batch.where}."
            )
            raise ConfigurationError(f"{label} {does} and needs log-probabilities, {why}")
    if selection.settings["mask_truncated_completions"] and batch.truncated is None:
        raise ConfigurationError(
            f"{selection.name}: mask_truncated_completions needs to know which completions were cut off at the limit, "
            f"and {batch.where} does not say. Token records do."
        )


def _rewards(selection: str, chosen: Sequence[Any], weights: Sequence[float] | None) -> list[RewardSource]:
    parsed = [
        parse_selection("reward", item) if isinstance(item, str | Mapping | Selection) else None for item in chosen
    ]
    loaded = load_rewards(
        [item for item, read in zip(chosen, parsed, strict=True) if read is None or read.distribution != SAVED]
    )
    calls = iter(zip(loaded, loaded.names, loaded.weights, strict=True))
    sources = []
    for item, read in zip(chosen, parsed, strict=True):
        if read is not None and read.distribution == SAVED:
            if read.parameters or read.guard is not None:
                raise ConfigurationError(f"{selection}: {read} takes saved values; it has a weight and nothing else.")
            sources.append(RewardSource(read.name, 1.0 if read.weight is None else read.weight, saved=read.name))
        else:
            function, name, weight = next(calls)
            plain = None if read is None else Selection(read.name, read.distribution, read.parameters, guard=read.guard)
            key = f"object {id(item)}" if plain is None else json.dumps(plain.plain(), sort_keys=True, default=repr)
            sources.append(RewardSource(name, weight, function, key=key))
    if weights is not None:
        if len(weights) != len(sources):
            raise ConfigurationError(
                f"{selection}: {len(weights)} reward_weights for {len(sources)} rewards; give one for each."
            )
        if any(read is not None and read.weight is not None for read in parsed):
            raise ConfigurationError(f"{selection}: reward weights are given twice, in rewards and in reward_weights.")
    given = [source.weight for source in sources] if weights is None else weights
    return [
        RewardSource(name, float(weight), source.function, source.saved, source.key)
        for source, name, weight in zip(sources, unique_names([source.name for source in sources]), given, strict=True)
    ]


def _setting(selection: str, key: str, value: Any, default: Any) -> Any:
    if value is None or (_is_none(value) and key != "scale_rewards"):
        return default
    if key == "scale_rewards" and isinstance(value, bool | str):  # TRL takes true for group and false for none
        value = {"true": "group", "false": "none"}.get(str(value).lower(), value)
    expected = None
    if key in _CHOICES and value not in _CHOICES[key]:
        expected = f"one of {', '.join(_CHOICES[key])}"
    elif key in ("max_completion_length", "num_generations") and not (type(value) is int and value > 0):
        expected = "a whole number from 1 up"
    elif key == "mask_truncated_completions" and not isinstance(value, bool):
        expected = "true or false"
    elif key == "reward_weights" and not (isinstance(value, list | tuple) and {*map(type, value)} <= {int, float}):
        expected = "a list of numbers"
    if expected is not None:
        raise ConfigurationError(f"{selection}: {key} is {value!r}; it must be {expected}.")
    return value


def _several(value: Any) -> list[Any] | None:
    """A list of selections; None for what TRL's command line takes as not set."""
    if _is_none(value):
        return None
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_none(value: Any) -> bool:
    value = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
    return value is None or (isinstance(value, str) and value.lower() in ("none", "null"))
