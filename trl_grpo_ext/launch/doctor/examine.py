"""The examination: everything known of a run before its weights load. Problems are collected, not raised."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from trl import get_peft_config

from ...errors import ConfigurationError
from ...guard.untrusted import one_line
from . import Problem, Severity
from .case import Case, load_plugins
from .environment import inspect_machine
from .launch_file import LaunchPlan, read_launch_file
from .memory import Memory, estimate, memory_problems
from .model import Adapters, Sizes, adapters_of, load_config, on_meta, sizes_of
from .rules import problems_of
from .run_file import PLUGIN_FIELDS, RunPlan, build_configs, read_run, read_script

_ORDER = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class Examination:
    """What was found; the problems are most severe first."""

    case: Case
    model_source: str  # where the model's config came from, or why there is none
    memory: Memory | None  # None without sizes or a sound configuration
    problems: tuple[Problem, ...]

    @property
    def exit_code(self) -> int:
        """1 if there is an error, else 0, with or without warnings."""
        return int(any(problem.severity == "error" for problem in self.problems))


def examine(
    config_file: str | None = None,
    configs: Sequence[str] = (),
    overrides: Sequence[str] = (),
    *,
    script: str | None = None,
    gpu_memory: float | None = None,
    prompt_length: int = 256,
    num_processes: int | None = None,
    machine_rank: int | None = None,
    rdzv_backend: str | None = None,
) -> Examination:
    """Examine a launch, a run and a machine together; the last three are the launcher's own options.

    Later `configs` override earlier ones; `overrides` are the words after the script, which is read and not run.
    `gpu_memory` is GiB of each GPU of another machine, `prompt_length` the longest prompt's tokens.
    """
    for path in (config_file, *configs, script):
        if path is not None and not os.path.isfile(path):  # noqa: PTH113  # false, too, where a path cannot be one
            raise ConfigurationError(f"There is no file {one_line(path, 300)}.")
    found: list[Problem] = []
    options = {"machine_rank": machine_rank, "rdzv_backend": rdzv_backend}
    launch = _launch(config_file, num_processes, options, found)
    run = read_run(configs, overrides, script=None if script is None else read_script(script))
    machine = inspect_machine(
        output_dir=str(run["output_dir"] or "trainer_output"),
        gpu_memory=gpu_memory,
        gpus=launch.processes_per_machine,
    )
    with _folder_on_path(run):
        plugins = load_plugins(run)
    run = build_configs(run, processes=launch.processes, leave_out=PLUGIN_FIELDS if plugins.problems else ())
    found += [*launch.problems, *run.problems, *plugins.problems]
    sizes, adapters, source = _model(run, found)
    case = Case(launch, run, machine, sizes, adapters, plugins)
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


def _launch(
    config_file: str | None, processes: int | None, options: dict[str, Any], found: list[Problem]
) -> LaunchPlan:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        return read_launch_file(config_file, gpus=gpus, processes=processes, **options)
    except ConfigurationError as error:
        found.append(Problem("error", "launch file", str(error), "Correct the file of --config_file."))
        return LaunchPlan(processes=processes or 1)


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


# ------------------------------------------------------------------------------------------------------ on a terminal

_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "bold yellow", "note": "bold blue"}


def render(examination: Examination, console: Console) -> None:
    """Print the verdict, what is wrong, and what would run; content of files is never markup."""
    counts = {severity: sum(p.severity == severity for p in examination.problems) for severity in _STYLES}
    listed = ", ".join(f"{count} {severity}{'' if count == 1 else 's'}" for severity, count in counts.items() if count)
    verdict = "This run will fail: " if counts["error"] else "No problems found" + (": " if listed else ".")
    console.print(Text.assemble((verdict, _STYLES["error"] if counts["error"] else "bold green"), (listed, "bold")))
    for problem in examination.problems:
        kind, about = (problem.severity, _STYLES[problem.severity]), (f" [{problem.subject}] ", "bold")
        said, fix = one_line(problem.message, 1000), one_line(problem.fix, 600)
        console.print(Text.assemble(kind, about, said, ("\n  fix: ", "green"), fix))
    console.print(Text.assemble(("run: ", "bold"), _described(examination)))
    if (memory := examination.memory) is not None:
        console.print(Text.assemble(("memory: ", "bold"), memory.described))


def _described(examination: Examination) -> str:
    launch, run, sizes = examination.case.launch, examination.case.run, examination.case.sizes
    machines = "" if launch.machines == 1 else f" on {launch.machines} machines"
    processes = f"{launch.processes} process{'es' * (launch.processes != 1)}"
    weights = "all weights" if not run["use_peft"] else f"LoRA of rank {run['lora_r']}"
    weights += f", on {examination.case.bits}-bit weights" if examination.case.bits else ""
    model = examination.model_source
    if sizes is not None:
        model = f"{run['model_name_or_path']}, {sizes.parameters:,} parameters"
    return one_line(f"{launch.engine}, {processes}{machines} ({launch.name}); {model}; {weights}", 600)
