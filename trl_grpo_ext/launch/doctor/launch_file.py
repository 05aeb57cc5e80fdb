"""What an Accelerate launch file starts, as read by Accelerate itself."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...errors import ConfigurationError
from ...guard.untrusted import one_line, read_settings
from . import Problem

Engine = Literal["one_process", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2", "fsdp2_hybrid"]
_SECTIONS = ("deepspeed_config", "fsdp_config", "parallelism_config")
_ZERO: dict[str, Engine] = {"0": "ddp", "1": "zero1", "2": "zero2", "3": "zero3"}


@dataclass(frozen=True)
class LaunchPlan:
    """What `accelerate launch` starts."""

    source: str | None = None  # the launch file; None for the launcher's own defaults
    engine: Engine = "one_process"  # if launcher and script agree
    processes: int = 1  # on all machines together
    machines: int = 1
    machine_rank: int | None = None  # from the launcher's command line
    distributed_type: str = "NO"
    use_cpu: bool = False  # the launcher's, which is not the script's
    rdzv_backend: str = "static"  # from the command line; accelerate ignores it in a file
    deepspeed: Mapping[str, Any] = field(default_factory=dict)  # in DeepSpeed's own shape
    fsdp: Mapping[str, Any] = field(default_factory=dict)  # without their prefix
    raw: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    @property
    def name(self) -> str:
        """The file's name, for messages."""
        return "the launcher's defaults" if self.source is None else one_line(Path(self.source).name, 300)

    @property
    def processes_per_machine(self) -> int:
        """Processes on one machine, at least one."""
        return max(1, self.processes // max(1, self.machines))

    @property
    def zero(self) -> Mapping[str, Any]:
        """DeepSpeed's `zero_optimization`."""
        return _mapping(self.deepspeed.get("zero_optimization"))

    def offloads(self, what: Literal["optimizer", "param"]) -> bool:
        """Whether DeepSpeed keeps it on the CPU or a disk."""
        return str(_mapping(self.zero.get(f"offload_{what}")).get("device", "none")) in ("cpu", "nvme")

    @property
    def accumulation(self) -> int | None:
        """Gradient accumulation that the file sets; None if it leaves it to the script."""
        value = self.deepspeed.get("gradient_accumulation_steps")
        return value if isinstance(value, int) else None


def read_launch_file(
    path: str | Path | None, *, gpus: int = 0, processes: int | None = None, **more: Any
) -> LaunchPlan:
    """Read a launch file with Accelerate's own reader, without one for the launcher's defaults with so many GPUs.

    `processes` and `more` are the launcher's options that override the file.
    """
    from accelerate.commands.config import config_args

    if path is None:
        path = config_args.default_config_file
        if not Path(path).is_file():
            count = processes or max(1, gpus)
            engine: Engine = "ddp" if count > 1 else "one_process"
            return LaunchPlan(engine=engine, processes=count, distributed_type="MULTI_GPU" if count > 1 else "NO")
    settings, name = read_settings(path), one_line(path, 300)
    if settings.get("distributed_type") is False:
        raise ConfigurationError(f'distributed_type in {name} is NO, which YAML reads as false: write "NO" in quotes.')
    for key in _SECTIONS:
        if not isinstance(settings.get(key, {}), dict):
            raise ConfigurationError(f"{key} in {name} is {one_line(repr(settings[key]), 60)}, not a mapping.")
    try:
        cluster = config_args.load_config_from_file(str(path))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigurationError(f"Accelerate cannot use {name}: {one_line(error, 600)}") from error
    if not isinstance(cluster, config_args.ClusterConfig):
        raise ConfigurationError(f"{name} is for SageMaker; the doctor only knows launches on your own machines.")
    kind = str(getattr(cluster.distributed_type, "value", cluster.distributed_type))
    sections = {key: _mapping(settings.get(key)) for key in _SECTIONS}
    json_path = sections["deepspeed_config"].get("deepspeed_config_file")
    if isinstance(json_path, str):
        try:
            deepspeed: Mapping[str, Any] = read_settings(json_path)
        except ConfigurationError as error:
            why = f"deepspeed_config_file: {error} Paths are relative to where you launch."
            raise ConfigurationError(why) from error
    else:
        deepspeed = _as_deepspeed(sections["deepspeed_config"])
    fsdp = {key.removeprefix("fsdp_"): value for key, value in sections["fsdp_config"].items()}
    more = {key: value for key, value in more.items() if value is not None}
    return LaunchPlan(
        source=str(path),
        engine=_engine(kind, deepspeed, fsdp, sections["parallelism_config"], name),
        processes=_count(cluster.num_processes if processes is None else processes, "num_processes", name),
        machines=_count(cluster.num_machines, "num_machines", name),
        distributed_type=kind,
        use_cpu=bool(cluster.use_cpu),
        deepspeed=deepspeed if kind == "DEEPSPEED" else {},
        fsdp=fsdp if kind == "FSDP" else {},
        raw=settings,
        problems=tuple(_ignored_keys(sections, name)),
        **more,
    )


def _engine(kind: str, deepspeed: Any, fsdp: Any, parallelism: Any, name: str) -> Engine:
    if kind == "DEEPSPEED":
        stage = str(_mapping(deepspeed.get("zero_optimization")).get("stage", 2))
        if stage not in _ZERO:
            raise ConfigurationError(f"The ZeRO stage in {name} is {one_line(stage, 60)}, not 0 to 3.")
        return _ZERO[stage]
    if kind == "FSDP":
        version = str(fsdp.get("version", 1))
        if version not in ("1", "2"):
            raise ConfigurationError(f"fsdp_version in {name} is {one_line(version, 60)}, not 1 or 2.")
        replicas = parallelism.get("parallelism_config_dp_replicate_size", 1)
        return "fsdp1" if version == "1" else "fsdp2" if replicas in (1, "1") else "fsdp2_hybrid"
    # Without mpirun the launcher starts one process for MULTI_CPU; a rule reports it.
    return "ddp" if kind.startswith("MULTI_") and kind != "MULTI_CPU" else "one_process"


def _ignored_keys(sections: Mapping[str, Mapping[str, Any]], name: str) -> list[Problem]:
    """Keys of the inner mappings that the launcher does not know: Accelerate silently ignores them."""
    from accelerate.commands.launch import launch_command_parser

    known = {action.dest for action in launch_command_parser()._actions}
    problems = []
    for section, given in sections.items():
        for key in given:
            option = f"fsdp_{key}" if section == "fsdp_config" and not key.startswith("fsdp") else key
            if option in known:
                continue
            near = difflib.get_close_matches(option, known, n=1, cutoff=0.7)
            message = f"{section} in {name} has {one_line(key, 60)!r}, which Accelerate ignores silently."
            fix = f"Write {near[0]!r}." if near else "Take it out."
            problems.append(Problem("error" if near else "warning", "launch file", message, fix))
    return problems


def _as_deepspeed(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The launch file's DeepSpeed keys in the shape of DeepSpeed's own settings."""
    zero = {
        "stage": given.get("zero_stage", 2),
        "offload_optimizer": {"device": given.get("offload_optimizer_device", "none")},
        "offload_param": {"device": given.get("offload_param_device", "none")},
    }
    accumulation = given.get("gradient_accumulation_steps", "auto")
    return {"zero_optimization": zero, "gradient_accumulation_steps": accumulation}


def _count(value: object, key: str, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{key} in {name} must be a number from 1 up, got {one_line(repr(value), 60)}.")
    return value


def _mapping(value: object) -> Mapping[str, Any]:
    return {str(key): inner for key, inner in value.items()} if isinstance(value, Mapping) else {}
