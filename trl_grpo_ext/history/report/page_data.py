"""The data of the page's completion browser: an index of all completions, and a chunk of text and numbers per step.

The index is small and always loaded; the browser unpacks a step's chunks, gzip in base64, when that step is opened. A
number keeps the first 24 of the 32 bits of a float32, rounded, so its relative error is at most 2⁻¹⁶ (0.0016 %); whole
numbers keep all. The bytes of a column are stored in planes, all lowest bytes, then all second ones and so on, which
gzip compresses well. A JSON header precedes the planes, preceded by its length as four bytes, lowest first.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from ...guard.outcomes import OUTCOME_SUFFIX
from ...records.token_records import COLUMNS
from .run import Run, is_number

TOKENS = 1_000_000
"""Most tokens with numbers on a page. 500,000 of them after two hooks, with their text, took 6 MB."""

CHARACTERS = 8_000_000
"""Most characters of completions on a page."""

_PER_TOKEN = ("advantage", "weight", "logp", "entropy")
_OF_TABLE = ("step", "prompt", "completion", "advantage")
_RIGHT_OR_WRONG = re.compile(r"accura|correct|right|exact|solved|tests|match", re.IGNORECASE)


@dataclass
class PageData:
    """The embedded data.

    Attributes:
        index: For `JSON.parse`: the runs, their steps, and of each completion what filters and sorting need.
        chunks: By name, gzip in base64: `tN` with the text, `nN` with the numbers of the tokens.
        notes: Sentences on which completions were left out, and why.
    """

    index: dict[str, Any] = field(default_factory=dict)
    chunks: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def page_data(runs: Sequence[Run], limit: int) -> PageData:
    """Collect the completions of runs.

    Takes as many whole groups as fit, of steps spread evenly from the first to the last; each run gets the same share.
    If a step has token records, TRL's table is used for the outcomes only.

    Args:
        runs: The runs shown; damaged files are added to their `missing`.
        limit: Most completions over all runs, but at least one group of each run.
    """
    data = PageData(index={"runs": []})
    share = max(limit // max(len(runs), 1), 1)
    for run in runs:
        steps, held, there = [], 0, 0
        for path, rows, count in _choose(run, share, TOKENS // len(runs), CHARACTERS // len(runs)):
            steps.append(_add_to_index(data, path, rows))
            held, there = held + len(rows), there + count
        files = _files(run)
        if steps and (held < there or len(steps) < len(files)):
            others = f", and {len(files) - len(steps)} more steps were saved" if len(steps) < len(files) else ""
            data.notes.append(
                f"{run.name}: of the {there} completions saved at {len(steps)} steps {held} are on this "
                f"page{others}. A larger --limit shows more, up to {TOKENS:,} tokens and {CHARACTERS:,} characters "
                f"in all."
            )
        rewards = list(dict.fromkeys(name for step in steps for name in step.pop("names")))
        for step in steps:
            step["rewards"] = {name: step["rewards"][name] for name in rewards if name in step["rewards"]}
        right = next((name for name in rewards if _RIGHT_OR_WRONG.search(name)), rewards[0] if rewards else None)
        data.index["runs"].append({"name": run.name, "rewards": rewards, "right": right, "steps": steps})
    return data


def _files(run: Run) -> list[Path]:
    """The file of each step: its token records, or else TRL's table."""
    by_step = {step_of(path): path for path in run.completions} | {step_of(path): path for path in run.records}
    return [by_step[step] for step in sorted(by_step)]


def _choose(run: Run, share: int, tokens: int, characters: int) -> Iterator[tuple[Path, list[Row], int]]:
    """Files with the rows to show from each, and their number of rows."""
    files = _files(run)
    first = next((rows for path in files if (rows := read_rows(run, path))), None)
    if first is None:
        return
    group = max(sum(1 for row in first if row.group == first[0].group), 1)
    count = min(len(files), max(share // group, 1))
    if count > 1:
        files = [files[round(place * (len(files) - 1) / (count - 1))] for place in range(count)]
    else:
        files = files[-1:]
    left = share
    before: list[tuple[str, str]] = []
    for place, path in enumerate(files):
        rows = read_rows(run, path)
        contents = [(row.prompt, row.completion) for row in rows]
        if not rows or (path in run.completions and contents == before):
            continue  # TRL rewrites the table of a generation batch for every step that uses it
        before = contents
        remaining = len(files) - place
        kept = _whole_groups(rows, max(left // remaining, 1), tokens // len(files), characters // len(files))
        left -= len(kept)
        yield path, kept, len(rows)


def _whole_groups(rows: Sequence[Row], completions: int, tokens: int, characters: int) -> list[Row]:
    """The first groups that fit, at least one."""
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    kept: list[Row] = []
    for members in groups.values():
        tokens -= sum(len(row.tokens or ()) for row in members)
        characters -= sum(len(row.completion) for row in members)
        if kept and (len(kept) + len(members) > completions or tokens < 0 or characters < 0):
            break
        kept += sorted(members, key=lambda row: row.member)
    return kept


# ---------------------------------------------------------------------------------------------- one step


def _add_to_index(data: PageData, path: Path, rows: Sequence[Row]) -> dict[str, Any]:
    """Add a step's chunks, and return its part of the index, one list per column."""
    names = list(dict.fromkeys(name for row in rows for name in row.rewards))
    with_tokens = all(row.tokens is not None for row in rows)
    text, numbers = f"t{len(data.chunks)}", f"n{len(data.chunks)}"
    data.chunks[text] = compress(_json(_texts(rows)))
    if with_tokens:
        data.chunks[numbers] = compress(_numbers(rows))
    return {
        "step": step_of(path),
        "text": text,
        "numbers": numbers if with_tokens else None,
        "group": [row.group for row in rows],
        "member": [row.member for row in rows],
        "length": [len(row.tokens) if row.tokens is not None else None for row in rows],
        "characters": [len(row.completion) for row in rows],
        "truncated": [row.truncated for row in rows],
        "reward": [row.reward for row in rows],
        "credit": [row.credit for row in rows],
        "trained": ["weight" in row.values and "advantage" in row.values for row in rows],
        "rewards": {name: [row.rewards.get(name) for row in rows] for name in names},
        "outcomes": [row.outcomes for row in rows],
        "names": names,
    }


def _texts(rows: Sequence[Row]) -> dict[str, Any]:
    prompts = list(dict.fromkeys(row.prompt for row in rows))
    places = {prompt: place for place, prompt in enumerate(prompts)}
    return {
        "prompts": prompts,
        "prompt": [places[row.prompt] for row in rows],
        "completions": [row.completion for row in rows],
        "extras": [row.extras for row in rows],
        "failed": [row.failed_turns for row in rows],
        "vocabulary": _vocabulary(rows),
        "stages": _stages(rows),
    }


def _vocabulary(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(token for row in rows for token in row.tokens or ()))


def _stages(rows: Sequence[Row]) -> list[str]:
    """The stages of the advantages: a row not yet trained on has only the first."""
    return max(([name for name, _ in row.stages] for row in rows), key=len)


def _numbers(rows: Sequence[Row]) -> bytes:
    """One value per token of all rows: `gap` and `size` say where its characters are, from the end of the last."""
    counts, stages = [len(row.tokens or ()) for row in rows], range(len(_stages(rows)))
    places = {token: place for place, token in enumerate(_vocabulary(rows))}
    columns: dict[str, list[Any]] = {}
    for row, count in zip(rows, counts, strict=True):
        spans, absent = row.spans, numpy.full(count, math.nan, numpy.float32)
        of_row = {
            "token": numpy.array([places[token] for token in row.tokens or ()], numpy.int64),
            "gap": numpy.zeros(count, int) if spans is None else spans[:, 0] - numpy.append(0, spans[:, 1])[:-1],
            "size": numpy.full(count, -1) if spans is None else spans[:, 1] - spans[:, 0],
            "live": row.live,
            "turn": numpy.zeros(count, int) if row.turns is None else row.turns,
            **{f"stage {place}": row.stages[place][1] if place < len(row.stages) else absent for place in stages},
            **{name: row.values.get(name, absent) for name in _PER_TOKEN},
        }
        for name, values in of_row.items():
            columns.setdefault(name, []).append(values)
    return pack(counts, {name: numpy.concatenate(parts) for name, parts in columns.items()})


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


# --------------------------------------------------------------------------------------------- completions as rows


@dataclass
class Row:
    """One completion.

    Attributes:
        group: Number of its prompt within the step.
        member: Number of the completion within the group.
        prompt: As text; messages one after the other, each with its role.
        completion: As text.
        truncated: Whether it ended at the limit; None if the file does not say.
        rewards: Each function's reward; None if it gave none.
        reward: Their weighted sum; None if the file does not say.
        credit: What the update does to it, by its sign: the sum over live tokens of advantage times weight; the mean of
            the last advantages over live tokens where it has not been trained on; TRL's advantage in its tables.
        outcomes: Each reward's outcome, where it logged one.
        extras: Other columns of TRL's table, as text.
        tokens: Their names in the vocabulary; None in TRL's tables.
        spans: `(start, end)` of each token in the completion, in UTF-16 units as browsers count; None if unknown.
        live: Whether each token counts in the loss.
        turns: The turn that wrote each token, -1 where none did; None if the file does not say.
        failed_turns: Those that have a tool call that failed.
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
    turns: numpy.ndarray[Any, Any] | None = None
    failed_turns: list[int] = field(default_factory=list)
    stages: list[tuple[str, numpy.ndarray[Any, Any]]] = field(default_factory=list)
    values: dict[str, numpy.ndarray[Any, Any]] = field(default_factory=dict)


def step_of(path: Path) -> int:
    """The step in the name of a file of completions."""
    return int(re.findall(r"\d+", path.stem)[-1])


def read_rows(run: Run, path: Path) -> list[Row]:
    """The completions of one file, in its order; none, with a line in `run.missing`, where it cannot be used."""
    import pyarrow

    try:
        return _of_records(run, path) if path in run.records else _of_table(run, path)
    except (pyarrow.ArrowException, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        run.note(
            f"{path} was left out of the completions: its columns are not what training writes "
            f"({type(error).__name__}: {str(error)[:100]!a})."
        )
        return []


def plain_text(value: Any) -> str:
    """A prompt or a completion as text; messages, also as JSON, one after the other with their roles."""
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
    """Convert places in a Python string to places in a JavaScript string, `(T, 2)`; out of range becomes the end."""
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
            *("outcomes", "stages", "tokens", "failed_turns"),
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
            outcomes=_short_outcomes(_at(simple["outcomes"], index)) or in_table.get((prompt, completion), {}),
            tokens=[str(token) for token in simple["tokens"][index]],
            failed_turns=[int(turn) for turn in _at(simple["failed_turns"], index) or ()],
        )
        _add_numbers(row, columns, index, simple["stages"][index] or [])
        row.credit = _credit(row)
        rows.append(row)
    return rows


def _add_numbers(row: Row, columns: Mapping[str, Any], index: int, stages: Sequence[str]) -> None:
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
    if (turns := list_at("turns")) is not None and len(turns) == size:
        row.turns = numpy.array(turns.to_pylist(), numpy.int64).clip(-1, size)
    by_stage = list_at("advantages")
    for place, name in enumerate(stages[: 0 if by_stage is None else len(by_stage)]):
        if (values := by_stage[place].values) is not None:
            row.stages.append((str(name), numbers(values)))
    row.values = {name: numbers(values) for name in _PER_TOKEN if (values := list_at(name)) is not None}


def _credit(row: Row) -> float | None:
    assert row.live is not None
    if not row.live.any():
        return 0.0
    if "advantage" in row.values and "weight" in row.values:
        products = row.values["advantage"].astype(numpy.float64) * row.values["weight"]
        return number(float(products[row.live].sum()))
    return number(float(row.stages[-1][1].astype(numpy.float64)[row.live].mean())) if row.stages else None


def _outcomes(run: Run, step: int) -> dict[tuple[str, str], dict[str, str]]:
    """What rewards logged of each completion in TRL's table for the same step, by prompt and completion."""
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
    """Group and member of each row: runs of equal prompts, cut at the group size in the settings."""
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
    except (pyarrow.ArrowException, OSError, ValueError):  # damaged since it was listed; reading it reports that
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


def _short_outcomes(outcomes: Any) -> dict[str, str]:
    return {str(name): _short(value, 60) for name, value in dict(outcomes or {}).items()}


def _all_numbers(values: Sequence[Any]) -> bool:
    return all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values)


def _short(value: Any, size: int = 500) -> str:
    text = str(value)
    return text if len(text) <= size else text[:size] + "…"


def number(value: Any) -> float | None:
    """A finite number of drawable size; anything else becomes None."""
    return float(value) if is_number(value) else None


def _at(values: Sequence[Any] | None, index: int) -> Any:
    return None if values is None else values[index]


# ----------------------------------------------------------------------------------------------------------- bytes


def compress(content: bytes) -> str:
    """Bytes as gzip in base64; the same for the same bytes."""
    return base64.b64encode(gzip.compress(content, compresslevel=6, mtime=0)).decode("ascii")


def round_mantissas(values: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    """Round numbers as the page stores them: float32 with 15 bits after the leading one."""
    bits = numpy.ascontiguousarray(values, dtype=numpy.float32).view(numpy.uint32)
    finite = (bits & numpy.uint32(0x7F800000)) != 0x7F800000
    largest = (bits & numpy.uint32(0x7FFFFFFF)) >= 0x7F7FFF80  # would round up to infinity
    up = numpy.where(finite & ~largest, bits + numpy.uint32(0x80), bits)
    kept: numpy.ndarray[Any, Any] = (up & numpy.uint32(0xFFFFFF00)).view(numpy.float32)
    return kept


def pack(counts: Sequence[int], columns: Mapping[str, numpy.ndarray[Any, Any]]) -> bytes:
    """Columns with one value per token, as bytes.

    Args:
        counts: Tokens of each row, one row after the other.
        columns: By name, `sum(counts)` values each: floating point, or whole numbers.
    """
    described, planes = [], []
    for name, values in columns.items():
        whole = values.dtype.kind in "iub"
        kept = values.astype("<i4") if whole else round_mantissas(values).astype("<f4")
        planes.append(kept.view(numpy.uint8).reshape(sum(counts), 4).T.tobytes())
        described.append([name, "integer" if whole else "float"])
    header = json.dumps({"counts": list(counts), "columns": described}).encode("ascii")
    return len(header).to_bytes(4, "little") + header + b"".join(planes)
