"""Everything that is known of a run where its trainer is constructed, as objects."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...guard.untrusted import one_line
from ..engine import launched_engine
from . import Machine, Problem
from .launch import Launch
from .model import Adapters, Sizes, adapters_of, load_config, on_meta, sizes_of, trainable_of

PLUGINS = ("advantage_hooks", "loss_aggregation", "group_filter")


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
    def bits(self) -> Literal[0, 4, 8]:
        """4 or 8 if the base model is quantised, else 0."""
        if getattr(self.quantisation, "load_in_4bit", False):
            return 4
        return 8 if getattr(self.quantisation, "load_in_8bit", False) else 0

    @property
    def uses_adapters(self) -> bool:
        """Whether adapters are trained in place of the weights."""
        return self.adapters is not None or self.peft_config is not None

    @property
    def engine(self) -> str:
        """What the launcher and the arguments ask for."""
        name = launched_engine({**os.environ, **self.launch.environment}, self.args) or "fsdp2"
        return f"{name}_hybrid" if name == "fsdp2" and self.launch.is_hybrid else name

    @property
    def is_zero(self) -> bool:
        """Any stage of DeepSpeed's ZeRO."""
        return self.engine.startswith("zero")

    @property
    def is_fsdp(self) -> bool:
        """Either version of FSDP."""
        return self.engine.startswith("fsdp")

    @property
    def keeps_no_master_weights(self) -> bool:
        """Whether there are no float32 master weights: ZeRO keeps copies, and FSDP2 upcasts."""
        return self.engine in ("one_process", "ddp")

    @property
    def on_cpu(self) -> bool:
        """Whether the arguments choose the CPU."""
        return bool(self["use_cpu"])

    @property
    def dtype(self) -> str:
        """Data type of the loaded weights; TRL's default is float32, and `auto` the checkpoint's own."""
        given = self.model_settings.get("dtype", self.model_settings.get("torch_dtype", "float32"))
        return str("auto" if given is None else given).removeprefix("torch.")

    @property
    def checkpointing(self) -> bool:
        """Whether activations are recomputed, by either name of that setting."""
        new = self["activation_checkpointing"]
        return bool(self["gradient_checkpointing"] if new is None else new)

    @property
    def keeps_adapters_in_float32(self) -> bool:
        """Whether TRL's cast of a quantised model's adapters is undone, as by the recipes; True if that is unknown."""
        return self.trainer is None or bool(getattr(self.trainer, "adapters_in_float32", False))

    @property
    def output_dir(self) -> str:
        """Where checkpoints go."""
        return str(self["output_dir"] or "trainer_output")

    @property
    def device_memory(self) -> int | None:
        """Bytes of the smallest GPU."""
        return min((size for size in self.devices if size), default=None)

    def disk(self) -> tuple[int | None, str]:
        """Free bytes at the nearest existing folder, and why nothing can be written there."""
        try:
            place = Path(self.output_dir).expanduser().absolute()
            while not place.is_dir():
                if place.is_file():
                    return None, f"{one_line(place, 300)} is a file, not a folder"
                place = place.parent
            problem = "" if os.access(place, os.W_OK | os.X_OK) else f"{one_line(place, 300)} may not be written to"
            return shutil.disk_usage(place).free, problem
        except (OSError, ValueError) as error:  # ValueError: a null character
            return None, one_line(error, 300)


def case_of(launch: Launch, machine: Machine, trainer: Any, given: Mapping[str, Any]) -> tuple[Case, list[Problem]]:
    """The case of a trainer that got these arguments, and why something of it is not known."""
    args, problems = given.get("args"), list[Problem]()
    model, settings = given.get("model"), dict(getattr(args, "model_init_kwargs", None) or {})
    quantisation = given.get("quantization_config") or settings.get("quantization_config")
    sizes, adapters, name = None, None, ""
    peft_config = given.get("peft_config")
    try:
        if isinstance(model, str) and model:
            name = model
            config, source = load_config(model, str(settings.get("revision") or "main"))
            if config is None:
                fix = "It is estimated once the model's config.json is in the hub's cache, or a folder is named."
                problems.append(Problem("note", "memory", f"The model's sizes are not known. {source}", fix))
            else:
                quantisation = quantisation or getattr(config, "quantization_config", None)
                model = on_meta(config)
        if model is not None and not isinstance(model, str):
            base = model.get_base_model() if hasattr(model, "get_base_model") else model
            if not name:  # a script's own model: its settings are what it has
                name = str(getattr(base.config, "name_or_path", "") or getattr(base.config, "_name_or_path", ""))
                quantisation = quantisation or getattr(base.config, "quantization_config", None)
                settings["dtype"] = str(base.dtype)
            sizes = sizes_of(base)
            if base is not model:
                adapters = Adapters(trainable_of(model), None, (), ())
            elif peft_config is not None:
                adapters = adapters_of(model, peft_config)
    except Exception as error:  # a config is an untrusted file, and a model any module
        fix = "Name another model, or check its config.json."
        problems.append(Problem("warning", "model", one_line(error, 400), fix))
    data: Any = given.get("train_dataset")
    rewards = given.get("reward_funcs")
    case = Case(
        launch=launch,
        machine=machine,
        args=args,
        devices=_devices(machine),
        model=name,
        model_settings=settings,
        trainer=trainer,
        peft_config=peft_config,
        quantisation=quantisation,
        rewards=tuple(rewards) if isinstance(rewards, list | tuple) else () if rewards is None else (rewards,),
        prompts=len(data) if hasattr(data, "__len__") else None,
        sizes=sizes,
        adapters=adapters,
    )
    return case, problems


def _devices(machine: Machine) -> tuple[int, ...]:
    """Bytes of each GPU; 0 where another machine's were not given."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if machine.elsewhere or machine.assumed:
        return (machine.gpu_bytes or 0,) * count
    return tuple(int(torch.cuda.get_device_properties(index).total_memory) for index in range(count))
