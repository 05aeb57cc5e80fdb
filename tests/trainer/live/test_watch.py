"""The report that follows a training."""

from __future__ import annotations

from pathlib import Path

from trl_grpo_ext.history.report.watch import watch
from trl_grpo_ext.trainer.live import LOG_FILE

ROOT = Path(__file__).parents[3]


# ---------------------------------------------------------------------------------------------- watching


def test_the_report_is_written_when_something_changed_and_only_then(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text("{}")
    looks = iter(range(100))
    writes: list[int] = []

    class Steps:
        """Stands for the time between two looks."""

        def wait(self, seconds: float) -> bool:
            look = next(looks)
            if look == 2:
                (tmp_path / LOG_FILE).write_text("{}\n")
            if look == 4:
                (tmp_path / "report.html").write_text("our own")
            if look == 5:
                (tmp_path / "token_records").mkdir()
                (tmp_path / "token_records" / "step_00001.parquet").write_bytes(b"half")
            return look == 8

    def write() -> None:
        writes.append(len(writes))
        if len(writes) == 2:
            raise OSError("disk full")

    said: list[str] = []
    assert watch([tmp_path], write, every=1, stop=Steps(), say=said.append) == 0  # type: ignore[arg-type]
    assert len(writes) == 4  # at first; the log, which failed; the log again; the records
    assert said == ["not written this time, will try again: disk full"]
