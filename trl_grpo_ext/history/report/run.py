"""Read what a training left in its folder into one `Run`.

| what | from |
| --- | --- |
| history | `trl_grpo_ext_log.jsonl`, `trainer_state.json` there or in the newest whole checkpoint, `metrics.json` |
| settings | `trl_grpo_ext_settings.json` |
| manifest | `trl_grpo_ext_plugins.json` |
| records | `token_records/step_*.parquet` |
| completions | `completions/completions_*.parquet`, TRL's |

Among several histories the longest counts; if there is a live log, only those that agree with it. `training_args.bin`
is not read: it is a pickle, and opening an untrusted pickle runs its code.

Any file in the folder may be truncated, still being written, from another program, or malicious. An unusable file
becomes a sentence, never an error: which file, what is wrong, and what would help.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError, ManifestError
from ...guard.untrusted import escape
from ...records.manifest import FILE as MANIFEST
from ...records.manifest import Manifest
from ...records.settings import FILE as SETTINGS
from ...records.settings import from_plain
from ...records.token_records import FOLDER as RECORDS

LOG = "trl_grpo_ext_log.jsonl"
"""The live log: one log entry per line, written while training goes on."""

STATE, METRICS, COMPLETIONS = "trainer_state.json", "metrics.json", "completions"

_CHECKPOINT = re.compile(r"checkpoint-(\d{1,12})")
_RECORD = re.compile(r"step_(\d{1,12})\.parquet")
_TABLE = re.compile(r"completions_(\d{1,12})\.parquet")
_RECORD_COLUMNS = (
    "step",
    "group",
    "member",
    "prompt",
    "completion",
    "rewards",
    "tokens",
    "live",
    "stages",
    "advantages",
)
_TABLE_COLUMNS = ("step", "prompt", "completion", "advantage")

LARGEST = 512 * 2**20
"""Most bytes of a JSON file that is read."""

LARGEST_NUMBER = 1e100
"""Metrics of larger magnitude are left out: their sums and differences would overflow."""

LARGEST_STEP = 10**12
"""Larger steps are left out."""

Note = Callable[[str], None]
"""Takes one sentence on what is missing."""

History = list[dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """One training, as its folder shows it.

    Attributes:
        folder: Its output folder.
        name: Its name; unique among those that `load_runs` returned.
        history: The log entries of training and evaluation, ordered by `step`; numbers that are not finite, or larger
            than `LARGEST_NUMBER`, are None.
        settings: Hyper-parameters that were set, and those that are always shown.
        manifest: The plugins; None if there is no record of them.
        records: Token record files, by step.
        completions: TRL's tables of completions, by step.
        missing: Sentences on what is missing or unusable, and what would help. `columns_of` adds files whose data is
            damaged, so show it last.
    """

    folder: Path
    name: str
    history: History = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    manifest: Manifest | None = None
    records: list[Path] = field(default_factory=list)
    completions: list[Path] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """The last optimizer step in the history; 0 if it is empty."""
        return max((int(entry["step"]) for entry in self.history), default=0)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric, leaving out values that are not finite."""
        pairs = [(int(entry["step"]), float(entry[key])) for entry in self.history if is_number(entry.get(key))]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def keys(self) -> list[str]:
        """The names of the metrics in the history, in order of first appearance."""
        return list(dict.fromkeys(key for entry in self.history for key in entry))

    def note(self, sentence: str) -> None:
        """Add a sentence to `missing`, once."""
        if sentence not in self.missing:
            self.missing.append(sentence)

    def columns_of(self, path: Path, columns: Sequence[str]) -> dict[str, Any] | None:
        """Columns of one of `records` or `completions` as pyarrow arrays; None if its data is damaged."""
        return read_columns(path, columns, self.note)


def load_run(folder: str | Path) -> Run:
    """Read what a training left in its folder.

    Args:
        folder: The `output_dir`, or a checkpoint of it.

    Returns:
        The run. Damaged, missing and foreign files are listed in `missing`, never raised.

    Raises:
        ConfigurationError: There is no such folder, it may not be read, or nothing of a run is in it.
    """
    folder = Path(folder)
    missing: list[str] = []
    try:
        entries = {entry.name for entry in folder.iterdir()}
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigurationError(
            f"{str(folder)!r} is not a readable folder ({reason}). Name the output_dir of a training."
        ) from error
    known = {LOG, STATE, METRICS, SETTINGS, MANIFEST, RECORDS, COMPLETIONS}
    if not entries & known and not any(_CHECKPOINT.fullmatch(name) for name in entries):
        raise ConfigurationError(
            f"No training data found in {str(folder)!r}: no {STATE}, {LOG}, {METRICS}, {RECORDS}/, {COMPLETIONS}/ or "
            "checkpoint. Name the output_dir of a training."
        )
    note = missing.append
    history = _history(folder, note)
    if not history:
        note(
            f"There is no history of metrics in {folder}. GRPOExtTrainer writes {LOG} while it trains, and TRL "
            f"{STATE} with every checkpoint (save_strategy, save_steps); without one there are no curves."
        )
    records = tables_in(folder / RECORDS, _RECORD, _RECORD_COLUMNS, note)
    completions = tables_in(folder / COMPLETIONS, _TABLE, _TABLE_COLUMNS, note)
    if not records:
        note(f"There are no token records in {folder}, so tokens are not shown. Train with token_records: 64.")
    if not records and not completions:
        note(f"There are no completions in {folder}. Train with log_completions: true or token_records: 64.")
    return Run(
        folder=folder,
        name=folder.resolve().name or str(folder),
        history=history,
        settings=_settings(folder, note),
        manifest=_manifest(folder, note),
        records=records,
        completions=completions,
        missing=missing,
    )


def load_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Read several runs, and lengthen the names of runs with the same name.

    Args:
        folders: In display order; a folder given twice is read once.

    Raises:
        ConfigurationError: As `load_run`; or no folder is named.
    """
    if not folders:
        raise ConfigurationError("No run is named. Name at least one output_dir.")
    different = {Path(folder).resolve(): folder for folder in reversed(folders)}
    runs = [load_run(different[key]) for key in dict.fromkeys(Path(folder).resolve() for folder in folders)]
    names = [run.name for run in runs]
    longer = [
        run.name if names.count(run.name) == 1 else "/".join(run.folder.resolve().parts[-2:]).lstrip("/")
        for run in runs
    ]
    named: list[Run] = []
    for run, name in zip(runs, longer, strict=True):
        unique, number = name, 1
        while unique in {other.name for other in named}:
            number += 1
            unique = f"{name} ({number})"
        named.append(replace(run, name=unique))
    return named


# ---------------------------------------------------------------------------------------------- history


def _history(folder: Path, note: Note) -> History:
    live: History = []
    if is_file(folder / LOG):
        live = entries_of(read_json_lines(folder / LOG, note, "Curves may miss a point."), folder / LOG, note) or []
    found = [history for history in (live, *_saved_histories(folder, note)) if history]
    agreeing = [history for history in found if not live or _agree(live, history)]
    if len(agreeing) < len(found):
        note(
            f"{folder} also holds checkpoints or metrics of another training. The report shows {LOG}, which belongs "
            f"to the last one. Give every training an output_dir of its own."
        )
    best = max(agreeing, key=lambda history: (max(entry["step"] for entry in history), len(history)), default=[])
    return sorted(best, key=lambda entry: float(entry["step"]))


def _saved_histories(folder: Path, note: Note) -> Iterator[History]:
    lost = "Its curves are missing if no other file has them."
    if is_file(folder / STATE) and (history := _state_history(folder / STATE, note, lost)):
        yield history
    try:
        names = [(int(found[1]), entry) for entry in folder.iterdir() if (found := _CHECKPOINT.fullmatch(entry.name))]
    except OSError:
        names = []
    for _, checkpoint in sorted(names, reverse=True):
        if not is_file(checkpoint / STATE):
            note(f"{checkpoint} has no {STATE}, so it is incomplete or still being written. An older one was read.")
        elif history := _state_history(checkpoint / STATE, note, "An older checkpoint was read, if there is one."):
            yield history
            break
    if is_file(folder / METRICS):
        content = read_json(folder / METRICS, note, lost)
        recorded = entries_of(content.get("history"), folder / METRICS, note) if isinstance(content, dict) else None
        if recorded:
            yield recorded
        elif content is not None:
            note(f"{folder / METRICS} was left out: it has no history of log entries, so another program wrote it.")


def _state_history(path: Path, note: Note, lost: str) -> History:
    content = read_json(path, note, lost)
    history = entries_of(content.get("log_history"), path, note) if isinstance(content, dict) else None
    if history is None and content is not None:
        note(f"{path} is not a state of transformers' Trainer: it has no log_history. {lost}")
    return history or []


def _agree(live: History, other: History) -> bool:
    """Whether two histories have the same numbers at the first step of training that both know."""
    firsts = [{entry["step"]: entry for entry in reversed(history) if "loss" in entry} for history in (live, other)]
    common = sorted(firsts[0].keys() & firsts[1].keys())
    if not common:
        return True
    one, two = (first[common[0]] for first in firsts)
    both = [key for key in one if is_number(one[key]) and is_number(two.get(key))]
    return all(one[key] == two[key] for key in both)


# ---------------------------------------------------------------------------------------------- settings and plugins


def _settings(folder: Path, note: Note) -> dict[str, Any]:
    path, remedy = folder / SETTINGS, "GRPOExtTrainer writes the hyper-parameters there when a training starts."
    if not is_file(path):
        note(f"There is no {SETTINGS} in {folder}, so no hyper-parameters are shown. {remedy}")
        return {}
    content = read_json(path, note, remedy)
    if content is None:
        return {}
    try:
        return from_plain(content)
    except ManifestError as error:
        note(f"{path} cannot be used: {error}. {remedy}")
        return {}


def _manifest(folder: Path, note: Note) -> Manifest | None:
    path, remedy = folder / MANIFEST, "GRPOExtTrainer writes it when a training starts."
    if not is_file(path):
        note(f"There is no {MANIFEST} in {folder}, so no plugins are shown. {remedy}")
        return None
    try:
        return Manifest.read(path)
    except (ManifestError, OSError) as error:
        note(f"The record of plugins is unusable, so none are shown: {error}")
        return None


# ----------------------------------------------------------------------------------------------------------- files


def read_json(path: Path, note: Note, what_then: str) -> Any:
    """The content of a JSON file; None, with a note, if it cannot be read. NaN becomes None.

    Args:
        path: Of an existing file.
        note: Takes the sentence.
        what_then: A sentence on what is lost and what would restore it.
    """
    text = _text_of(path, note, what_then)
    if text is None:
        return None
    try:
        return json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        note(f"{path} is not complete JSON ({_reason(error)}); it may be truncated or still being written. {what_then}")
        return None


def read_json_lines(path: Path, note: Note, what_then: str) -> list[Any]:
    """The values of a file with one JSON value per line; an unterminated last line is still being written."""
    text = _text_of(path, note, what_then)
    values: list[Any] = []
    lines = (text or "").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values.append(json.loads(line, parse_constant=lambda _: None))
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                note(f"Line {number} of {path} is not JSON ({_reason(error)}), it was left out. {what_then}")
    return values


def entries_of(values: Any, path: Path, note: Note) -> list[dict[str, Any]] | None:
    """The log entries in a list of values: mappings with a step. None if there is no list.

    Args:
        values: The file's content.
        path: The file.
        note: Takes a sentence if entries or numbers are too large.
    """
    if not isinstance(values, list):
        return None
    entries, strange = [], []
    for value in values:
        if not isinstance(value, dict) or not isinstance(value.get("step"), int | float):
            continue
        if not is_number(value["step"]) or abs(value["step"]) > LARGEST_STEP:
            strange += ["step"] if not isinstance(value["step"], bool) else []
            continue
        strange += [str(key) for key, number in value.items() if _is_too_large(number)]
        entries.append({str(key): None if _is_unusable(number) else number for key, number in value.items()})
    if strange:
        note(
            f"{path} holds {len(strange)} numbers too large to be drawn (the first is a {escape(strange[0])[:80]!r}): "
            f"steps beyond {LARGEST_STEP:,} or metrics beyond {LARGEST_NUMBER:g}. They were left out."
        )
    return entries


def is_number(value: Any) -> bool:
    """Whether a value is a drawable number, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_NUMBER


def _is_unusable(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not is_number(value)


def _is_too_large(value: Any) -> bool:
    return _is_unusable(value) and value == value  # not-a-number is not a large one


def is_file(path: Path) -> bool:
    """Whether a regular file is there and may be accessed."""
    try:
        return path.is_file()
    except OSError:
        return False


def tables_in(folder: Path, name: re.Pattern[str], needed: Sequence[str], note: Note) -> list[Path]:
    """The complete parquet files of a folder that have the columns needed, ordered by the step in their names.

    Args:
        folder: Need not exist.
        name: Pattern of file names; its first group is the step.
        needed: Columns.
        note: Takes a sentence on each file that is left out.
    """
    try:
        named = [(int(found[1]), file) for file in folder.iterdir() if (found := name.fullmatch(file.name))]
        others = [file for file in folder.iterdir() if file.suffix == ".parquet" and not name.fullmatch(file.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        note(f"{folder} cannot be read ({_reason(error)}). Check its permissions.")
        return []
    for file in sorted(others):
        note(f"{file} was left out: training gives no file such a name.")
    return [file for _, file in sorted(named) if is_file(file) and _usable(file, needed, note)]


def read_columns(path: Path, columns: Sequence[str], note: Note) -> dict[str, Any] | None:
    """Columns of a parquet file as pyarrow arrays in one chunk each; None, with a note, if its data is damaged.

    Args:
        path: One of those that `tables_in` returned.
        columns: Those that the file lacks are left out.
        note: Takes the sentence.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        names = pyarrow.parquet.read_schema(path).names
        # By this thread alone: where one column is damaged, no other thread may still be reading what is then freed.
        kept = [name for name in columns if name in names]
        table = pyarrow.parquet.read_table(path, columns=kept, use_threads=False, pre_buffer=False)
        table.validate(full=True)
        return {name: table.column(name).combine_chunks() for name in table.column_names}
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
        note(f"{path} was left out: its data is damaged ({_reason(error)}). Only training writes it again.")
        return None


def _usable(path: Path, needed: Sequence[str], note: Note) -> bool:
    import pyarrow
    import pyarrow.parquet

    try:
        names = pyarrow.parquet.read_schema(path).names
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
        note(
            f"{path} was left out: it is not a complete parquet file ({_reason(error)}); it may be truncated or "
            f"still being written. If training is still running, make the report again."
        )
        return False
    lacking = [name for name in needed if name not in names]
    if lacking:
        note(f"{path} was left out: it has no columns {', '.join(lacking)}.")
    return not lacking


def _text_of(path: Path, note: Note, what_then: str) -> str | None:
    try:
        if (size := path.stat().st_size) > LARGEST:
            note(f"{path} has {size:,} bytes, more than the {LARGEST:,} that are read. {what_then}")
            return None
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        note(f"{path} is not text, so it is damaged or no file of a run. {what_then}")
    except OSError as error:
        note(f"{path} cannot be read ({_reason(error)}). {what_then}")
    return None


def _reason(error: BaseException) -> str:
    """The first line of an error, shortened, without control characters."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    line = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return "".join(character if character.isprintable() else "?" for character in line)[:160]
