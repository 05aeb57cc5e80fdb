"""What the page's completion browser works on: an index of all completions, and one chunk of text and numbers per step.

The index is small and always there; a step's chunks are unpacked by the browser when somebody looks at that step. See
`page_chunks` for how they are written and how exact the numbers are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .page_chunks import pack, squeezed
from .page_rows import Row, read_rows, step_of
from .run import Run

if TYPE_CHECKING:
    import numpy

TOKENS = 1_000_000
"""Tokens whose numbers a page holds at most. 500,000 of them after two hooks, with their text, took 6 MB."""

CHARACTERS = 8_000_000
"""Characters of completions that a page holds at most."""

_RIGHT_OR_WRONG = re.compile(r"accura|correct|right|exact|solved|tests|match", re.IGNORECASE)


@dataclass
class PageData:
    """What is embedded.

    Attributes:
        index: For `JSON.parse`: the runs, their steps, and of each completion what filters and sorting need.
        chunks: By name, gzip in base64: `tN` with the text, `nN` with the numbers of the tokens.
        notes: Sentences: what of the completions was left out, and why.
    """

    index: dict[str, Any] = field(default_factory=dict)
    chunks: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def page_data(runs: Sequence[Run], limit: int) -> PageData:
    """Collect the completions of runs.

    Whole groups of steps that are spread evenly from the first to the last are taken, as many as fit; each run gets the
    same share. Where a step has token records, TRL's table of it is used for the outcomes only.

    Args:
        runs: Those shown; files that turn out damaged are told in their `missing`.
        limit: Completions at most, over all runs, but at least one group of each run.
    """
    data = PageData(index={"runs": []})
    share = max(limit // max(len(runs), 1), 1)
    for run in runs:
        steps, held, there = [], 0, 0
        for path, rows, count in _chosen(run, share, TOKENS // len(runs), CHARACTERS // len(runs)):
            steps.append(_indexed(data, path, rows))
            held, there = held + len(rows), there + count
        files = _files(run)
        if steps and (held < there or len(steps) < len(files)):
            others = f", and {len(files) - len(steps)} more steps were saved" if len(steps) < len(files) else ""
            data.notes.append(
                f"{run.name}: of the {there} completions saved at {len(steps)} steps {held} are on this page{others}. "
                f"A larger --limit takes more, up to {TOKENS:,} tokens and {CHARACTERS:,} characters in all."
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


def _chosen(run: Run, share: int, tokens: int, characters: int) -> Iterator[tuple[Path, list[Row], int]]:
    """Files with the rows to show of each, and the number of rows that it has."""
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
            continue  # TRL writes the table of a generation batch again for every step that it feeds
        before = contents
        remaining = len(files) - place
        kept = _whole_groups(rows, max(left // remaining, 1), tokens // len(files), characters // len(files))
        left -= len(kept)
        yield path, kept, len(rows)


def _whole_groups(rows: Sequence[Row], completions: int, tokens: int, characters: int) -> list[Row]:
    """The first groups that fit; one in any case."""
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


def _indexed(data: PageData, path: Path, rows: Sequence[Row]) -> dict[str, Any]:
    """Add a step's chunks, and return its part of the index, one list per column."""
    names = list(dict.fromkeys(name for row in rows for name in row.rewards))
    with_tokens = all(row.tokens is not None for row in rows)
    text, numbers = f"t{len(data.chunks)}", f"n{len(data.chunks)}"
    data.chunks[text] = squeezed(_json(_texts(rows)))
    if with_tokens:
        data.chunks[numbers] = squeezed(_numbers(rows))
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
        "vocabulary": _vocabulary(rows),
        "stages": _stages(rows),
    }


def _vocabulary(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(token for row in rows for token in row.tokens or ()))


def _stages(rows: Sequence[Row]) -> list[str]:
    """What acted on the advantages: a row that has not been trained on has the first of them only."""
    return max(([name for name, _ in row.stages] for row in rows), key=len)


def _numbers(rows: Sequence[Row]) -> bytes:
    """One value per token of all rows: `gap` and `size` say where its characters are, from the end of the last."""
    import numpy

    counts = [len(row.tokens or ()) for row in rows]
    places = {token: place for place, token in enumerate(_vocabulary(rows))}
    columns: dict[str, list[Any]] = {name: [] for name in ("token", "gap", "size", "live")}
    floats: dict[str, list[Any]] = {f"stage {place}": [] for place in range(len(_stages(rows)))}
    floats |= {name: [] for name in ("advantage", "weight", "logp", "entropy")}
    for row, count in zip(rows, counts, strict=True):
        columns["token"].append(numpy.array([places[token] for token in row.tokens or ()], numpy.int64))
        if row.spans is None:
            columns["gap"].append(numpy.zeros(count, numpy.int64))
            columns["size"].append(numpy.full(count, -1))
        else:
            ends = numpy.concatenate([[0], row.spans[:-1, 1]]) if count else row.spans[:, 1]
            columns["gap"].append(row.spans[:, 0] - ends)
            columns["size"].append(row.spans[:, 1] - row.spans[:, 0])
        columns["live"].append(row.live)
        absent = numpy.full(count, math.nan, numpy.float32)
        for place in range(len(_stages(rows))):
            floats[f"stage {place}"].append(row.stages[place][1] if place < len(row.stages) else absent)
        for name in ("advantage", "weight", "logp", "entropy"):
            floats[name].append(row.values.get(name, absent))
    return pack(counts, {name: _joined(parts) for name, parts in {**columns, **floats}.items()})


def _joined(parts: Sequence[Any]) -> numpy.ndarray[Any, Any]:
    import numpy

    joined: numpy.ndarray[Any, Any] = numpy.concatenate(parts)
    return joined


def _json(value: Any) -> bytes:
    import json

    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")
