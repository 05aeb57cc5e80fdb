"""`trl-grpo-ext doctor`: the command line, which starts the examination in other processes and prints what they say."""

import dataclasses
import functools
import json
import os
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

from ...guard.untrusted import one_line, printable
from . import Machine, Problem, Severity
from .launch import Launch, from_json, read_command
from .memory import Memory

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": False}
_ORDER = {"error": 0, "warning": 1, "note": 2}
_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "bold yellow", "note": "bold blue"}
_LINES = 8
"""Of the script's last words, where there is no other reason why it ended."""


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

    @property
    def exit_code(self) -> int:
        """1 if a real run would stop or differ from the request, 2 if nothing could be examined, else 0."""
        if any(problem.severity == "error" for problem in self.problems):
            return 1
        return 2 if self.unreached else 0


def examine(words: Sequence[str], machine: Machine | None = None, *, prompt_length: int = 256) -> Examination:
    """Examine the run that this command line starts, on this machine or the one described.

    The launcher and the script each run in a process of their own; `prompt_length` is the longest prompt's tokens.

    Raises:
        ConfigurationError: The words name no launcher, script or file.
    """
    launch, machine = read_command(words), machine or Machine()
    with tempfile.TemporaryDirectory(prefix="trl-grpo-ext-doctor-") as folder:
        request, answer = Path(folder, "request.json"), Path(folder, "answer.json")
        asked = {"launch": dataclasses.asdict(launch), "machine": dataclasses.asdict(machine)}
        request.write_text(json.dumps({**asked, "prompt_length": prompt_length}))
        said = ""
        if launch.script is None:
            said = _child("launch", (request,), launch)
            launch = from_json(json.loads(request.read_text())["launch"])
        if launch.script is None:
            problems = launch.problems or (Problem("error", "launch", f"{launch.launcher} stops: {said}"),)
            return Examination(launch, machine, problems)
        said = _child("probe", (request, answer), launch)
        if not answer.is_file():
            return Examination(launch, machine, launch.problems, unreached="the script's process ended", said=said)
        found = json.loads(answer.read_text())
    problems = tuple(dict.fromkeys([*launch.problems, *(Problem(**one) for one in found.pop("problems"))]))
    ordered = tuple(sorted(problems, key=lambda problem: _ORDER[problem.severity]))
    machine = Machine(**found.pop("machine"))
    memory = found.pop("memory")
    return Examination(launch, machine, ordered, said=said, memory=memory and Memory(**memory), **found)


def _child(module: str, paths: Sequence[Path], launch: Launch) -> str:
    """Run one of our modules in the run's own environment; what it said last."""
    environment = {**os.environ, **launch.environment}
    if not _hub_answers():
        environment["HF_HUB_OFFLINE"] = "1"  # else every file is asked for again and again, for minutes
    name = f"{__package__}.{module}"
    words = [sys.executable, "-m", name, *map(str, paths)]
    done = subprocess.run(
        words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    lines = [line for line in done.stdout.decode(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-_LINES:])


@functools.cache
def _hub_answers() -> bool:
    from huggingface_hub import constants

    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=5)
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def doctor_command(
    context: typer.Context,
    gpus: Annotated[int | None, typer.Option("--gpus", help="GPUs of each machine; 0 for none.", min=0)] = None,
    gpu_memory: Annotated[
        float | None, typer.Option("--gpu_memory", "--gpu-memory", help="GiB of each GPU.", min=0.1, max=100_000)
    ] = None,
    machines: Annotated[int | None, typer.Option("--machines", help="Machines that there are.", min=1)] = None,
    prompt_length: Annotated[
        int,
        typer.Option("--prompt_length", "--prompt-length", help="Tokens of the longest prompt.", min=0, max=10_000_000),
    ] = 256,
) -> None:
    """Say what a training run will do, before its weights load.

    After `--` comes the command that starts it, or a YAML file with its settings: `trl-grpo-ext doctor -- accelerate
    launch --config_file zero3.yaml train.py --config run.yaml`. The script really runs, up to its trainer. --gpus,
    --gpu_memory and --machines describe the machine that it is meant for, if that is another one. Exits with 1 if the
    run would stop or not be what was asked for, and with 2 if it could not be examined.
    """
    size = None if gpu_memory is None else int(gpu_memory * 1024**3)
    with Console(stderr=True).status("Running the script up to its trainer"):
        examination = examine(context.args, Machine(gpus, size, machines), prompt_length=prompt_length)
    render(examination, Console())
    raise typer.Exit(examination.exit_code)


def render(examination: Examination, console: Console) -> None:
    """Print the verdict, what is wrong, and what would run; content of files is never markup."""
    counts = {severity: sum(p.severity == severity for p in examination.problems) for severity in _STYLES}
    listed = ", ".join(f"{count} {severity}{'' if count == 1 else 's'}" for severity, count in counts.items() if count)
    if counts["error"]:
        verdict, style = "This run will fail: ", "error"
    elif examination.unreached:
        verdict, style = f"Not examined: {examination.unreached}{': ' if listed else '.'}", "warning"
    else:
        verdict, style = "No problems found" + (": " if listed else "."), "note"
    console.print(Text.assemble((verdict, _STYLES[style]), (listed, "bold")))  # type: ignore[index]
    for problem in examination.problems:
        kind, about = (problem.severity, _STYLES[problem.severity]), (f" [{problem.subject}] ", "bold")
        parts: list[Any] = [kind, about, one_line(problem.message, 1000)]
        if problem.fix:
            parts += [("\n  fix: ", "green"), one_line(problem.fix, 600)]
        console.print(Text.assemble(*parts))
    if examination.machine.assumed:
        console.print(
            Text(
                f"No GPU is here: examined as on machines with {examination.machine.gpus} of unknown size. "
                "--gpus and --gpu_memory say what there is (--gpus 0: none)."
            )
        )
    if examination.unreached and examination.said:
        console.print(Text(printable(examination.said), style="dim"))
    for label, text in (
        ("run", examination.described),
        ("memory", "" if examination.memory is None else examination.memory.described),
    ):
        if text:
            console.print(Text.assemble((f"{label}: ", "bold"), one_line(text, 900)))
