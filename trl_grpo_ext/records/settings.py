"""The hyper-parameters of a run, recorded beside its manifest: `output_dir/trl_grpo_ext_settings.json`.

TRL keeps them in a pickle, which is unsafe to open. The record has the settings that differ from the defaults, those in
`ALWAYS`, the model, the number of processes and the adapter; it leaves out `NEVER` and secrets.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from ..errors import ManifestError
from .manifest import plain_mapping
from .writing import write_atomically

FILE = "trl_grpo_ext_settings.json"  # in a run's folder
_COURSE = ("learning_rate", "lr_scheduler_type", "max_steps", "num_train_epochs", "seed")
_BATCHES = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations", "num_generations")
_SAMPLING = ("max_completion_length", "temperature")
_LOSS = ("loss_type", "scale_rewards", "beta", "epsilon", "compact_updates")
ALWAYS = (*_COURSE, *_BATCHES, *_SAMPLING, *_LOSS)  # recorded even at their default values
NEVER = ("output_dir", "logging_dir", "run_name", "disable_tqdm", "local_rank", "accelerator_config", "token_records")
"""Settings that say nothing of what is learned."""

_FORMAT = 1
_OF_ADAPTER = ("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "init_lora_weights")


def settings_of(trainer: Any) -> dict[str, Any]:
    """The settings of a constructed trainer, ours or TRL's, as JSON."""
    args = trainer.args
    found: dict[str, Any] = {}
    if path := getattr(getattr(trainer.model, "config", None), "_name_or_path", None):
        found["model"] = str(path)
    found["processes"] = int(trainer.accelerator.num_processes)
    adapters = getattr(trainer.model, "peft_config", None)
    if isinstance(adapters, Mapping) and adapters:
        adapter = next(iter(adapters.values()))
        kept = {name: getattr(adapter, name) for name in _OF_ADAPTER if hasattr(adapter, name)}
        found["adapter"] = {"kind": type(adapter).__name__, **kept}
    for field in fields(args):
        value = getattr(args, field.name, None)
        if field.name not in NEVER and (field.name in ALWAYS or _differs(field, value)):
            found[field.name] = value
    return plain_mapping(found)


def write_settings(trainer: Any, path: str | os.PathLike[str]) -> None:
    write_atomically(path, json.dumps({"format": _FORMAT, "settings": settings_of(trainer)}, indent=2) + "\n")


def from_plain(value: Any) -> dict[str, Any]:
    """The settings in a file's content."""
    if not isinstance(value, dict) or value.get("format") != _FORMAT or not isinstance(value.get("settings"), dict):
        raise ManifestError("it is no record of settings that this version reads")
    return dict(value["settings"])


def _differs(field: Field[Any], value: Any) -> bool:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    default = None if default is MISSING else default
    if isinstance(value, (int, float)) or isinstance(default, (int, float)):
        return bool(value != default)
    return bool((value or default) and value != default)  # None, "" and [] are all "not set"
