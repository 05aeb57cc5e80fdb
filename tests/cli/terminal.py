"""Running `trl-grpo-ext` as a person does, in a terminal of a given width, and as a pipe does."""

import importlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.cells import cell_len

from trl_grpo_ext.cli.main import main
from trl_grpo_ext.plugins import discovery

COMMAND = Path(sys.executable).parent / "trl-grpo-ext"
_DECIDES_THE_OUTPUT = ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "PYTEST_CURRENT_TEST", "TRL_GRPO_EXT_PLUGINS")
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")


@dataclass(frozen=True)
class Finished:
    """What a command left. In a terminal both streams arrive as `out`."""

    status: int
    out: str
    err: str

    @property
    def plain(self) -> str:
        return without_escapes(self.out)


class _Stream(io.TextIOWrapper):
    """What stdout or stderr is while a command runs in this process."""

    def __init__(self, terminal: bool) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    def written(self) -> str:
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode()


def invoke(
    *words: str | Path,
    width: int | None = None,
    color: bool = True,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Finished:
    """Run the command in this process, with a width in a terminal. Modules from PYTHONPATH are forgotten afterwards."""
    changed = {"TERM": "xterm-256color", **(env or {}), **({} if color else {"NO_COLOR": "1"})}
    if width is not None:
        changed["COLUMNS"] = str(width)
    path = [part for part in changed.pop("PYTHONPATH", "").split(os.pathsep) if part]
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        for name in _DECIDES_THE_OUTPUT:
            patch.delenv(name, raising=False)
        for name, value in changed.items():
            patch.setenv(name, value)
        patch.setattr(sys, "path", [*path, *sys.path])
        importlib.invalidate_caches()
        if path:
            discovery._packages.cache_clear()
        if cwd is not None:
            patch.chdir(cwd)
        out = _Stream(width is not None)
        err = out if width is not None else _Stream(terminal=False)
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        patch.setattr(sys, "argv", ["trl-grpo-ext", *map(str, words)])
        patch.setattr(sys.modules["__main__"], "__package__", None)  # else click calls it "python -m pytest"
        try:
            main()
            status: object = 0
        except SystemExit as end:
            status = end.code or 0
        finally:
            for name in set(sys.modules) - before if path else ():
                if (getattr(sys.modules[name], "__file__", None) or "").startswith(tuple(path)):
                    del sys.modules[name]
    assert isinstance(status, int), status
    return Finished(status, out.written(), "" if err is out else err.written())


def run_command(*words: str | Path, env: Mapping[str, str] | None = None) -> Finished:
    """Run the installed `trl-grpo-ext WORDS` with pipes."""
    environ = {name: value for name, value in os.environ.items() if name not in _DECIDES_THE_OUTPUT} | dict(env or {})
    command = [str(COMMAND), *map(str, words)]
    done = subprocess.run(command, env=environ, capture_output=True, timeout=120, check=False)
    return Finished(done.returncode, done.stdout.decode(), done.stderr.decode())


def without_escapes(text: str) -> str:
    return _ESCAPES.sub("", text)


def assert_readable(out: str, width: int | None) -> None:
    """No line is wider than the terminal, nothing is cut with an ellipsis, and no control character is left."""
    plain = without_escapes(out)
    assert "…" not in plain, plain
    for line in plain.split("\n"):
        assert width is None or cell_len(line) <= width, f"{cell_len(line)} cells, not {width}: {line!r}"
        odd = [character for character in line if ord(character) < 32 or 127 <= ord(character) < 160]
        assert not odd, f"control characters {odd} in {line!r}"
