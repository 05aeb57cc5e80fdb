"""The examination: everything that can be told of a run before its weights load, problems collected and not raised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError
from .batch import BatchPlan, BatchSetup, batch_arithmetic
from .case import Case
from .combinations import columns_of, combination_problems, load_plugins
from .environment import Environment, look_around
from .launch_file import LaunchPlan, read_launch_file
from .memory import MemoryEstimate
from .model_shape import ModelShape, load_config, shape_of
from .problem import Problem
from .run_file import BATCH_FIELDS, PLUGIN_FIELDS, RunPlan, read_run, with_configs
from .script_file import Script, read_script
from .settings_file import shown
from .sizes import assumed_prompt_length, memory_estimate, memory_problems

_ORDER = {"error": 0, "warning": 1, "note": 2}
_ROWS_OF_GSM8K = 7473
_MOST_BYTES_COUNTED = 200_000_000


@dataclass(frozen=True)
class Request:
    """What the doctor is asked to look at.

    Attributes:
        config_file: The launch file; None: what the launcher does without.
        configs: The run's YAML files; a later one beats an earlier one.
        overrides: The words behind the script on its command line.
        script: The training script.
        gpu_memory: GiB of each GPU of a machine that is not this one; None: this machine.
        num_processes: `--num_processes` of the launcher.
        machine_rank: Likewise.
        main_process_ip: Likewise.
        rdzv_backend: Likewise.
        prompt_length: Tokens of the longest prompt; None: an assumption.
    """

    config_file: str | None = None
    configs: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    script: str | None = None
    gpu_memory: float | None = None
    num_processes: int | None = None
    machine_rank: int | None = None
    main_process_ip: str | None = None
    rdzv_backend: str | None = None
    prompt_length: int | None = None


@dataclass(frozen=True)
class Examination:
    """What was found.

    Attributes:
        request: What was asked for.
        environment: The machine.
        launch: What the launcher starts.
        run: The run's settings.
        batch: Batch arithmetic.
        shape: The model's; None where its config cannot be found.
        model_source: Where the config came from, or why there is none.
        memory: The estimate; None without a shape.
        problems: Most severe first.
    """

    request: Request
    environment: Environment
    launch: LaunchPlan
    run: RunPlan
    batch: BatchPlan
    shape: ModelShape | None = None
    model_source: str = ""
    memory: MemoryEstimate | None = None
    problems: tuple[Problem, ...] = field(default=())

    @property
    def errors(self) -> int:
        """How many problems are errors."""
        return sum(problem.severity == "error" for problem in self.problems)

    def plain(self) -> dict[str, Any]:
        """Everything as JSON can write it."""
        return {
            "problems": [asdict(problem) for problem in self.problems],
            "launch": _plain(asdict(self.launch)),
            "run": {"sources": list(self.run.sources), "given": _plain(self.run.given)},
            "environment": _plain(asdict(self.environment)),
            "batch": _plain(asdict(self.batch)),
            "model": self.model_source,
            "memory": None if self.memory is None else _plain(asdict(self.memory)),
        }


def examine(request: Request) -> Examination:
    """Look at a launch, a run and a machine together.

    Raises:
        ConfigurationError: A file that was named is not there.
    """
    import torch

    for path in (request.config_file, *request.configs, request.script):
        if path is not None and not _is_file(path):
            raise ConfigurationError(f"There is no file {shown(path)}.")
    found: list[Problem] = []
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    has_gpu = request.gpu_memory is not None or gpus > 0
    launch = _launch(request, gpus, found)
    script = _script(request, found)
    run = _run(request, script, has_gpu, found)
    found += [*launch.problems, *run.problems]
    environment = _environment(request, launch, run)

    plugins = load_plugins(run)
    batch = batch_arithmetic(_batch_setup(request, launch, run))
    leave_out = [
        *(BATCH_FIELDS if not batch.fits else ()),
        *(PLUGIN_FIELDS if plugins.problems else ()),
    ]
    known = len(run.problems)
    run = with_configs(run, processes=launch.processes, leave_out=leave_out)
    found += [*run.problems[known:], *plugins.problems, *batch.problems]

    config, shape, source = _model(run, found)
    case = Case(launch, run, environment, shape, plugins, columns_of(run), config)
    found += combination_problems(case)
    memory = None if shape is None else memory_estimate(case, batch, request.prompt_length)
    if memory is not None:
        found += memory_problems(case, memory)
    unique = list(dict.fromkeys(found))
    return Examination(
        request=request,
        environment=environment,
        launch=launch,
        run=run,
        batch=batch,
        shape=shape,
        model_source=source,
        memory=memory,
        problems=tuple(sorted(unique, key=lambda problem: _ORDER[problem.severity])),
    )


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def _launch(request: Request, gpus: int, found: list[Problem]) -> LaunchPlan:
    try:
        return read_launch_file(
            request.config_file,
            gpus=gpus,
            processes=request.num_processes,
            machine_rank=request.machine_rank,
            main_process_ip=request.main_process_ip,
            rdzv_backend=request.rdzv_backend,
        )
    except ConfigurationError as error:
        found.append(Problem("error", "launch file", str(error), "Mend the file of --config_file."))
        return LaunchPlan(processes=request.num_processes or 1)


def _script(request: Request, found: list[Problem]) -> Script | None:
    try:
        return None if request.script is None else read_script(request.script)
    except ConfigurationError as error:
        found.append(Problem("error", "script", str(error), "Mend the file of --script."))
        return None


def _run(request: Request, script: Script | None, has_gpu: bool, found: list[Problem]) -> RunPlan:
    """The run's settings, without the files that cannot be read."""
    paths = []
    for path in request.configs:
        try:
            read_run([path], script=None)
        except ConfigurationError as error:
            found.append(Problem("error", "settings", str(error), "Mend the file of --config."))
        else:
            paths.append(path)
    try:
        return read_run(paths, request.overrides, script=script, has_gpu=has_gpu)
    except ConfigurationError as error:  # of the script's own defaults
        found.append(Problem("error", "script", str(error), "Mend the script's defaults."))
        return read_run(paths, request.overrides, has_gpu=has_gpu)


def _environment(request: Request, launch: LaunchPlan, run: RunPlan) -> Environment:
    optimizer = str(getattr(run["optim"], "value", run["optim"]))
    model = run["model_name_or_path"]
    return look_around(
        output_dir=str(run["output_dir"] or "trainer_output"),
        model=None if model is None else str(model),
        checkpoint=run["resume_from_checkpoint"],
        needs_bitsandbytes=bool(
            run["load_in_4bit"] or run["load_in_8bit"] or "8bit" in optimizer or "bnb" in optimizer
        ),
        gpu_memory=request.gpu_memory,
        gpus=launch.processes_per_machine,
    )


def _batch_setup(request: Request, launch: LaunchPlan, run: RunPlan) -> BatchSetup:
    def value(name: str) -> str:
        return str(getattr(run[name], "value", run[name]))

    recipe = run.script is not None and run.script.is_recipe
    prompts, held_out = _prompts(run)
    return BatchSetup(
        **{name: run[name] for name in BATCH_FIELDS},
        processes=launch.processes,
        evaluates=recipe or value("eval_strategy") != "no",
        prompts=prompts,
        eval_prompts=held_out,
        num_train_epochs=float(run["num_train_epochs"]),
        max_steps=int(run["max_steps"]),
        save_steps=run["save_steps"] if value("save_strategy") == "steps" else None,
        eval_steps=run["eval_steps"] if value("eval_strategy") == "steps" else None,
        max_completion_length=int(run["max_completion_length"]),
        prompt_length=assumed_prompt_length(run, request.prompt_length),
        auto_find_batch_size=bool(run["auto_find_batch_size"]),
    )


def _prompts(run: RunPlan) -> tuple[int | None, int | None]:
    """Rows to train on and rows held out, where settings or a file say so."""
    path, name = run.get("dataset_path"), run.get("dataset_name")
    if isinstance(path, str):
        try:
            if Path(path).suffix == ".jsonl" and Path(path).stat().st_size <= _MOST_BYTES_COUNTED:
                with Path(path).open("rb") as file:
                    return sum(1 for line in file if line.strip()), None
        except (OSError, ValueError):
            pass
        return None, None
    if name == "openai/gsm8k":
        return _ROWS_OF_GSM8K, None
    model = None if run.script is None else run.script.embedded_model
    embedded = model is not None and str(run["model_name_or_path"]) == str(model)
    generated = run.own.get("train_problems") if embedded and name is None else None
    return (generated if isinstance(generated, int) and not isinstance(generated, bool) else None), None


def _model(run: RunPlan, found: list[Problem]) -> tuple[Any, ModelShape | None, str]:
    name = run["model_name_or_path"]
    if name is None:
        fix = "Set model_name_or_path."
        found.append(Problem("note", "model", "No model is named: sizes and LoRA targets are not checked.", fix))
        return None, None, "no model is named"
    loaded = load_config(str(name), revision=str(run["model_revision"] or "main"))
    if loaded.config is None:
        fix = "Fetch its config.json, or give --model_name_or_path a folder; sizes are not checked without it."
        found.append(Problem("warning", "model", shown(loaded.reason, 400), fix))
        return None, None, loaded.reason
    try:
        shape = shape_of(loaded.config, from_table=loaded.source == "table")
    except ConfigurationError as error:
        found.append(Problem("error", "model", str(error), "Name another model."))
        return loaded.config, None, str(error)
    source = {"folder": "its folder", "table": "the doctor's table of published sizes"}
    return loaded.config, shape, source.get(loaded.source, "the hub's cache")


def _plain(value: Any) -> Any:
    """A value as JSON can write it; texts without control characters."""
    if isinstance(value, dict) or hasattr(value, "items"):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    if isinstance(value, Fraction):
        return float(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    return shown(value, 2000)


def exit_code(examination: Examination) -> int:
    """0 where the run may start, warnings or not; 1 where something is wrong."""
    return 1 if examination.errors else 0


def request_from(
    config_file: str | None,
    configs: Sequence[str],
    overrides: Sequence[str],
    **others: Any,
) -> Request:
    """A request from a command line's lists."""
    return Request(config_file, tuple(configs), tuple(overrides), **others)
