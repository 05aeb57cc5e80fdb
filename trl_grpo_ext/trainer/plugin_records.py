"""The part of the trainer that records its plugins, and compares them when it resumes.

| TRL calls | we add |
| --- | --- |
| `train` | compare with the checkpoint's manifest; write the run's, and its settings |
| `_save`, `save_model` | write it beside the weights |
| `create_model_card` | a table of the plugins |

Compared is on every rank, with the file that the main process reads: so a rank that has other plugins installed than
the others stops them too. The manifest is that of the trainer as it was constructed.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers.trainer_utils import get_last_checkpoint

from ..errors import ManifestError
from ..plugins.loading import Loaded
from ..records.manifest import FILE, Manifest, differences, version_notes, with_plugins
from ..records.settings import FILE as SETTINGS
from ..records.settings import write_settings


class ManifestWarning(UserWarning):
    """A checkpoint's plugins are not those of this run, or nobody can tell."""


class RecordsPlugins:
    """What `GRPOExtMixin` does about the manifest.

    Attributes:
        plugin_manifest: The plugins that this trainer was constructed with.
    """

    args: Any
    accelerator: Any
    plugin_manifest: Manifest
    _agreement: Any

    def _record_plugins(self, aggregation: Loaded | None) -> None:
        self.plugin_manifest = Manifest.of(self, aggregation)

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **keywords: Any) -> Any:
        """Train as TRL does, after comparing the plugins with those of the checkpoint to resume from.

        Args:
            resume_from_checkpoint: As in TRL.
            *arguments: As in TRL.
            **keywords: As in TRL.

        Raises:
            ManifestError: They differ and `plugin_changes` is `stop`; the checkpoint's record of them cannot be read;
                or this run's cannot be written.
        """
        if resume_from_checkpoint:
            self._compare_plugins(resume_from_checkpoint)
        with self._agreement.section():
            if self.accelerator.is_main_process:
                self._write_records(Path(self.args.output_dir))
        return super().train(resume_from_checkpoint, *arguments, **keywords)  # type: ignore[misc]

    def _write_records(self, folder: Path) -> None:
        """Write what this run is: its plugins and its settings."""
        file, what = FILE, "plugins"
        try:
            self.plugin_manifest.write(folder / FILE)
            file, what = SETTINGS, "hyper-parameters"
            write_settings(self, folder / SETTINGS)
        except OSError as error:
            raise ManifestError(
                f"{file}, the record of the {what}, cannot be written to {folder}: {type(error).__name__}: {error}. "
                "Make room there, or choose another output_dir."
            ) from error

    def _compare_plugins(self, resume_from_checkpoint: str | bool) -> None:
        """Compare on all ranks with what the main process finds; one that differs stops all."""
        found: dict[str, Any] | None = None
        place = ""
        with self._agreement.section():
            if self.accelerator.is_main_process and (folder := self._checkpoint(resume_from_checkpoint)) is not None:
                place = str(folder)
                found = self._recorded(folder)
        place, found = broadcast_object_list([place, found])
        if found is None:
            return
        old = Manifest.from_plain(found)
        with self._agreement.section():
            changed = differences(old, self.plugin_manifest)
            if changed and self._stops:
                raise ManifestError(
                    f"Not resumed from {place}: it was trained with other plugins. Select and install what it was "
                    f"trained with (its {FILE} has all of it), start from its model instead of resuming, or set "
                    f"plugin_changes: warn to go on with what is here. {'; '.join(changed)}."
                )
        if changed and self.accelerator.is_main_process:
            notes = "; ".join([*changed, *version_notes(old, self.plugin_manifest)])
            _warn(f"{place} was trained with other plugins than this run has: {notes}.")
        elif self.accelerator.is_main_process and (notes := "; ".join(version_notes(old, self.plugin_manifest))):
            _warn(f"{place} was trained with the same plugins on other versions: {notes}.")

    @property
    def _stops(self) -> bool:
        return getattr(self.args, "plugin_changes", "stop") == "stop"

    def _checkpoint(self, resume_from_checkpoint: str | bool) -> Path | None:
        """The folder to resume from; None where there is none, which the trainer itself says best."""
        folder: str | None = str(resume_from_checkpoint)
        if resume_from_checkpoint is True:
            output_dir = self.args.output_dir
            folder = get_last_checkpoint(output_dir) if Path(output_dir).is_dir() else None
        return Path(folder) if folder is not None and Path(folder).is_dir() else None

    def _recorded(self, folder: Path) -> dict[str, Any] | None:
        try:
            return Manifest.read(folder / FILE).plain()
        except FileNotFoundError:
            _warn(f"{folder} has no {FILE}, so nobody can tell whether its plugins are those of this run.")
        except ManifestError as error:
            if self._stops:
                raise
            _warn(str(error))
        return None

    # ------------------------------------------------------------------ what is written beside the weights

    def _save(self, output_dir: str | None = None, *arguments: Any, **keywords: Any) -> None:
        super()._save(output_dir, *arguments, **keywords)  # type: ignore[misc]
        self._save_manifest(output_dir)

    def save_model(self, output_dir: str | None = None, *arguments: Any, **keywords: Any) -> None:
        """Save as TRL does, with the manifest."""
        super().save_model(output_dir, *arguments, **keywords)  # type: ignore[misc]
        if self._trl.is_fsdp_enabled:  # which does not call `_save` for a sharded state
            self._save_manifest(output_dir)

    def _save_manifest(self, output_dir: str | None) -> None:
        if self.args.should_save:
            self.plugin_manifest.write(Path(output_dir or self.args.output_dir) / FILE)

    def create_model_card(self, model_name: str | None = None, *arguments: Any, **keywords: Any) -> None:
        """Write the model card as TRL does, with a section on the plugins."""
        super().create_model_card(model_name, *arguments, **keywords)  # type: ignore[misc]
        card = Path(self.args.output_dir) / "README.md"
        if self.accelerator.is_main_process and card.is_file():
            text = card.read_text(encoding="utf-8")
            card.write_text(with_plugins(text, self.plugin_manifest), encoding="utf-8")

    @property
    def _trl(self) -> Any:
        """This object as TRL's trainer, whose attributes the type checker cannot see from a mixin."""
        return self


def _warn(text: str) -> None:
    warnings.warn(text, ManifestWarning, stacklevel=4)
