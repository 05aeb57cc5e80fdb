"""Everything the doctor knows of a run before weights load: launch, settings, machine, model, plugins and batch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from trl.trainer.utils import RepeatSampler

from ...errors import ConfigurationError, PluginError
from ...guard.untrusted import one_line
from ...plugins.kinds import LABELS, Kind
from ...plugins.loading import resolve
from ..ranges import SIZES
from .environment import Environment
from .launch_file import LaunchPlan
from .model import Adapters, Sizes
from .reading import Problem
from .run_file import PLUGIN_FIELDS, RunPlan

_KINDS: tuple[Kind, ...] = ("reward", "advantage_hook", "loss_aggregation")
_LONGEST_LINE, _MOST_BYTES_COUNTED = 1_000_000, 200_000_000
_ROWS_OF_GSM8K = 7473


@dataclass(frozen=True)
class Plugins:
    """The plugins that the run selects, built.

    Attributes:
        rewards: Reward functions by name.
        hooks: Advantage hooks by name.
        aggregation: The loss aggregation.
        problems: Plugins that could not be built, and why.
    """

    rewards: Mapping[str, Any] = field(default_factory=dict)
    hooks: Mapping[str, Any] = field(default_factory=dict)
    aggregation: Any = None
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class Batch:
    """Sizes over all processes, as the real `GRPOExtConfig` has them. A row is one completion; None means unknown.

    Attributes:
        generation_batch_size: Completions generated at once.
        prompts_per_generation_batch: Distinct prompts among them.
        rows_per_process: Completions that one process generates at once.
        completions_per_optimizer_step: Completions in the gradient of one optimizer step.
        optimizer_steps_per_generation: Not an integer if generation and optimizer steps are out of step.
        optimizer_steps: Of the whole run.
        prompts: Rows of the training set.
        eval_batch: Completions in one evaluation batch.
    """

    generation_batch_size: int
    prompts_per_generation_batch: int
    rows_per_process: int
    completions_per_optimizer_step: int
    optimizer_steps_per_generation: Fraction
    optimizer_steps: int | None
    prompts: int | None
    eval_batch: int

    @classmethod
    def of(cls, run: RunPlan) -> Batch | None:
        """Derive the sizes from the configuration and its number of processes; None without a configuration."""
        config, prompts = run.config, prompts_of(run)
        if config is None or sizes_below_one(run):
            return None
        assert config.generation_batch_size is not None
        assert config.steps_per_generation is not None
        processes, accumulation = config.world_size, config.gradient_accumulation_steps
        per_batch = config.generation_batch_size // config.num_generations
        micro_batches = config.steps_per_generation * config.num_iterations
        steps = config.max_steps if config.max_steps > 0 else None
        if steps is None and prompts is not None and per_batch > 0:
            sampler = RepeatSampler(
                range(prompts), config.num_generations, batch_size=per_batch, repeat_count=micro_batches
            )
            of_an_epoch = -(-len(sampler) // config.generation_batch_size // accumulation)
            steps = -int(-config.num_train_epochs * of_an_epoch // 1)
        return cls(
            generation_batch_size=config.generation_batch_size,
            prompts_per_generation_batch=per_batch,
            rows_per_process=config.generation_batch_size // processes,
            completions_per_optimizer_step=config.per_device_train_batch_size * processes * accumulation,
            optimizer_steps_per_generation=Fraction(micro_batches, accumulation),
            optimizer_steps=steps,
            prompts=prompts,
            eval_batch=config.per_device_eval_batch_size * processes,
        )


@dataclass(frozen=True)
class Case:
    """Everything that is known before weights load.

    Attributes:
        launch: What the launcher starts.
        run: The settings of the run.
        machine: The machine that it will run on.
        sizes: The model's sizes; None if its config cannot be found.
        adapters: What PEFT makes of the model; None without `use_peft` or sizes.
        plugins: The selected plugins.
        batch: None if the configuration refuses the settings.
        columns: Columns of the data set, if it is a readable file; else None.
    """

    launch: LaunchPlan
    run: RunPlan
    machine: Environment
    sizes: Sizes | None = None
    adapters: Adapters | None = None
    plugins: Plugins = field(default_factory=Plugins)
    batch: Batch | None = None
    columns: frozenset[str] | None = None

    @property
    def bits(self) -> int:
        """4 or 8 if the base model is quantised, else 0."""
        return 4 if self.run["load_in_4bit"] else 8 if self.run["load_in_8bit"] else 0

    @property
    def engine(self) -> str:
        """The launcher's."""
        return self.launch.engine

    @property
    def is_zero(self) -> bool:
        """Any stage of DeepSpeed's ZeRO."""
        return self.engine.startswith("zero")

    @property
    def is_fsdp(self) -> bool:
        """Either version of FSDP."""
        return self.engine.startswith("fsdp")

    @property
    def is_fsdp2(self) -> bool:
        """With or without replicas."""
        return self.engine.startswith("fsdp2")

    @property
    def keeps_no_master_weights(self) -> bool:
        """Whether there are no float32 master weights: ZeRO keeps copies, and FSDP2 upcasts."""
        return self.engine in ("one_process", "ddp")

    @property
    def on_cpu(self) -> bool:
        """Whether the script sets `use_cpu`."""
        return bool(self.run["use_cpu"])

    @property
    def dtype(self) -> str:
        """Data type of the loaded weights; to transformers None means the checkpoint's own."""
        return str(self.run["dtype"] or "auto")

    @property
    def bf16(self) -> bool:
        """Whether bf16 is on; TRL turns it on if neither bf16 nor fp16 is set."""
        return bool(self.run["bf16"] if self.run.config is None else self.run.config.bf16)

    @property
    def precision(self) -> str:
        """Precision that the run computes in; its own flags override the launcher's."""
        own = "fp16" if self.run["fp16"] else "bf16" if self.bf16 else None
        return own or {"fp8": "bf16"}.get(self.launch.mixed_precision, self.launch.mixed_precision)

    @property
    def checkpointing(self) -> bool:
        """Whether activations are recomputed, by either name of that setting."""
        new = self.run.get("activation_checkpointing")
        return bool(self.run.get("gradient_checkpointing") if new is None else new)

    @property
    def reentrant(self) -> bool:
        """Whether reentrant checkpointing is on, by either name."""
        given = [self.run.get(f"{name}_checkpointing_kwargs") for name in ("activation", "gradient")]
        return self.checkpointing and any(isinstance(v, Mapping) and v.get("use_reentrant") is True for v in given)

    @property
    def colocated(self) -> bool:
        """Whether vLLM shares the GPUs."""
        return bool(self.run["use_vllm"]) and self.run["vllm_mode"] == "colocate"


def load_plugins(run: RunPlan) -> Plugins:
    """Import and build the selected plugins one by one, to report every broken one."""
    built: dict[Kind, dict[str, Any]] = {kind: {} for kind in _KINDS}
    problems = []
    for kind, name in zip(_KINDS, PLUGIN_FIELDS, strict=True):
        for selection in _selections(run.settings.get(name)):
            label = str(selection.get("name", selection)) if isinstance(selection, Mapping) else str(selection)
            try:
                loaded = resolve(kind, selection)
            except (ConfigurationError, PluginError) as error:
                fix = f"Correct {LABELS[kind]} {one_line(label, 80)} in `{name}`."
                problems.append(Problem("error", "plugins", one_line(error, 600), fix))
                continue
            key = label if loaded.selection is None else str(loaded.selection)
            place = built[kind]
            place[key if key not in place else f"{key} ({len(place) + 1})"] = loaded.object
    aggregation = next(iter(built["loss_aggregation"].values()), None)
    return Plugins(built["reward"], built["advantage_hook"], aggregation, tuple(problems))


def _selections(value: Any) -> list[Any]:
    if value is None:
        return []
    values = list(value) if isinstance(value, list | tuple) else [value]
    return [] if [str(item).lower() for item in values] in (["none"], ["null"]) else values


def sizes_below_one(run: RunPlan) -> str:
    """Batch sizes below 1."""
    return ", ".join(f"{name} {run[name]}" for name in SIZES if run[name] is not None and run[name] < 1)


def columns_of(run: RunPlan) -> frozenset[str] | None:
    """Columns of the first row of a data set in JSON Lines; None for anything else."""
    path = run.get("dataset_path")
    if not isinstance(path, str) or Path(path).suffix != ".jsonl":
        return None
    try:
        with Path(path).open(encoding="utf-8") as file:
            row = json.loads(file.readline(_LONGEST_LINE))
    except (OSError, ValueError, RecursionError):
        return None
    return frozenset(row) if isinstance(row, dict) else None


def prompts_of(run: RunPlan) -> int | None:
    """Rows to train on, if settings or a file say."""
    path, name = run.get("dataset_path"), run.get("dataset_name")
    if isinstance(path, str):
        try:
            if Path(path).suffix == ".jsonl" and Path(path).stat().st_size <= _MOST_BYTES_COUNTED:
                with Path(path).open("rb") as file:
                    return sum(1 for line in file if line.strip())
        except (OSError, ValueError):
            pass
        return None
    if name == "openai/gsm8k":
        return _ROWS_OF_GSM8K
    model = None if run.script is None else run.script.embedded_model
    generated = run.own.get("train_problems") if model is not None and name is None else None
    counts = str(run["model_name_or_path"]) == str(model) and isinstance(generated, int)
    return int(generated) if counts and generated is not None else None
