"""Another release of TRL beside the installed one: a directory with it stands first on PYTHONPATH."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

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
