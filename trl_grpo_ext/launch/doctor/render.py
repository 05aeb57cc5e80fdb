"""The examination on a terminal: the verdict, what is wrong, what would run; and tables on request.

Content of files is never markup.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...guard.untrusted import one_line
from .examine import Examination
from .memory import ASSUMED_PROMPT, GB, STAGES, MemoryEstimate
from .problem import Severity

_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "bold yellow", "note": "bold blue"}
_LARGEST = 4


def render(examination: Examination, console: Console, *, assumptions: bool = False, verbose: bool = False) -> None:
    """Print an examination: with the formulas of the memory estimate, or with tables of everything."""
    _problems(examination, console)
    memory, run = examination.memory, _run(examination)
    if verbose:
        tables = {"machine": _machine(examination), "run": run, "batch": _batch(examination)}
        for title, rows in tables.items():
            if rows:
                console.print(_facts(title, rows))
    else:
        _fact(console, "run", one_line(f"{run['launch']}; {run['model']}; {run['trained']}", 600))
    if memory is None:
        # Without sizes where the model was looked for; with them the configuration has errors.
        why = examination.model_source if examination.case.sizes is None else "the errors above come first"
        console.print(Text(f"No memory estimate: {one_line(why, 300)}."))
    else:
        on_disk = f"{memory.checkpoint_bytes / GB:.2f} GB on disk for a checkpoint. {memory.note}"
        peak = f"{memory.peak_bytes / GB:.1f} GB at most for each process ({memory.peak_stage})"
        if verbose:
            console.print(_memory(memory))
        _fact(console, "memory", f"{peak}, {on_disk}")
        if assumptions:
            console.print(_formulas(memory))
    more = ["--verbose for tables"] * (not verbose) + ["--assumptions for each item's formula"] * (not assumptions)
    if more:
        console.print(Text(f"More: {', '.join(more)}. GB are 10^9 bytes.", style="dim"))


def _fact(console: Console, name: str, text: str) -> None:
    console.print(Text.assemble((f"{name}: ", "bold"), text))


def _facts(title: str, rows: dict[str, object]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    table.add_column(no_wrap=title != "batch")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(one_line(value, 500)))
    return table


def _machine(examination: Examination) -> dict[str, object]:
    facts = examination.case.machine
    versions = [f"{name} {version or '-'}" for name, version in facts.versions.items()]
    rows: dict[str, object] = {
        "versions": ", ".join([*versions, f"Python {facts.python}, torch built for {facts.torch_build}"]),
        "devices": "no GPU is visible",
        "disk": f"{'?' if facts.disk_free is None else f'{facts.disk_free / GB:.0f}'} GB free at {facts.output_dir}",
    }
    if facts.devices:
        first = facts.devices[0]
        capability = "" if first.capability is None else f", compute capability {'.'.join(map(str, first.capability))}"
        size = f"{first.memory / GB:.1f} GB ({first.memory / 2**30:.1f} GiB)"
        rows["devices"] = f"{len(facts.devices)} x {first.name}, {size}{capability}"
    if facts.variables:
        rows["environment"] = ", ".join(f"{name}={value}" for name, value in facts.variables.items())
    return rows


def _run(examination: Examination) -> dict[str, object]:
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
    return {
        "launch": f"{launch.engine}, {processes}{machines}{offload} ({launch.name})",
        "settings": ", ".join(run.sources) or "defaults",
        "model": model,
        "trained": weights,
        **{name: run[name] for name in ("rewards", "advantage_hooks", "loss_aggregation") if run[name]},
    }


def _batch(examination: Examination) -> dict[str, object]:
    batch = examination.case.batch
    if batch is None:
        return {}
    steps = "not known: neither max_steps nor the number of prompts is"
    return {
        "completions generated at once": f"{batch.generation_batch_size:,}",
        "prompts among them": f"{batch.prompts_per_generation_batch:,}",
        "of them for each process": f"{batch.rows_per_process:,}",
        "completions per optimizer step": f"{batch.completions_per_optimizer_step:,}",
        "optimizer steps per generation batch": f"{float(batch.optimizer_steps_per_generation):g}",
        "optimizer steps": steps if batch.optimizer_steps is None else f"{batch.optimizer_steps:,}",
        "evaluation batch": f"{batch.eval_batch:,}",
    }


def _memory(memory: MemoryEstimate) -> Table:
    table = Table("stage", "GB", "largest items", title="memory of each process, an estimate", title_justify="left")
    for stage in STAGES:
        items = sorted((item for item in memory.items if stage in item.stages), key=lambda item: -item.bytes)
        largest = ", ".join(f"{item.name} {item.bytes / GB:.1f}" for item in items[:_LARGEST])
        style = "bold" if stage == memory.peak_stage else None
        table.add_row(stage, f"{memory.device_bytes[stage] / GB:.1f}", largest, style=style)
    return table


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
