"""`trl-grpo-ext doctor`: the command line, which starts the examination in other processes and prints what they say."""

import functools
import os
import pickle
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ...guard.terminal import messages, results
from ...guard.untrusted import one_line, printable
from . import Machine, Problem, Severity
from .launch import Launch, read_command
from .memory import Memory

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": False}
_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "bold yellow", "note": "bold blue"}  # by severity


@dataclass(frozen=True)
class Examination:
    """What was found; the problems are most severe first."""

    launch: Launch
    machine: Machine
    problems: tuple[Problem, ...]
    described: str = ""  # the run, in one line; empty if it is not known
    memory: Memory | None = None  # None without sizes or sound settings
    unreached: str = ""  # why no trainer was seen, if that is no problem of the run
    said: str = ""  # the script's last words
    settings_alone: bool = False  # the trainer was not the script's

    @property
    def exit_code(self) -> int:
        """1 if a real run would stop or differ from the request, 2 if nothing could be examined, else 0."""
        if any(problem.severity == "error" for problem in self.problems):
            return 1
        return 2 if self.unreached else 0


def examine(words: Sequence[str], machine: Machine | None = None, *, prompt_length: int = 256) -> Examination:
    """Examine the run that a command line starts, on this machine or another; its script runs in its own process."""
    launch = read_command(words)
    machine = machine or Machine()
    if launch.script is None:
        read, said = _ask("launch", launch, machine, prompt_length)
        launch = read or launch
        if launch.script is None:
            problems = launch.problems or (Problem("error", "launch", f"{launch.launcher} stops: {said}"),)
            return Examination(launch, machine, problems)
    found, said = _ask("probe", launch, machine, prompt_length)
    if found is None:
        return Examination(launch, machine, launch.problems, unreached="the script's process ended", said=said)
    unique = dict.fromkeys([*launch.problems, *found.pop("problems")])
    ordered = sorted(unique, key=lambda problem: list(_STYLES).index(problem.severity))
    return Examination(launch, problems=tuple(ordered), said=said, **found)


def _ask(module: str, launch: Launch, machine: Machine, prompt_length: int) -> tuple[Any, str]:
    """What a process of one of our modules answers, None if it does not, and what it said last."""
    with tempfile.TemporaryDirectory(prefix="trl-grpo-ext-doctor-") as folder:
        request = Path(folder, "request")
        answer = Path(folder, "answer")
        request.write_bytes(pickle.dumps((launch, machine, prompt_length)))
        said = _child(module, (request, answer), launch)
        return pickle.loads(answer.read_bytes()) if answer.is_file() else None, said


def _child(module: str, paths: Sequence[Path], launch: Launch) -> str:
    """Run one of our modules in the run's own environment; what it said last."""
    environment = {**os.environ, **launch.environment}
    if not _hub_answers():
        environment["HF_HUB_OFFLINE"] = "1"  # else every file is asked for again and again, for minutes
    words = [sys.executable, "-m", f"{__package__}.{module}", *map(str, paths)]
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(words, env=environment, errors="replace", check=False, **streams)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    return "\n".join(lines[-8:])


@functools.cache
def _hub_answers() -> bool:
    from huggingface_hub import constants

    try:
        urllib.request.urlopen(constants.ENDPOINT, timeout=5)
    except OSError as error:
        return isinstance(error, urllib.error.HTTPError)
    return True


def _option(name: str, text: str, least: float) -> Any:
    return typer.Option(f"--{name}", f"--{name.replace('_', '-')}", help=text, min=least)


def doctor_command(
    context: typer.Context,
    gpus: Annotated[int | None, typer.Option("--gpus", help="GPUs of each machine; 0 for none.", min=0)] = None,
    gpu_memory: Annotated[float | None, _option("gpu_memory", "GiB of each GPU.", 0.1)] = None,
    machines: Annotated[int | None, typer.Option("--machines", help="Machines that there are.", min=1)] = None,
    prompt_length: Annotated[int, _option("prompt_length", "Tokens of the longest prompt.", 0)] = 256,
) -> None:
    """Say what a training run will do, before its weights load.

    After `--` comes the command that starts it, or a YAML file with its settings: `trl-grpo-ext doctor -- accelerate
    launch --config_file zero3.yaml train.py --config run.yaml`. The script really runs, up to its trainer. --gpus,
    --gpu_memory and --machines describe the machine that it is meant for, if that is another one. Exits with 1 if the
    run would stop or not be what was asked for, and with 2 if it could not be examined.
    """
    size = None if gpu_memory is None else int(gpu_memory * 1024**3)
    with messages().status("Running the script up to its trainer"):
        examination = examine(context.args, Machine(gpus, size, machines), prompt_length=prompt_length)
    render(examination, results())
    raise typer.Exit(examination.exit_code)


def render(examination: Examination, console: Console) -> None:
    """Print the verdict, what is wrong, and what would run; content of files is never markup."""
    counts = {severity: sum(p.severity == severity for p in examination.problems) for severity in _STYLES}
    listed = ", ".join(f"{count} {severity}{'s' * (count != 1)}" for severity, count in counts.items() if count)
    where = " in the settings, which is all that was examined" if examination.settings_alone else ""
    verdict = Text(f"No problems found{where}", _STYLES["note"])
    if counts["error"]:
        verdict = Text("This run will fail", _STYLES["error"])
    elif examination.unreached:
        verdict = Text(f"Not examined: {examination.unreached}", _STYLES["warning"])
    console.print(Text.assemble(verdict, ": " if listed else ".", (listed, "bold")))
    for problem in examination.problems:
        text = Text.assemble((problem.severity, _STYLES[problem.severity]), (f" [{problem.subject}] ", "bold"))
        text.append(one_line(problem.message, 1000))
        if problem.fix:
            text.append("\n  fix: ", "green").append(one_line(problem.fix, 600))
        console.print(text)
    if examination.machine.assumed:
        known = f"No GPU is here: examined as on machines with {examination.machine.gpus} of unknown size. "
        console.print(Text(f"{known}--gpus and --gpu_memory say what there is (--gpus 0: none)."))
    if examination.unreached and examination.said:
        console.print(Text(printable(examination.said), style="dim"))
    lines = {"run": examination.described, "memory": examination.memory and examination.memory.described}
    for label, said in lines.items():
        if said:
            console.print(Text.assemble((f"{label}: ", "bold"), one_line(said, 900)))
