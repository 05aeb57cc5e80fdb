"""Which distribution is the running one, in folders put on the path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.cli.distributions import write_distribution


def available(folder: Path, **environ: str) -> dict[str, tuple[str, str, bool]]:
    """Plugins by name, as an interpreter sees them that has the folder first on its path."""
    code = """
import json
from trl_grpo_ext.plugins.discovery import available
print(json.dumps({info.name: (info.target, info.distribution, info.builtin) for info in available()}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(folder), **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return {name: tuple(found) for name, found in json.loads(done.stdout).items()}


def test_another_version_s_metadata_earlier_on_the_path_does_not_replace_the_built_ins(tmp_path: Path) -> None:
    taken_over = {"reward": {"gsm8k_accuracy": "not_ours:reward", "more": "not_ours:reward"}}
    write_distribution(tmp_path, "trl-grpo-ext", taken_over, version="9")
    for allowed in ("none", ""):
        found = available(tmp_path, TRL_GRPO_EXT_PLUGINS=allowed)
        assert found["gsm8k_accuracy"] == (
            "trl_grpo_ext.rewards.gsm8k_accuracy:GSM8KAccuracy",
            "trl-grpo-ext",
            True,
        )
        assert "more" not in found
        assert not any(target.startswith("not_ours") for target, *_ in found.values())


def test_the_same_distribution_in_two_folders_is_none(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        write_distribution(tmp_path / folder, "dup-one", {"reward": {f"of_{folder}": "dup:reward"}})
    found = available(tmp_path / "one", PYTHONPATH=os.pathsep.join(str(tmp_path / f) for f in ("one", "two")))
    assert "of_one" in found
    assert "of_two" not in found
