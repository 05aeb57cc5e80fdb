"""Run files of public projects without the script that they were written for."""

from pathlib import Path

import pytest

from tests.launch.doctor.examining import EIGHT, MODEL, assert_says, cases
from tests.launch.doctor.public_runs import RUN_FILES, RunFile
from trl_grpo_ext.launch.doctor.command import examine

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize("run", cases(RUN_FILES))
def test_examine_a_run_file_alone(run: RunFile) -> None:
    Path("run.yaml").write_text(run.text.replace("MODEL", MODEL))
    found = examine(["run.yaml"], EIGHT)
    assert_says(found, run)
    assert run.error or "rlhf_type" in run.text or found.memory is not None
