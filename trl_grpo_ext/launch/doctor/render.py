"""The examination on a terminal: the verdict, what is wrong, and what would run. Content of files is never markup."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...guard.untrusted import one_line
from .examine import Examination
from .memory import ASSUMED_PROMPT, GB, STAGES, MemoryEstimate
from .problem import Severity

_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "bold yellow", "note": "bold blue"}


def render(examination: Examination, console: Console, *, assumptions: bool = False) -> None:
    """Print an examination, on request with the formulas of the memory estimate."""
    _problems(examination, console)
    _fact(console, "run", _run(examination))
    memory = examination.memory
    if memory is None:
        # Without sizes where the model was looked for; with them the configuration has errors.
        why = examination.model_source if examination.case.sizes is None else "the errors above come first"
        console.print(Text(f"No memory estimate: {one_line(why, 300)}."))
    else:
        stages = ", ".join(f"{stage} {memory.device_bytes[stage] / GB:.1f}" for stage in STAGES)
        peak = f"{memory.peak_bytes / GB:.1f} GB at most for each process ({stages})"
        on_disk = f"{memory.checkpoint_bytes / GB:.2f} GB on disk for a checkpoint. {memory.note}"
        _fact(console, "memory", f"{peak}, {on_disk}")
        if assumptions:
            console.print(_formulas(memory))
    more = "--json for everything" + ", --assumptions for each item's formula" * (not assumptions)
    console.print(Text(f"More: {more}. GB are 10^9 bytes.", style="dim"))


def _fact(console: Console, name: str, text: str) -> None:
    console.print(Text.assemble((f"{name}: ", "bold"), text))


def _run(examination: Examination) -> str:
    launch, run, sizes = examination.case.launch, examination.case.run, examination.case.sizes
    machines = "" if launch.machines == 1 else f" on {launch.machines} machines"
    offload = ", optimizer offloaded" if launch.offloads("optimizer") else ""
    offload += ", parameters offloaded" if launch.offloads("param") else ""
    processes = f"{launch.processes} process{'es' * (launch.processes != 1)}"
    weights = "all weights" if not run["use_peft"] else f"LoRA of rank {run['lora_r']}"
    weights += f", on {examination.case.bits}-bit weights" if examination.case.bits else ""
    weights += "" if examination.memory is None else f": {examination.memory.trainable:,} parameters"
    model = examination.model_source
    if sizes is not None:
        model = f"{run['model_name_or_path']}, {sizes.parameters:,} parameters; sizes from {model}"
    return one_line(f"{launch.engine}, {processes}{machines}{offload} ({launch.name}); {model}; {weights}", 600)


def _formulas(memory: MemoryEstimate) -> Table:
    table = Table("item", "GB", "when", "assumption", title=f"for prompts of up to {ASSUMED_PROMPT} tokens by default")
    for item in memory.items:
        table.add_row(item.name, f"{item.bytes / GB:.2f}", ", ".join(item.stages), Text(item.formula))
    return table


def _problems(examination: Examination, console: Console) -> None:
    counts = {severity: sum(p.severity == severity for p in examination.problems) for severity in _STYLES}
    listed = ", ".join(f"{count} {severity}{'' if count == 1 else 's'}" for severity, count in counts.items() if count)
    verdict = "This run will fail: " if counts["error"] else "No problems found" + (": " if listed else ".")
    console.print(Text.assemble((verdict, _STYLES["error"] if counts["error"] else "bold green"), (listed, "bold")))
    for problem in examination.problems:
        kind, about = (problem.severity, _STYLES[problem.severity]), (f" [{problem.subject}] ", "bold")
        said, fix = one_line(problem.message, 1000), one_line(problem.fix, 600)
        console.print(Text.assemble(kind, about, said, ("\n  fix: ", "green"), fix))
