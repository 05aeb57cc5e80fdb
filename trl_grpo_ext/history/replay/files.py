"""Files of saved completions, found and read into columns: TRL's parquet, our token records, other people's JSON Lines.

A file is read into a mapping from column names to lists with one entry per row. Lists of numbers inside parquet come
as numpy arrays: there may be millions of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError
from ...records.token_records import FOLDER

Columns = dict[str, list[Any]]
Say = Callable[[str], None]
"""Takes what the user should know about how the files were understood, one sentence at a time."""

TRL_FOLDER = "completions"
"""Where TRL writes its tables of completions, inside the output_dir."""

_NOT_READ = {"tokens", "stages", "advantages"}
"""Columns of the token records that the replay has no use for, and that are large."""

_SUFFIXES = (".parquet", ".jsonl")


def saved_files(completions: str | Path, say: Say) -> list[Path]:
    """The files that a path stands for, ordered by name.

    Args:
        completions: A file, a folder with such files, or an output_dir with `token_records` or `completions`.
        say: Told which of the two is read where both are there.

    Raises:
        ConfigurationError: There is no such file or folder, or nothing in it.
    """
    path = Path(completions)
    if path.is_file():
        if path.suffix not in _SUFFIXES:
            raise ConfigurationError(f"{path} ends in neither of {', '.join(_SUFFIXES)}: saved completions are those.")
        return [path]
    if not path.is_dir():
        raise ConfigurationError(f"There is no file or folder {str(path)!r} with saved completions.")
    for folder in (path / FOLDER, path / TRL_FOLDER, path):
        files = sorted(file for file in folder.iterdir() if file.suffix in _SUFFIXES) if folder.is_dir() else []
        if files:
            if folder.name == FOLDER and (path / TRL_FOLDER).is_dir():
                say(f"Reading {FOLDER}/, which has tokens; name {path / TRL_FOLDER} to read TRL's tables instead.")
            return files
    raise ConfigurationError(
        f"{str(path)!r} holds no saved completions. Train with log_completions: true (which writes {TRL_FOLDER}/) or "
        f"token_records: 64 (which writes {FOLDER}/)."
    )


def read_columns(file: Path) -> Columns:
    """The columns of one file.

    Raises:
        ConfigurationError: The file is not readable as what its name says.
    """
    return _read_parquet(file) if file.suffix == ".parquet" else _read_json_lines(file)


def rows_of(columns: Columns, rows: Sequence[int]) -> Columns:
    """Some rows of every column, in the order given."""
    return {name: [values[row] for row in rows] for name, values in columns.items()}


def number_of(value: Any) -> float | None:
    """A saved value as a number: None where it is none, or NaN."""
    if isinstance(value, bool):
        return float(value)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _read_parquet(file: Path) -> Columns:
    import pyarrow
    import pyarrow.parquet

    try:
        names = [name for name in pyarrow.parquet.read_schema(file).names if not name.startswith("__index_level_")]
        skipped = _NOT_READ if "token_ids" in names else set()
        table = pyarrow.parquet.read_table(file, columns=[name for name in names if name not in skipped])
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ConfigurationError(
            f"{file} cannot be read as parquet, it may be cut off: {_first_line(error)}"
        ) from error
    return {name: _column(table.column(name)) for name in table.column_names}


def _column(chunks: Any) -> list[Any]:
    import numpy
    import pyarrow

    kind = chunks.type
    if not pyarrow.types.is_list(kind) or not (
        pyarrow.types.is_primitive(kind.value_type) and not pyarrow.types.is_null(kind.value_type)
    ):
        listed: list[Any] = chunks.to_pylist()
        return listed
    array = pyarrow.concat_arrays(chunks.chunks) if chunks.num_chunks else pyarrow.array([], kind)
    lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    values = array.flatten().to_numpy(zero_copy_only=False)
    parts = numpy.split(values, numpy.cumsum(lengths)[:-1]) if len(array) else []
    return [part if valid else None for part, valid in zip(parts, array.is_valid().to_pylist(), strict=True)]


def _read_json_lines(file: Path) -> Columns:
    rows: list[dict[str, Any]] = []
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ConfigurationError(f"{file}, line {number} is not an object: {line.strip()[:60]!r}.")
                rows.append(row)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} cannot be read as text in UTF-8: {_first_line(error)}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{file}, line {number} is not JSON: {_first_line(error)}") from error
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [row.get(name) for row in rows] for name in names}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
