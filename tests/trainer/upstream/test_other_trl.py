"""The oldest TRL that we support, first on PYTHONPATH: the contract and the parity with its loss hold there.

Everything but TRL is the environment of this test run.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trl_grpo_ext.trainer.upstream import contract

ROOT = Path(__file__).parents[3]

# TRL 1.14 imports requests without asking for it: when it was new, datasets brought it in.
UNDECLARED = {"1.14": ["requests"]}


def run(*words: str | Path, pythonpath: Path | None = None, timeout: int = 3600) -> subprocess.CompletedProcess[str]:
    """This Python, offline and with one thread, in the repository."""
    before = os.environ.get("PYTHONPATH")
    paths = [str(pythonpath), *([before] if before else [])] if pythonpath else [before or ""]
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def install(release: str, folder: Path) -> str:
    """Put TRL `release` (its first patch) into `folder`; an empty string, or why pip could not."""
    pip: list[str | Path] = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", folder]
    for words in (["--no-deps", f"trl=={release}.0"], UNDECLARED.get(release, [])):
        done = run(*pip, *words) if words else None
        if done is not None and done.returncode != 0:
            return f"pip cannot install {words[-1]}: {done.stderr.strip().splitlines()[-1:]}"
    return ""


SUITES = [
    "tests/trainer/upstream/test_contract.py",
    "tests/trainer/test_parity.py",
    "tests/trainer/test_sampled_batch.py",
    "tests/trainer/test_logps.py",
    "tests/trainer/test_record_stage.py",
    "tests/trainer/test_reward_watch.py",
    # The old policy's and the reference's forward passes, whose arguments are named otherwise.
    "tests/trainer/compact/test_updates.py::test_updates_with_absolute_positions",
]


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the oldest supported TRL in it."""
    folder = tmp_path_factory.mktemp("oldest") / "site"
    if problem := install(contract.OLDEST_TESTED, folder):
        pytest.skip(problem)
    return folder


@pytest.mark.nightly
def test_contract_and_parity_hold_with_the_oldest_trl(oldest: Path) -> None:
    where = run("-c", "import trl; print(trl.__version__, trl.__file__)", pythonpath=oldest)
    assert where.stdout.split() == [f"{contract.OLDEST_TESTED}.0", str(oldest / "trl" / "__init__.py")], where.stderr

    done = run("-m", "pytest", "-q", "-m", "", "--no-header", "-p", "no:cacheprovider", *SUITES, pythonpath=oldest)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    reasons = ("this TRL gives no other model its head", "this TRL's head makes all logits at once")
    assert all(any(reason in line for reason in reasons) for line in skipped)
