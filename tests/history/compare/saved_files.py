"""Small files of saved completions."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl_grpo_ext.records.token_records import SCHEMA, write_records


def write_lines(file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_words(folder: Path, rows: Sequence[dict[str, Any]], step: int = 0) -> Path:
    """A run's folder with token records of these rows, in which every word is a token."""
    numbers: dict[str, int] = {}
    records = []
    for row in rows:
        words = list(re.finditer(r"\w+|[^\w\s]", row["completion"]))
        tokens = {
            "token_ids": [numbers.setdefault(word[0], len(numbers)) for word in words],
            "starts": [word.start() for word in words],
            "ends": [word.end() for word in words],
            "live": [True for _ in words],
            "reward": sum(row.get("rewards", {}).values()),
        }
        records.append({**dict.fromkeys(SCHEMA.names), "group": 0, "member": 0, "truncated": False, **tokens, **row})
    write_records(records, str(folder), step)
    return folder


def two_groups(folder: Path) -> Path:
    """Two prompts with two completions each, of 2, 4, 1 and 3 words; only the first group has signal."""
    rows = [("p", "a b", 1.0), ("p", "a b c d", 0.0), ("q", "a", 1.0), ("q", "a b c", 1.0)]
    columns = [
        {"group": "pq".index(prompt), "prompt": prompt, "completion": text, "rewards": {"score": score}}
        for prompt, text, score in rows
    ]
    return write_words(folder, columns)
