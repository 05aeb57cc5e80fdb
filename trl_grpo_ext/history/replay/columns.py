"""Dataset columns that rewards need and a table of completions has not, joined to it by the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError
from .files import Columns, Say, read_columns
from .saved import SavedBatch, join_key, text_of_message

_KEYS = ("prompt", "question")


def join_columns(batches: Sequence[SavedBatch], dataset: str | Path, say: Say) -> list[SavedBatch]:
    """Give every completion the columns of its prompt's row in a dataset.

    A row's prompt is its column `prompt`, or else `question`. It is the completion's where both are equal, or where
    the last message of the saved prompt is that text; else where the saved prompt contains it (a prompt made of a
    template), the longest such one.

    Args:
        batches: Saved completions.
        dataset: A `.jsonl` or `.parquet` file.
        say: Told of prompts that the dataset has twice with different columns; the first counts.

    Raises:
        ConfigurationError: The file is not there or has neither column, or a prompt is not in it.
    """
    file = Path(dataset)
    if not file.is_file() or file.suffix not in (".jsonl", ".parquet"):
        raise ConfigurationError(f"--dataset {str(dataset)!r} is no .jsonl or .parquet file.")
    columns = read_columns(file)
    key = next((name for name in _KEYS if name in columns), None)
    if key is None:
        raise ConfigurationError(
            f"--dataset {file} has neither a column 'prompt' nor 'question' to join by; its columns: "
            f"{', '.join(sorted(columns)[:12]) or 'none'}."
        )
    places: dict[str, int] = {}
    conflicts = 0
    for row, prompt in enumerate(columns[key]):
        first = places.setdefault(join_key(prompt), row)
        conflicts += any(values[first] != values[row] for values in columns.values())
    if conflicts:
        say(f"{conflicts} rows of {file.name} have the prompt of an earlier row and other columns; the earlier counts.")
    finder = _Finder(places)
    missing = [prompt for batch in batches for prompt in batch.prompts if finder.row(prompt) is None]
    if missing:
        distinct = list(dict.fromkeys(join_key(prompt) for prompt in missing))
        raise ConfigurationError(
            f"{len(distinct)} of the saved prompts are not in --dataset {file}, such as {distinct[0][:80]!r}. Its "
            f"column {key!r} must hold the prompts, or a text that stands in them."
        )
    return [_joined(batch, columns, finder) for batch in batches]


class _Finder:
    """Which row of the dataset a saved prompt is, searched once for each."""

    def __init__(self, places: dict[str, int]) -> None:
        self._places = places
        self._longest_first = sorted(places, key=len, reverse=True)
        self._found: dict[str, int | None] = {}

    def row(self, prompt: Any) -> int | None:
        """The row; None where there is none."""
        key = join_key(prompt)
        if key not in self._found:
            self._found[key] = self._search(prompt, key)
        return self._found[key]

    def _search(self, prompt: Any, key: str) -> int | None:
        asked = key if isinstance(prompt, str) or not prompt else text_of_message(prompt[-1])
        for text in (key, asked):
            if text in self._places:
                return self._places[text]
        return next((self._places[text] for text in self._longest_first if text.strip() and text in asked), None)


def _joined(batch: SavedBatch, columns: Columns, finder: _Finder) -> SavedBatch:
    rows = [finder.row(prompt) for prompt in batch.prompts]
    new = {
        name: [values[row] for row in rows if row is not None]
        for name, values in columns.items()
        if name not in ("prompt", "completion") and name not in batch.columns
    }
    return replace(batch, columns={**batch.columns, **new})
