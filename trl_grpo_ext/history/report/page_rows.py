"""Completions of a run as rows for the page: from token records, or from TRL's tables where there are none."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...guard.outcomes import OUTCOME_SUFFIX
from ...records.token_records import COLUMNS
from .run import Run

if TYPE_CHECKING:
    import numpy

_PER_TOKEN = ("advantage", "weight", "logp", "entropy")
_OF_TABLE = ("step", "prompt", "completion", "advantage")


@dataclass
class Row:
    """One completion.

    Attributes:
        group: Number of its prompt within the step.
        member: Number of the completion within the group.
        prompt: As text; messages one after the other, each with its role.
        completion: As text.
        truncated: Whether it ended at the limit; None where the file does not say.
        rewards: Each function's reward; None where it gave none.
        reward: Their weighted sum; None where the file does not say.
        credit: What the update does to it, by its sign: the sum over live tokens of advantage times weight; the mean of
            the last advantages over live tokens where it has not been trained on; TRL's advantage in its tables.
        outcomes: Each reward's outcome, where it logged one.
        extras: Other columns of TRL's table, as text.
        tokens: Their names in the vocabulary; None in TRL's tables.
        spans: `(start, end)` of each token in the completion, in UTF-16 units as browsers count; None where unknown.
        live: Whether each token counts in the loss.
        stages: What acted on the advantages, with `T` values each.
        values: `advantage`, `weight`, `logp`, `entropy`, `T` values each, those that are there.
    """

    group: int
    member: int
    prompt: str
    completion: str
    truncated: bool | None
    rewards: dict[str, float | None]
    reward: float | None
    credit: float | None = None
    outcomes: dict[str, str] = field(default_factory=dict)
    extras: dict[str, str] = field(default_factory=dict)
    tokens: list[str] | None = None
    spans: numpy.ndarray[Any, Any] | None = None
    live: numpy.ndarray[Any, Any] | None = None
    stages: list[tuple[str, numpy.ndarray[Any, Any]]] = field(default_factory=list)
    values: dict[str, numpy.ndarray[Any, Any]] = field(default_factory=dict)


def step_of(path: Path) -> int:
    """The step in the name of a file of completions."""
    return int(re.findall(r"\d+", path.stem)[-1])


def read_rows(run: Run, path: Path) -> list[Row]:
    """The completions of one file, in its order; none, told in `run.missing`, where it cannot be used."""
    import pyarrow

    try:
        return _of_records(run, path) if path in run.records else _of_table(run, path)
    except (pyarrow.ArrowException, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        run.tell(
            f"{path} was left out of the completions: its columns hold something else than training writes there "
            f"({type(error).__name__}: {str(error)[:100]!a})."
        )
        return []


def plain_text(value: Any) -> str:
    """A prompt or a completion as text; of messages, or messages as JSON, one after the other with their roles."""
    if isinstance(value, str):
        if not value.startswith('[{"'):
            return value
        try:
            messages = json.loads(value)
        except (ValueError, RecursionError):
            return value
        return plain_text(messages) if isinstance(messages, list) else value
    if not isinstance(value, list):
        return "" if value is None else str(value)
    return "\n\n".join(_message(message) for message in value)


def utf16_spans(text: str, starts: Sequence[int], ends: Sequence[int]) -> numpy.ndarray[Any, Any]:
    """Places in a Python string as places in a JavaScript string, `(T, 2)`; out of range is put to the end."""
    import numpy

    spans = numpy.stack([numpy.asarray(starts, numpy.int64), numpy.asarray(ends, numpy.int64)], axis=1)
    spans = numpy.clip(spans, 0, len(text))
    if text and ord(max(text)) > 0xFFFF:
        wide = numpy.frombuffer(text.encode("utf-32-le", "surrogatepass"), numpy.uint32) > 0xFFFF
        spans = spans + numpy.concatenate([[0], numpy.cumsum(wide)])[spans]
    return spans


def _message(message: Any) -> str:
    if not isinstance(message, Mapping):
        return plain_text(message)
    content = message.get("content")
    if isinstance(content, list):  # blocks
        content = "".join(str(b.get("text") or "") if isinstance(b, Mapping) else str(b) for b in content)
    return f"[{message.get('role') or '?'}]\n{'' if content is None else content}"


# ---------------------------------------------------------------------------------------------- token records


def _of_records(run: Run, path: Path) -> list[Row]:
    columns = run.columns_of(path, list(COLUMNS))
    if columns is None:
        return []
    simple: dict[str, Any] = {
        name: columns[name].to_pylist() if name in columns else None
        for name in (
            *("group", "member", "prompt", "completion", "truncated", "rewards", "reward"),
            *("outcomes", "stages", "tokens"),
        )
    }
    in_table = _outcomes(run, step_of(path))  # records of 0.1.0 have none of their own
    rows = []
    for index in range(len(columns["prompt"])):
        prompt, completion = plain_text(simple["prompt"][index]), str(simple["completion"][index])
        row = Row(
            group=int(simple["group"][index]),
            member=int(simple["member"][index]),
            prompt=prompt,
            completion=completion,
            truncated=_at(simple["truncated"], index),
            rewards={str(name): number(value) for name, value in dict(simple["rewards"][index] or {}).items()},
            reward=number(_at(simple["reward"], index)),
            outcomes=_told(_at(simple["outcomes"], index)) or in_table.get((prompt, completion), {}),
            tokens=[str(token) for token in simple["tokens"][index]],
        )
        _add_numbers(row, columns, index, simple["stages"][index] or [])
        row.credit = _credit(row)
        rows.append(row)
    return rows


def _add_numbers(row: Row, columns: Mapping[str, Any], index: int, stages: Sequence[str]) -> None:
    import numpy

    assert row.tokens is not None
    size = len(row.tokens)

    def list_at(name: str) -> Any:
        scalar = columns[name][index] if name in columns else None
        return None if scalar is None or scalar.values is None else scalar.values

    def numbers(array: Any) -> numpy.ndarray[Any, Any]:
        values = numpy.asarray(array.to_numpy(zero_copy_only=False), numpy.float32)[:size]
        return numpy.concatenate([values, numpy.full(size - len(values), numpy.nan, numpy.float32)])

    starts, ends, live = list_at("starts"), list_at("ends"), list_at("live")
    if starts is not None and ends is not None and len(starts) == len(ends) == size:
        row.spans = utf16_spans(row.completion, starts.to_pylist(), ends.to_pylist())
    kept = [bool(value) for value in live.to_pylist()][:size] if live is not None else []
    row.live = numpy.array([*kept, *[False] * (size - len(kept))], bool)
    by_stage = list_at("advantages")
    for place, name in enumerate(stages[: 0 if by_stage is None else len(by_stage)]):
        if (values := by_stage[place].values) is not None:
            row.stages.append((str(name), numbers(values)))
    row.values = {name: numbers(values) for name in _PER_TOKEN if (values := list_at(name)) is not None}


def _credit(row: Row) -> float | None:
    import numpy

    assert row.live is not None
    if not row.live.any():
        return 0.0
    if "advantage" in row.values and "weight" in row.values:
        products = row.values["advantage"].astype(numpy.float64) * row.values["weight"]
        return number(float(products[row.live].sum()))
    return number(float(row.stages[-1][1].astype(numpy.float64)[row.live].mean())) if row.stages else None


def _outcomes(run: Run, step: int) -> dict[tuple[str, str], dict[str, str]]:
    """What rewards logged of each completion in TRL's table of the same step, by prompt and completion."""
    files = [path for path in run.completions if step_of(path) == step]
    if not files:
        return {}
    columns = run.columns_of(
        files[0], ["prompt", "completion", *(name for name in _names(files[0]) if _is_outcome(name))]
    )
    if columns is None or len(columns) < 3:
        return {}
    lists = {name: values.to_pylist() for name, values in columns.items()}
    found: dict[tuple[str, str], dict[str, str]] = {}
    for index, (prompt, completion) in enumerate(zip(lists["prompt"], lists["completion"], strict=True)):
        outcomes = {name: str(lists[name][index]) for name in lists if _is_outcome(name) and lists[name][index]}
        found[plain_text(prompt), _completion_text(completion)] = _by_reward(outcomes)
    return found


# ---------------------------------------------------------------------------------------------- TRL's tables


def _of_table(run: Run, path: Path) -> list[Row]:
    columns = run.columns_of(path, _names(path))
    if columns is None:
        return []
    lists = {name: values.to_pylist() for name, values in columns.items()}
    logged = run.keys()
    known = {key.split("/")[1] for key in logged if key.startswith("rewards/") and key.count("/") == 2}
    numeric = [name for name in lists if name not in _OF_TABLE and _all_numbers(lists[name])]
    rewards = [name for name in numeric if name in known] or numeric
    outcomes = [name for name in lists if _is_outcome(name)]
    extras = [name for name in lists if name not in {*_OF_TABLE, *rewards, *outcomes}]
    rows = []
    for index, (group, member) in enumerate(_groups([plain_text(prompt) for prompt in lists["prompt"]], run)):
        given = {name: number(lists[name][index]) for name in rewards}
        row = Row(
            group=group,
            member=member,
            prompt=plain_text(lists["prompt"][index]),
            completion=_completion_text(lists["completion"][index]),
            truncated=None,
            rewards=given,
            reward=None,  # the table has no weights
            credit=number(lists["advantage"][index]),
            outcomes=_by_reward({name: str(lists[name][index]) for name in outcomes if lists[name][index]}),
            extras={name: _short(lists[name][index]) for name in extras if lists[name][index] is not None},
        )
        rows.append(row)
    return rows


def _groups(prompts: Sequence[str], run: Run) -> Iterator[tuple[int, int]]:
    """Group and member of each row: equal prompts in a row, cut where the settings say how many belong together."""
    size = run.settings.get("num_generations")
    whole = size if isinstance(size, int) and size > 0 and len(prompts) % size == 0 else None
    group, member = -1, 0
    for index, prompt in enumerate(prompts):
        new = index == 0 or prompt != prompts[index - 1] or member + 1 == whole
        group, member = (group + 1, 0) if new else (group, member + 1)
        yield group, member


def _names(path: Path) -> list[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        names = [str(name) for name in pyarrow.parquet.read_schema(path).names]
    except (pyarrow.ArrowException, OSError, ValueError):  # since it was listed; reading it tells
        return list(_OF_TABLE)
    return [name for name in names if not name.startswith("__index_level_")]


def _completion_text(value: Any) -> str:
    """A single message of an assistant without its role, as the token records have it."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping):
        return _message(value[0]).partition("\n")[2]
    return plain_text(value)


def _is_outcome(name: str) -> bool:
    return name.endswith(OUTCOME_SUFFIX)


def _by_reward(outcomes: Mapping[str, str]) -> dict[str, str]:
    return {name.removesuffix(OUTCOME_SUFFIX): _short(value, 60) for name, value in outcomes.items()}


def _told(outcomes: Any) -> dict[str, str]:
    return {str(name): _short(value, 60) for name, value in dict(outcomes or {}).items()}


def _all_numbers(values: Sequence[Any]) -> bool:
    return all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values)


def _short(value: Any, size: int = 500) -> str:
    text = str(value)
    return text if len(text) <= size else text[:size] + "…"


def number(value: Any) -> float | None:
    """A finite number as such, anything else as None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if value - value == 0 else None


def _at(values: Sequence[Any] | None, index: int) -> Any:
    return None if values is None else values[index]
