"""Whatever an author calls things: either it is refused with a reason, or all files are what they say they are."""

import ast
import builtins
import keyword
import re
import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path
from typing import get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.cli.scaffold.distribution import NewDistribution, PluginKind
from trl_grpo_ext.errors import ConfigurationError

KINDS: tuple[PluginKind, ...] = get_args(PluginKind)
NAMES = [
    "a",
    "my_reward2",
    "match",
    "json",
    "test_it",
    "any",
    "rollout",
    "value_error",
    "configuration_error",
    "a" * 28,
]


def check_files(new: NewDistribution, files: dict[str, str]) -> None:
    """Every file parses, and says what was asked for."""
    project = tomllib.loads(files["pyproject.toml"])
    assert project["project"]["name"] == new.distribution
    (points,) = project["project"]["entry-points"].values()
    ((name, target),) = points.items()
    assert name == new.name
    module, _, class_name = target.partition(":")
    assert class_name.isidentifier()
    assert not keyword.iskeyword(class_name)
    tree = ast.parse(files[f"src/{module.replace('.', '/')}.py"])
    (defined,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert defined.name == class_name
    imported = {a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    assert class_name not in imported
    assert not hasattr(builtins, class_name)
    assert (ast.get_docstring(defined) or "").split("\n\n")[0] == project["project"]["description"]
    for path, text in files.items():
        if path.endswith(".py"):
            compile(text, path, "exec")
        assert text.endswith("\n") != path.endswith("py.typed")
    workflow = yaml.safe_load(files[".github/workflows/ci.yml"])
    (_, setup, *steps) = workflow["jobs"]["test"]["steps"]
    assert setup["with"]["python-version"] == "${{ matrix.python-version }}"
    assert steps[-1]["run"] == f"trl-grpo-ext check {new.distribution}:{new.name}"
    assert f"Copyright {date.today().year} The {new.distribution} developers" in files["LICENSE"]


@pytest.mark.slow
def test_whatever_the_name_the_linter_has_nothing_to_say(tmp_path: Path) -> None:
    for kind in KINDS:
        for name in NAMES:
            longest = f"d{'x' * 37}" if len(name) == 28 else ""
            new = NewDistribution(kind=kind, name=name, distribution=longest)
            new.write(tmp_path / kind / name)
            files = new.files()
            check_files(new, files)
            assert not re.search(r"(?<!\$)\{\{|\{%|\{#", "".join(files.values()))  # nothing of a template is left over
    ruff = Path(sys.executable).parent / "ruff"
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([ruff, *command, "--no-cache", tmp_path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr


@given(st.text(max_size=35) | st.from_regex(r"[a-z_0-9]{1,35}", fullmatch=True) | st.sampled_from(keyword.kwlist))
def test_a_name_is_refused_or_works_as_a_module_and_in_yaml(name: str) -> None:
    try:
        NewDistribution(kind="reward", name=name, distribution="grpo-of-names")
    except ConfigurationError as error:
        assert repr(name) in str(error)  # noqa: PT017 - some are not refused
        return
    ast.parse(f"import a.{name}")
    assert yaml.safe_load(f"[{name}, {{name: {name}}}]") == [name, {"name": name}]
    assert tomllib.loads(f'{name} = "a"') == {name: "a"}
    assert len(name) <= 28


@pytest.mark.parametrize(
    ("option", "words", "reason"),
    [
        ("name", ("MyReward", "", "1st", "größe", "a\n", "../a", "class", "off", "a" * 29), "A plugin's name has"),
        ("distribution", ("-x", "a b", "a/b", "a.", "none", "a" * 39, "a\n", "class", "a;b", "é"), "no word of Python"),
        ("distribution", ("json", "Pytest", "torch", "jinja2"), "is here already"),
    ],
)
def test_words_that_cannot_be_used_are_refused(option: str, words: tuple[str, ...], reason: str) -> None:
    for word in words:
        with pytest.raises(ConfigurationError, match=reason):
            NewDistribution(**{"kind": "reward", "name": "polite", option: word})  # type: ignore[arg-type]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for taken in (tmp_path / "file", tmp_path):
        with pytest.raises(ConfigurationError, match="File exists"):
            NewDistribution(kind="reward", name="x").write(taken)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
