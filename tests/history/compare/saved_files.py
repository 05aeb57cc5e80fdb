"""Small files of saved completions."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet


def write_lines(file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_table(file: Path, **columns: list[Any]) -> Path:
    """A parquet file as TRL writes it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file


def two_groups(folder: Path) -> Path:
    """Two prompts with two completions each, of 2, 4, 1 and 3 words; only the first group has signal."""
    rows = [("p", "a b", 1.0), ("p", "a b c d", 0.0), ("q", "a", 1.0), ("q", "a b c", 1.0)]
    columns = [{"prompt": prompt, "completion": text, "rewards": {"score": score}} for prompt, text, score in rows]
    # Truncated, so that no token ends them.
    return write_lines(folder / "saved.jsonl", [{**row, "truncated": True} for row in columns])
