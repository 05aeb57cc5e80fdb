"""A plugin author's machine: an environment of its own with the commands that an author types, and no index."""

import importlib.metadata
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.plugins_env import Environment, make_environment

COMMANDS = ("trl-grpo-ext", "pytest", "mypy", "accelerate")
_WITHOUT_AN_INDEX = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0"}
"""What `pip install` has as options in other tests. The last is how pip reads it: 0 turns the isolation off."""


@dataclass(frozen=True)
class Author:
    """Runs commands in a fresh environment, which sees the packages of the one that runs the tests."""

    environment: Environment

    def shell(self, command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run a command as it stands on a page."""
        return self.run("bash", "-euo", "pipefail", "-c", command, cwd=cwd)

    def run(self, *words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
        left_out = ("TRL_GRPO_EXT_PLUGINS", "PYTEST_CURRENT_TEST", "PYTEST_ADDOPTS", "PYTHONPATH", "COLUMNS")
        environ = {name: value for name, value in os.environ.items() if name not in left_out}
        environ |= _WITHOUT_AN_INDEX
        environ |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        here = str(Path(sys.executable).parent)
        environ["PATH"] = os.pathsep.join([str(self.environment.directory / "bin"), here, environ["PATH"]])
        return subprocess.run(words, cwd=cwd, env=environ, capture_output=True, text=True, timeout=600, check=False)


def make_author(directory: Path) -> Author:
    """Make the environment, with pip and `COMMANDS` in its `bin`, as pip would have put them there."""
    environment = make_environment(directory)
    scripts = {entry.name: entry.value for entry in importlib.metadata.entry_points(group="console_scripts")}
    for name in COMMANDS:
        module, _, attribute = scripts[name].partition(":")
        _script(environment, name, f"import sys\nfrom {module} import {attribute}\nsys.exit({attribute}())\n")
    if not (environment.directory / "bin" / "pip").exists():
        _script(environment, "pip", "import runpy\nrunpy.run_module('pip', run_name='__main__')\n")
    return Author(environment)


def _script(environment: Environment, name: str, code: str) -> None:
    path = environment.directory / "bin" / name
    path.write_text(f"#!{environment.python}\n{code}")
    path.chmod(0o755)
