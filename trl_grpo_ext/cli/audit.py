"""`trl-grpo-ext audit`: does a reward understand a data set's references? Run it before you rent a GPU.

Each reference goes back to the reward as if a model had written it, and then a wrong answer of the same shape: another
number, another sign, another parity.
"""

import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from ..errors import ConfigurationError
from ..guard.calls import PASSED_BY_TRL, call, check_scores, reward_name
from ..guard.outcomes import Judgement, Outcome, shown
from ..guard.terminal import messages, results
from ..guard.untrusted import one_line, printable
from ..plugins.loading import load_rewards
from ..types import RewardDeclaration
from .console import paragraph

__all__ = ["Audit", "Finding", "audit"]

_RENDERINGS = ("{0}", "\\boxed{{{1}}}", "<answer>{1}</answer>", "${1}$", "```json\n{0}\n```", "{2}")
"""How a reference, what follows its last `####`, or its numbered lines become a completion. One has to score right."""
_AT_ONCE = 64
_SHOWN = 10


@dataclass(frozen=True)
class Finding:
    """What is wrong with one row: the outcome of its reference against itself, or that it accepts a wrong answer."""

    row: int
    reference: str  # quoted
    problem: str
    detail: str  # what exactly


@dataclass(frozen=True)
class Read:
    """What the reward read one reference as, and what of its text that left over."""

    row: int
    reference: str
    read_as: str
    left_over: str


@dataclass(frozen=True)
class Audit:
    """What was found: the reward's and the column's names, rows and distinct references, and what is wrong by row."""

    reward: str
    column: str
    rows: int
    references: int
    findings: list[Finding]
    read: list[Read]  # what the different references were read as, if the reward has `read_references`

    def counts(self) -> dict[str, int]:
        """The number of rows with each problem."""
        return dict(Counter(finding.problem for finding in self.findings))


def audit(
    reward: Any, rows: Sequence[Mapping[str, Any]], *, column: str | None = None, completions: str | None = None
) -> Audit:
    """Audit a data set's references with a reward.

    Args:
        reward: The reward. If it has `judge`, its outcomes are read; otherwise a score of at least 1 counts as right.
        rows: The data set's rows, as mappings.
        column: The column that holds the references; by default the reward's `reference_column`, under whose name the
            reward gets the column named here too.
        completions: A column with a right completion for each row. Without it the reference stands in, a list by line
            and a mapping as JSON: as it is, boxed, in answer tags, between dollars, in a fence of JSON and with
            its lines numbered, and one of these has to score right.

    Raises:
        ConfigurationError: There are no rows, or no such column, or the reward names none.
        TRLGRPOExtError: What the reward itself raises.
    """
    if not rows:
        raise ConfigurationError("The data set has no rows to audit.")
    column = column or RewardDeclaration.of(reward).reference_column or completions
    if column is None:
        raise ConfigurationError(f"{reward_name(reward)} names no column of references: name one with --reference.")
    for name in (column, completions):
        if name is not None and name not in rows[0]:
            raise ConfigurationError(f"There is no column {name!r}; the columns are {', '.join(rows[0])}.")
    judge = partial(_judged, reward, rows, column)
    found: dict[int, tuple[str, Judgement]] = {}
    for form in _RENDERINGS if completions is None else ("{0}",):
        asked = []
        for number, row in enumerate(rows):
            if number not in found or found[number][1].outcome not in (Outcome.RIGHT, Outcome.UNPARSEABLE):
                reference = _as_text(row[completions or column])
                numbered = "\n".join(f"{n}. {line}" for n, line in enumerate(reference.split("\n"), 1))
                asked.append((number, form.format(reference, reference.rpartition("####")[2].strip(), numbered)))
        for number, text, judged in judge(asked):
            if number not in found or judged.outcome is not Outcome.NO_ANSWER:  # which says least of a reference
                found[number] = (text, judged)
    problems: dict[int, tuple[str, str]] = {}
    wrong = []
    for number, (text, judged) in found.items():
        if judged.outcome is not Outcome.RIGHT:
            problems[number] = (judged.outcome.value, judged.detail)
        elif completions is None:
            wrong += [(number, other) for other in _same_shape_but_wrong(text)]
    for number, text, judged in judge(wrong):
        if judged.outcome is Outcome.RIGHT:
            problems.setdefault(number, ("accepts_wrong_answer", shown(text[-_LONGEST_ANSWER:])))
    first = {repr(rows[number][column]): number for number in reversed(range(len(rows)))}
    read: list[Read] = []
    if completions is None and hasattr(reward, "read_references"):
        distinct = sorted(first.values())
        as_read = reward.read_references([rows[number][column] for number in distinct])
        pairs = zip(distinct, as_read, strict=True)
        read = [Read(row, shown(rows[row][column]), *pair) for row, pair in pairs if any(pair)]  # else not read at all
    findings = [Finding(row, shown(rows[row][column]), *problem) for row, problem in sorted(problems.items())]
    return Audit(reward_name(reward), column, len(rows), len(first), findings, read)


def _as_text(reference: Any) -> str:
    if isinstance(reference, list | tuple):
        return "\n".join(map(str, reference))
    return json.dumps(reference, default=str) if isinstance(reference, Mapping) else str(reference)


def _judged(
    reward: Any, rows: Sequence[Mapping[str, Any]], column: str, asked: Sequence[tuple[int, str]]
) -> Iterator[tuple[int, str, Judgement]]:
    """The reward's verdicts on completions of some rows, by their numbers."""
    for start in range(0, len(asked), _AT_ONCE):
        numbers, completions = zip(*asked[start : start + _AT_ONCE], strict=True)
        theirs = rows[0].keys() - PASSED_BY_TRL - {"prompt", "completion"}
        columns: dict[str, Any] = {name: [rows[number][name] for number in numbers] for name in theirs}
        if (own := RewardDeclaration.of(reward).reference_column) is not None:
            columns.setdefault(own, [rows[number][column] for number in numbers])
        columns["prompts"] = [rows[number].get("prompt", "") for number in numbers]
        columns["completions"] = list(completions)
        columns["completion_ids"] = [[0] * max(1, len(completion.split())) for completion in completions]
        with warnings.catch_warnings():  # what a reward would warn of is found here
            warnings.simplefilter("ignore")
            if hasattr(reward, "judge"):
                judged = call(reward.judge, columns)
            else:
                scores = check_scores(call(reward, columns), len(completions), reward_name(reward))
                judged = [Judgement(Outcome.NONE if score is None else Outcome.SCORED, score=score) for score in scores]
        yield from zip(numbers, completions, map(_by_score, judged), strict=True)


def _by_score(one: Judgement) -> Judgement:
    if one.outcome is not Outcome.SCORED or one.score is None:
        return one
    return Judgement(Outcome.RIGHT if one.score >= 1 else Outcome.WRONG, f"score {one.score:g}")


_NUMBER = re.compile(r"(?<![\\A-Za-z_\d.])\d+(?:,\d{3})*(?![\d])")
_OPPOSITES = {"\\pm": "", "even": "odd", "odd": "even", "\\forall": "\\exists", "\\le": "\\ge", "\\ge": "\\le"}
_OPPOSITE = re.compile(rf"(?:{'|'.join(map(re.escape, _OPPOSITES))})(?![A-Za-z])")
_SIGN = re.compile(r"(?<=[\w})\s])[+-](?=\s?[\w\\({])")
_LONGEST_ANSWER = 200


def _same_shape_but_wrong(text: str) -> list[str]:
    """At most three completions whose last answer has the shape of this one's and another value."""
    answer = text[-_LONGEST_ANSWER:]
    answer = answer[max(answer.rfind("####"), answer.rfind("\\boxed"), 0) :]
    head = text[: len(text) - len(answer)]
    numbers = [*_NUMBER.finditer(answer)]
    changes = [(found, f"1{found[0]}") for found in (*numbers[:1], *numbers[-1:])]
    if opposite := _OPPOSITE.search(answer):
        changes.insert(0, (opposite, _OPPOSITES[opposite[0]]))
    elif "=" in answer and (sign := _SIGN.search(answer)):
        changes.insert(0, (sign, "-" if sign[0] == "+" else "+"))
    return list(dict.fromkeys(head + answer[: old.start()] + new + answer[old.end() :] for old, new in changes))


_DATA = "A .jsonl or .parquet file, a folder of `save_to_disk`, or a data set of the hub."
_REWARD = "The reward: a name, or a mapping such as '{name: math_accuracy, timeout: 1}'."
_COMPLETION = "A column with right completions, for references that are not themselves answers."
_CONFIG = "Configuration of a hub data set, such as `main` for GSM8K."


def audit_command(
    data: Annotated[str, typer.Argument(help=_DATA)],
    reward: Annotated[str, typer.Option(help=_REWARD)],
    reference: Annotated[str | None, typer.Option(help="The column that holds the references.")] = None,
    completion: Annotated[str | None, typer.Option(help=_COMPLETION)] = None,
    config: Annotated[str | None, typer.Option(help=_CONFIG)] = None,
    split: Annotated[str, typer.Option(help="The split.")] = "train",
    limit: Annotated[int | None, typer.Option(min=1, help="Audit only this many rows, from the first.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all findings as JSON.")] = False,
) -> None:
    """Find references that a reward cannot read or scores as wrong.

    Exits with 1 if it finds any, and with 2 if the reward names no column of references, so that none was checked.
    """
    (function,) = load_rewards([reward])
    rows = _rows(data, config, split, limit)
    with messages().status(f"Scoring {len(rows):,} rows"):
        found = audit(function, rows, column=reference, completions=completion)
    if as_json:
        typer.echo(json.dumps({**asdict(found), "problems": found.counts()}, indent=2))
    else:
        _print_audit(found)
    if found.findings:
        raise typer.Exit(1)


def _rows(data: str, config: str | None, split: str, limit: int | None) -> list[dict[str, Any]]:
    path = Path(data)
    if path.suffix == ".jsonl":  # Arrow's reader crashes on odd files
        from ..history.run_files import read_columns  # slow to import

        columns = read_columns(path)  # where a row lacks one it has None, as in training
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)][:limit]
    import datasets  # slow to import

    datasets.disable_progress_bars()
    try:
        if path.suffix == ".parquet":
            loaded = datasets.Dataset.from_parquet(data)  # `load_dataset` would ask the hub about a local file
        elif path.is_dir():
            loaded = datasets.load_from_disk(data)
            loaded = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            loaded = datasets.load_dataset(data, config, split=split)
        rows: list[dict[str, Any]] = loaded.select(range(min(limit or len(loaded), len(loaded)))).to_list()
        return rows
    except Exception as error:  # whatever the readers of `datasets` raise on odd files and names
        raise ConfigurationError(f"The data set {shown(data)} could not be loaded: {one_line(error, 300)}") from error


def _print_audit(found: Audit) -> None:
    console = results()
    counted = f" on {found.rows:,} rows, {found.references:,} different references in column "
    console.print(Text.assemble((one_line(found.reward), "bold"), counted, (one_line(found.column), "bold")))
    if found.read:
        cut = [one for one in found.read if one.left_over]
        console.print(f"read with text left over: {len(cut):,} of {len(found.read):,} different references")
        lines = [f"row {one.row}, {one.reference}: {shown(one.read_as)}, without {shown(one.left_over)}" for one in cut]
        _print_some(lines)
        whole = [one for one in found.read if one.read_as and not one.left_over]
        console.print(f"read in full: {len(whole):,}")
        _print_some([f"row {one.row}, {one.reference}: {shown(one.read_as)}" for one in whole])
    for problem, count in found.counts().items():
        console.print(f"{problem}: {count:,} ({count / found.rows:.2%})", style="bold red")
        of_kind = [one for one in found.findings if one.problem == problem]
        _print_some([f"row {one.row}, {one.reference}: {one.detail}" for one in of_kind])
    if not found.findings:
        console.print("Nothing is wrong with any.")


def _print_some(lines: Sequence[str]) -> None:
    """Print the first lines of untrusted text, and how many there are more."""
    for line in lines[:_SHOWN]:
        paragraph(results(), Text(printable(line)), indent=2)
    if len(lines) > _SHOWN:
        results().print(f"  ... and {len(lines) - _SHOWN:,} more (--json for all)")
