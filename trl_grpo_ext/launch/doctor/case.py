"""Everything the doctor knows of a run before weights load: launch, settings, machine, model and plugins."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...credit.chain import HookChain
from ...errors import ConfigurationError, PluginError
from ...guard.untrusted import one_line, parse_yaml
from ...plugins.kinds import LABELS, Kind
from ...plugins.loading import resolve
from ...trainer.resampling import read_resample, refuse_inexact
from . import Problem
from .environment import Environment
from .launch_file import LaunchPlan
from .model import Adapters, Sizes
from .run_file import RunPlan

_LISTS: dict[str, Kind] = {
    "rewards": "reward",
    "advantage_hooks": "advantage_hook",
    "loss_aggregation": "loss_aggregation",
}
_MOST_BYTES_COUNTED = 200_000_000


@dataclass(frozen=True)
class Plugins:
    """The plugins that the run selects, built, and why others could not be built."""

    rewards: Mapping[str, Any] = field(default_factory=dict)
    hooks: Mapping[str, Any] = field(default_factory=dict)
    aggregation: Any = None
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class Case:
    """Everything that is known before weights load; None where it cannot be known."""

    launch: LaunchPlan
    run: RunPlan
    machine: Environment
    sizes: Sizes | None = None
    adapters: Adapters | None = None  # what PEFT makes of the model
    plugins: Plugins = field(default_factory=Plugins)

    @property
    def bits(self) -> Literal[0, 4, 8]:
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
    def checkpointing(self) -> bool:
        """Whether activations are recomputed, by either name of that setting."""
        new = self.run.get("activation_checkpointing")
        return bool(self.run.get("gradient_checkpointing") if new is None else new)


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
        attempt(lambda: refuse_inexact(group_filter, [*hooks.values()], None), "Take one of them out.")
    return Plugins(built["rewards"], hooks, aggregation, tuple(problems))


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


def prompts_of(run: RunPlan) -> int | None:
    """Rows of the run's `dataset_path`; None unless that is a JSON Lines file of usual size."""
    path = run.get("dataset_path")
    if not isinstance(path, str) or not path.endswith(".jsonl"):
        return None
    try:
        if Path(path).stat().st_size > _MOST_BYTES_COUNTED:
            return None
        with Path(path).open("rb") as file:
            return sum(1 for line in file if line.strip())
    except (OSError, ValueError):
        return None
