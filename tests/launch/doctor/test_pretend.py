"""Another machine's answers: one without GPUs."""

from pathlib import Path

import pytest

from tests.launch.doctor.examining import MODEL, errors
from tests.launch.doctor.public_runs import SCRIPTS
from trl_grpo_ext.launch.doctor import Machine
from trl_grpo_ext.launch.doctor.command import examine

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.slow
def test_examine_for_a_machine_without_gpus() -> None:
    source = SCRIPTS[0].text.replace("MODEL", MODEL)
    Path("train.py").write_text(source)
    assert ["doesn't support bf16" in one for one in errors(examine(["train.py"], Machine(gpus=0)))] == [True]
    Path("train.py").write_text(source.replace("=4,", "=4, use_cpu=True,"))
    assert errors(examine(["train.py"], Machine(gpus=0))) == []
