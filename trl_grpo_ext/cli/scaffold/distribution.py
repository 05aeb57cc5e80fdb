"""A new distribution with one plugin in it, from the templates beside this file, written where nothing is.

A plugin's name becomes an entry point, a module, a class, a file of tests and a word in YAML; a distribution's name
becomes a package. Both are held to what all of these take.
"""

from __future__ import annotations

import builtins
import functools
import importlib.metadata
import importlib.util
import keyword
import re
import sys
import tomllib
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from ...errors import ConfigurationError
from ...plugins.kinds import GROUPS, LABELS, WORDS, with_article
from ...plugins.metadata import installed_distributions, normalise, provenance
from ...types import CONTRACT_VERSION
from . import PluginKind, Role

LINE_LENGTH = 120
"""As the scaffold's own pyproject.toml sets it."""
_LONGEST_NAME, _LONGEST_DISTRIBUTION = 40, 60
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_DISTRIBUTION = re.compile(r"[A-Za-z][A-Za-z0-9]*([._-]+[A-Za-z0-9]+)*")  # PEP 508, without a digit in front
_READ_BY_YAML = frozenset({"yes", "no", "on", "off", "true", "false", "null"})
_IMPORTED = frozenset({"Any", "Sequence", "ConfigurationError", "Rollout", "Span"})  # by the templates
_DESCRIPTIONS: dict[str, str] = {
    "reward": "Pays completions that say a phrase.",
    "hook/shaper": "Makes tokens cost something.",
    "hook/estimator": "Compares a completion with its group and evens out the differences.",
    "hook/transform": "Credits the tokens that wrote a match of a pattern.",
    "hook/forward": "Credits uncertain tokens more.",
    "filter": "Keep groups whose completions are short enough.",
    "aggregation": "A mean of token means in which very short completions count as if they were longer.",
}


@dataclass(frozen=True)
class GeneratedFile:
    """One file of a new distribution: its path relative to the folder, its text, and what it is for."""

    path: str
    text: str
    purpose: str


@dataclass(kw_only=True)
class NewDistribution:
    """What an author chose, checked. `there` means that the distribution exists and gets one more plugin."""

    kind: PluginKind
    name: str
    role: Role | None = None
    distribution: str = ""
    there: bool = False

    def __post_init__(self) -> None:
        """Check the words, and fill in those that were left out."""
        _check_name(self.name)
        if self.role is not None and self.kind != "hook":
            raise ConfigurationError(f"--role {self.role}: only hooks have a role, and this is a {self.kind}.")
        self.distribution = checked_distribution(self.distribution or f"grpo-{self.name.replace('_', '-')}")
        if not self.there:
            _check_new(self.distribution)
        self.templates = f"hook/{self.role or 'transform'}" if self.kind == "hook" else self.kind
        self.package = package_of(self.distribution)
        self.target = f"{self.package}.{self.name}:{class_of(self.name, self.kind)}"

    def files(self) -> list[GeneratedFile]:
        """Render every file, in the order in which a reader wants them; of one that is there already the plugin's."""
        kind = WORDS[self.kind]
        values = {
            **vars(self),
            "class_name": class_of(self.name, self.kind),
            "description": _DESCRIPTIONS[self.templates],
            "author": f"The {self.distribution} developers",
            "year": date.today().year,
            "group": GROUPS[kind],
            "label": LABELS[kind],
            "label_with_article": with_article(kind),
            "requirement": requirement(),
            "contract_version": CONTRACT_VERSION,
        }
        places = [
            (f"src/{self.package}/{self.name}.py", f"{self.templates}/module", f"the {LABELS[kind]}: change this"),
            (f"tests/test_{self.name}.py", f"{self.templates}/test", "its numbers worked out by hand, and the rules"),
        ]
        if not self.there:
            places += [
                ("pyproject.toml", "common/pyproject", "names, dependencies, the entry point"),
                ("README.md", "common/readme", "how to install, select and train"),
                ("CHANGELOG.md", "common/changelog", "what a user notices"),
                (f"src/{self.package}/__init__.py", "common/package", "offers the class"),
                (f"src/{self.package}/py.typed", "", "says that it has types"),
                (".gitignore", "common/gitignore", "what git leaves out"),
                (".github/workflows/ci.yml", "common/ci", "lint, types and tests on every push"),
                (".github/workflows/publish.yml", "common/publish", "puts a release on the package index"),
                ("LICENSE", "common/LICENSE", "Apache-2.0; replace it if you choose another"),
            ]
        render = _environment().get_template
        return [
            GeneratedFile(path, render(f"{template}.jinja").render(values) if template else "", purpose)
            for path, template, purpose in places
        ]

    def write(self, directory: Path) -> list[GeneratedFile]:
        """Write the distribution into a folder that is not there yet or empty, or the plugin into one that is there."""
        files, project = self.files(), directory / "pyproject.toml"
        try:
            if not self.there and directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
                what = "is a file" if not directory.is_dir() else "is not empty, and nothing is ever overwritten"
                raise ConfigurationError(f"{directory} {what}. Choose another folder with --directory.")
            for file in files:
                if (directory / file.path).exists():
                    raise ConfigurationError(f"{directory / file.path} is there already. Choose another name.")
            changed = with_plugin(project.read_text(encoding="utf-8"), self, project) if self.there else ""
            for file in files:
                place = directory / file.path
                place.parent.mkdir(parents=True, exist_ok=True)
                with place.open("x", encoding="utf-8", newline="\n") as handle:
                    handle.write(file.text)
            if changed:
                project.write_text(changed, encoding="utf-8", newline="\n")
        except OSError as error:
            raise ConfigurationError(f"The folder {directory} cannot be written: {error.strerror}.") from error
        return [*files, GeneratedFile("pyproject.toml", changed, "has its entry point now")] if changed else files


def existing(directory: Path) -> str:
    """The name of the distribution in a folder, whose package is `src/` and that name."""
    project = directory / "pyproject.toml"
    try:
        name = str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["name"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"--into {directory}: {project} is not there, or names no project. Give the folder of a distribution."
        ) from error
    package = directory / "src" / package_of(name)
    if not package.is_dir():
        raise ConfigurationError(
            f"--into {directory}: plugins are put into the package {package}, which is not there. Make the plugin "
            "apart and copy its module and its test; its entry point goes into pyproject.toml."
        )
    return checked_distribution(name)


def with_plugin(text: str, new: NewDistribution, project: Path) -> str:
    """The text of a pyproject.toml with one more entry point, and nothing else changed."""
    group = GROUPS[WORDS[new.kind]]
    if new.name in tomllib.loads(text)["project"].get("entry-points", {}).get(group, {}):
        raise ConfigurationError(f"{project} has {new.name!r} in {group!r} already. Choose another name.")
    line = f'{new.name} = "{new.target}"\n'
    header = re.search(rf"""^\[project\.entry-points\.["']{re.escape(group)}["']\][^\n]*\n""", text, re.MULTILINE)
    if header is not None:
        text = text[: header.end()] + line + text[header.end() :]
    else:
        text = f'{text.rstrip()}\n\n[project.entry-points."{group}"]\n{line}'
    try:
        found = tomllib.loads(text)["project"]["entry-points"][group].get(new.name)
    except tomllib.TOMLDecodeError:
        found = None
    if found != new.target:
        raise ConfigurationError(
            f"The entry points in {project} are written in a way that cannot be added to. Put this into the table of "
            f"{group!r} yourself: {line.strip()}"
        )
    return text


def requirement() -> str:
    """The range of this package's versions that a plugin written today works with: from here to the next major one."""
    version = importlib.metadata.version("trl-grpo-ext")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        raise ConfigurationError(f"The installed trl-grpo-ext has the version {version!r}, which names no release.")
    return f"trl-grpo-ext>={numbers[1]}.{numbers[2]},<{int(numbers[1]) + 1}"


# ------------------------------------------------------------------------------------------------------------- words


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        hint = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()).strip("_")
        hint = f" Perhaps {hint!r}?" if _NAME.fullmatch(hint) else ""
        raise ConfigurationError(
            f"A plugin's name is made of small letters, digits and single underscores, with a letter in front, such as "
            f"'answer_length'; got {name!r}.{hint}"
        )
    if keyword.iskeyword(name) or name in _READ_BY_YAML:
        what = "a keyword of Python" if keyword.iskeyword(name) else "a value to YAML"
        raise ConfigurationError(f"{name!r} is {what}. Choose another name, such as '{name}_words'.")
    if len(name) > _LONGEST_NAME:
        raise ConfigurationError(f"A plugin's name has {_LONGEST_NAME} characters at most; {name!r} has {len(name)}.")


def checked_distribution(name: str) -> str:
    """A distribution's name that can be used."""
    if not _DISTRIBUTION.fullmatch(name) or len(name) > _LONGEST_DISTRIBUTION:
        raise ConfigurationError(
            f"--distribution: the name has letters, digits and dashes, {_LONGEST_DISTRIBUTION} at most and a letter in "
            f"front, such as 'grpo-manners'; got {name!r}."
        )
    if name.lower() == "none" or keyword.iskeyword(package_of(name)):
        raise ConfigurationError(f"--distribution: {name!r} is a word with another meaning. Choose another.")
    return name


def _check_new(distribution: str) -> None:
    """Refuse a distribution that is installed, and one whose package would hide a module or be hidden by it."""
    for key, installed in installed_distributions():
        if key == normalise(distribution):
            called, version = provenance(key, installed)
            raise ConfigurationError(
                f"The distribution {called} {version or '(version unknown)'} is installed already, and yours would "
                "take its place. Choose another name with --distribution."
            )
    package = package_of(distribution)
    try:
        found = None if package in sys.modules else importlib.util.find_spec(package)  # nothing is imported
        there = package in sys.modules or (found is not None and found.origin is not None)
    except (ImportError, ValueError):
        there = False
    if there or package in sys.stdlib_module_names:
        raise ConfigurationError(
            f"--distribution: {distribution!r} would have the package {package!r}, and there is a module of that name "
            "already. Choose another name."
        )


def package_of(distribution: str) -> str:
    """The import package of a distribution: `Grpo-Manners` has `grpo_manners`."""
    return re.sub(r"[-_.]+", "_", distribution).lower()


def class_of(name: str, kind: str) -> str:
    """The class of a plugin: `answer_length` has `AnswerLength`; `any` has `AnyReward`, for `Any` is taken."""
    camel = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    return camel + kind.capitalize() if camel in _IMPORTED or hasattr(builtins, camel) else camel


# --------------------------------------------------------------------------------------------------------- templates


def imported(name: str, module: str) -> str:
    """The import of one name, in parentheses where the line would be longer than ruff and its formatter leave it."""
    line = f"from {module} import {name}"
    return line if len(line) <= LINE_LENGTH else f"from {module} import (\n    {name},\n)"


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("trl_grpo_ext.cli.scaffold"),
        undefined=StrictUndefined,
        autoescape=False,  # nothing here is HTML, and every word was checked
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["imported"] = imported
    return environment
