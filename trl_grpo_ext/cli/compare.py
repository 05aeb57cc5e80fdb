"""`trl-grpo-ext compare`: the command line of the comparison. Heavy imports happen when the command runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from ..errors import ConfigurationError
from ..guard.terminal import messages, results
from ..guard.untrusted import printable

if TYPE_CHECKING:
    from ..history.compare import Comparison, Gradients

_SAME = 0.0005  # shares below this print as 0.0%
_STEPS = re.compile(r"(\d*)\.\.(\d*)|(\d+)")

_COMPLETIONS = "A run's output_dir with token records, or a file of them; with --model also JSON Lines of texts."
_WITH = "A YAML file with rewards, advantage_hooks, loss_aggregation. Repeat it; the first is the base."
_MODEL = "Measure gradients with the policy that sampled the completions: path or hub id, or an adapter's folder."
_DATASET = "A .jsonl or .parquet file with the columns that rewards need, joined by prompt."
_RIGHT_AT = "The least value of the base's first reward that counts as right."
_TEMPERATURE = "Sampling temperature; the model's logits are divided by it. Default: the run's."
_DIMENSIONS = "Dimensions of the gradient sketch; it is exact with one per trained parameter."


def compare_command(
    completions: Annotated[str, typer.Argument(help=_COMPLETIONS)],
    with_: Annotated[list[str], typer.Option("--with", help=_WITH)],
    model: Annotated[str | None, typer.Option(help=_MODEL)] = None,
    dataset: Annotated[str | None, typer.Option(help=_DATASET)] = None,
    right_at: Annotated[float, typer.Option("--right-at", help=_RIGHT_AT)] = 0.5,
    step: Annotated[str | None, typer.Option(help="The step, or the first and last as N..M.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most completions to use, in whole groups.")] = None,
    temperature: Annotated[float | None, typer.Option(min=1e-6, help=_TEMPERATURE)] = None,
    dimensions: Annotated[int, typer.Option(min=2, help=_DIMENSIONS)] = 4096,
    rows: Annotated[int, typer.Option(min=1, help="Completions per micro-batch of the model.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Compare selections of plugins on the same completions, without training.

    Rewards, advantages, weights, and where the gradient goes: to long or short, right or wrong. With a
    model also how much of each gradient is signal, and where it points.
    """
    steps = step_range(step)
    from ..history.compare import compare  # slow to import

    found = compare(
        completions,
        with_,
        model=model,
        dataset=dataset,
        right_at=right_at,
        steps=steps,
        limit=limit,
        temperature=temperature,
        dimensions=dimensions,
        rows=rows,
        progress=lambda items, title: track(items, title, console=messages(), transient=True),
    )
    for sentence in found.notes:
        messages().print(printable(sentence), soft_wrap=not messages().is_terminal)
    if as_json:
        typer.echo(json.dumps(found.plain(), indent=2, allow_nan=False))
    else:
        _print(found, results())


def step_range(text: str | None) -> tuple[int | None, int | None]:
    """The first and last step in `--step`; None means no bound."""
    match = _STEPS.fullmatch((text or "..").strip())
    if match is None:
        raise ConfigurationError(f"--step is {text!r}; write one step, such as 10, or first and last, such as 10..20.")
    first, last = (match[3], match[3]) if match[3] else (match[1], match[2])
    return int(first) if first else None, int(last) if last else None


def _print(found: Comparison, console: Console) -> None:
    what = f"{found.completions:,} completions in {found.groups:,} groups, {found.tokens:,} tokens"
    console.print(printable(f"{found.source}: {what}, steps {found.steps[0]} to {found.steps[-1]}"))
    for sentence in _conclusions(found):
        console.print(Text(printable(sentence), style="bold"))
    names = [one.name for one in found.selections]
    lines = [
        (part.name, [_percent(part.tokens), *(_percent(part.mass[name]) for name in names)])
        for part in (*found.by_length, *found.by_correctness)
    ]
    title = f"share of the gradient mass (right: {found.correct_by} from {found.right_at:g} on)"
    _print_table(console, title, ["of the tokens", *names], lines)
    if found.gradients is not None:
        _print_gradients(found.gradients, console)


def _conclusions(found: Comparison) -> Iterator[str]:
    """Sum up the comparison, one sentence for each selection besides the base."""
    base = found.selections[0]
    if not found.pairs:
        signal = f"{_percent(base.without_signal)} of the groups without signal"
        reward = "no reward" if base.reward_mean is None else f"reward {base.reward_mean:.4g} on average"
        yield f"{base.name}: {reward}, {signal}."
    for pair, other in zip(found.pairs, found.selections[1:], strict=True):
        changes = (pair.moved, pair.moved_between_tokens, pair.turned)
        if None in changes:
            empty = [one.name for one in (base, other) if one.positive_mass is None]
            yield f"{' and '.join(empty)} {'has' if len(empty) == 1 else 'have'} no gradient mass: nothing is learnt."
            continue
        if all(change is not None and change < _SAME for change in changes):
            yield f"{pair.other} and {pair.base} train the same: no gradient mass moves, nor is any turned."
            continue
        yield (
            f"{pair.other} moves {_percent(pair.moved)} of {pair.base}'s gradient mass to other completions and "
            f"{_percent(pair.moved_between_tokens)} to other tokens; {_percent(pair.same_sign)} of the completions "
            f"are pushed the same way, {_percent(other.without_signal)} of the groups have no signal ({pair.base}: "
            f"{_percent(base.without_signal)})."
        )


def _print_gradients(found: Gradients, console: Console) -> None:
    error = "exact" if found.sketch_error == 0 else f"squared norms to {found.sketch_error:.1%}"
    sketch = f"{found.parameters:,} trained parameters in {found.dimensions:,} dimensions ({error})"
    console.print(printable(f"{found.model}: {sketch}, {found.prompts:,} prompts"))
    noise = f"signal / noise of {found.batch_size} completions"
    columns = (noise, "worth x completions", "cosine to plain TRL", "cosine to policy gradient")
    lines = []
    for place, one in enumerate(found.selections):  # plain TRL and the policy gradient come first
        worth = "-" if place == 0 else one.worth.text(2)
        to_plain = "-" if place == 0 else one.to_plain.text(2)
        to_policy_gradient = "-" if place == 1 else one.to_policy_gradient.text(2)
        ratio = one.ratio.text() if one.signal_seen else f"{one.ratio.text()}, none seen"
        lines.append((one.name, [ratio, worth, to_plain, to_policy_gradient]))
    _print_table(console, "gradients, with 95 % intervals", columns, lines)


def _print_table(console: Console, title: str, columns: Sequence[str], lines: Iterable[tuple[str, list[str]]]) -> None:
    """Print a table of untrusted text: names on the left, cells on the right."""
    table = Table(title=Text(printable(title)), title_justify="left", title_style="bold")
    table.add_column("", overflow="fold")
    for column in columns:
        table.add_column(Text(printable(column)), justify="right", overflow="fold")
    for name, cells in lines:
        table.add_row(Text(printable(name)), *(Text(printable(cell)) for cell in cells))
    console.print(table)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
