"""Read what a training left in its folder into one `Run`: log, settings, manifest, token records, TRL's completions.

`training_args.bin` is not read: it is a pickle, and opening an untrusted pickle runs its code. An unusable file becomes
a sentence, never an error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError, ManifestError
from ...guard.calls import unique_names
from ...records.checkpoint_state import STATE, checkpoint_steps
from ...records.log import LOG_FILE as LOG
from ...records.manifest import FILE as MANIFEST
from ...records.manifest import Manifest
from ...records.settings import FILE as SETTINGS
from ...records.settings import from_plain
from .. import run_files as files

LARGEST_NUMBER = 1e100  # larger ones are left out, as NaN is: their sums would overflow
History = list[dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """One training, as its folder shows it."""

    folder: Path  # its output folder
    name: str  # its name; unique among those that `load_runs` returned
    history: History = field(default_factory=list)  # log entries by `step`; numbers that cannot be drawn are None
    settings: dict[str, Any] = field(default_factory=dict)  # those that were set, and those that are always shown
    manifest: Manifest | None = None  # the plugins; None if there is no record of them
    records: list[Path] = field(default_factory=list)  # token record files, by step
    completions: list[Path] = field(default_factory=list)  # TRL's tables of completions, by step
    missing: list[str] = field(default_factory=list)  # what is not there or unusable; `columns_of` adds to it

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

    def columns_of(self, path: Path, columns: Sequence[str] | None = None) -> files.Columns | None:
        """Columns of one of `records` or `completions`, one entry per row; None if its data is damaged."""
        try:
            return files.read_columns(path, columns)
        except files.UnreadableError as error:
            self.note(f"{error} It was left out; if training is still running, make the report again.")
            return None


def load_run(folder: str | Path) -> Run:
    """Read what a training left in its `output_dir`, or in a checkpoint of it.

    Damaged, missing and foreign files are listed in `missing`, never raised.

    Raises:
        ConfigurationError: There is no such folder, it may not be read, or nothing of a run is in it.
    """
    folder = Path(folder)
    known = (LOG, STATE, SETTINGS, MANIFEST, files.RECORDS, files.COMPLETIONS)
    if not folder.is_dir() or not (any((folder / name).exists() for name in known) or checkpoint_steps(folder)):
        raise ConfigurationError(f"No training data found in {str(folder)!r}. Name the output_dir of a training.")
    missing: list[str] = []
    note = missing.append
    run = Run(
        folder=folder,
        name=folder.resolve().name or str(folder),
        history=_history(folder, note),
        settings=_recorded(folder / SETTINGS, "hyper-parameters", lambda p: from_plain(files.read_json(p)), note) or {},
        manifest=_recorded(folder / MANIFEST, "plugins", Manifest.read, note),
        records=sorted((folder / files.RECORDS).glob("step_*.parquet"), key=files.step_of),
        completions=sorted((folder / files.COMPLETIONS).glob("completions_*.parquet"), key=files.step_of),
        missing=missing,
    )
    if not run.history:
        note(f"There is neither {LOG} nor {STATE} with a history of metrics in {folder}, so there are no curves.")
    if not run.records:
        note(f"There are no token records in {folder}, so tokens are not shown. Train with token_records: 64.")
    return run


def load_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Read several runs, each folder once, and lengthen the names of runs with the same name."""
    if not folders:
        raise ConfigurationError("No run is named. Name at least one output_dir.")
    runs = [load_run(folder) for folder in dict.fromkeys(Path(folder).resolve() for folder in folders)]
    names = [run.name for run in runs]
    longer = [run.name if names.count(run.name) == 1 else "/".join(run.folder.parts[-2:]).lstrip("/") for run in runs]
    return [replace(run, name=name) for run, name in zip(runs, unique_names(longer), strict=True)]


def is_number(value: Any) -> bool:
    """Whether a value is a drawable number, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_NUMBER


def _history(folder: Path, note: files.Say) -> History:
    """The live log, which is of the last training in the folder, else the newest state that the trainer saved."""
    found: History = []
    if (folder / LOG).is_file():
        try:
            found = _entries(files.read_json_lines(folder / LOG, bad=note))
        except files.UnreadableError as error:
            note(str(error))
    for place in [folder, *(folder / f"checkpoint-{step}" for step in checkpoint_steps(folder))]:
        if not found and (place / STATE).is_file():
            try:
                content = files.read_json(place / STATE)
                found = _entries(content.get("log_history") if isinstance(content, dict) else None)
            except files.UnreadableError as error:
                note(f"{error} An older checkpoint was read, if there is one.")
        elif not found and place != folder:
            note(f"{place} has no {STATE}, so it is incomplete. An older one was read.")
    return sorted(found, key=lambda entry: float(entry["step"]))


def _entries(values: Any) -> History:
    """The log entries in a list of values: mappings with a step; numbers that cannot be drawn become None."""
    known = [one for one in values if isinstance(one, dict)] if isinstance(values, list) else []
    return [
        {str(key): None if isinstance(of, int | float) and not is_number(of) else of for key, of in one.items()}
        for one in known
        if is_number(one.get("step"))
    ]


def _recorded(path: Path, what: str, read: Callable[[Path], Any], note: files.Say) -> Any:
    """What GRPOExtTrainer recorded in a file when a training started; None if it cannot be used."""
    if not path.exists():
        note(f"No {what} are shown: there is no {path.name}, which plain TRL does not write.")
        return None
    try:
        return read(path)
    except (ManifestError, files.UnreadableError, OSError) as error:
        note(f"No {what} are shown ({path.name}): {error}")
        return None
