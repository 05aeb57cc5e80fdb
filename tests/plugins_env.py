"""A throw-away environment with real distributions in it: built from `tests/plugins`, installed by pip."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SOURCES = Path(__file__).parent / "distributions"
BROKEN = ("tge-raises", "tge-exits", "tge-no-attribute", "tge-wrong-kind")

# What every probe begins with: `attempt` reports a value or an error with its cause, as JSON.
_PRELUDE = """
import json, sys, warnings
import trl_grpo_ext.plugins.loading as plugins
from trl_grpo_ext import errors

def attempt(function, *arguments):
    try:
        return {"value": repr(function(*arguments))}
    except BaseException as error:
        cause = error.__cause__
        said = {"type": type(error).__name__, "message": str(error), "cause_message": str(cause)}
        return {**said, "cause": None if cause is None else type(cause).__name__}

def imported():
    return sorted(name for name in sys.modules if name.startswith("tge_") or name in ("torch", "transformers", "trl"))
"""


@dataclass(frozen=True)
class Environment:
    """An interpreter that sees the packages of the one that runs the tests, and has its own site-packages in front."""

    directory: Path

    @property
    def python(self) -> Path:
        return self.directory / "bin" / "python"

    def pip(self, *arguments: str | Path) -> str:
        return _run([self.python, "-m", "pip", "--disable-pip-version-check", *arguments], self.directory)

    def probe(self, code: str, path: tuple[Path, ...] = (), **environ: str) -> Any:
        """Run code that ends by assigning `answer`; directories of `path` come first on its sys.path."""
        script = f"sys.path[:0] = {[str(place) for place in path]!r}\n{code}\nprint()\nprint(json.dumps(answer))"
        output = _run([self.python, "-c", f"{_PRELUDE}\n{script}"], self.directory, environ)
        return json.loads(output.splitlines()[-1])


def make_environment(directory: Path) -> Environment:
    """Make a virtual environment without installing anything into it: a .pth file brings the parent's packages in."""
    venv.EnvBuilder(with_pip=importlib.util.find_spec("pip") is None, symlinks=True).create(directory)
    environment = Environment(directory)
    parents = [place for place in sys.path if place.endswith(("site-packages", "dist-packages"))]
    # addsitedir and not a bare path, so that the parent's own .pth files, editable installs among them, count too
    lines = [f"import site; site.addsitedir({place!r})\n" for place in parents]
    (site_packages,) = (directory / "lib").glob("python*/site-packages")
    (site_packages / "parent.pth").write_text("".join(lines))
    return environment


def _run(command: list[str | Path], cwd: Path, environ: dict[str, str] | None = None) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "TRL_GRPO_EXT_PLUGINS"}
    env = {**kept, **(environ or {})}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command[:4]} failed\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def plugin_wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel of each distribution in `tests/plugins`, by the distribution's name."""
    work = tmp_path_factory.mktemp("plugin_wheels")
    shutil.copytree(SOURCES, work / "sources", ignore=shutil.ignore_patterns("__pycache__", "build"))
    names = sorted(place.name for place in (work / "sources").iterdir() if (place / "pyproject.toml").is_file())
    how = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    sources = [work / "sources" / name for name in names]
    _run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", *how, "-w", work / "wheels", *sources], work)
    return {name: next((work / "wheels").glob(f"{name.replace('-', '_')}-*.whl")) for name in names}


@pytest.fixture(scope="session")
def plugin_environment(tmp_path_factory: pytest.TempPathFactory, plugin_wheels: dict[str, Path]) -> Environment:
    """All of `tests/plugins` in one environment, the broken ones beside the good one. Tests must not change it."""
    environment = make_environment(tmp_path_factory.mktemp("plugin_environment") / "venv")
    environment.pip("install", "-q", "--no-deps", "--no-index", *plugin_wheels.values())
    return environment
