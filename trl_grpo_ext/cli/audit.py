"""`trl-grpo-ext audit`: does a reward understand a data set's references? Run it before you rent a GPU.

Each reference goes back to the reward as if a model had written it, and then a wrong answer of the same shape: another
number, another sign, another parity. A reference that does not parse, that scores wrong against itself or that takes
the wrong answer teaches nothing or the wrong thing. Heavy imports happen when the command runs.
"""

from __future__ import annotations

import inspect
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track
from rich.table import Table
from rich.text import Text

from ..errors import ConfigurationError
from ..guard.outcomes import Judgement, Outcome, shown
from ..guard.untrusted import one_line, printable
from ..types import RewardDeclaration
from .console import messages, results

__all__ = ["Audit", "Finding", "audit"]

PROBLEMS = 1

RENDERINGS = ("{}", "\\boxed{{{}}}", "<answer>{}</answer>", "${}$")
"""How a reference becomes a completion. One of these has to score right, or the reference's last explicit answer,
boxed."""
_Asked = tuple[int, Mapping[str, Any], str]
"""A row's number, the row, and a completion of it."""
_OTHER_ANSWER = "\\boxed{-12345.5}"
"""An answer that hardly any reference gives; comparing a reference with it must not fail."""

_USUAL_COLUMNS = ("solution", "answer", "reference", "target", "label")
_NESTED = r"(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})"
_EXPLICIT = re.compile(
    rf"\\boxed\s*\{{({_NESTED}{{1,2000}})\}}|<answer>([^<]{{1,2000}})</answer>|^####([^\n]{{1,2000}})$", re.MULTILINE
)
"""The last box, answer tag or `####` line of a reference."""
_AT_ONCE = 64
_SHOWN = 10
_FAILURES = (Outcome.TIMEOUT, Outcome.DIED, Outcome.REFUSED, Outcome.ERROR)
_ORDER = (Outcome.NO_ANSWER, *_FAILURES, Outcome.WRONG, Outcome.RIGHT)
"""Verdicts by what they say about a reference; those that are not here say most."""
_ACCEPTS = "accepts a wrong answer"
_KINDS = ("does not parse", "wrong against itself", "fails", _ACCEPTS)
_PROBLEMS = {
    **dict.fromkeys((Outcome.UNPARSEABLE, Outcome.NONE), "does not parse"),
    **dict.fromkeys(_FAILURES, "fails"),
}
"""What a verdict is called; all others are "wrong against itself"."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with one row of the data set; the problem is one of `Audit.counts`."""

    row: int
    problem: str
    reference: str  # quoted
    detail: str = ""  # what exactly


@dataclass(frozen=True)
class Read:
    """What the reward read one reference as, and what of its text that left over."""

    row: int
    reference: str
    read_as: str
    left_over: str


@dataclass(frozen=True)
class Audit:
    """What was found: the reward's and the column's names, rows and distinct references, and what is wrong by row.

    `read` is what the different references were read as, if the reward has `read_references`.
    """

    reward: str
    column: str
    rows: int
    references: int
    findings: list[Finding] = field(default_factory=list)
    read: list[Read] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """The number of rows with each problem."""
        return {kind: sum(finding.problem == kind for finding in self.findings) for kind in _KINDS}

    def plain(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {**asdict(self), "problems": self.counts()}


def audit(
    reward: Any,
    rows: Sequence[Mapping[str, Any]],
    *,
    column: str | None = None,
    completions: str | None = None,
    right_at: float = 1.0,
    progress: Callable[[Iterable[range], int], Iterable[range]] = lambda batches, count: batches,
) -> Audit:
    """Audit a data set's references with a reward.

    Args:
        reward: The reward. If it has `judge`, its outcomes are read, otherwise its scores.
        rows: The data set's rows, as mappings.
        column: The column that holds the references. By default the one that the reward reads: its `reference_column`,
            or the usual name that its signature has. The reward also gets the column named here under its own column's
            name.
        completions: A column with a right completion for each row. Without it the reference stands in: as it is, boxed,
            in answer tags and between dollars, and one of these has to score right.
        right_at: The least score that counts as right, for a reward without `judge`.
        progress: Wraps the batches to show progress; also gets their number.

    Raises:
        ConfigurationError: There are no rows, or no such column; or the reward reads a missing one, which would stop a
            training; or it reads none.
        TRLGRPOExtError: What the reward itself raises.
    """
    from ..guard.calls import reward_name  # slow to import

    if not rows:
        raise ConfigurationError("The data set has no rows to audit.")
    if completions is not None and completions not in rows[0]:
        raise ConfigurationError(f"There is no column {completions!r}; the columns are {', '.join(rows[0])}.")
    column = _reference_column(reward, rows[0], column) or completions
    if column is None:
        raise ConfigurationError(
            f"{reward_name(reward)} reads no column of references that these rows have ({', '.join(rows[0])}), so "
            "there is nothing to check. If it does read references, name their column with --reference."
        )
    judge = partial(_judged, reward, column, right_at)
    findings: list[Finding] = []
    read: list[Read] = []
    known: set[str] = set()
    batches = [range(len(rows))[start : start + _AT_ONCE] for start in range(0, len(rows), _AT_ONCE)]
    for batch in progress(batches, len(batches)):
        findings += _against_themselves(judge, [(row, rows[row]) for row in batch], column, completions)
        if completions is None and hasattr(reward, "read_references"):
            fresh = {repr(rows[row][column]): row for row in reversed(batch) if repr(rows[row][column]) not in known}
            known |= fresh.keys()
            first = sorted(fresh.values())
            as_read = reward.read_references([rows[row][column] for row in first])
            read += [Read(row, shown(rows[row][column]), *pair) for row, pair in zip(first, as_read, strict=True)]
    return Audit(
        reward=reward_name(reward),
        column=column,
        rows=len(rows),
        references=len({repr(row[column]) for row in rows}),
        findings=sorted(findings, key=lambda finding: finding.row),
        read=read,
    )


def _judged(reward: Any, column: str, right_at: float, asked: Sequence[_Asked]) -> list[Judgement]:
    """The reward's verdicts."""
    if not asked:
        return []
    from ..guard.calls import PASSED_BY_TRL, call, check_scores, reward_name  # slow to import

    rows = [row for _, row, _ in asked]
    completions = [text for *_, text in asked]
    theirs = rows[0].keys() - PASSED_BY_TRL - {"prompt", "completion"}
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in theirs}
    if (own := RewardDeclaration.of(reward).reference_column) is not None:
        columns.setdefault(own, [row[column] for row in rows])
    columns["prompts"] = [row.get("prompt", "") for row in rows]
    columns["completions"] = completions
    columns["completion_ids"] = [[0] * max(1, len(completion.split())) for completion in completions]
    with warnings.catch_warnings():  # what a reward would warn of is found here
        warnings.simplefilter("ignore")
        if hasattr(reward, "judge"):
            judgements: list[Judgement] = call(reward.judge, columns)
        else:
            scores = check_scores(call(reward, columns), len(completions), reward_name(reward))
            judgements = [Judgement(Outcome.NONE if s is None else Outcome.SCORED, score=s) for s in scores]
    return [_by_score(one, right_at) for one in judgements]


def _by_score(one: Judgement, right_at: float) -> Judgement:
    if one.outcome is not Outcome.SCORED or one.score is None:
        return one
    return Judgement(Outcome.RIGHT if one.score >= right_at else Outcome.WRONG, f"score {one.score:g}", one.score)


def _reference_column(reward: Any, row: Mapping[str, Any], asked: str | None) -> str | None:
    """The column asked for, or else the one that training would read; None if the reward reads none."""
    own = RewardDeclaration.of(reward).reference_column
    if asked is not None and asked not in row:
        raise ConfigurationError(f"There is no column {asked!r}; the columns are {', '.join(row)}.")
    if asked is None and own is not None and own not in row:
        raise ConfigurationError(
            f"The reward reads the column {own!r}, and the columns are {', '.join(row)}: training would stop. Rename "
            "the one that holds the references, or name it with --reference to audit it all the same."
        )
    if asked is not None or own is not None:
        return asked or own
    try:
        named = inspect.signature(reward).parameters
    except (TypeError, ValueError):  # compiled
        return None
    return next((name for name in _USUAL_COLUMNS if name in named and name in row), None)


def _against_themselves(
    judge: Callable[[Sequence[_Asked]], list[Judgement]],
    rows: Sequence[tuple[int, Mapping[str, Any]]],
    column: str,
    completions: str | None,
) -> Iterator[Finding]:
    """Try each rendering on the rows that no earlier one got right, and a wrong answer on the rows that are right."""
    found = dict[int, Judgement]()
    rendered = dict[int, str]()
    texts = {number: _renderings(str(row[column])) for number, row in rows}
    if completions is not None:
        texts = {number: [str(row[completions])] for number, row in rows}
    for place in range(max(map(len, texts.values()))):
        asked = [
            (number, row, texts[number][place])
            for number, row in rows
            if place < len(texts[number])
            and (number not in found or found[number].outcome not in (Outcome.RIGHT, Outcome.UNPARSEABLE))
        ]
        for (number, _, text), judged in zip(asked, judge(asked), strict=True):
            if number not in found or _says(judged) > _says(found[number]):
                found[number] = judged
                rendered[number] = text
    for number, row in rows:
        judged = found[number]
        if judged.outcome is not Outcome.RIGHT:
            yield _finding(number, row[column], judged)
    right = [(number, row, rendered[number]) for number, row in rows if found[number].outcome is Outcome.RIGHT]
    yield from _wrong_ones(judge, right, column, same_shape=completions is None)


def _finding(row: int, reference: Any, judged: Judgement, after: str = "") -> Finding:
    detail = ": ".join(part for part in (f"{judged.outcome.value}{after}", judged.detail) if part)
    return Finding(row, _PROBLEMS.get(judged.outcome, "wrong against itself"), shown(reference), detail)


def _wrong_ones(
    judge: Callable[[Sequence[_Asked]], list[Judgement]], right: Sequence[_Asked], column: str, *, same_shape: bool
) -> Iterator[Finding]:
    """The rows that take a wrong answer for right, or fail at it: one far off, and those of the same shape."""
    asked = [
        (number, row, wrong)
        for number, row, text in right
        for wrong in (_OTHER_ANSWER, *(same_shape_but_wrong(text) if same_shape else ()))
    ]
    reported: set[int] = set()
    for (number, row, text), judged in zip(asked, judge(asked), strict=True):
        if number in reported:
            continue
        if text is _OTHER_ANSWER:
            if judged.outcome is Outcome.UNPARSEABLE or judged.outcome in _FAILURES:
                reported.add(number)
                yield _finding(number, row[column], judged, ": compared with another answer")
        elif judged.outcome is Outcome.RIGHT:
            reported.add(number)
            detail = f"right as well: {shown(text[-_LONGEST_ANSWER:])}"
            yield Finding(number, _ACCEPTS, shown(row[column]), detail)


_NUMBER = re.compile(r"(?<![\\A-Za-z_\d.])\d+(?:,\d{3})*(?![\d])")
_PAIRS = (
    ("even", "odd"),
    ("positive", "negative"),
    ("increasing", "decreasing"),
    ("\\forall", "\\exists"),
    ("\\leq", "\\geq"),
    ("\\le", "\\ge"),
    ("\\cup", "\\cap"),
)
_OPPOSITES = {"\\pm": "", **dict(_PAIRS), **{other: one for one, other in _PAIRS}}
_OPPOSITE = re.compile(rf"(?:{'|'.join(map(re.escape, _OPPOSITES))})(?![A-Za-z])")
_SIGN = re.compile(r"(?<=[\w})\s])[+-](?=\s?[\w\\({])")
_LONGEST_ANSWER = 200


def same_shape_but_wrong(text: str) -> list[str]:
    """At most three completions whose last answer has the shape of this one's and another value."""
    answer = text[-_LONGEST_ANSWER:]
    start = max(answer.rfind("####"), answer.rfind("\\boxed"), 0)
    head = text[: len(text) - len(answer) + start]
    answer = answer[start:]
    numbers = [*_NUMBER.finditer(answer)]
    signs = [*_SIGN.finditer(answer)]
    made = []
    if opposite := _OPPOSITE.search(answer):
        made.append(_with(answer, [(opposite, _OPPOSITES[opposite[0]])]))
    elif signs and "=" in answer:
        made.append(_with(answer, [(signs[0], "-" if signs[0][0] == "+" else "+")]))
    if len(numbers) > 1:
        made.append(_with(answer, [(number, _next(number[0])) for number in numbers[:-1]]))
    if numbers:
        made.append(_with(answer, [(numbers[-1], _next(numbers[-1][0]))]))
    return [head + other for other in made if other != answer]


def _next(number: str) -> str:
    return f"{int(number.replace(',', '')) + 1:{',' if ',' in number else ''}}"


def _with(text: str, changes: Sequence[tuple[re.Match[str], str]]) -> str:
    for match, other in reversed(changes):
        text = text[: match.start()] + other + text[match.end() :]
    return text


def _says(judged: Judgement) -> int:
    return _ORDER.index(judged.outcome) if judged.outcome in _ORDER else len(_ORDER)


def _renderings(reference: str) -> list[str]:
    """A reference as completions, and its last explicit answer, boxed."""
    explicit = ["".join(filter(None, match.groups())).strip() for match in _EXPLICIT.finditer(reference)]
    answers = [RENDERINGS[1].format(answer) for answer in explicit if answer]
    return [rendering.format(reference) for rendering in RENDERINGS] + answers[-1:]


def audit_command(
    data: Annotated[
        str,
        typer.Argument(help="A .jsonl or .parquet file, a folder of `save_to_disk`, or a data set of the hub."),
    ],
    reward: Annotated[
        str, typer.Option(help="The reward: a name, or a mapping such as '{name: math_accuracy, timeout: 1}'.")
    ],
    reference: Annotated[str | None, typer.Option(help="The column that holds the references.")] = None,
    completion: Annotated[
        str | None,
        typer.Option(help="A column with right completions, for references that are not themselves answers."),
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="Configuration of a hub data set, such as `main` for GSM8K.")
    ] = None,
    split: Annotated[str, typer.Option(help="The split.")] = "train",
    limit: Annotated[int | None, typer.Option(min=1, help="Audit only this many rows, from the first.")] = None,
    right_at: Annotated[
        float, typer.Option(help="The least score that counts as right, for a reward without outcomes.")
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print all findings as JSON.")] = False,
) -> None:
    """Find references that a reward cannot read or scores as wrong.

    Exits with 1 if it finds any, and with 2 if the reward reads no column of references, so that none was checked.
    """
    from ..plugins.loading import load_rewards  # slow to import

    def progress(batches: Iterable[range], count: int) -> Iterator[range]:
        yield from track(batches, "Scoring", total=count, console=messages(), transient=True)

    (function,) = load_rewards([reward])
    rows = _rows(data, config, split, limit)
    found = audit(function, rows, column=reference, completions=completion, right_at=right_at, progress=progress)
    if as_json:
        typer.echo(json.dumps(found.plain(), indent=2))
    else:
        _print_audit(found)
    if found.findings:
        raise typer.Exit(PROBLEMS)


def _rows(data: str, config: str | None, split: str, limit: int | None) -> list[dict[str, Any]]:
    path = Path(data)
    try:
        if path.suffix == ".jsonl":  # Arrow's reader crashes on odd files
            from ..history.run_files import read_columns  # slow to import

            columns = read_columns(path)  # where a row lacks one it has None, as in training
            return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)][:limit]
        if path.is_file() and path.suffix != ".parquet":
            raise ConfigurationError(f"{data} is a file, but neither .jsonl nor .parquet.")
        import datasets  # slow to import

        datasets.disable_progress_bars()
        if path.is_dir():
            loaded = datasets.load_from_disk(data)
            loaded = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        elif path.suffix == ".parquet":
            loaded = datasets.Dataset.from_parquet(data)  # `load_dataset` would ask the hub about a local file
        else:
            loaded = datasets.load_dataset(data, config, split=split)
        rows: list[dict[str, Any]] = loaded.select(range(min(limit or len(loaded), len(loaded)))).to_list()
        return rows
    except ConfigurationError:
        raise
    except Exception as error:  # whatever the readers of `datasets` raise on odd files and names
        raise ConfigurationError(f"The data set {shown(data)} could not be loaded: {one_line(error, 300)}") from error


def _print_audit(found: Audit) -> None:
    console = results()
    counted = f" on {found.rows:,} rows, {found.references:,} different references in column "
    console.print(Text.assemble((one_line(found.reward), "bold"), counted, (one_line(found.column), "bold")))
    shown_rows = []
    for problem, count in found.counts().items():
        console.print(f"{problem}: {count:,} ({count / found.rows:.2%})", style="bold red" if count else None)
        of_kind = [finding for finding in found.findings if finding.problem == problem]
        shown_rows += [(one.row, problem, one.reference, one.detail) for one in of_kind[:_SHOWN]]
    if found.read:
        left = sum(bool(read.left_over) for read in found.read)
        console.print(f"read with text left over: {left:,} of {len(found.read):,} different references")
        read = sorted(found.read, key=lambda one: not one.left_over)[:_SHOWN]
        lines = [(one.row, one.reference, one.read_as, one.left_over) for one in read]
        _print_table(("row", "reference", "read as", "left over"), lines, len(found.read))
    _print_table(("row", "problem", "reference", "what"), shown_rows, len(found.findings))


def _print_table(titles: Sequence[str], lines: Sequence[tuple[Any, ...]], of: int) -> None:
    """Print lines of untrusted text, and how many there are more."""
    table = Table()
    for title in titles:
        table.add_column(title, overflow="fold")
    for line in lines:
        table.add_row(*(Text(printable(str(cell))) for cell in line))
    if lines:
        results().print(table)
    if of > len(lines):
        results().print(f"... and {of - len(lines):,} more (--json for all)")
