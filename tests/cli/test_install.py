"""`trl-grpo-ext install` in an environment of its own, with real pip and wheels written here."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest

from tests.cli.distributions import MARKED, write_distribution
from tests.cli.scaffold.author import Author, make_author
from tests.cli.terminal import invoke

REWARD = f'{MARKED}def fair(completions, **columns):\n    """Score fairly."""\n'


def write_wheel(folder: Path, name: str, module: str, entry_points: dict[str, dict[str, str]], version: str) -> Path:
    """A wheel of one module, as `write_distribution` writes its files."""
    tree = folder / f"{name}-{version}"
    write_distribution(tree, name, entry_points, {f"{module}.py": REWARD}, version)
    stem = f"{name.replace('-', '_')}-{version}"
    (tree / f"{stem}.dist-info" / "WHEEL").write_text(
        "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in tree.rglob("*.*"):
            if file.is_file():
                archive.write(file, file.relative_to(tree))
        archive.write(tree / f"{stem}.dist-info" / "WHEEL", f"{stem}.dist-info/WHEEL")
        archive.write(tree / f"{stem}.dist-info" / "METADATA", f"{stem}.dist-info/METADATA")
        archive.write(tree / f"{stem}.dist-info" / "RECORD", f"{stem}.dist-info/RECORD")
    return wheel


@pytest.fixture(scope="module")
def author(tmp_path_factory: pytest.TempPathFactory) -> Author:
    return make_author(tmp_path_factory.mktemp("installs") / "venv")


def test_it_installs_by_pip_and_lists_what_came_and_imports_none_of_it(author: Author, tmp_path: Path) -> None:
    points = {"reward": {"fair": "in_fair:fair"}}
    old, new = (write_wheel(tmp_path, "in-fair", "in_fair", points, version) for version in ("1.0", "1.1"))
    (tmp_path / "pip.py").write_text("raise SystemExit('a file of the current folder was run')")
    done = author.run("trl-grpo-ext", "install", old, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()[1:]
    assert line.split() == ["reward", "fair", "-", "in-fair", "1.0", "ready", "-", "Score", "fairly."]
    assert "Installing may run code" in done.stderr
    assert "Successfully installed in-fair-1.0" in done.stderr, "pip's words are no result"
    assert "trl-grpo-ext check --distribution in-fair" in done.stderr
    assert not list(author.environment.site_packages.glob("*.imported"))

    again = author.run("trl-grpo-ext", "install", "In.Fair>=1", cwd=tmp_path)
    assert (again.returncode, again.stdout) == (0, done.stdout), "it was there already, and is what was asked for"
    newer = author.run("trl-grpo-ext", "install", "--upgrade", new, "--", "--no-compile", "--quiet", cwd=tmp_path)
    assert newer.returncode == 0, newer.stderr
    assert " 1.1 " in newer.stdout
    assert "Successfully" not in newer.stderr


def test_what_has_no_plugin_is_said_and_what_pip_refuses_ends_with_pips_status(author: Author, tmp_path: Path) -> None:
    other = write_wheel(tmp_path, "in-other", "in_other", {"console_scripts": {"other": "in_other:fair"}}, "1.0")
    done = author.run("trl-grpo-ext", "install", other, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "No plugin came with it" in done.stderr
    again = author.run("trl-grpo-ext", "install", "in-other", cwd=tmp_path)
    assert "Nothing has changed: it was installed already." in again.stderr
    direct = author.run("python", "-m", "pip", "install", "in-nowhere", cwd=tmp_path)
    missing = author.run("trl-grpo-ext", "install", "in-nowhere", cwd=tmp_path)
    assert missing.returncode == direct.returncode != 0
    assert missing.stdout == ""
    assert "No matching distribution found for in-nowhere" in missing.stderr
    assert "trl-grpo-ext: in-nowhere: not installed" in missing.stderr


def test_without_pip_it_is_uv_and_without_either_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "pip" else found(name, *more))
    none = invoke("install", "in-fair", env={"PATH": str(tmp_path)})
    assert (none.status, none.out) == (2, "")
    assert "has no pip, and there is no uv on the PATH" in none.err
    uv = tmp_path / "uv"
    uv.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\nexit 7\n')
    uv.chmod(0o755)
    done = invoke("install", "-e", "./in-fair", env={"PATH": str(tmp_path)})
    assert done.status == 7
    words = (tmp_path / "words").read_text().split()
    assert words == ["pip", "install", "--python", sys.executable, "--editable", "./in-fair"]
