"""Everything that is known of a run where its trainer is constructed, as objects."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...credit.flow import plugin_label
from ...guard.untrusted import one_line
from ..engine import launched_engine
from . import Machine, Problem
from .launch import Launch
from .model import Adapters, Sizes, adapters_of, load_config, on_meta, sizes_of, trainable_of


@dataclass(frozen=True)
class Case:
    """A run before its weights load; None where something is not known."""

    launch: Launch
    machine: Machine
    args: Any  # the trainer's
    devices: tuple[int, ...] = ()  # bytes of each GPU of a machine; 0 if not known
    model: str = ""  # its name or folder
    model_settings: Mapping[str, Any] = field(default_factory=dict)  # what its `from_pretrained` gets
    trainer: Any = None  # not initialised beyond what the script's own class does
    peft_config: Any = None
    quantisation: Any = None
    rewards: tuple[Any, ...] = ()
    prompts: int | None = None  # rows of the training data
    sizes: Sizes | None = None
    adapters: Adapters | None = None  # what PEFT makes of the model

    def __getitem__(self, name: str) -> Any:
        """A training argument; None if this trainer has no such one."""
        return getattr(self.args, name, None)

    @property
    def bits(self) -> int:
        """4 or 8 if the base model is quantised, else 0."""
        return next((bits for bits in (4, 8) if getattr(self.quantisation, f"load_in_{bits}bit", False)), 0)

    @property
    def uses_adapters(self) -> bool:
        """Whether adapters are trained in place of the weights."""
        return self.adapters is not None or self.peft_config is not None

    @property
    def engine(self) -> str:
        """What the launcher and the arguments ask for."""
        name = launched_engine({**os.environ, **self.launch.environment}, self.args) or "fsdp2"
        replicas = self.launch.environment.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1") != "1"
        return f"{name}_hybrid" if name == "fsdp2" and replicas else name

    @property
    def dtype(self) -> str:
        """Data type of the loaded weights; TRL's default is float32, and `auto` the checkpoint's own."""
        return str(self.model_settings.get("dtype", "float32") or "auto").removeprefix("torch.")

    @property
    def keeps_adapters_in_float32(self) -> bool:
        """Whether TRL's cast of a quantised model's adapters is undone, as by the recipes; True if that is unknown."""
        return self.trainer is None or bool(getattr(self.trainer, "adapters_in_float32", False))

    def described(self, trainer: Any) -> str:
        launch = self.launch
        machines = f" on {launch.machines} machines" if launch.machines > 1 else ""
        processes = f"{launch.processes} process{'es' * (launch.processes != 1)}{machines}"
        size = "" if self.sizes is None else f", {self.sizes.parameters:,} parameters"
        weights = f"LoRA of rank {getattr(self.peft_config, 'r', '?')}" if self.uses_adapters else "all weights"
        quantised = f", on {self.bits}-bit weights" if self.bits else ""
        parts = [f"{self.engine}, {processes} ({launch.name})", type(trainer).__name__]
        parts += [f"{self.model or 'no model is named'}{size}", f"{weights}{quantised}"]
        if self.prompts is not None:
            parts.append(f"{self.prompts} prompts")
        of_ours = ("advantage_hooks", "loss_aggregation", "group_filter", "token_losses", "prompt_sampler")
        for kind in ("rewards", *of_ours):
            plugins = self.rewards if kind == "rewards" else getattr(trainer, kind, None)
            listed = plugins if isinstance(plugins, list | tuple) else [plugins]
            if own := [one if isinstance(one, str) else plugin_label(one) for one in listed if one]:
                parts.append(f"{kind.replace('_', ' ')} {', '.join(own)}")
        return "; ".join(parts)


def case_of(launch: Launch, machine: Machine, trainer: Any, given: Mapping[str, Any]) -> tuple[Case, list[Problem]]:
    """The case of a trainer that got these arguments, and why something of it is not known."""
    args = given.get("args")
    settings = dict(getattr(args, "model_init_kwargs", None) or {})
    facts: dict[str, Any] = {"peft_config": given.get("peft_config"), "model_settings": settings}
    facts["quantisation"] = given.get("quantization_config") or settings.get("quantization_config")
    unknown: list[Problem] = []
    try:
        unknown += _look_at_model(given.get("model"), settings, facts)
    except Exception as error:  # a config is an untrusted file, and a model any module
        fix = "Name another model, or check its config.json."
        unknown.append(Problem("warning", "model", one_line(error, 400), fix))
    data: Any = given.get("train_dataset")
    rewards = given.get("reward_funcs") or ()
    facts["rewards"] = tuple(rewards) if isinstance(rewards, list | tuple) else (rewards,)
    facts["prompts"] = len(data) if hasattr(data, "__len__") else None
    return Case(launch, machine, args, _devices(machine), trainer=trainer, **facts), unknown


def _look_at_model(model: Any, settings: dict[str, Any], facts: dict[str, Any]) -> Iterator[Problem]:
    """Add the model's name, quantisation, sizes and adapters to the facts, as far as they are known."""
    if not model:
        return
    if isinstance(model, str):
        facts["model"] = model
        config, why = load_config(model, str(settings.get("revision") or "main"))
        if config is None:
            fix = "It is estimated once the model's config.json is in the hub's cache, or a folder is named."
            yield Problem("note", "memory", f"The model's sizes are not known. {why}", fix)
            return
        model = on_meta(config)
    else:  # a script's own model: its settings are what it has
        settings["dtype"] = str(model.dtype)
    if facts["peft_config"] is None and not trainable_of(model):
        fix = "An adapter that goes on training is loaded with PeftModel.from_pretrained(..., is_trainable=True)."
        yield Problem("error", "model", "No weight of the model is trained: all are frozen.", fix)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    facts.setdefault("model", str(getattr(base.config, "name_or_path", "")))
    facts["quantisation"] = facts["quantisation"] or getattr(base.config, "quantization_config", None)
    facts["sizes"] = sizes_of(base)
    if base is not model:
        facts["adapters"] = Adapters(trainable_of(model))
    elif facts["peft_config"] is not None:
        facts["adapters"] = adapters_of(model, facts["peft_config"])


def _devices(machine: Machine) -> tuple[int, ...]:
    """Bytes of each GPU; 0 where another machine's were not given."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if machine.gpus is not None or machine.gpu_bytes is not None:
        return (machine.gpu_bytes or 0,) * count
    return tuple(int(torch.cuda.get_device_properties(index).total_memory) for index in range(count))
