"""The files of a run, read so that a damaged one becomes a sentence and never an error.

Whatever lies in the folder may be cut off, still being written, of another program, or made by a stranger. Nothing is
unpickled. What cannot be used is told in words: which file, what is wrong, and what would mend it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LARGEST = 512 * 2**20
"""Bytes of a JSON file past which it is not read."""

Tell = Callable[[str], None]
"""Takes one sentence on what is missing."""


def read_json(path: Path, tell: Tell, what_then: str) -> Any:
    """The content of a JSON file; None, told, where it cannot be read. Not-a-number becomes None.

    Args:
        path: Of a file that is there.
        tell: Takes the sentence.
        what_then: What is lost by it and what would bring it back, a sentence.
    """
    text = _text_of(path, tell, what_then)
    if text is None:
        return None
    try:
        return json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        tell(f"{path} is not whole JSON ({_reason(error)}), it may be cut off or still being written. {what_then}")
        return None


def read_json_lines(path: Path, tell: Tell, what_then: str) -> list[Any]:
    """The values of a file with one JSON value per line; a last line without an end is still being written."""
    text = _text_of(path, tell, what_then)
    values: list[Any] = []
    lines = (text or "").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values.append(json.loads(line, parse_constant=lambda _: None))
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                tell(f"Line {number} of {path} is not JSON ({_reason(error)}), it was left out. {what_then}")
    return values


def entries_of(values: Any) -> list[dict[str, Any]] | None:
    """The log entries among the values of a list: mappings with a step. None where there is no list."""
    if not isinstance(values, list):
        return None
    entries = [value for value in values if isinstance(value, dict) and is_number(value.get("step"))]
    return [{str(key): plain_value(value) for key, value in entry.items()} for entry in entries]


def plain_value(value: Any) -> Any:
    """A logged value: a number that is not finite becomes None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_file(path: Path) -> bool:
    """Whether an ordinary file is there, as far as we may look."""
    try:
        return path.is_file()
    except OSError:
        return False


def tables_in(folder: Path, name: re.Pattern[str], needed: Sequence[str], tell: Tell) -> list[Path]:
    """The parquet files of a folder whose ends are whole and that have the columns needed, by the step in their names.

    Args:
        folder: Need not be there.
        name: Of such a file; its first group is the step.
        needed: Columns.
        tell: Takes a sentence on each file that is left out.
    """
    try:
        named = [(int(found[1]), file) for file in folder.iterdir() if (found := name.fullmatch(file.name))]
        others = [file for file in folder.iterdir() if file.suffix == ".parquet" and not name.fullmatch(file.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        tell(f"{folder} cannot be looked into ({_reason(error)}). Give yourself the right to read it.")
        return []
    for file in sorted(others):
        tell(f"{file} was left out: its name is not one that training gives to such a file.")
    return [file for _, file in sorted(named) if is_file(file) and _usable(file, needed, tell)]


def read_columns(path: Path, columns: Sequence[str], tell: Tell) -> dict[str, Any] | None:
    """Columns of a parquet file as pyarrow arrays in one chunk each; None, told, where its data is damaged.

    Args:
        path: One of those that `tables_in` returned.
        columns: Those that the file lacks are left out.
        tell: Takes the sentence.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        names = pyarrow.parquet.read_schema(path).names
        table = pyarrow.parquet.read_table(path, columns=[name for name in columns if name in names])
        table.validate(full=True)
        return {name: table.column(name).combine_chunks() for name in table.column_names}
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
        tell(f"{path} was left out: its data is damaged ({_reason(error)}). Only training writes it again.")
        return None


def _usable(path: Path, needed: Sequence[str], tell: Tell) -> bool:
    import pyarrow
    import pyarrow.parquet

    try:
        names = pyarrow.parquet.read_schema(path).names
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
        tell(
            f"{path} was left out: it is no whole parquet file ({_reason(error)}), it may be cut off or still being "
            "written. If training still goes on, make the report again."
        )
        return False
    lacking = [name for name in needed if name not in names]
    if lacking:
        tell(f"{path} was left out: it is another program's table, without {', '.join(lacking)}.")
    return not lacking


def _text_of(path: Path, tell: Tell, what_then: str) -> str | None:
    try:
        if (size := path.stat().st_size) > LARGEST:
            tell(f"{path} has {size:,} bytes, more than the {LARGEST:,} that are read. {what_then}")
            return None
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        tell(f"{path} is not text, so it is damaged or no file of a run. {what_then}")
    except OSError as error:
        tell(f"{path} cannot be read ({_reason(error)}). {what_then}")
    return None


def _reason(error: BaseException) -> str:
    """The first line of an error, short, without what a terminal would obey."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    line = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return "".join(character if character.isprintable() else "?" for character in line)[:160]
