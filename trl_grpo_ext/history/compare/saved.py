"""The reader of saved completions: token records, TRL's tables, anybody's files. A generation batch is a `SavedBatch`.

Tokens are the saved ones, a tokenizer's, or words if there is neither.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...credit.alignment import token_offsets
from ...errors import AlignmentError, ConfigurationError
from ...guard.messages import joined_text
from ...records.token_records import encodable
from ..run_files import (
    SUFFIXES,
    Columns,
    Say,
    messages_in,
    plain_messages,
    read_columns,
    reason_of,
    rows_of,
    saved_files,
)

_WORD = re.compile(r"\w+|[^\w\s]")
MOST_CELLS = 200_000_000
"""Most completions times longest completion; a larger batch would take many gigabytes."""

Offsets = Callable[[int], Sequence[tuple[int, int]]]

_NOT_READ = ("tokens", "stages", "advantages")
"""Large columns of the token records that no selection uses."""
_OURS = {"step", "group", "member", "prompt", "completion", "truncated", "rewards", "reward", "advantage", "weight"}
_TOKENS = {"prompt_ids", "token_ids", "starts", "ends", "live", "logp", "entropy"}


@dataclass(frozen=True)
class Tokens:
    """The tokens of one batch, `(B, T)`, padded on the right; log-probabilities only if every completion has some."""

    ids_B_T: torch.Tensor
    completion_mask_B_T: torch.Tensor
    mask_B_T: torch.Tensor
    offsets: Offsets
    logps_B_T: torch.Tensor | None = None
    entropies_B_T: torch.Tensor | None = None

    @functools.cached_property
    def id_rows(self) -> list[list[int]]:
        """The token numbers of each completion, without padding."""
        lengths = self.completion_mask_B_T.sum(dim=1).long().tolist()
        return [row[:length] for row, length in zip(self.ids_B_T.tolist(), lengths, strict=True)]


@dataclass(frozen=True, kw_only=True)
class SavedBatch:
    """One generation batch, or the saved part of it; `B` completions in whole groups, one group after the other."""

    step: int  # optimizer steps done when it was saved
    where: str  # the file and the step, for messages
    prompts: Sequence[Any]  # strings or lists of messages
    completions: Sequence[Any]  # as reward functions get them: strings or lists of messages
    texts: Sequence[str]
    group_names: Sequence[Any]  # the file's name for each row's group; a running number if it has none
    num_generations: int
    tokens: Tokens
    rewards: Mapping[str, Sequence[float | None]] = field(default_factory=dict)  # the run's, by name
    reward: Sequence[float | None] | None = None  # the saved weighted sum; None if it was not saved
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # everything else
    records: Columns | None = None  # columns of the token records; None in other files
    truncated: Sequence[bool] | None = None  # None if the file does not say


class _Part(NamedTuple):
    """The rows of one step of one file."""

    where: str
    step: int
    columns: Columns

    def keys(self, column: str) -> list[str]:
        """A column of prompts or completions, as strings that can be compared."""
        return [join_key(value) for value in self.columns[column]]


def read_saved(
    completions: str | Path,
    say: Say,
    *,
    steps: tuple[int | None, int | None] = (None, None),
    limit: int | None = None,
    num_generations: int | None = None,
    with_logps: bool = False,
    tokenizer: Any = None,
) -> list[SavedBatch]:
    """Read saved completions in the order of their steps; `with_logps` leaves out groups without log-probabilities."""
    every = sorted((part for file in saved_files(completions, say) for part in _parts(file)), key=lambda one: one.step)
    first, last = steps
    parts = [one for one in every if (first is None or one.step >= first) and (last is None or one.step <= last)]
    if not parts:
        kept = f"the steps are {every[0].step} to {every[-1].step}" if every else "there are no completions in it"
        raise ConfigurationError(f"{completions}: nothing to compare, {kept}.")
    parts = _without_repetitions(parts, say)
    if num_generations is None and any("group" not in part.columns for part in parts):
        say("Equal prompts in a row are taken for one group (--num_generations).")
    batches: list[SavedBatch] = []
    words: dict[str, int] = {}
    left = limit
    lost = 0
    for part in parts:
        groups = _groups(part, num_generations)
        if with_logps and "token_ids" in part.columns:
            trained = [group for group in groups if all(_has_logps(part.columns, row) for row in group)]
            lost += sum(map(len, groups)) - sum(map(len, trained))
            groups = trained
        if left is not None and groups:
            groups = groups[: max(left // len(groups[0]), 0 if batches else 1)]
            left -= sum(map(len, groups))
        if groups:
            batches.append(_batch(part, groups, tokenizer, words))
    if lost:
        say(f"{lost} completions are left out, in whole groups whose records lack log-probabilities: not trained on.")
    if not batches:
        raise ConfigurationError(
            f"{completions}: nothing to compare, no group has the log-probabilities that a hook needs."
        )
    return batches


def join_key(prompt: Any) -> str:
    """The same string for the same prompt, whether it is text, messages, or messages as JSON."""
    if isinstance(prompt, str):
        return prompt
    return json.dumps(plain_messages(prompt), ensure_ascii=False, sort_keys=True, default=str)


def number_of(value: Any) -> float | None:
    """A saved value as a number; None if it is not a number, or NaN."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _parts(file: Path) -> list[_Part]:
    columns = read_columns(file, without=_NOT_READ)
    needed = {"prompt", "completion"} | ({"live", "group", "starts", "ends"} if "token_ids" in columns else set())
    if missing := sorted(needed - columns.keys()):
        there = ", ".join(sorted(columns)[:12]) or "none"
        raise ConfigurationError(
            f"{file} holds no saved completions: it has no column {' and no '.join(map(repr, missing))}, but: {there}."
        )
    for name in ("prompt", "completion"):
        for row, value in enumerate(columns[name]):
            if not isinstance(value, str | list):
                raise ConfigurationError(
                    f"{file}, row {row}: the {name} is {value!r:.60}; it must be text or a list of messages."
                )
    rows: dict[int, list[int]] = {}
    for row, step in enumerate(columns.get("step", [0] * len(columns["prompt"]))):
        if type(step) is not int:
            raise ConfigurationError(f"{file}: the step {step!r:.60} is no whole number.")
        rows.setdefault(step, []).append(row)
    return [_Part(f"{file.name}, step {step}", step, rows_of(columns, chosen)) for step, chosen in rows.items()]


def _without_repetitions(parts: Sequence[_Part], say: Say) -> list[_Part]:
    """Keep the last copy of a generation batch that was saved for several steps or logged twice."""
    contents = [(part.keys("prompt"), part.keys("completion")) for part in parts]
    kept = [part for part, own, after in zip(parts, contents, [*contents[1:], None], strict=True) if own != after]
    if len(kept) < len(parts):
        repeated = len(parts) - len(kept)
        say(f"{repeated} of {len(parts)} tables repeat earlier completions; only the last copy is used.")
    return kept


def _has_logps(columns: Columns, row: int) -> bool:
    """Whether a row was trained on: each of its tokens has a log-probability and an entropy."""
    found = [columns.get(name, {row: None})[row] for name in ("logp", "entropy")]
    return all(values is not None and len(values) == len(columns["token_ids"][row]) for values in found)


def _batch(part: _Part, groups: Sequence[Sequence[int]], tokenizer: Any, words: dict[str, int]) -> SavedBatch:
    columns = rows_of(part.columns, [row for group in groups for row in group])
    records = "token_ids" in columns
    count = len(columns["prompt"])
    size = len(groups[0])
    prompts = [
        messages_in(prompt) if records and isinstance(prompt, str) else plain_messages(prompt)
        for prompt in columns["prompt"]
    ]
    completions: list[Any] = [plain_messages(completion) for completion in columns["completion"]]
    if records:  # these have only text; a reward function saw messages if the prompt is a conversation
        completions = [
            completion if isinstance(prompt, str) else [{"role": "assistant", "content": completion}]
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
    texts = [joined_text(completion) for completion in completions]
    rewards = _rewards(columns)
    truncated = columns.get("truncated", [None])
    known = None if None in truncated else [bool(value) for value in truncated]
    ours = _OURS | (_TOKENS if records else set()) | rewards.keys()
    return SavedBatch(
        step=part.step,
        where=part.where,
        prompts=prompts,
        completions=completions,
        texts=texts,
        group_names=columns.get("group", [row // size for row in range(count)]),
        num_generations=size,
        tokens=recorded_tokens(columns, part.where)
        if records
        else text_tokens(texts, known or [False] * count, part.where, tokenizer, words),
        rewards=rewards,
        reward=[number_of(value) for value in columns["reward"]] if "reward" in columns else None,
        columns={name: values for name, values in columns.items() if name not in ours},
        records={name: columns[name] for name in _TOKENS if name in columns} if records else None,
        truncated=known,
    )


def _rewards(columns: Columns) -> dict[str, list[float | None]]:
    """The run's rewards: the mapping in `rewards`, else `reward`, else TRL's columns of floating-point numbers."""
    if "rewards" in columns:
        rows = [dict(value or ()) for value in columns["rewards"]]
        return {name: [number_of(row.get(name)) for row in rows] for name in rows[0]}
    if "reward" in columns:
        return {"reward": [number_of(value) for value in columns["reward"]]}
    kinds = {name: {type(value) for value in columns[name]} for name in columns.keys() - _OURS - _TOKENS}
    floats = [name for name in columns if float in kinds.get(name, ()) and kinds[name] <= {int, float, type(None)}]
    return {name: [number_of(value) for value in columns[name]] for name in floats}


def _groups(part: _Part, num_generations: int | None) -> list[list[int]]:
    """The rows of each group: by the file's own numbers, or else consecutive rows with one prompt."""
    numbers = part.columns.get("group")
    if numbers is None:
        runs = [len(list(run)) for _, run in itertools.groupby(part.keys("prompt"))]
        if wrong := [run for run in runs if num_generations and run % num_generations]:
            raise ConfigurationError(
                f"{part.where}: {wrong[0]} completions of one prompt stand in a row, which is no multiple of "
                f"num_generations={num_generations}. Give the run's --num_generations."
            )
        numbers = [number for number, run in enumerate(runs) for _ in range(run)]
        if num_generations:
            numbers = [row // num_generations for row in range(len(numbers))]
    rows: dict[str, list[int]] = {}
    for row, number in enumerate(numbers):
        rows.setdefault(str(number), []).append(row)
    sizes = {len(members): number for number, members in reversed(rows.items())}
    if len(sizes) > 1:
        shown = ", ".join(f"{sizes[size]!r:.40} has {size}" for size in sorted(sizes))
        raise ConfigurationError(
            f"{part.where}: all groups must have as many completions, and group {shown}. If a prompt came twice in a "
            "row, give --num_generations."
        )
    return list(rows.values())


# -------------------------------------------------------------------------------------------- columns of a dataset


def join_columns(batches: Sequence[SavedBatch], dataset: str | Path) -> list[SavedBatch]:
    """Give every completion the columns of its prompt's row in a `.jsonl` or `.parquet` file.

    A row's prompt is its column `prompt`, or else `question`; of equal ones the first row counts. It matches a saved
    prompt that equals it or whose last message does. Failing that, the longest one that the saved prompt contains
    matches (a prompt made from a template).
    """
    file = Path(dataset)
    if not file.is_file() or file.suffix not in SUFFIXES:
        raise ConfigurationError(f"--dataset {str(file)!r} is no .jsonl or .parquet file.")
    columns = read_columns(file)
    key = next((name for name in ("prompt", "question") if name in columns), None)
    if key is None:
        raise ConfigurationError(
            f"--dataset {file} has neither a column 'prompt' nor 'question' to join by; its columns: "
            f"{', '.join(sorted(columns)[:12]) or 'none'}."
        )
    first_rows: dict[str, int] = {}
    for row, prompt in enumerate(columns[key]):
        first_rows.setdefault(join_key(prompt), row)

    @functools.cache
    def row_of(own: str, asked: str) -> int:
        exact = [text for text in (own, asked) if text in first_rows]
        inside = (text for text in first_rows if text.strip() and text in asked)
        found = exact[0] if exact else max(inside, key=len, default=None)
        if found is None:
            raise ConfigurationError(
                f"A saved prompt is not in --dataset {file}: {own[:80]!r}. Its column {key!r} must hold the prompts, "
                "or a text contained in them."
            )
        return first_rows[found]

    joined = []
    for batch in batches:
        asked = [one if isinstance(one, str) or not one else joined_text(one[-1]) for one in batch.prompts]
        rows = [row_of(join_key(prompt), text) for prompt, text in zip(batch.prompts, asked, strict=True)]
        new = {name: values for name, values in columns.items() if name not in ("prompt", "completion", *batch.columns)}
        joined.append(replace(batch, columns={**batch.columns, **rows_of(new, rows)}))
    return joined


# ---------------------------------------------------------------------------------------------------------- tokens


def text_tokens(
    texts: Sequence[str], truncated: Sequence[bool], where: str, tokenizer: Any, words: dict[str, int]
) -> Tokens:
    """The tokens of texts, or their words, numbered in `words`; with one that ends each text that is not truncated."""
    texts = [encodable(text) for text in texts]
    spans = [[match.span() for match in _WORD.finditer(text)] for text in texts]
    if tokenizer is None:
        pieces = [[text[start:end] for start, end in row] for text, row in zip(texts, spans, strict=True)]
        ids = [[words.setdefault(piece, len(words)) for piece in row] for row in pieces]
        end = words.setdefault("", len(words))
    else:
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        end = tokenizer.eos_token_id
    ids = [row if end is None or is_cut else [*row, end] for row, is_cut in zip(ids, truncated, strict=True)]

    def offsets_of(row: int) -> Sequence[tuple[int, int]]:
        if tokenizer is not None:
            return token_offsets(tokenizer, ids[row], texts[row])
        return [*spans[row], (len(texts[row]), len(texts[row]))][: len(ids[row])]

    mask_B_T = _mask(ids, where)
    return Tokens(_padded(ids, torch.long), mask_B_T, mask_B_T, offsets_of)


def loaded_or_refused(option: str, name: str, load: Callable[[], Any]) -> Any:
    """What `load` makes of a path or hub id that an option gives."""
    try:
        return load()
    except (RuntimeError, MemoryError):  # out of memory, or a device that fails, says nothing about the name
        raise
    except Exception as error:  # the hub's, the file system's and the parsers' errors have no common root
        raise ConfigurationError(f"{option} {name!r} cannot be loaded: {reason_of(error)}") from error


def load_tokenizer(name: str) -> Any:
    """A tokenizer by its path or hub id."""
    from transformers import AutoTokenizer

    return loaded_or_refused("--tokenizer", name, lambda: AutoTokenizer.from_pretrained(name))


def recorded_tokens(records: Columns, where: str) -> Tokens:
    """The tokens in the columns of token records."""
    ids = records["token_ids"]
    starts = records["starts"]
    ends = records["ends"]
    if bad := [row for row, live in enumerate(records["live"]) if live is None or len(live) != len(ids[row])]:
        raise ConfigurationError(f"{where}: row {bad[0]} does not have one entry in `live` per token.")

    def numbers(name: str) -> torch.Tensor | None:
        values = records.get(name, [None] * len(ids))
        if any(row is None or len(row) != len(of) for row, of in zip(values, ids, strict=True)):
            return None
        return _padded(values, torch.float32)

    def offsets_of(row: int) -> Sequence[tuple[int, int]]:
        if starts[row] is None or ends[row] is None:
            raise AlignmentError(
                f"{where}, row {row}: the record has no offsets, because the tokens could not be matched with "
                "the text. Hooks that need offsets or spans cannot run on it."
            )
        return [(int(start), int(end)) for start, end in zip(starts[row], ends[row], strict=True)]

    return Tokens(
        ids_B_T=_padded(ids, torch.long),
        completion_mask_B_T=_mask(ids, where),
        mask_B_T=_padded(records["live"], torch.float32),
        offsets=offsets_of,
        logps_B_T=numbers("logp"),
        entropies_B_T=numbers("entropy"),
    )


def _mask(rows: Sequence[Any], where: str) -> torch.Tensor:
    longest = max(map(len, rows))
    if len(rows) * longest > MOST_CELLS:
        raise ConfigurationError(
            f"{where}: {len(rows):,} completions of up to {longest:,} tokens are too many for one batch. Add a "
            f"column `step` that says which were sampled together, or use fewer with --limit."
        )
    return _padded([[1.0] * len(row) for row in rows], torch.float32)


def _padded(rows: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    """Rows of numbers, `(B, T)`, padded with zeros on the right to one column at least."""
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    return torch.nn.utils.rnn.pad_sequence([*tensors, torch.zeros(1, dtype=dtype)], batch_first=True)[:-1]
