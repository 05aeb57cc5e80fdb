"""A file that is written is whole or not there."""

from pathlib import Path

import pytest

from trl_grpo_ext.records.writing import write_atomically


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "file"
    write_atomically(written, "old")

    def full(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError):  # noqa: PT011 (the one above)
        write_atomically(written, "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]
