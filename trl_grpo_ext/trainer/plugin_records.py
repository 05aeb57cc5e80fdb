"""Write a run's plugin manifest; when the run resumes, compare it with the checkpoint's, on every rank."""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers.trainer_utils import get_last_checkpoint

from ..errors import ManifestError
from ..guard.agreement import Agreement
from ..records.checkpoint_state import STATE, check_resumed, missing_state
from ..records.manifest import FILE, Manifest, differences, version_notes
from ..records.settings import FILE as SETTINGS


class ManifestWarning(UserWarning):
    """A checkpoint's plugins differ from those of this run, or are unknown."""


class PluginRecords:
    """Writes the manifest of a run, and compares it when the run resumes, where `on_changes` is `stop` or `warn`."""

    def __init__(self, manifest: Manifest, args: Any, on_changes: str, agreement: Agreement) -> None:
        self._manifest, self._args, self._agreement = manifest, args, agreement
        self._stops, self._main_process = on_changes == "stop", args.process_index == 0

    def begin(self, resume_from_checkpoint: str | bool | None, write_settings: Callable[[Path], None]) -> None:
        """Compare with the checkpoint to resume from, and write this run's records."""
        if resume_from_checkpoint:
            self._compare(resume_from_checkpoint)
        with self._agreement.section():
            if self._main_process:
                folder = Path(self._args.output_dir)
                try:
                    self._manifest.write(folder / FILE)
                    write_settings(folder / SETTINGS)
                except OSError as error:
                    raise ManifestError(f"The records of this run cannot be written to {folder}: {error}.") from error
        if self._main_process and (line := self._manifest.line()):
            print(f"trl-grpo-ext: {line}", file=sys.stderr, flush=True)

    def write_beside_weights(self, output_dir: str | None) -> None:
        if self._args.should_save:
            self._manifest.write(Path(output_dir or self._args.output_dir) / FILE)

    def _compare(self, resume_from_checkpoint: str | bool) -> None:
        found: dict[str, Any] | None = None
        place = ""
        with self._agreement.section():
            if self._main_process and (folder := self._checkpoint(resume_from_checkpoint)) is not None:
                check_resumed(folder)
                if (folder / STATE).is_file() and (lacking := missing_state(folder, 0, self._args.world_size)):
                    _warn(f"{folder} has no {lacking}: the resumed run differs from one that went on.")
                place, found = str(folder), self._recorded(folder)
        place, found = broadcast_object_list([place, found])
        if found is None:
            return
        old = Manifest.from_plain(found)
        changed = differences(old, self._manifest)
        with self._agreement.section():
            if changed and self._stops:
                what = f"{place}: it was trained with different plugins ({FILE} lists them): {'; '.join(changed)}"
                raise ManifestError(f"Not resumed from {what}. Select those, or set plugin_changes: warn.")
        if self._main_process and (notes := [*changed, *version_notes(old, self._manifest)]):
            _warn(f"{place} was trained with plugins or versions that differ: {'; '.join(notes)}.")

    def _checkpoint(self, resume_from_checkpoint: str | bool) -> Path | None:
        """The folder to resume from; None if there is none, which the trainer itself reports."""
        folder: str | None = str(resume_from_checkpoint)
        if resume_from_checkpoint is True:
            output_dir = self._args.output_dir
            folder = get_last_checkpoint(output_dir) if Path(output_dir).is_dir() else None
        return Path(folder) if folder is not None and Path(folder).is_dir() else None

    def _recorded(self, folder: Path) -> dict[str, Any] | None:
        try:
            return Manifest.read(folder / FILE).plain()
        except FileNotFoundError:
            _warn(f"{folder} has no {FILE}, so its plugins cannot be compared with those of this run.")
        except ManifestError as error:
            if self._stops:
                raise
            _warn(str(error))
        return None


def _warn(text: str) -> None:
    warnings.warn(text, ManifestWarning, stacklevel=4)
