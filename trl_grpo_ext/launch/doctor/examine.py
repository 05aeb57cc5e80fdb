"""The examination: everything known of a run before its weights load. Problems are collected, not raised."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from trl import get_peft_config

from ...errors import ConfigurationError
from ...guard.untrusted import as_json, one_line
from .case import Batch, Case, columns_of, load_plugins
from .environment import Environment, inspect_machine
from .launch_file import LaunchPlan, read_launch_file
from .memory import MemoryEstimate, estimate, memory_problems
from .model import Adapters, Sizes, adapters_of, load_config, on_meta, sizes_of
from .problem import Problem
from .rules import problems_of
from .run_file import PLUGIN_FIELDS, RunPlan, build_configs, read_run, read_script

_ORDER = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class Request:
    """The doctor's input."""

    config_file: str | None = None  # the launch file; None for the launcher's defaults
    configs: tuple[str, ...] = ()  # the run's YAML files; later ones override earlier ones
    overrides: tuple[str, ...] = ()  # the words after the script on its command line
    script: str | None = None
    gpu_memory: float | None = None  # GiB of each GPU of another machine; None means this machine
    num_processes: int | None = None  # this and the next three: the launcher's options
    machine_rank: int | None = None
    main_process_ip: str | None = None
    rdzv_backend: str | None = None


@dataclass(frozen=True)
class Examination:
    """What was found; the problems are most severe first."""

    case: Case
    model_source: str  # where the model's config came from, or why there is none
    memory: MemoryEstimate | None  # None without sizes or a sound configuration
    problems: tuple[Problem, ...]

    @property
    def exit_code(self) -> int:
        """1 if there is an error, else 0, with or without warnings."""
        return int(any(problem.severity == "error" for problem in self.problems))

    def plain(self) -> dict[str, Any]:
        """Everything as JSON values."""
        case = self.case
        found = {
            "problems": [asdict(problem) for problem in self.problems],
            "launch": asdict(case.launch),
            "run": {"sources": list(case.run.sources), "given": case.run.given},
            "environment": asdict(case.machine),
            "batch": None if case.batch is None else asdict(case.batch),
            "model": self.model_source,
            "memory": None if self.memory is None else asdict(self.memory),
        }
        return {key: as_json(value) for key, value in found.items()}


def examine(request: Request, prompt_length: int | None = None) -> Examination:
    """Examine a launch, a run and a machine together; a `ConfigurationError` if a named file is missing.

    `prompt_length` is the tokens in the longest prompt, None for an assumption.
    """
    for path in (request.config_file, *request.configs, request.script):
        if path is not None and not _is_file(path):
            raise ConfigurationError(f"There is no file {one_line(path, 300)}.")
    found: list[Problem] = []
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    launch = _launch(request, gpus, found)
    run = _run(request, request.gpu_memory is not None or gpus > 0, found)
    machine = _machine(request, launch, run)
    with _folder_on_path(run):
        plugins = load_plugins(run)
    run = build_configs(run, processes=launch.processes, leave_out=PLUGIN_FIELDS if plugins.problems else ())
    found += [*launch.problems, *run.problems, *plugins.problems]
    sizes, adapters, source = _model(run, found)
    case = Case(launch, run, machine, sizes, adapters, plugins, Batch.of(run), columns_of(run))
    found += problems_of(case)
    memory = estimate(case, prompt_length)
    found += [] if memory is None else memory_problems(case, memory)
    ordered = sorted(dict.fromkeys(found), key=lambda problem: _ORDER[problem.severity])
    return Examination(case, source, memory, tuple(ordered))


@contextlib.contextmanager
def _folder_on_path(run: RunPlan) -> Iterator[None]:
    """As when the script runs: modules beside it can be imported."""
    before = [*sys.path]
    if run.script is not None:
        sys.path.insert(0, str(Path(run.script.path).resolve().parent))
    try:
        yield
    finally:
        sys.path[:] = before


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def _launch(request: Request, gpus: int, found: list[Problem]) -> LaunchPlan:
    options = {name: getattr(request, name) for name in ("machine_rank", "main_process_ip", "rdzv_backend")}
    try:
        return read_launch_file(request.config_file, gpus=gpus, processes=request.num_processes, **options)
    except ConfigurationError as error:
        found.append(Problem("error", "launch file", str(error), "Correct the file of --config_file."))
        return LaunchPlan(processes=request.num_processes or 1)


def _run(request: Request, has_gpu: bool, found: list[Problem]) -> RunPlan:
    """The run's settings, leaving out unreadable files."""
    script = None
    try:
        script = None if request.script is None else read_script(request.script)
    except ConfigurationError as error:
        found.append(Problem("error", "script", str(error), "Correct the file of --script."))
    paths = []
    for path in request.configs:
        try:
            read_run([path])
        except ConfigurationError as error:
            found.append(Problem("error", "settings", str(error), "Correct the file of --config."))
        else:
            paths.append(path)
    try:
        return read_run(paths, request.overrides, script=script, has_gpu=has_gpu)
    except ConfigurationError as error:
        found.append(Problem("error", "script", str(error), "Correct the script's defaults."))
        return read_run(paths, request.overrides, has_gpu=has_gpu)


def _machine(request: Request, launch: LaunchPlan, run: RunPlan) -> Environment:
    optimizer, model = run.value("optim"), run["model_name_or_path"]
    quantised = run["load_in_4bit"] or run["load_in_8bit"] or "8bit" in optimizer or "bnb" in optimizer
    return inspect_machine(
        output_dir=str(run["output_dir"] or "trainer_output"),
        model=None if model is None else str(model),
        checkpoint=run["resume_from_checkpoint"],
        needs_bitsandbytes=bool(quantised),
        gpu_memory=request.gpu_memory,
        gpus=launch.processes_per_machine,
    )


def _model(run: RunPlan, found: list[Problem]) -> tuple[Sizes | None, Adapters | None, str]:
    """Sizes of the model and of its adapters, and where its config came from."""
    name = run["model_name_or_path"]
    if name is None:
        return None, None, "no model is named"
    config, source = load_config(str(name), str(run["model_revision"] or "main"))
    if config is None:
        fix = "Download its config.json, or give --model_name_or_path a folder; without it sizes are not checked."
        found.append(Problem("warning", "model", one_line(source, 400), fix))
        return None, None, source
    try:
        model = on_meta(config)
    except ConfigurationError as error:
        found.append(Problem("error", "model", str(error), "Name another model."))
        return None, None, str(error)
    peft_config: Any = None if run.model is None else get_peft_config(run.model)
    if peft_config is None:
        return sizes_of(model), None, source
    targets = peft_config.target_modules
    if run.is_recipe and isinstance(targets, str) and targets.isidentifier():
        peft_config.target_modules = {targets}  # as the recipes do; TRL makes a pattern of a single name
    return sizes_of(model), adapters_of(model, peft_config), source
