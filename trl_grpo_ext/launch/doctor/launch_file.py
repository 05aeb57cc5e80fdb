"""What an Accelerate launch file starts: read by Accelerate itself, and told as one plan."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from ...errors import ConfigurationError
from .problem import Problem
from .settings_file import read_settings, shown

Engine = Literal["one_process", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2", "fsdp2_hybrid"]
PRECISIONS = ("no", "fp16", "bf16", "fp8")


@dataclass(frozen=True)
class LaunchPlan:
    """What `accelerate launch` starts.

    Attributes:
        source: The launch file; None where there is none and the launcher's own defaults hold.
        engine: What trains, if the launcher and the script agree.
        processes: Of all machines together.
        machines: Computers in the job.
        machine_rank: The number that the launcher's command line gives this machine; None where it gives none.
        distributed_type: As the file has it.
        mixed_precision: Of the launcher; the run's own bf16 or fp16 beats it.
        use_cpu: The launcher's `use_cpu`, which is not the script's.
        main_process_ip: Where the machines meet; None where nobody says.
        main_process_port: The port there.
        rdzv_backend: Of the command line; accelerate ignores it in a file.
        offload_optimizer: "none", "cpu" or "nvme".
        offload_parameters: Likewise.
        accumulation: Gradient accumulation that the launch file fixes; None where it leaves it to the script.
        clipping: The largest gradient norm that it fixes; None likewise.
        deepspeed_config_file: The JSON file that it names.
        deepspeed: DeepSpeed's settings: of the JSON file where there is one, else those of the launch file.
        fsdp: FSDP's settings, without their prefix.
        raw: All of the file.
        problems: What can be told of the file alone.
    """

    source: str | None = None
    engine: Engine = "one_process"
    processes: int = 1
    machines: int = 1
    machine_rank: int | None = None
    distributed_type: str = "NO"
    mixed_precision: str = "no"
    use_cpu: bool = False
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str = "static"
    offload_optimizer: str = "none"
    offload_parameters: str = "none"
    accumulation: int | None = None
    clipping: float | None = None
    deepspeed_config_file: str | None = None
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    fsdp: Mapping[str, Any] = field(default_factory=dict)
    raw: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    @property
    def processes_per_machine(self) -> int:
        """Of one machine, at least one."""
        return max(1, self.processes // max(1, self.machines))

    @property
    def name(self) -> str:
        """The file's name, for messages."""
        return "the launcher's defaults" if self.source is None else shown(Path(self.source).name)


def read_launch_file(
    path: str | Path | None,
    *,
    gpus: int = 0,
    processes: int | None = None,
    machine_rank: int | None = None,
    main_process_ip: str | None = None,
    rdzv_backend: str | None = None,
) -> LaunchPlan:
    """Read a launch file with Accelerate's own reader.

    Args:
        path: The file of `--config_file`; None: Accelerate's default file if there is one, else its defaults.
        gpus: GPUs that the launcher would see, for its defaults.
        processes: `--num_processes` of the launcher, which beats the file.
        machine_rank: Likewise.
        main_process_ip: Likewise.
        rdzv_backend: Likewise.

    Raises:
        ConfigurationError: Accelerate would refuse the file, too.
    """
    from accelerate.commands.config import config_args

    if path is None:
        default = config_args.default_config_file
        if not Path(default).is_file():
            count = processes or max(1, gpus)
            engine: Engine = "ddp" if count > 1 else "one_process"
            kind = "MULTI_GPU" if count > 1 else "NO"
            return LaunchPlan(engine=engine, processes=count, distributed_type=kind)
        path = default
    read = read_settings(path)
    settings, name = read.settings, shown(str(path))
    known = {f.name for f in fields(config_args.ClusterConfig)}
    _refuse_odd(settings, known, name)
    try:
        cluster = config_args.load_config_from_file(str(path))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigurationError(f"Accelerate cannot use {name}: {shown(error)}") from error
    if not isinstance(cluster, config_args.ClusterConfig):
        raise ConfigurationError(f"{name} is for SageMaker; the doctor knows launches on machines of your own.")
    kind = str(getattr(cluster.distributed_type, "value", cluster.distributed_type))
    deepspeed, fsdp = _mapping(cluster.deepspeed_config), _mapping(cluster.fsdp_config)
    problems = [*read.problems, *_ignored_keys(deepspeed, fsdp, _mapping(cluster.parallelism_config), name)]
    json_path = deepspeed.get("deepspeed_config_file")
    resolved = _json_settings(json_path) if isinstance(json_path, str) else _as_deepspeed(deepspeed)
    zero = _mapping(resolved.get("zero_optimization"))
    engine, odd = _engine(kind, zero, fsdp, _mapping(cluster.parallelism_config), name)
    return LaunchPlan(
        source=str(path),
        engine=engine,
        processes=_count(cluster.num_processes if processes is None else processes, "num_processes", name),
        machines=_count(cluster.num_machines, "num_machines", name),
        machine_rank=machine_rank,
        distributed_type=kind,
        mixed_precision=_precision(cluster.mixed_precision, name),
        use_cpu=bool(cluster.use_cpu),
        main_process_ip=main_process_ip or cluster.main_process_ip,
        main_process_port=cluster.main_process_port,
        rdzv_backend=rdzv_backend or "static",
        offload_optimizer=_offload(zero.get("offload_optimizer")),
        offload_parameters="cpu" if _true(fsdp.get("offload_params")) else _offload(zero.get("offload_param")),
        accumulation=_number(resolved.get("gradient_accumulation_steps"), int),
        clipping=_number(resolved.get("gradient_clipping"), float),
        deepspeed_config_file=json_path if isinstance(json_path, str) else None,
        deepspeed=resolved if kind == "DEEPSPEED" else {},
        fsdp=_unprefixed(fsdp) if kind == "FSDP" else {},
        raw=settings,
        problems=(*problems, *odd),
    )


def _refuse_odd(settings: Mapping[str, Any], known: set[str], name: str) -> None:
    """What Accelerate refuses with a message that helps less."""
    legacy = {"fp16", "dynamo_backend"}
    for key in settings:
        if key not in known | legacy:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else " Take it out."
            raise ConfigurationError(f"Accelerate knows no key {shown(key)!r} (in {name}), and refuses the file.{hint}")
    for key in ("deepspeed_config", "fsdp_config", "parallelism_config"):
        value = settings.get(key)
        if value is not None and not isinstance(value, dict):
            raise ConfigurationError(f"{key} in {name} is {shown(repr(value), 60)}, not a mapping.")
    kind = settings.get("distributed_type")
    if kind is False:
        raise ConfigurationError(f'distributed_type in {name} is NO, which YAML reads as false: write "NO" in quotes.')


def _engine(
    kind: str, zero: Mapping[str, Any], fsdp: Mapping[str, Any], parallelism: Mapping[str, Any], name: str
) -> tuple[Engine, list[Problem]]:
    if kind == "DEEPSPEED":
        stage = _number(zero.get("stage", 2), int)
        stages: dict[int | None, Engine] = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
        if stage not in stages:
            raise ConfigurationError(f"The ZeRO stage in {name} is {shown(repr(zero.get('stage')), 60)}, not 0 to 3.")
        return stages[stage], []
    if kind == "FSDP":
        version = str(_unprefixed(fsdp).get("version", 1))
        if version not in ("1", "2"):
            raise ConfigurationError(f"fsdp_version in {name} is {shown(version, 60)}, not 1 or 2.")
        sizes = {key.removeprefix("parallelism_config_"): value for key, value in parallelism.items()}
        replicas = _number(sizes.get("dp_replicate_size", 1), int) or 1
        hybrid: Engine = "fsdp2_hybrid" if replicas > 1 else "fsdp2"
        return ("fsdp1" if version == "1" else hybrid), []
    if kind.startswith("MULTI_"):
        return ("one_process" if kind == "MULTI_CPU" else "ddp"), []
    if kind == "NO":
        return "one_process", []
    message = f"distributed_type {kind} in {name} is none that trl-grpo-ext was tried with."
    fix = 'Use "NO", MULTI_GPU, DEEPSPEED or FSDP.'
    return "one_process", [Problem("warning", "launch file", message, fix)]


def _ignored_keys(
    deepspeed: Mapping[str, Any], fsdp: Mapping[str, Any], parallelism: Mapping[str, Any], name: str
) -> list[Problem]:
    """Keys of the inner mappings that no option of the launcher has: Accelerate ignores them without a word."""
    from accelerate.commands.launch import launch_command_parser

    known = {action.dest for action in launch_command_parser()._actions}
    problems = []
    for section, keys in (
        ("deepspeed_config", deepspeed),
        ("fsdp_config", [key if key.startswith("fsdp") else f"fsdp_{key}" for key in fsdp]),
        ("parallelism_config", parallelism),
    ):
        for key in keys:
            if key in known:
                continue
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
            message = f"{section} in {name} has {shown(key)!r}, which Accelerate does not know and ignores silently."
            fix = f"Write {near[0]!r}." if near else "Take it out."
            problems.append(Problem("error" if near else "warning", "launch file", message, fix))
    return problems


def _json_settings(path: str) -> Mapping[str, Any]:
    """DeepSpeed's JSON file; the launcher looks for it from the folder where it is started."""
    try:
        return read_settings(path).settings
    except ConfigurationError as error:
        raise ConfigurationError(f"deepspeed_config_file: {error} Paths are relative to where you launch.") from error


def _as_deepspeed(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The launch file's DeepSpeed keys in the shape of DeepSpeed's own settings."""
    return {
        "zero_optimization": {
            "stage": given.get("zero_stage", 2),
            "offload_optimizer": {"device": given.get("offload_optimizer_device", "none")},
            "offload_param": {"device": given.get("offload_param_device", "none")},
            "stage3_gather_16bit_weights_on_model_save": given.get("zero3_save_16bit_model", False),
        },
        "gradient_accumulation_steps": given.get("gradient_accumulation_steps", "auto"),
        "gradient_clipping": given.get("gradient_clipping", "auto"),
        **{key: given[key] for key in ("zero3_init_flag", "deepspeed_multinode_launcher") if key in given},
    }


def _precision(value: object, name: str) -> str:
    if value is False:
        raise ConfigurationError(f'mixed_precision in {name} is no, which YAML reads as false: write "no" in quotes.')
    precision = "no" if value is None else str(value)
    if precision not in PRECISIONS:
        raise ConfigurationError(
            f"mixed_precision in {name} is {shown(precision, 60)!r}, not one of {', '.join(PRECISIONS)}."
        )
    return precision


def _count(value: object, key: str, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{key} in {name} must be a number from 1 up, got {shown(repr(value), 60)}.")
    return value


def _mapping(value: object) -> Mapping[str, Any]:
    return {str(key): inner for key, inner in value.items()} if isinstance(value, Mapping) else {}


def _unprefixed(fsdp: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key.removeprefix("fsdp_"): value for key, value in fsdp.items()}


def _offload(value: object) -> str:
    device = str(_mapping(value).get("device", "none"))
    return device if device in ("cpu", "nvme") else "none"


def _number(value: Any, kind: type[int] | type[float]) -> Any:
    """A number that is written there; None for "auto" and what is no number."""
    try:
        return None if isinstance(value, bool) or value is None else kind(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _true(value: object) -> bool:
    return str(value).lower() in ("true", "1", "yes")
