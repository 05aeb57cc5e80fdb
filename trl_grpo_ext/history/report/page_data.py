"""The data of the page's completion browser: an index of all completions, and chunks of text and numbers per step.

The index is always loaded; the browser unpacks a step's chunks, JSON in gzip in base64, when that step is opened. The
numbers of tokens have five significant digits, one more than the page shows.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from ...guard.messages import content_text
from ...guard.outcomes import OUTCOME_SUFFIX
from ...records.pictures import MOST, data_uri
from ...records.token_records import SCHEMA
from ..run_files import messages_in, step_of
from .trained_run import Run, is_number

SIZE = 12_000_000  # most characters of completions on a page; a token with its numbers counts as eight more
PER_TOKEN = ("advantage", "weight", "logp", "entropy")
_RIGHT_OR_WRONG = re.compile(r"accura|correct|right|exact|solved|tests|match", re.IGNORECASE)
_AS_THEY_ARE = ("group", "member", "truncated", "reward", "credit", "outcomes")  # of `Row`
Numbers = numpy.ndarray[Any, Any]


@dataclass
class PageData:
    """The embedded data: an index, chunks `tN` of text and `nN` of tokens' numbers, and notes on what is missing."""

    index: dict[str, Any] = field(default_factory=dict)
    chunks: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def page_data(runs: Sequence[Run], limit: int) -> PageData:
    """Collect completions, at most `limit`, in whole groups of steps spread evenly; each run gets the same share."""
    data = PageData(index={"runs": []})
    for run in runs:
        by_step = {step_of(path): path for path in (*run.completions, *run.records)}
        files = [by_step[step] for step in sorted(by_step)]
        chosen = list(_choose(run, files, max(limit // len(runs), 1), SIZE // len(runs)))
        shown = sum(len(rows) for _, rows, _ in chosen)
        saved = sum(count for *_, count in chosen)
        if chosen and (shown < saved or len(chosen) < len(files)):
            others = f", and {len(files) - len(chosen)} more steps were saved" if len(chosen) < len(files) else ""
            here = f"of the {saved} completions saved at {len(chosen)} steps {shown} are on this page{others}"
            data.notes.append(f"{run.name}: {here}. A larger --limit shows more, up to {SIZE:,} characters in all.")
        steps = [_add_to_index(data, path, rows) for path, rows, _ in chosen]
        rewards = list(dict.fromkeys(name for step in steps for name in step["rewards"]))
        opens = place_to_open([rows for _, rows, _ in chosen])
        right = next((name for name in rewards if _RIGHT_OR_WRONG.search(name)), next(iter(rewards), None))
        about = {"name": run.name, "rewards": rewards, "right": right, "opens": opens, "steps": steps}
        data.index["runs"].append(about)
    return data


def _choose(run: Run, files: list[Path], share: int, size: int) -> Iterator[tuple[Path, list[Row], int]]:
    """Files with the rows to show from each, and their number of rows."""
    first = next((rows for path in files if (rows := read_rows(run, path))), None)
    if first is None:
        return
    group = sum(row.group == first[0].group for row in first)
    most = min(max(share // group, 1), len(files))
    places = numpy.linspace(len(files) - 1, 0, most).round().astype(int)[::-1]  # of one, the last
    before: list[tuple[str, str]] = []
    for number, path in enumerate(files[place] for place in places):
        rows = read_rows(run, path)
        contents = [(row.prompt, row.completion) for row in rows]
        if not rows or (path in run.completions and contents == before):
            continue  # TRL rewrites the table of a generation batch for every step that uses it
        before = contents
        kept = _whole_groups(rows, max(share // (most - number), 1), size // most)
        share -= len(kept)
        yield path, kept, len(rows)


def place_to_open(steps: Sequence[Sequence[Row]]) -> tuple[int, int]:
    """Places of a step and of a group in it: the latest step's first group with signal, else the last step's first."""
    for place in reversed(range(len(steps))):
        groups = list(dict.fromkeys(row.group for row in steps[place]))
        for row in steps[place]:
            if row.has_signal:
                return place, groups.index(row.group)
    return max(len(steps) - 1, 0), 0


def _whole_groups(rows: Sequence[Row], completions: int, size: int) -> list[Row]:
    """The first groups that fit, at least one."""
    kept: list[Row] = []
    for group in dict.fromkeys(row.group for row in rows):
        members = sorted((row for row in rows if row.group == group), key=lambda row: row.member)
        size -= sum(len(row.completion) + 8 * len(row.tokens or ()) for row in members)
        size -= sum(map(len, {picture for row in members for picture in row.pictures}))
        if kept and (len(kept) + len(members) > completions or size < 0):
            break
        kept += members
    return kept


def _add_to_index(data: PageData, path: Path, rows: Sequence[Row]) -> dict[str, Any]:
    """Add a step's chunks, and return its part of the index, one list per column."""
    asked = [(row.prompt, tuple(row.pictures)) for row in rows]
    prompts = {prompt: number for number, prompt in enumerate(dict.fromkeys(asked))}
    names = dict.fromkeys(name for row in rows for name in row.tokens or ())
    vocabulary = {name: number for number, name in enumerate(names)}
    # A row that is not trained on yet has only the stages of the rollout.
    stages = max(([name for name, _ in row.stages] for row in rows), key=len)
    texts = {
        "prompts": [text for text, _ in prompts],
        "pictures": [pictures for _, pictures in prompts],
        "prompt": [prompts[prompt] for prompt in asked],
        "completions": [row.completion for row in rows],
        "failed": [row.failed_turns for row in rows],
        "parts": [row.parts for row in rows],
        "vocabulary": list(vocabulary),
        "stages": stages,
    }
    text = f"t{len(data.chunks)}"
    data.chunks[text] = compress(json.dumps(texts, ensure_ascii=False, separators=(",", ":"), allow_nan=False))
    numbers = None
    if all(row.tokens is not None for row in rows):
        numbers = f"n{len(data.chunks)}"
        columns = json.dumps([_numbers(row, vocabulary, len(stages)) for row in rows], separators=(",", ":"))
        data.chunks[numbers] = compress(columns.replace("NaN", "null").replace("Infinity", "1e999"))
    return {
        "step": step_of(path),
        "text": text,
        "numbers": numbers,
        "length": [len(row.tokens) if row.tokens is not None else None for row in rows],
        "characters": [len(row.completion) for row in rows],
        "trained": [row.trained for row in rows],
        "rewards": {name: [row.rewards.get(name) for row in rows] for row in rows for name in row.rewards},
        **{name: [getattr(row, name) for row in rows] for name in _AS_THEY_ARE},
    }


def _numbers(row: Row, vocabulary: Mapping[str, int], stages: int) -> dict[str, Any]:
    """A row's tokens, a list per column; 1e999 is infinity to a browser."""
    tokens = row.tokens or []
    missing = numpy.full(len(tokens), numpy.nan)
    after_stages = [values for _, values in row.stages]
    after_stages += [missing] * (stages - len(after_stages))
    return {
        "token": [vocabulary[token] for token in tokens],
        **row.columns,
        **{name: _rounded(row.values.get(name, missing)) for name in PER_TOKEN},
        "stage": [_rounded(values) for values in after_stages],
    }


def _rounded(values: Numbers) -> list[float]:
    return [float(f"{value:.5g}") for value in values.tolist()]


def compress(text: str) -> str:
    """Text as gzip in base64; the same for the same text."""
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), compresslevel=6, mtime=0)).decode("ascii")


@dataclass
class Row:
    """One completion as the page shows it; what the file does not say is None."""

    group: int
    member: int
    prompt: str
    completion: str
    truncated: bool | None
    rewards: dict[str, float | None]
    reward: float | None
    credit: float | None = None  # what the update does to it, by its sign: see `live_credit`; in tables TRL's advantage
    has_signal: bool = False  # whether any token is pushed up or down, so that the page shows a colour
    trained: bool = False  # whether the loss has used it
    outcomes: dict[str, str] = field(default_factory=dict)
    pictures: list[str] = field(default_factory=list)
    failed_turns: list[int] = field(default_factory=list)
    parts: list[tuple[str, float | None]] = field(default_factory=list)  # of its rewards, with their scores
    tokens: list[str] | None = None
    columns: dict[str, list[int]] = field(default_factory=dict)  # as the page reads them: see `_columns_of`
    stages: list[tuple[str, Numbers]] = field(default_factory=list)
    values: dict[str, Numbers] = field(default_factory=dict)


def read_rows(run: Run, path: Path) -> list[Row]:
    """The completions of one file, in its order; none, with a line in `run.missing`, where it cannot be used."""
    try:
        return _of_records(run, path) if path in run.records else _of_table(run, path)
    except (ArithmeticError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        why = f"{type(error).__name__}: {str(error)[:100]!a}"
        run.note(f"{path} was left out of the completions: its columns are not what training writes ({why}).")
        return []


def plain_text(value: Any) -> str:
    """A prompt or a completion as text; messages, also as JSON, one after the other with their roles."""
    if isinstance(value, str):
        value = messages_in(value)
    if not isinstance(value, list):
        return "" if value is None else str(value)
    heads = [f"[{one.get('role') or '?'}]\n" if isinstance(one, Mapping) else "" for one in value]
    texts = [content_text(one.get("content")) if isinstance(one, Mapping) else plain_text(one) for one in value]
    return "\n\n".join(head + text for head, text in zip(heads, texts, strict=True))


def utf16_spans(text: str, starts: Numbers, ends: Numbers) -> Numbers:
    """Convert places in a Python string to places in a JavaScript string, `(T, 2)`; out of range becomes the end."""
    spans: Numbers = numpy.clip(numpy.stack([starts, ends], axis=1), 0, len(text))
    if text and ord(max(text)) > 0xFFFF:
        wide = numpy.frombuffer(text.encode("utf-32-le", "surrogatepass"), numpy.uint32) > 0xFFFF
        spans = spans + numpy.concatenate([[0], numpy.cumsum(wide)])[spans]
    return spans


def _of_records(run: Run, path: Path) -> list[Row]:
    columns = run.columns_of(path, SCHEMA.names)
    if columns is None:
        return []
    rows = []
    for index in range(len(columns["prompt"])):
        at = {name: values[index] for name, values in columns.items() if values[index] is not None}
        size = len(at["tokens"])
        scores = zip(at.get("parts", ()), at.get("part_scores", ()), strict=True)
        stages = zip(at.get("stages", ()), at.get("advantages", ()), strict=True)
        row = Row(
            group=int(at["group"]),
            member=int(at["member"]),
            prompt=plain_text(at["prompt"]),
            completion=str(at["completion"]),
            truncated=at.get("truncated"),
            rewards={str(name): number(value) for name, value in dict(at.get("rewards", ())).items()},
            reward=number(at.get("reward")),
            outcomes={str(name): _short(value) for name, value in dict(at.get("outcomes", ())).items()},
            pictures=_pictures(run, path, at.get("images", ())),
            failed_turns=[int(turn) for turn in at.get("failed_turns", ())],
            parts=[(_short(name), number(float(score))) for name, score in scores],
            tokens=[str(token) for token in at["tokens"]],
            stages=[(str(name), _per_token(values, size)) for name, values in stages],
            values={name: _per_token(at[name], size) for name in PER_TOKEN if name in at},
        )
        row.columns = _columns_of(row, at, size)
        row.trained = {"advantage", "weight"} <= row.values.keys()
        credit_L = live_credit(row)
        row.credit = number(float(credit_L.sum()))
        row.has_signal = bool(numpy.nan_to_num(credit_L).any())
        rows.append(row)
    return rows


def live_credit(row: Row) -> Numbers:
    """What each live token gets: advantage times weight; its part in the mean of the last advantages before that."""
    live = numpy.array(row.columns["live"], bool)
    credit_T = numpy.full(len(live), numpy.nan)
    if row.trained:
        credit_T = row.values["advantage"].astype(numpy.float64) * row.values["weight"]
    elif row.stages:
        credit_T = row.stages[-1][1] / numpy.float64(max(live.sum(), 1))
    credit_L: Numbers = credit_T[live]
    return credit_L


def _columns_of(row: Row, at: Mapping[str, Any], size: int) -> dict[str, list[int]]:
    """Whole numbers of each token; `gap` and `size` say where its characters are, from the last one's end."""

    def whole(name: str, missing: int) -> Numbers:
        return _per_token(at[name], size, numpy.int64) if name in at else numpy.full(size, missing)

    gaps = numpy.zeros(size, int)
    sizes = numpy.full(size, -1)
    if "starts" in at and "ends" in at:
        spans = utf16_spans(row.completion, whole("starts", 0), whole("ends", 0))
        gaps = spans[:, 0] - numpy.append(0, spans[:, 1])[:-1]
        sizes = spans[:, 1] - spans[:, 0]
    columns = {
        "gap": gaps,
        "size": sizes,
        "live": _per_token(at["live"], size, bool).astype(int),
        "turn": whole("turns", 0).clip(-1, size),
        "part": whole("token_part", -1).clip(-1, len(row.parts) - 1),
    }
    return {name: values.tolist() for name, values in columns.items()}


def _pictures(run: Run, path: Path, copies: Sequence[Any]) -> list[str]:
    """The pictures of a prompt; one that cannot be shown is left out, with a line in `run.missing`."""
    shown = []
    for copy in copies[:MOST]:
        try:
            shown.append(data_uri(copy))
        except ImportError:
            run.note("Pictures are not shown, because pillow is missing: pip install pillow.")
        except ValueError as error:
            run.note(f"A picture in {path} was left out: {error}.")
    return shown


def _per_token(values: Any, size: int, kind: Any = numpy.float32) -> Numbers:
    found = numpy.asarray(values, kind)
    if found.shape != (size,):
        raise ValueError(f"{found.size} values for {size} tokens")
    return found


def _of_table(run: Run, path: Path) -> list[Row]:
    columns = run.columns_of(path)
    if columns is None:
        return []
    logged = run.keys()
    rewards = [name for name in columns if f"rewards/{name}/mean" in logged]
    outcomes = [name for name in columns if name.endswith(OUTCOME_SUFFIX)]
    prompts = [plain_text(prompt) for prompt in columns["prompt"]]
    rows = []
    for index, (group, member) in enumerate(_groups(prompts, run)):
        at = {name: values[index] for name, values in columns.items()}
        completion = at["completion"]
        if isinstance(completion, list) and len(completion) == 1 and isinstance(completion[0], Mapping):
            completion = content_text(completion[0].get("content"))  # without its role, as the token records have it
        rows.append(
            Row(
                group=group,
                member=member,
                prompt=prompts[index],
                completion=plain_text(completion) if isinstance(completion, list) else str(completion),
                truncated=None,
                rewards={name: number(at[name]) for name in rewards},
                reward=None,  # the table has no weights
                credit=number(at["advantage"]),
                has_signal=bool(number(at["advantage"])),
                outcomes={name.removesuffix(OUTCOME_SUFFIX): _short(at[name]) for name in outcomes if at[name]},
            )
        )
    return rows


def _groups(prompts: Sequence[str], run: Run) -> Iterator[tuple[int, int]]:
    """Group and member of each row: runs of equal prompts, cut at the group size in the settings."""
    size = run.settings.get("num_generations")
    whole = size if isinstance(size, int) and size > 0 and len(prompts) % size == 0 else None
    group = -1
    member = 0
    for index, prompt in enumerate(prompts):
        member += 1
        if index == 0 or prompt != prompts[index - 1] or member == whole:
            group += 1
            member = 0
        yield group, member


def _short(value: Any, size: int = 60) -> str:
    text = str(value)
    return text if len(text) <= size else text[:size] + "…"


def number(value: Any) -> float | None:
    """A finite number of drawable size; anything else becomes None."""
    return float(value) if is_number(value) else None
