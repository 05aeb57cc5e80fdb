"""Write a run's plugin manifest; when the run resumes, compare it with the checkpoint's, on every rank."""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass
class PluginRecords:
    """Writes the manifest of a run, and compares it when the run resumes, where `on_changes` is `stop` or `warn`."""

    manifest: Manifest
    args: Any
    on_changes: str
    agreement: Agreement

    def begin(self, resume_from_checkpoint: str | bool | None, write_settings: Callable[[Path], None]) -> None:
        """Compare with the checkpoint to resume from, and write this run's records."""
        if resume_from_checkpoint:
            self._compare(resume_from_checkpoint)
        folder = Path(self.args.output_dir)
        with self.agreement.section():
            if self.args.process_index == 0:
                try:
                    self.manifest.write(folder / FILE)
                    write_settings(folder / SETTINGS)
                except OSError as error:
                    raise ManifestError(f"The records of this run cannot be written to {folder}: {error}.") from error
        if self.args.process_index == 0 and (line := self.manifest.line()):
            print(f"trl-grpo-ext: {line}", file=sys.stderr, flush=True)

    def write_beside_weights(self, output_dir: str | None) -> None:
        if self.args.should_save:
            self.manifest.write(Path(output_dir or self.args.output_dir) / FILE)

    def _compare(self, resume_from_checkpoint: str | bool) -> None:
        """Compare with the folder to resume from; if there is none, the trainer itself reports it."""
        place = str(resume_from_checkpoint)
        found: dict[str, Any] | None = None
        with self.agreement.section():
            main = self.args.process_index == 0
            if main and resume_from_checkpoint is True and Path(self.args.output_dir).is_dir():
                place = get_last_checkpoint(self.args.output_dir) or ""
            if main and place and (folder := Path(place)).is_dir():
                check_resumed(folder)
                if (folder / STATE).is_file() and (lacking := missing_state(folder, 0, self.args.world_size)):
                    _warn(f"{folder} has no {lacking}: the resumed run differs from one that went on.")
                found = self._recorded(folder)
        place, found = broadcast_object_list([place, found])
        if found is None:
            return
        old = Manifest.from_plain(found)
        changed = differences(old, self.manifest)
        with self.agreement.section():
            if changed and self.on_changes == "stop":
                what = f"{place}: it was trained with different plugins ({FILE} lists them): {'; '.join(changed)}"
                raise ManifestError(f"Not resumed from {what}. Select those, or set plugin_changes: warn.")
        if self.args.process_index == 0 and (notes := [*changed, *version_notes(old, self.manifest)]):
            _warn(f"{place} was trained with plugins or versions that differ: {'; '.join(notes)}.")

    def _recorded(self, folder: Path) -> dict[str, Any] | None:
        try:
            return Manifest.read(folder / FILE).plain()
        except FileNotFoundError:
            _warn(f"{folder} has no {FILE}, so its plugins cannot be compared with those of this run.")
        except ManifestError as error:
            if self.on_changes == "stop":
                raise
            _warn(str(error))
        return None


def _warn(text: str) -> None:
    warnings.warn(text, ManifestWarning, stacklevel=4)
