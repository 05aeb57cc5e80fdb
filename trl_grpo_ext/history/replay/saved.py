"""Read saved completions of any format into one `SavedBatch` per generation batch.

| file | what is read |
| --- | --- |
| token records | prompts, completions, each reward; groups, tokens, offsets, loss mask, log-probabilities, truncation |
| TRL's tables | prompts, completions, each reward, columns that rewards logged |
| JSON Lines, parquet | `prompt`, `completion`; if there `step`, `group`, `truncated`, `rewards`, `reward`; columns |

A file is read into a mapping from column names to lists with one entry per row. Lists of numbers inside parquet come
as numpy arrays: there may be millions of them.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError
from ...guard.messages import joined_text
from ...records.token_records import FOLDER

Columns = dict[str, list[Any]]
Say = Callable[[str], None]
"""Takes notes for the user on how the files were read, one sentence at a time."""

TRL_FOLDER = "completions"
"""Where TRL writes its tables of completions, inside the output_dir."""

_NOT_READ = {"tokens", "stages", "advantages"}
"""Large columns of the token records that the replay does not use."""

_SUFFIXES = (".parquet", ".jsonl")

_OURS = {"step", "group", "member", "prompt", "completion", "truncated", "rewards", "reward", "advantage", "weight"}
_TOKENS = {"prompt_ids", "token_ids", "starts", "ends", "live", "logp", "entropy"}


@dataclass(frozen=True, kw_only=True)
class SavedBatch:
    """One generation batch, or the saved part of it; `B` completions in whole groups, one group after the other.

    Attributes:
        step: Optimizer steps done when it was saved.
        where: The file and the step, for messages.
        prompts: Strings or lists of messages.
        completions: As reward functions get them: strings or lists of messages.
        texts: The completions' texts.
        group_names: The file's name for each row's group; a running number if it has none.
        num_generations: `G`.
        rewards: Every column of numbers that may be a reward, by name, `B` values or Nones.
        reward_names: Those used if a selection lists no rewards.
        reward: The saved weighted sum; None if it was not saved.
        columns: Everything else, by name, `B` values each.
        tokens: Columns of the token records, by name; None in other files.
        truncated: Whether each was truncated; None if the file does not say.
    """

    step: int
    where: str
    prompts: Sequence[Any]
    completions: Sequence[Any]
    texts: Sequence[str]
    group_names: Sequence[Any]
    num_generations: int
    rewards: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    reward_names: Sequence[str] = ()
    reward: Sequence[float | None] | None = None
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    tokens: Columns | None = None
    truncated: Sequence[bool] | None = None

    def with_log_probabilities(self) -> SavedBatch:
        """The batch without groups whose records lack log-probabilities; it may be empty."""
        saved = self.tokens or {}
        size, count = self.num_generations, len(self.texts)
        both = (saved.get("logp", [None] * count), saved.get("entropy", [None] * count))
        has = [logps is not None and entropies is not None for logps, entropies in zip(*both, strict=True)]
        kept = [row for row in range(count) if all(has[row - row % size : row - row % size + size])]

        def cut(values: Any) -> Any:
            if isinstance(values, Mapping):
                return {name: cut(column) for name, column in values.items()}
            return None if values is None else [values[row] for row in kept]

        of_rows = ("prompts", "completions", "texts", "group_names", "rewards", "reward", "columns", "tokens")
        return replace(self, **{name: cut(getattr(self, name)) for name in (*of_rows, "truncated")})


@dataclass(frozen=True)
class _Part:
    """The rows of one step of one file."""

    where: str
    step: int
    columns: Columns

    @property
    def contents(self) -> tuple[list[str], list[str]]:
        """What distinguishes two parts."""
        return [join_key(prompt) for prompt in self.columns["prompt"]], [
            join_key(completion) for completion in self.columns["completion"]
        ]


def read_saved(
    completions: str | Path,
    say: Say,
    *,
    steps: tuple[int | None, int | None] = (None, None),
    limit: int | None = None,
    num_generations: int | None = None,
    hoped_for: int | None = None,
) -> list[SavedBatch]:
    """Read saved completions in the order of their steps.

    Args:
        completions: A file or a folder.
        say: Called with notes on how the files were read.
        steps: First and last step to read; None means no bound.
        limit: Most completions, in whole groups, but at least one group.
        num_generations: `G`, if the file does not say which completions belong together; None infers it.
        hoped_for: The `G` of a run file, used if it fits the prompts, so that a repeated prompt is reported.

    Raises:
        ConfigurationError: There is nothing to read, or it has no readable format.
    """
    parts = [part for file in saved_files(completions, say) for part in _parts(file)]
    parts.sort(key=lambda part: part.step)
    first, last = steps
    seen = sorted({part.step for part in parts})
    parts = [p for p in parts if (first is None or p.step >= first) and (last is None or p.step <= last)]
    if not parts:
        kept = f"the steps are {seen[0]} to {seen[-1]}" if seen else "there are no completions in it"
        raise ConfigurationError(f"{completions}: nothing to replay, {kept}.")
    parts = _without_repetitions(parts, say)
    if num_generations is None and any("group" not in part.columns for part in parts):
        num_generations = _infer(parts, hoped_for, say)
    batches: list[SavedBatch] = []
    left = limit
    for part in parts:
        if "group" in part.columns:
            groups = groups_by_number(part.columns["group"], part.where)
        else:
            assert num_generations is not None
            prompts = [join_key(prompt) for prompt in part.columns["prompt"]]
            groups = groups_by_runs(prompts, num_generations, part.where)
        if left is not None:
            groups = groups[: max(left // len(groups[0]), 0 if batches else 1)]
            left -= sum(map(len, groups))
        if groups:
            batches.append(_batch(part, groups))
    return batches


def join_key(prompt: Any) -> str:
    """The same string for the same prompt, whether it is text, messages, or messages as JSON."""
    if isinstance(prompt, str):
        return prompt
    return json.dumps(plain_messages(prompt), ensure_ascii=False, sort_keys=True, default=str)


def plain_messages(messages: Any) -> Any:
    """Messages without the empty fields that parquet adds to all of them if one has them."""
    if isinstance(messages, Mapping):
        return {key: plain_messages(value) for key, value in messages.items() if value is not None}
    return [plain_messages(item) for item in messages] if isinstance(messages, list | tuple) else messages


def _parts(file: Path) -> list[_Part]:
    columns = read_columns(file)
    missing = [name for name in ("prompt", "completion") if name not in columns]
    if missing:
        there = ", ".join(sorted(columns)[:12]) or "none"
        raise ConfigurationError(
            f"{file} has no column {' and no '.join(map(repr, missing))}, so it holds no saved completions. Its "
            f"columns: {there}."
        )
    if "token_ids" in columns and (lacking := sorted({"live", "group", "starts", "ends"} - columns.keys())):
        raise ConfigurationError(f"{file} looks like token records and lacks the column {lacking[0]!r}.")
    count = len(columns["prompt"])
    for name in ("prompt", "completion"):
        for row, value in enumerate(columns[name]):
            if not isinstance(value, str | list):
                raise ConfigurationError(
                    f"{file}, row {row}: the {name} is {value!r:.60}; it must be text or a list of messages."
                )
    steps = columns.get("step", [0] * count)
    if bad := [step for step in steps if isinstance(step, bool) or not isinstance(step, int)]:
        raise ConfigurationError(f"{file}: the step {bad[0]!r:.60} is no whole number.")
    rows: dict[int, list[int]] = {}
    for row, step in enumerate(steps):
        rows.setdefault(step, []).append(row)
    if len(rows) == 1:
        return [_Part(f"{file.name}, step {step}", step, columns) for step in rows]
    return [_Part(f"{file.name}, step {step}", step, rows_of(columns, chosen)) for step, chosen in rows.items()]


def _without_repetitions(parts: Sequence[_Part], say: Say) -> list[_Part]:
    """Keep the last copy of a generation batch that was saved for several steps or logged twice."""
    kept: list[_Part] = []
    before: tuple[list[str], list[str]] | None = None
    repeated = 0
    for part in parts:
        contents = part.contents
        if contents == before:
            kept.pop()
            repeated += 1
        kept.append(part)
        before = contents
    if repeated:
        say(f"{repeated} of {len(parts)} tables repeat earlier completions; only the last copy is replayed.")
    return kept


def _infer(parts: Sequence[_Part], hoped_for: int | None, say: Say) -> int:
    runs = [
        run
        for part in parts
        if "group" not in part.columns
        for run in runs_of_equal([join_key(prompt) for prompt in part.columns["prompt"]])
    ]
    if hoped_for is not None and hoped_for > 1 and not any(run % hoped_for for run in runs):
        say(f"Groups have {hoped_for} completions, the selection's num_generations, which fits the prompts.")
        return hoped_for
    size = infer_num_generations(runs)
    beside = "" if hoped_for is None else f" The selection's num_generations={hoped_for} does not fit."
    say(
        f"Groups have {size} completions, inferred from equal prompts in a row.{beside} --num_generations overrides "
        f"this."
    )
    return size


def _batch(part: _Part, groups: Sequence[Sequence[int]]) -> SavedBatch:
    columns = rows_of(part.columns, [row for group in groups for row in group])
    records = "token_ids" in columns
    count, size = len(columns["prompt"]), len(groups[0])
    prompts = [_prompt(prompt, records) for prompt in columns["prompt"]]
    completions: list[Any] = [plain_messages(completion) for completion in columns["completion"]]
    if records:  # these have only text; a reward function saw messages if the prompt is a conversation
        completions = [
            completion if isinstance(prompt, str) else [{"role": "assistant", "content": completion}]
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
    rewards, reward_names = _rewards(columns, count)
    truncated = columns.get("truncated")
    others = columns.keys() - _OURS - (_TOKENS if records else set()) - rewards.keys()
    numbers = [number_of(value) for value in columns["reward"]] if "reward" in columns else None
    return SavedBatch(
        step=part.step,
        where=part.where,
        prompts=prompts,
        completions=completions,
        texts=[joined_text(completion) for completion in completions],
        group_names=columns.get("group", [row // size for row in range(count)]),
        num_generations=size,
        rewards=rewards,
        reward_names=reward_names,
        reward=numbers,
        columns={name: columns[name] for name in columns if name in others},
        tokens={name: columns[name] for name in _TOKENS if name in columns} if records else None,
        truncated=None if truncated is None or None in truncated else [bool(value) for value in truncated],
    )


def _prompt(prompt: Any, records: bool) -> Any:
    """A prompt as reward functions get it; the token records write messages as JSON."""
    if not isinstance(prompt, str):
        return plain_messages(prompt)
    if records and prompt.startswith('[{"'):
        try:
            messages = json.loads(prompt)
        except (json.JSONDecodeError, RecursionError):
            return prompt
        if all(isinstance(message, dict) and "role" in message for message in messages):
            return messages
    return prompt


def _rewards(columns: Columns, count: int) -> tuple[dict[str, list[float | None]], list[str]]:
    """Columns of numbers, and which of them are taken for the run's rewards.

    Token records and similar files have rewards separately, in `rewards`. In TRL's table the rewards are the floating
    point columns, but a reward may have logged such a column too.
    """
    mapped = [dict(value) if value else {} for value in columns.get("rewards", [])]
    rewards: dict[str, list[float | None]] = {
        name: [number_of(row.get(name)) for row in mapped] for row in mapped[:1] for name in row
    }
    named = list(rewards)
    for name, values in columns.items():
        if name in _OURS | _TOKENS or name in rewards:
            continue
        kinds = {type(value) for value in values if value is not None}
        if kinds and kinds <= {int, float, bool}:
            rewards[name] = [number_of(value) for value in values]
            if float in kinds and "rewards" not in columns and "reward" not in columns:
                named.append(name)
    if not named and "reward" in columns:
        rewards["reward"] = [number_of(value) for value in columns["reward"]]
        named = ["reward"]
    assert all(len(values) == count for values in rewards.values())
    return rewards, named


# ---------------------------------------------------------------------------------------------- files into columns


def saved_files(completions: str | Path, say: Say) -> list[Path]:
    """The files at a path, ordered by name.

    Args:
        completions: A file, a folder with such files, or an output_dir with `token_records` or `completions`.
        say: Called with which of the two is read, if both exist.

    Raises:
        ConfigurationError: There is no such file or folder, or nothing in it.
    """
    path = Path(completions)
    if path.is_file():
        if path.suffix not in _SUFFIXES:
            raise ConfigurationError(
                f"{path} ends in neither of {', '.join(_SUFFIXES)}, the formats of saved completions."
            )
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
        ConfigurationError: The file is not readable in the format of its suffix.
    """
    return _read_parquet(file) if file.suffix == ".parquet" else _read_json_lines(file)


def rows_of(columns: Columns, rows: Sequence[int]) -> Columns:
    """Some rows of every column, in the order given."""
    return {name: [values[row] for row in rows] for name, values in columns.items()}


def number_of(value: Any) -> float | None:
    """A saved value as a number; None if it is not a number, or NaN."""
    if isinstance(value, bool):
        return float(value)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _read_parquet(file: Path) -> Columns:
    import pyarrow
    import pyarrow.parquet

    try:
        names = [name for name in pyarrow.parquet.read_schema(file).names if not name.startswith("__index_level_")]
        skipped = _NOT_READ if "token_ids" in names else set()
        kept = [name for name in names if name not in skipped]
        # By this thread alone, as in a report: what is damaged in one column is not read on by another thread.
        table = pyarrow.parquet.read_table(file, columns=kept, use_threads=False, pre_buffer=False)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ConfigurationError(
            f"{file} cannot be read as parquet, it may be cut off: {_first_line(error)}"
        ) from error
    return {name: _column(table.column(name)) for name in table.column_names}


def _column(chunks: Any) -> list[Any]:
    import pyarrow

    kind = chunks.type
    of_numbers = pyarrow.types.is_list(kind) and pyarrow.types.is_primitive(kind.value_type)
    return list(chunks.to_numpy()) if of_numbers else list(chunks.to_pylist())


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


# ------------------------------------------------------------------------------------------------ rows into groups


def runs_of_equal(prompts: Sequence[Any]) -> list[int]:
    """The lengths of the runs of equal prompts, in order."""
    return [sum(1 for _ in run) for _, run in itertools.groupby(prompts)]


def infer_num_generations(runs: Sequence[int]) -> int:
    """The number of completions of one prompt, `G`, from all runs of equal prompts.

    TRL writes the `G` completions of a prompt one after the other. A prompt that comes twice in a row makes a run of `2
    G`, so `G` is the common divisor of the runs. If every prompt comes twice, the result is wrongly `2 G`.

    Raises:
        ConfigurationError: The runs have no common divisor but 1.
    """
    size = math.gcd(*runs)
    if size == 1:
        raise ConfigurationError(
            f"The number of completions per prompt is unclear: prompts come in runs of {_some_of(runs)}, which "
            "have no common divisor. Give --num_generations, or files of whole groups in TRL's order."
        )
    return size


def groups_by_runs(prompts: Sequence[Any], num_generations: int, where: str) -> list[list[int]]:
    """The rows of each group, if the completions of a prompt are consecutive.

    Raises:
        ConfigurationError: A run of equal prompts is no multiple of `num_generations`.
    """
    runs = runs_of_equal(prompts)
    wrong = [run for run in runs if run % num_generations]
    if wrong:
        raise ConfigurationError(
            f"{where}: {wrong[0]} completions of one prompt stand in a row, which is no multiple of num_generations="
            f"{num_generations}. Give the run's --num_generations."
        )
    return [list(range(first, first + num_generations)) for first in range(0, len(prompts), num_generations)]


def groups_by_number(numbers: Sequence[Any], where: str) -> list[list[int]]:
    """The rows of each group by the file's own numbers, in the order in which they first occur.

    Raises:
        ConfigurationError: The groups have different sizes.
    """
    rows: dict[Any, list[int]] = {}
    for row, number in enumerate(numbers):
        rows.setdefault(str(number) if isinstance(number, list | dict) else number, []).append(row)
    sizes = {len(members): number for number, members in reversed(rows.items())}
    if len(sizes) > 1:
        shown = ", ".join(f"{sizes[size]!r:.40} has {size}" for size in sorted(sizes))
        raise ConfigurationError(f"{where}: all groups must have as many completions, and group {shown}.")
    return list(rows.values())


def _some_of(runs: Sequence[int]) -> str:
    distinct = sorted(set(runs))
    return ", ".join(map(str, distinct[:5])) + (", ..." if len(distinct) > 5 else "")


# -------------------------------------------------------------------------------------------- columns of a dataset


_KEYS = ("prompt", "question")


def join_columns(batches: Sequence[SavedBatch], dataset: str | Path, say: Say) -> list[SavedBatch]:
    """Give every completion the columns of its prompt's row in a dataset.

    A row's prompt is its column `prompt`, or else `question`. It matches a saved prompt that equals it or whose last
    message does. Failing that, the longest one that the saved prompt contains matches (a prompt made from a template).

    Args:
        batches: Saved completions.
        dataset: A `.jsonl` or `.parquet` file.
        say: Called with prompts that the dataset has twice with different columns; the first row counts.

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
        say(f"{conflicts} rows of {file.name} repeat an earlier row's prompt with other columns; the first counts.")
    finder = _Finder(places)
    missing = [prompt for batch in batches for prompt in batch.prompts if finder.row(prompt) is None]
    if missing:
        distinct = list(dict.fromkeys(join_key(prompt) for prompt in missing))
        raise ConfigurationError(
            f"{len(distinct)} of the saved prompts are not in --dataset {file}, such as {distinct[0][:80]!r}. Its "
            f"column {key!r} must hold the prompts, or a text contained in them."
        )
    return [_join(batch, columns, finder) for batch in batches]


class _Finder:
    """Finds the dataset row of a saved prompt, once per prompt."""

    def __init__(self, places: dict[str, int]) -> None:
        self._places = places
        self._longest_first = sorted(places, key=len, reverse=True)
        self._found: dict[str, int | None] = {}

    def row(self, prompt: Any) -> int | None:
        """The row; None if there is none."""
        key = join_key(prompt)
        if key not in self._found:
            self._found[key] = self._search(prompt, key)
        return self._found[key]

    def _search(self, prompt: Any, key: str) -> int | None:
        asked = key if isinstance(prompt, str) or not prompt else joined_text(prompt[-1])
        for text in (key, asked):
            if text in self._places:
                return self._places[text]
        return next((self._places[text] for text in self._longest_first if text.strip() and text in asked), None)


def _join(batch: SavedBatch, columns: Columns, finder: _Finder) -> SavedBatch:
    rows = [finder.row(prompt) for prompt in batch.prompts]
    new = {
        name: [values[row] for row in rows if row is not None]
        for name, values in columns.items()
        if name not in ("prompt", "completion") and name not in batch.columns
    }
    return replace(batch, columns={**batch.columns, **new})
