"""The examination on a terminal: machine, launch, batch, memory, problems last. What files hold is never markup."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .examine import Examination
from .memory import STAGES
from .model_shape import ModelShape
from .problem import Severity
from .settings_file import shown
from .sizes import GB, assumed_prompt_length

_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "bold yellow", "note": "bold blue"}
_LARGEST = 4


def render(examination: Examination, console: Console, *, assumptions: bool = False) -> None:
    """Print an examination.

    Args:
        examination: What was found.
        console: Where to.
        assumptions: Also each item of the memory estimate with its formula.
    """
    for part in (_machine(examination), _run(examination), _batch(examination)):
        console.print(part)
    if examination.memory is not None:
        console.print(_memory(examination))
        _notes(examination, console, assumptions)
    else:
        console.print(Text(f"No memory estimate: {shown(examination.model_source) or 'the settings do not allow one'}"))
    _problems(examination, console)


def _table(title: str, *columns: str) -> Table:
    return Table(
        *columns, title=title, title_justify="left", title_style="bold", show_header=bool(columns), expand=False
    )


def _machine(examination: Examination) -> Table:
    facts = examination.environment
    table = _table("machine (versions are of this one)" if facts.elsewhere else "machine")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    versions = Text()
    for package in facts.packages.values():
        if package.version is None and not package.wanted:
            continue
        style = "red" if package.version is not None and not package.fits else "dim" if package.version is None else ""
        versions.append(f"{package.name} {shown(package.version or '-', 40)}", style=style)
        versions.append(", ")
    versions.append(f"Python {facts.python}, torch built for {facts.torch_build}")
    table.add_row("versions", versions)
    if facts.devices:
        first = facts.devices[0]
        capability = "" if first.capability is None else f", compute capability {'.'.join(map(str, first.capability))}"
        more = "" if facts.bf16 is None else f", bf16: {'yes' if facts.bf16 else 'no'}"
        told = f"{len(facts.devices)} x {first.name}, {first.memory / GB:.1f} GB{capability}{more}"
    else:
        told = "no GPU is visible"
    table.add_row("devices", Text(told))
    memory = f"{facts.memory / GB:.0f} GB memory, {_gb(facts.disk_free)} free at {shown(facts.output_dir, 80)}"
    table.add_row("this machine" if facts.elsewhere else "memory, disk", Text(memory))
    if facts.variables:
        table.add_row("environment", Text(", ".join(f"{name}={value}" for name, value in facts.variables.items())))
    return table


def _run(examination: Examination) -> Table:
    launch, run, shape = examination.launch, examination.run, examination.shape
    table = _table("run")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    machines = "" if launch.machines == 1 else f" on {launch.machines} machines"
    offload = "" if launch.offload_optimizer == "none" else f", optimizer on {launch.offload_optimizer}"
    offload += "" if launch.offload_parameters == "none" else f", parameters on {launch.offload_parameters}"
    told = f"{launch.engine}, {launch.processes} process(es){machines}{offload} ({launch.name})"
    table.add_row("launch", Text(told))
    table.add_row("settings", Text(", ".join(shown(s, 120) for s in run.sources) or "defaults"))
    model = shown(run["model_name_or_path"] or "not named", 120)
    table.add_row("model", Text(f"{model}{_size(shape)}; sizes from {shown(examination.model_source, 200)}"))
    weights = "all weights" if not run["use_peft"] else f"LoRA of rank {run['lora_r']}"
    weights += ", on 4-bit weights" if run["load_in_4bit"] else ", on 8-bit weights" if run["load_in_8bit"] else ""
    if examination.memory is not None:
        weights += f": {examination.memory.trainable:,} parameters"
    table.add_row("trained", Text(weights))
    for name in ("rewards", "advantage_hooks", "loss_aggregation"):
        if run[name]:
            table.add_row(name, Text(shown(run[name], 300)))
    return table


def _size(shape: ModelShape | None) -> str:
    return "" if shape is None else f", {shape.parameters:,} parameters"


def _batch(examination: Examination) -> Table:
    batch = examination.batch
    table = _table("batch")
    table.add_column()
    table.add_column(justify="right")
    length = assumed_prompt_length(examination.run, examination.request.prompt_length)
    rows: list[tuple[str, object]] = [
        ("completions generated at once", batch.generation_batch_size),
        ("prompts among them", batch.prompts_per_generation_batch),
        ("of them for each process", batch.rows_per_process),
        ("completions per optimizer step", batch.completions_per_optimizer_step),
        (f"tokens per optimizer step, at most ({length} for a prompt)", batch.tokens_per_optimizer_step),
        ("optimizer steps per generation batch", batch.optimizer_steps_per_generation),
        ("optimizer steps", batch.optimizer_steps),
        ("epochs", batch.epochs),
        ("completions generated in all", batch.completions_generated),
        ("evaluation batch", batch.eval_batch),
    ]
    for name, value in rows:
        table.add_row(name, _number(value))
    return table


def _memory(examination: Examination) -> Table:
    memory = examination.memory
    assert memory is not None
    table = Table(title="memory of each process, an estimate", title_justify="left", title_style="bold")
    table.add_column("stage")
    table.add_column("GB", justify="right")
    table.add_column("largest items", overflow="fold")
    least = min((device.memory for device in examination.environment.devices), default=None)
    for stage in STAGES:
        total = memory.device_bytes[stage]
        items = ", ".join(f"{item.name} {item.bytes / GB:.1f}" for item in memory.of_stage(stage)[:_LARGEST])
        over = least is not None and total > least and not examination.run["use_cpu"]
        style = "bold red" if over else "bold" if stage == memory.peak_stage else None
        table.add_row(stage, f"{total / GB:.1f}", Text(items), style=style)
    return table


def _notes(examination: Examination, console: Console, assumptions: bool) -> None:
    memory = examination.memory
    assert memory is not None
    devices = examination.environment.devices
    least = min((device.memory for device in devices), default=None)
    have = "" if least is None else f" of {least / GB:.1f} GB"
    told = f"peak {memory.peak_bytes / GB:.1f} GB{have} ({memory.peak_stage}); "
    told += f"each machine's memory {memory.host_peak_bytes / GB:.1f} GB; "
    told += f"a checkpoint {memory.checkpoint_bytes / GB:.2f} GB, on disk at most {memory.disk_bytes / GB:.2f} GB"
    console.print(Text(told))
    console.print(Text(memory.note, style="dim"))
    if not assumptions:
        console.print(Text("Each item's formula: --assumptions", style="dim"))
        return
    for title, items in (
        ("on the device", memory.device_items),
        ("in the machine", memory.host_items),
        ("on disk", memory.disk_items),
    ):
        table = Table("item", "GB", "when", "assumption", title=title, title_justify="left", title_style="bold")
        for item in items:
            when = "always" if len(item.stages) == len(STAGES) else ", ".join(item.stages)
            table.add_row(Text(item.name), f"{item.bytes / GB:.2f}", when, Text(item.assumption))
        console.print(table)


def _problems(examination: Examination, console: Console) -> None:
    counts = dict.fromkeys(_STYLES, 0)
    for problem in examination.problems:
        counts[problem.severity] += 1
        text = Text()
        text.append(f"{problem.severity}", style=_STYLES[problem.severity])
        text.append(f" [{problem.subject}] ", style="bold")
        text.append(shown(problem.message, 1000))
        text.append("\n  fix: ", style="green")
        text.append(shown(problem.fix, 600))
        console.print(text)
    told = ", ".join(f"{count} {severity}{'' if count == 1 else 's'}" for severity, count in counts.items() if count)
    console.print(Text(told or "No problems found.", style="bold"))


def _number(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Fraction):
        return f"{float(value):g}"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def _gb(value: int | None) -> str:
    return "?" if value is None else f"{value / GB:.0f} GB"
