"""The oldest TRL that we support, installed for this test alone: the contract and the parity with its loss hold there.

Everything but TRL is the environment of this test run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.upstream.other_trl import install, run
from trl_grpo_ext.trainer import upstream

SUITES = [
    "tests/upstream/test_contract.py",
    "tests/trainer/test_parity.py",
    "tests/trainer/test_contexts.py",
    "tests/trainer/test_needs.py",
    "tests/trainer/test_logged.py",
    "tests/trainer/test_reward_watch.py",
    # The old policy's and the reference's forward passes, whose arguments are named otherwise.
    "tests/trainer/compact/test_trainings.py::test_absolute_positions_keep_the_padding_of_prompts_and_share_none",
]


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the oldest supported TRL in it."""
    folder = tmp_path_factory.mktemp("oldest") / "site"
    if problem := install(upstream.OLDEST_TESTED, folder):
        pytest.skip(problem)
    return folder


@pytest.mark.nightly
def test_contract_and_parity_hold_with_the_oldest_trl(oldest: Path) -> None:
    where = run("-c", "import trl; print(trl.__version__, trl.__file__)", pythonpath=oldest)
    assert where.stdout.split() == [f"{upstream.OLDEST_TESTED}.0", str(oldest / "trl" / "__init__.py")], where.stderr

    done = run("-m", "pytest", "-q", "-m", "", "--no-header", "-p", "no:cacheprovider", *SUITES, pythonpath=oldest)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
