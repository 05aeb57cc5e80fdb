"""`trl-grpo-ext audit`: the command line of the audit. Heavy imports happen inside, when it runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from ..errors import ConfigurationError
from .console import messages, one_line, printable, results

if TYPE_CHECKING:
    from .auditing import Audit

PROBLEMS = 1
_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def register(app: typer.Typer) -> None:
    """Add the command to an app."""
    app.command("audit", short_help="Can a reward read a data set's references?")(audit_command)


def audit_command(
    data: Annotated[
        str,
        typer.Argument(
            help="A .jsonl, .json, .csv or .parquet file, a folder of `save_to_disk`, or a data set of the hub."
        ),
    ],
    reward: Annotated[
        str, typer.Option(help="The reward: a name, or a mapping such as '{name: math_accuracy, timeout: 1}'.")
    ],
    reference: Annotated[str | None, typer.Option(help="The column that holds the references.")] = None,
    completion: Annotated[
        str | None, typer.Option(help="A column that holds a right completion, for rewards whose reference is none.")
    ] = None,
    config: Annotated[str | None, typer.Option(help="The configuration of a hub data set, `main` for GSM8K.")] = None,
    split: Annotated[str, typer.Option(help="The split.")] = "train",
    limit: Annotated[int | None, typer.Option(min=1, help="Look at the first rows only.")] = None,
    right_at: Annotated[float, typer.Option(help="From which score on a reward without outcomes says right.")] = 1.0,
    show: Annotated[int, typer.Option(min=0, help="How many findings of each kind to list.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything that was found as JSON.")] = False,
) -> None:
    """Find references that a reward cannot read, that are wrong against themselves, or ambiguous; and time the reward.

    Exits with 1 where it finds any.
    """
    from ..plugins.loading import load_rewards
    from .auditing import audit

    def progress(batches: Iterable[range], count: int) -> Iterator[range]:
        yield from track(batches, "Scoring", total=count, console=messages(), transient=True)

    (function,) = load_rewards([reward])
    rows = _rows(data, config, split, limit)
    found = audit(function, rows, column=reference, completions=completion, right_at=right_at, progress=progress)
    if as_json:
        typer.echo(json.dumps(found.plain(), indent=2))
    else:
        _print_audit(found, results(), show)
    if found.findings:
        raise typer.Exit(PROBLEMS)


def _rows(data: str, config: str | None, split: str, limit: int | None) -> list[dict[str, Any]]:
    import datasets  # slow to import

    datasets.disable_progress_bars()
    path = Path(data)
    if path.suffix in _FORMATS and not path.is_file():
        raise ConfigurationError(f"There is no file {data}.")
    try:
        if path.is_dir():
            loaded = datasets.load_from_disk(data)
            loaded = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        elif path.suffix in _FORMATS:
            loaded = datasets.load_dataset(_FORMATS[path.suffix], data_files=data, split="train")
        else:
            loaded = datasets.load_dataset(data, config, split=split)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise ConfigurationError(f"The data set {data!r} could not be loaded: {error}") from error
    rows: list[dict[str, Any]] = (loaded if limit is None else loaded.select(range(min(limit, len(loaded))))).to_list()
    return rows


def _print_audit(found: Audit, console: Console, show: int) -> None:
    counted = f" on {found.rows:,} rows, {found.references:,} different references in column "
    console.print(Text.assemble((one_line(found.reward), "bold"), counted, (one_line(found.column), "bold")))
    counts = Table("problem", "rows", "share")
    for column in counts.columns[1:]:
        column.justify = "right"
    for problem, count in found.counts().items():
        counts.add_row(problem, f"{count:,}", f"{count / found.rows:.2%}", style="bold red" if count else None)
    console.print(counts)
    for problem in found.counts():
        findings = [finding for finding in found.findings if finding.problem == problem]
        if findings and show:
            table = Table("row", title=problem, title_justify="left")
            for title in ("reference", "what"):
                table.add_column(title, overflow="fold")
            for finding in findings[:show]:
                table.add_row(str(finding.row), Text(printable(finding.reference)), Text(printable(finding.detail)))
            console.print(table)
            if len(findings) > show:
                console.print(f"... and {len(findings) - show:,} more (--show, or --json for all)")
    latency = Table("one completion", *found.latency())
    latency.add_row("milliseconds", *(f"{1000 * seconds:.2f}" for seconds in found.latency().values()))
    console.print(latency)
    console.print(f"{found.per_second:,.0f} completions per second in batches")
