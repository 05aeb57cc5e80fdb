"""The examination on a terminal: the verdict, what is wrong, and what would run. Content of files is never markup."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from ...guard.untrusted import one_line
from . import Severity
from .examine import Examination

_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "bold yellow", "note": "bold blue"}


def render(examination: Examination, console: Console) -> None:
    """Print an examination."""
    counts = {severity: sum(p.severity == severity for p in examination.problems) for severity in _STYLES}
    listed = ", ".join(f"{count} {severity}{'' if count == 1 else 's'}" for severity, count in counts.items() if count)
    verdict = "This run will fail: " if counts["error"] else "No problems found" + (": " if listed else ".")
    console.print(Text.assemble((verdict, _STYLES["error"] if counts["error"] else "bold green"), (listed, "bold")))
    for problem in examination.problems:
        kind, about = (problem.severity, _STYLES[problem.severity]), (f" [{problem.subject}] ", "bold")
        said, fix = one_line(problem.message, 1000), one_line(problem.fix, 600)
        console.print(Text.assemble(kind, about, said, ("\n  fix: ", "green"), fix))
    console.print(Text.assemble(("run: ", "bold"), _run(examination)))
    if (memory := examination.memory) is not None:
        console.print(Text.assemble(("memory: ", "bold"), memory.described))


def _run(examination: Examination) -> str:
    launch, run, sizes = examination.case.launch, examination.case.run, examination.case.sizes
    machines = "" if launch.machines == 1 else f" on {launch.machines} machines"
    processes = f"{launch.processes} process{'es' * (launch.processes != 1)}"
    weights = "all weights" if not run["use_peft"] else f"LoRA of rank {run['lora_r']}"
    weights += f", on {examination.case.bits}-bit weights" if examination.case.bits else ""
    model = examination.model_source
    if sizes is not None:
        model = f"{run['model_name_or_path']}, {sizes.parameters:,} parameters"
    return one_line(f"{launch.engine}, {processes}{machines} ({launch.name}); {model}; {weights}", 600)
