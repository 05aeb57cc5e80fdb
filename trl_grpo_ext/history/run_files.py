"""The one reader of a run's files, for the report and the comparison.

Any file may be cut off, still being written, foreign or malicious: what cannot be read raises `UnreadableError`, one
printable sentence. Lists of numbers inside parquet come as numpy arrays: there may be millions of them.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from ..errors import ConfigurationError
from ..guard.untrusted import one_line
from ..records.token_records import FOLDER

RECORDS = FOLDER  # where the recorder writes them, inside the output_dir
COMPLETIONS = "completions"  # where TRL writes completions
Columns = dict[str, list[Any]]
Say = Callable[[str], None]  # takes one sentence on what is missing or how a file was read
_STEP = re.compile(r"(?:step|completions)_(\d{1,12})\.parquet")


class UnreadableError(ConfigurationError):
    """A file cannot be read; the message is one sentence that names it."""


def step_of(path: Path) -> int:
    """The step in the name of a file of completions; -1 if training gives no file such a name."""
    found = _STEP.fullmatch(path.name)
    return int(found[1]) if found else -1


def read_json(path: Path) -> Any:
    """The content of a JSON file; NaN becomes None."""
    text = _text(path)
    try:
        return _json(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{path} is not complete JSON ({reason_of(error)}).") from error


def read_json_lines(path: Path, bad: Say | None = None) -> list[Any]:
    """The values of a file with one JSON value per line; `bad` takes a sentence on each other one, or it raises."""
    values: list[Any] = []
    lines = re.split(r"\r?\n", _text(path))
    for number, line in enumerate(lines, start=1):
        try:
            values += [_json(line)] if line.strip() else []
        except (ValueError, RecursionError) as error:
            sentence = f"Line {number} of {path} is not JSON ({reason_of(error)})"
            if bad is None:
                raise UnreadableError(f"{sentence}.") from error
            if number < len(lines):
                bad(f"{sentence}, it was left out.")
    return values


def read_columns(path: Path, only: Sequence[str] | None = None, without: Sequence[str] = ()) -> Columns:
    """Columns of a `.parquet` or `.jsonl` file; of `only`, those that it lacks are left out."""
    if path.suffix != ".parquet":
        rows = read_json_lines(path)
        if bad := [number for number, row in enumerate(rows, start=1) if not isinstance(row, dict)]:
            raise UnreadableError(f"{path}, line {bad[0]} is not an object: {str(rows[bad[0] - 1])[:60]!r}.")
        return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    try:
        names = [str(name) for name in pyarrow.parquet.read_schema(path).names]
        names = [name for name in names if (only is None or name in only) and name not in without]
        # By this thread alone: where one column is damaged, no other thread may still be reading what is then freed.
        table = pyarrow.parquet.read_table(path, columns=names, use_threads=False, pre_buffer=False)
        table.validate(full=True)
        return {name: _values(table.column(name)) for name in names if not name.startswith("__index_level_")}
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
        raise UnreadableError(f"{path} is damaged, truncated or still being written ({reason_of(error)}).") from error


def _values(chunks: Any) -> list[Any]:
    kind = chunks.type
    of_numbers = pyarrow.types.is_list(kind) and pyarrow.types.is_primitive(kind.value_type)
    return list(chunks.to_numpy()) if of_numbers else list(chunks.to_pylist())


def rows_of(columns: Columns, rows: Sequence[int]) -> Columns:
    return {name: [values[row] for row in rows] for name, values in columns.items()}


def reason_of(error: BaseException) -> str:
    """An error on one line, shortened; of the operating system's only what it says."""
    return one_line(getattr(error, "strerror", None) or str(error) or type(error).__name__, 160).rstrip(".")


def plain_messages(messages: Any) -> Any:
    """Messages without the empty fields that parquet adds to all of them if one has them."""
    if isinstance(messages, Mapping):
        return {key: plain_messages(value) for key, value in messages.items() if value is not None}
    return [plain_messages(item) for item in messages] if isinstance(messages, list | tuple) else messages


def messages_in(prompt: str) -> Any:
    """The messages in a prompt that the token records wrote as JSON; the text itself if it is none."""
    if prompt.startswith('[{"'):
        try:
            messages = json.loads(prompt)
        except (ValueError, RecursionError):
            return prompt
        if isinstance(messages, list) and all(isinstance(one, dict) and "role" in one for one in messages):
            return messages
    return prompt


def _json(text: str) -> Any:
    return json.loads(text, parse_constant=lambda _: None)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableError(f"{path} cannot be read ({reason_of(error)}).") from error
