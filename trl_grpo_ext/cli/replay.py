"""`trl-grpo-ext replay`: the command line of the replay. Heavy imports happen when the command runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import ConfigurationError
from ..guard.untrusted import printable
from .console import messages, results

if TYPE_CHECKING:
    from ..history.replay import Comparison, Pair

_SAME = 0.0005
"""Shares below this print as 0.0%."""
_EXCERPT = 160
"""Characters shown of a prompt or a completion."""
_STEPS = re.compile(r"(\d*)\.\.(\d*)|(\d+)")


Tokenizer = Annotated[str | None, typer.Option(help="A tokenizer, path or hub id, for files without tokens.")]
Dataset = Annotated[
    str | None,
    typer.Option(help="A .jsonl or .parquet file with the columns that rewards need, joined by prompt."),
]
Step = Annotated[str | None, typer.Option(help="The step, or the first and last as N..M.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Most completions to use, in whole groups.")]
NumGenerations = Annotated[
    int | None, typer.Option("--num_generations", min=1, help="Completions per prompt, if the files don't say.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]


def replay_command(
    completions: Annotated[
        str,
        typer.Argument(
            help="A run's output_dir, or a folder or file with token records, TRL's completion tables, or JSON Lines "
            "of prompt and completion."
        ),
    ],
    with_: Annotated[
        list[str],
        typer.Option(
            "--with",
            help="A YAML file with rewards, advantage_hooks, loss_aggregation. Repeat it; the first is the base.",
        ),
    ],
    tokenizer: Tokenizer = None,
    dataset: Dataset = None,
    right_at: Annotated[
        float, typer.Option("--right-at", help="The least value of the base's first reward that counts as right.")
    ] = 0.5,
    step: Step = None,
    limit: Limit = None,
    num_generations: NumGenerations = None,
    show: Annotated[int, typer.Option(min=0, help="Completions to list.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Compare selections of plugins on saved completions, without a model.

    Rewards, advantages, weights, and where the gradient goes: to long or short, right or wrong, early or late.
    """
    steps = step_range(step)
    from ..history.replay import replay  # slow to import

    comparison = replay(
        completions,
        with_,
        tokenizer=tokenizer,
        dataset=dataset,
        right_at=right_at,
        steps=steps,
        limit=limit,
        num_generations=num_generations,
        show=show,
    )
    print_notes(comparison.notes)
    if as_json:
        typer.echo(json.dumps(comparison.plain(), indent=2, allow_nan=False))
    else:
        _print(comparison, results())


def step_range(text: str | None) -> tuple[int | None, int | None]:
    """The first and last step in `--step`; None means no bound."""
    match = _STEPS.fullmatch((text or "..").strip())
    if match is None:
        raise ConfigurationError(f"--step is {text!r}; write one step, such as 10, or first and last, such as 10..20.")
    first, last = (match[3], match[3]) if match[3] else (match[1], match[2])
    return int(first) if first else None, int(last) if last else None


def print_notes(notes: Iterable[str]) -> None:
    """Say on stderr how the files were read, and what the numbers leave out."""
    console = messages()
    for sentence in notes:
        console.print(printable(sentence), soft_wrap=not console.is_terminal)


# ------------------------------------------------------------------ printing


def _print(found: Comparison, console: Console) -> None:
    unit = "words" if found.tokens_are == "words" else "tokens"
    what = f"{found.completions:,} completions in {found.groups:,} groups, {found.tokens:,} {unit}"
    steps = f"{found.steps[0]}" if len(set(found.steps)) == 1 else f"{found.steps[0]} to {found.steps[-1]}"
    console.print(printable(f"{found.source}: {what}, step {steps}"))
    for sentence in _conclusions(found):
        console.print(Text(printable(sentence), style="bold"))
    names = [one.name for one in found.selections]
    lines = []
    for part in (*found.by_length, *found.by_correctness, *found.by_position):
        tokens = "" if part.tokens is None else _percent(part.tokens)
        lines.append((part.name, [tokens, *(_percent(part.mass[name]) for name in names)]))
    print_table(
        console,
        f"share of the gradient mass (right: {found.correct_by} from {found.right_at:g} on)",
        ["of the tokens", *names],
        lines,
    )
    for pair in found.pairs:
        _print_examples(pair, console)


def _conclusions(found: Comparison) -> Iterator[str]:
    """Sum up the comparison, one sentence for each selection besides the base."""
    base = found.selections[0]
    if not found.pairs:
        signal = f"{_percent(base.without_signal)} of the groups without signal"
        yield f"{base.name}: reward {_number(base.reward_mean)} on average, {signal}."
    for pair, other in zip(found.pairs, found.selections[1:], strict=True):
        if pair.moved is not None and pair.moved < _SAME and (pair.moved_between_tokens or 0.0) < _SAME:
            yield f"{pair.other} and {pair.base} train the same: no gradient mass moves to other completions or tokens."
            continue
        yield (
            f"{pair.other} moves {_percent(pair.moved)} of {pair.base}'s gradient mass to other completions and "
            f"{_percent(pair.moved_between_tokens)} to other tokens; {_percent(pair.same_sign)} of the completions "
            f"are pushed the same way, {_percent(other.without_signal)} of the groups have no signal ({pair.base}: "
            f"{_percent(base.without_signal)})."
        )


def print_table(console: Console, title: str, columns: Sequence[str], lines: Iterable[tuple[str, list[str]]]) -> None:
    """Print a table of untrusted text: names on the left, cells on the right."""
    table = Table(title=Text(printable(title)), title_justify="left", title_style="bold")
    table.add_column("", overflow="fold")
    for column in columns:
        table.add_column(Text(printable(column)), justify="right", overflow="fold")
    for name, cells in lines:
        table.add_row(Text(printable(name)), *(Text(printable(cell)) for cell in cells))
    console.print(table)


def _print_examples(pair: Pair, console: Console) -> None:
    if pair.disagreements:
        console.print(Text("Completions on which they disagree most", style="bold"))
    for number, one in enumerate(pair.disagreements, start=1):
        where = f"step {one.step}, group {one.group}, member {one.member}, {one.tokens:,} tokens"
        console.print(printable(f"{number}. {where}"))
        for name, mass in one.mass.items():
            numbers = f"advantage {_number(one.advantage[name])}, reward {_number(one.reward[name])}"
            console.print(printable(f"   {name}: {_percent(mass)} of the mass, {numbers}"))
        console.print(Text(f"   prompt: {_excerpt(one.prompt)}"))
        console.print(Text(f"   completion: {_excerpt(one.completion)}"))


def _excerpt(text: str) -> str:
    """The beginning of what a model or a dataset wrote, on one line, escaped."""
    shown = printable(text[: _EXCERPT + 1].replace("\n", "\\n"))
    if len(text) <= _EXCERPT:
        return shown
    return f"{shown[:_EXCERPT]}... ({len(text):,} characters)"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
