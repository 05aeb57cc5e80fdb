"""Everything the doctor knows of a run before weights load: launch, settings, machine, model, plugins and batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from trl.trainer.utils import RepeatSampler

from ...credit.chain import HookChain
from ...errors import ConfigurationError, PluginError
from ...guard.untrusted import one_line, parse_yaml
from ...plugins.kinds import LABELS, Kind
from ...plugins.loading import resolve
from ...trainer.resampling import read_resample, refuse_inexact
from ..ranges import SIZES
from .environment import Environment
from .launch_file import LaunchPlan
from .model import Adapters, Sizes
from .problem import Problem
from .run_file import RunPlan

_LISTS: dict[str, Kind] = {
    "rewards": "reward",
    "advantage_hooks": "advantage_hook",
    "loss_aggregation": "loss_aggregation",
}
_LONGEST_LINE, _MOST_BYTES_COUNTED = 1_000_000, 200_000_000
_ROWS_OF_GSM8K = 7473


@dataclass(frozen=True)
class Plugins:
    """The plugins that the run selects, built, and why others could not be built."""

    rewards: Mapping[str, Any] = field(default_factory=dict)
    hooks: Mapping[str, Any] = field(default_factory=dict)
    aggregation: Any = None
    group_filter: Any = None
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class Batch:
    """Sizes over all processes, as the real `GRPOExtConfig` has them. A row is one completion; None means unknown."""

    generation_batch_size: int
    prompts_per_generation_batch: int
    rows_per_process: int  # that one process generates at once
    completions_per_optimizer_step: int
    optimizer_steps_per_generation: Fraction  # no integer if generation and optimizer steps are out of step
    optimizer_steps: int | None
    prompts: int | None
    eval_batch: int

    @classmethod
    def of(cls, run: RunPlan) -> Batch | None:
        """Derive the sizes from the configuration and its number of processes; None without a configuration."""
        config, prompts = run.config, prompts_of(run)
        if config is None or any(run[name] is not None and run[name] < 1 for name in SIZES):
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
    """Everything that is known before weights load; None where it cannot be known."""

    launch: LaunchPlan
    run: RunPlan
    machine: Environment
    sizes: Sizes | None = None
    adapters: Adapters | None = None  # what PEFT makes of the model
    plugins: Plugins = field(default_factory=Plugins)
    batch: Batch | None = None
    columns: frozenset[str] | None = None  # of the data set, if it is a readable file

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
    """Import and build the selected plugins one by one, to report every broken one; then what the chain refuses."""
    built: dict[str, dict[str, Any]] = {name: {} for name in _LISTS}
    problems: list[Problem] = []

    def attempt(action: Callable[[], Any], fix: str) -> Any:
        try:
            return action()
        except (ConfigurationError, PluginError) as error:
            problems.append(Problem("error", "plugins", one_line(error, 600), fix))
            return None

    for name, kind in _LISTS.items():
        for selection in _selections(run.settings.get(name)):
            label = str(selection.get("name", selection)) if isinstance(selection, Mapping) else str(selection)
            fix = f"Correct {LABELS[kind]} {one_line(label, 80)} in `{name}`."
            loaded = attempt(lambda kind=kind, selection=selection: resolve(kind, selection), fix)  # type: ignore[misc]
            if loaded is not None:
                key = label if loaded.selection is None else str(loaded.selection)
                place = built[name]
                place[key if key not in place else f"{key} ({len(place) + 1})"] = loaded.object
    hooks = built["advantage_hooks"]
    aggregation = next(iter(built["loss_aggregation"].values()), None)
    group_filter = attempt(lambda: _group_filter(run.settings.get("resample")), "Correct `resample` or its filter.")
    if not problems:
        attempt(lambda: HookChain([*hooks.values()], aggregation), "Take one of them out.")
    if not problems and group_filter is not None:
        attempt(lambda: refuse_inexact(group_filter, [*hooks.values()], None, None), "Take one of them out.")
    return Plugins(built["rewards"], hooks, aggregation, group_filter, tuple(problems))


def _group_filter(value: Any) -> Any:
    """The filter of `resample`, built; as a mapping, or as the command line has one."""
    if isinstance(value, str):
        value = None if value.lower() in ("none", "null") else value
        value = parse_yaml(value, "resample") if value is not None and value.lstrip().startswith("{") else value
    settings = read_resample(value)
    return None if settings is None else resolve("group_filter", settings.filter).object


def _selections(value: Any) -> list[Any]:
    if value is None:
        return []
    values = list(value) if isinstance(value, list | tuple) else [value]
    return [] if [str(item).lower() for item in values] in (["none"], ["null"]) else values


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
    return generated if isinstance(generated, int) and str(run["model_name_or_path"]) == str(model) else None
