"""`trl-grpo-ext replay`: the command line of the replay. Heavy imports happen when the command runs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from ..errors import ConfigurationError
from ..guard.untrusted import printable
from .console import messages, results

if TYPE_CHECKING:
    from ..history.replay import Comparison, Disagreement, Pair, Part, RankingFlip, SelectionNumbers

_SAME, _FEW = 0.0005, 1
"""Shares below this print as 0.0%; examples of each kind without --verbose."""
_EXCERPT = 160
"""Characters shown of a prompt or a completion."""
_PATIENCE = 1.0
"""Seconds until a progress bar shows."""
_STEPS = re.compile(r"(\d*)\.\.(\d*)|(\d+)")


def register(app: typer.Typer) -> None:
    """Add the command to an app."""
    app.command("replay", short_help="Compare selections on saved completions.")(replay_command)


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
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer, path or hub id, for files without tokens.")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="A .jsonl or .parquet file with the columns that rewards need, joined by prompt. By default the "
            "`dataset_path` of the first selection that has one."
        ),
    ] = None,
    correct: Annotated[
        str | None,
        typer.Option(help="The reward or column that decides what is right. Default: the base's first reward."),
    ] = None,
    right_at: Annotated[float, typer.Option("--right-at", help="Its least value that counts as right.")] = 0.5,
    step: Annotated[str | None, typer.Option(help="The step, or the first and last as N..M.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most completions to use, in whole groups.")] = None,
    num_generations: Annotated[
        int | None, typer.Option("--num_generations", min=1, help="Completions per prompt, if the files don't say.")
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="Completions and groups to list.")] = 5,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print all tables.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Compare selections of plugins on saved completions, without a model.

    Rewards, advantages, weights, and where the gradient goes: to long or short, right or wrong, early or late.
    """
    steps = step_range(step)
    from ..history.replay import replay  # slow to import

    said = messages()
    comparison = replay(
        completions,
        with_,
        tokenizer=tokenizer,
        dataset=dataset,
        correct=correct,
        right_at=right_at,
        steps=steps,
        limit=limit,
        num_generations=num_generations,
        show=show,
        say=lambda sentence: said.print(printable(sentence), soft_wrap=not said.is_terminal),
        progress=lambda batches, count: progress_if_slow(batches, count, said),
    )
    if as_json:
        typer.echo(json.dumps(comparison.plain(), indent=2, allow_nan=False))
    else:
        _print(comparison, results(), verbose)


def step_range(text: str | None) -> tuple[int | None, int | None]:
    """The first and last step in `--step`; None means no bound.

    Raises:
        ConfigurationError: It names none.
    """
    if text is None:
        return None, None
    match = _STEPS.fullmatch(text.strip())
    if match is None:
        raise ConfigurationError(
            f"--step is {text!r}; write one step, such as 10, or the first and last, such as 10..20."
        )
    if match[3]:
        return int(match[3]), int(match[3])
    return int(match[1]) if match[1] else None, int(match[2]) if match[2] else None


def progress_if_slow(batches: Iterable[Any], count: int, console: Console, what: str = "Replaying") -> Iterator[Any]:
    """Show a progress bar, on a terminal, once the work takes longer than a moment."""
    started, bar = time.monotonic(), None
    try:
        for number, batch in enumerate(batches):
            if bar is None and console.is_terminal and time.monotonic() - started > _PATIENCE:
                bar = Progress(console=console, transient=True)
                bar.start()
                task = bar.add_task(what, total=count)
            if bar is not None:
                bar.update(task, completed=number)
            yield batch
    finally:
        if bar is not None:
            bar.stop()


# ------------------------------------------------------------------ printing


def _print(found: Comparison, console: Console, verbose: bool) -> None:
    what = f"{found.completions:,} completions in {found.groups:,} groups, {found.tokens:,} {_unit(found)}"
    steps = f"{found.steps[0]}" if len(set(found.steps)) == 1 else f"{found.steps[0]} to {found.steps[-1]}"
    console.print(printable(f"{found.source}: {what}, step {steps}"))
    for sentence in _conclusions(found):
        console.print(Text(printable(sentence), style="bold"))
    if not verbose:
        for pair in found.pairs:
            _print_examples(pair, console, _FEW)
        console.print(Text("More: --verbose for tables of rewards, lengths, positions and weights", style="dim"))
        return
    console.print(_selections_table(found))
    console.print(_rewards_table(found))
    names = [one.name for one in found.selections]
    console.print(_parts_table("share of the gradient mass, by length", found.by_length, names, counts=True))
    if found.by_correctness:
        title = f"share of the gradient mass, by correctness (right: {found.correct_by} from {found.right_at:g} on)"
        console.print(_parts_table(title, found.by_correctness, names, counts=True))
    console.print(
        _parts_table(
            "share of the gradient mass, by position in the completion", found.by_position, names, counts=False
        )
    )
    console.print(
        _extent_table(
            "mean weight of a completion (its tokens' sum), relative to all", found.by_length, names, "weight"
        )
    )
    if found.by_correctness:
        console.print(_extent_table("mean advantage", found.by_correctness, names, "advantage"))
    for pair in found.pairs:
        _print_pair(pair, console)


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
        to = _gaining_lengths(found, pair)
        yield (
            f"{pair.other} moves {_percent(pair.moved)} of {pair.base}'s gradient mass to other completions and "
            f"{_percent(pair.moved_between_tokens)} to other tokens{to}; {_percent(pair.same_sign)} of the completions "
            f"are pushed the same way, {_percent(pair.groups_flipped)} of the groups are ranked differently, "
            f"{_percent(other.without_signal)} of them have no signal ({pair.base}: {_percent(base.without_signal)})."
        )


def _gaining_lengths(found: Comparison, pair: Pair) -> str:
    """Name the lengths that gain most."""
    gains = [
        (part.mass[pair.other] - part.mass[pair.base], part.name)  # type: ignore[operator]
        for part in found.by_length
        if part.mass[pair.other] is not None and part.mass[pair.base] is not None
    ]
    gain, name = max(gains, default=(0.0, ""))
    quarter, _, tokens = name.partition(" (")
    return f", most of it to the {quarter} by length ({tokens.rstrip(')')}, +{_percent(gain)})" if gain > _SAME else ""


def _unit(found: Comparison) -> str:
    return "words" if found.tokens_are == "words" else "tokens"


def _table(title: str, first: str, names: Sequence[str]) -> Table:
    table = Table(title=Text(printable(title)), title_justify="left", title_style="bold")
    table.add_column(first, overflow="fold")
    for name in names:
        table.add_column(Text(printable(name)), justify="right", overflow="fold")
    return table


def _selections_table(found: Comparison) -> Table:
    table = _table("selections", "", [one.name for one in found.selections])

    def row(label: str, cells: Iterable[str]) -> None:
        table.add_row(label, *(Text(printable(cell)) for cell in cells))

    row("hooks", (", ".join(one.hooks) or "none" for one in found.selections))
    row("aggregation", (_aggregation(one) for one in found.selections))
    row("reward, mean", (_number(one.reward_mean) for one in found.selections))
    row("reward, std", (_number(one.reward_std) for one in found.selections))
    row("groups without signal", (_percent(one.without_signal) for one in found.selections))
    row("advantage, std", (_number(one.advantage_std) for one in found.selections))
    row("gradient mass on advantages above 0", (_percent(one.positive_mass) for one in found.selections))
    row("sum of the weights of a batch", (_number(one.total_weight) for one in found.selections))
    return table


def _aggregation(one: SelectionNumbers) -> str:
    return one.aggregation if one.aggregation_of is None else f"{one.aggregation} (loss_type {one.aggregation_of})"


def _rewards_table(found: Comparison) -> Table:
    table = Table(title=Text("rewards"), title_justify="left", title_style="bold")
    for name in ("selection", "reward"):
        table.add_column(name, overflow="fold")
    for name in ("mean", "std", "none"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("outcomes", overflow="fold")
    for one in found.selections:
        for reward in one.rewards:
            outcomes = ", ".join(f"{name} {count:,}" for name, count in sorted(reward.outcomes.items()))
            cells = (one.name, reward.name, _number(reward.mean), _number(reward.std), f"{reward.none:,}", outcomes)
            table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _parts_table(title: str, parts: Sequence[Part], names: Sequence[str], counts: bool) -> Table:
    extra = ["completions", "tokens"] if counts else []
    table = _table(title, "", [*extra, *names])
    for part in parts:
        known = [f"{part.completions or 0:,}", _percent(part.tokens)] if counts else []
        table.add_row(Text(part.name), *known, *(_percent(part.mass[name]) for name in names))
    return table


def _extent_table(title: str, parts: Sequence[Part], names: Sequence[str], what: str) -> Table:
    table = _table(title, "", names)
    for part in parts:
        numbers: Mapping[str, float | None] = getattr(part, what)
        table.add_row(Text(part.name), *(_number(numbers[name]) for name in names))
    return table


def _print_pair(pair: Pair, console: Console) -> None:
    table = _table(f"{pair.base} and {pair.other}", "", ["value"])
    table.add_row("correlation of advantages (Pearson)", _number(pair.pearson))
    table.add_row("correlation of advantages (Spearman)", _number(pair.spearman))
    table.add_row("completions with the same sign", _percent(pair.same_sign))
    table.add_row("gradient mass moved to other completions", _percent(pair.moved))
    table.add_row("gradient mass moved to other tokens", _percent(pair.moved_between_tokens))
    table.add_row("groups ranked differently", _percent(pair.groups_flipped))
    console.print(table)
    _print_examples(pair, console)


def _print_examples(pair: Pair, console: Console, most: int | None = None) -> None:
    if pair.disagreements:
        console.print(Text("Completions on which they disagree most", style="bold"))
    for number, one in enumerate(pair.disagreements[:most], start=1):
        _print_disagreement(number, one, pair, console)
    if pair.flips:
        console.print(Text("Groups whose rankings differ most", style="bold"))
    for number, flip in enumerate(pair.flips[:most], start=1):
        _print_flip(number, flip, pair, console)


def _print_disagreement(number: int, one: Disagreement, pair: Pair, console: Console) -> None:
    place = f"step {one.step}, group {one.group}, member {one.member}, {one.tokens:,} tokens"
    console.print(printable(f"{number}. {place}"))
    for name, side in ((pair.base, one.base), (pair.other, one.other)):
        numbers = (
            f"{_percent(side.mass)} of the mass, advantage {_number(side.advantage)}, reward {_number(side.reward)}"
        )
        console.print(printable(f"   {name}: {numbers}"))
    console.print(Text(f"   prompt: {_excerpt(one.prompt)}"))
    console.print(Text(f"   completion: {_excerpt(one.completion)}"))


def _print_flip(number: int, flip: RankingFlip, pair: Pair, console: Console) -> None:
    console.print(
        printable(f"{number}. step {flip.step}, group {flip.group}: {flip.pairs:,} pair{'s' * (flip.pairs > 1)} turned")
    )
    for name, advantages in ((pair.base, flip.base), (pair.other, flip.other)):
        listed = " ".join(map(_number, advantages[:16])) + (" ..." if len(advantages) > 16 else "")
        console.print(printable(f"   {name}: {listed}"))
    console.print(Text(f"   prompt: {_excerpt(flip.prompt)}"))


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
