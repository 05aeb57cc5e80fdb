"""A new distribution with one plugin in it: what its files are, and writing them where nothing is."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from ...errors import ConfigurationError
from ...plugins.kinds import GROUPS, LABELS, WORDS, with_article
from ...plugins.metadata import installed_distributions, normalise, provenance
from ...types import CONTRACT_VERSION
from .templates import fill
from .words import (
    Ci,
    License,
    PluginKind,
    Role,
    checked_distribution,
    checked_name,
    checked_package,
    checked_text,
    class_of,
    package_of,
)

LICENSE_IDS: dict[License, str | None] = {
    "apache-2.0": "Apache-2.0",
    "mit": "MIT",
    "bsd-3-clause": "BSD-3-Clause",
    "none": None,
}
"""Each choice's SPDX identifier."""

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
    """One file of a new distribution.

    Attributes:
        path: Relative to the distribution's folder, with slashes.
        text: All of it.
        purpose: A few words on what it is for.
    """

    path: str
    text: str
    purpose: str


@dataclass(frozen=True, kw_only=True)
class NewDistribution:
    """What an author chose for a new distribution, checked.

    Args:
        kind: "reward", "hook", "aggregation" or "filter".
        role: Of a hook: "transform", "estimator", "shaper" or "forward"; None is "transform". Other kinds have none.
        name: The plugin's name, in small letters, digits and underscores.
        distribution: The distribution's name; empty for `grpo-<name>`.
        description: What the plugin does, on one line; empty for the example's.
        author: Who holds the rights; empty for "The <distribution> developers".
        license: Which licence the distribution has.
        ci: Whose continuous integration gets a file.
        year: The year in the licence.
        there: Whether the distribution is there already, with a package of its name, and this adds a plugin to it.

    Raises:
        ConfigurationError: A name or a text cannot be used, or a distribution of that name is installed; or a role is
            given for what has none.
    """

    kind: PluginKind
    name: str
    role: Role | None = None
    distribution: str = ""
    description: str = ""
    author: str = ""
    license: License = "apache-2.0"
    ci: Ci = "github"
    year: int = field(default_factory=lambda: date.today().year)
    there: bool = False

    def __post_init__(self) -> None:
        """Check the words, and fill in those that were left out."""
        checked_name(self.name)
        if self.role is not None and self.kind != "hook":
            raise ConfigurationError(f"--role {self.role}: only hooks have a role, and this is a {self.kind}.")
        distribution = checked_distribution(self.distribution or f"grpo-{self.name.replace('_', '-')}")
        for key, installed in () if self.there else installed_distributions():
            if key == normalise(distribution):
                called, version = provenance(key, installed)
                raise ConfigurationError(
                    f"The distribution {called} {version or '(version unknown)'} is installed already, and yours would "
                    "take its place. Choose another name with --distribution."
                )
        if not self.there:
            checked_package(distribution)
        description = checked_text("--description", self.description or _DESCRIPTIONS[self.templates])
        author = checked_text("--author", self.author or f"The {distribution} developers")
        for name, value in {"distribution": distribution, "description": description, "author": author}.items():
            object.__setattr__(self, name, value)

    @property
    def package(self) -> str:
        """The import package."""
        return package_of(self.distribution)

    @property
    def templates(self) -> str:
        """The folder of the templates that make the plugin."""
        return f"hook/{self.role or 'transform'}" if self.kind == "hook" else self.kind

    @property
    def target(self) -> str:
        """What its entry point names."""
        return f"{self.package}.{self.name}:{class_of(self.name, self.kind)}"

    def _values(self) -> dict[str, object]:
        """What the templates ask for."""
        kind = WORDS[self.kind]
        label = LABELS[kind]
        return {
            "kind": self.kind,
            "templates": self.templates,
            "name": self.name,
            "class_name": class_of(self.name, self.kind),
            "distribution": self.distribution,
            "package": self.package,
            "description": self.description,
            "author": self.author,
            "ci": self.ci,
            "license_id": LICENSE_IDS[self.license],
            "year": self.year,
            "group": GROUPS[kind],
            "label": label,
            "label_with_article": with_article(kind),
            "target": self.target,
            "requirement": requirement(),
            "contract_version": CONTRACT_VERSION,
        }

    def files(self) -> list[GeneratedFile]:
        """Render every file, in the order in which a reader wants them; of one that is there already the plugin's."""
        label = LABELS[WORDS[self.kind]]
        places: list[tuple[str, str | None, str]] = [
            (f"src/{self.package}/{self.name}.py", f"{self.templates}/module", f"the {label}: change this"),
            (f"tests/test_{self.name}.py", f"{self.templates}/test", "its numbers worked out by hand, and the rules"),
        ]
        if self.there:
            return self._rendered(places)
        places += [
            ("pyproject.toml", "common/pyproject", "names, dependencies, the entry point"),
            ("README.md", "common/readme", "how to install, select and train"),
            ("CHANGELOG.md", "common/changelog", "what a user notices"),
            (f"src/{self.package}/__init__.py", "common/package", "offers the class"),
            (f"src/{self.package}/py.typed", None, "says that it has types"),
            (".gitignore", "common/gitignore", "what git leaves out"),
        ]
        if self.ci == "github":
            places.append((".github/workflows/ci.yml", "common/ci", "lint, types and tests on every push"))
            if self.license != "none":  # the index refuses it without one
                places.append(
                    (".github/workflows/publish.yml", "common/publish", "puts a release on the package index")
                )
        if self.license != "none":
            places.append(("LICENSE", f"licenses/{self.license}", f"{LICENSE_IDS[self.license]}, {self.year}"))
        return self._rendered(places)

    def _rendered(self, places: list[tuple[str, str | None, str]]) -> list[GeneratedFile]:
        values = self._values()
        return [
            GeneratedFile(path, "" if template is None else fill(template, values), purpose)
            for path, template, purpose in places
        ]

    def write(self, directory: Path) -> list[GeneratedFile]:
        """Write the distribution into a folder that is not there yet, or empty.

        Args:
            directory: The distribution's own folder.

        Returns:
            What was written.

        Raises:
            ConfigurationError: Something is there already, or the folder cannot be written.
        """
        files = self.files()
        try:
            if directory.exists() and not directory.is_dir():
                raise ConfigurationError(f"{directory} is a file. Choose another folder with --directory.")
            if directory.is_dir() and any(directory.iterdir()):
                raise ConfigurationError(
                    f"The folder {directory} is not empty, and nothing is ever overwritten. Choose another with "
                    "--directory, or remove it."
                )
            for file in files:
                place = directory / file.path
                place.parent.mkdir(parents=True, exist_ok=True)
                with place.open("x", encoding="utf-8", newline="\n") as handle:
                    handle.write(file.text)
        except OSError as error:
            raise ConfigurationError(f"The folder {directory} cannot be written: {error.strerror}.") from error
        return files

    def add_to(self, directory: Path) -> list[GeneratedFile]:
        """Write the plugin's module and test into a distribution that is there, and its entry point.

        Args:
            directory: The distribution's folder.

        Returns:
            What was written; pyproject.toml, of which nothing else changes, is the last.

        Raises:
            ConfigurationError: There is no such distribution, it has a plugin or a file of that name already, or the
                folder cannot be written.
        """
        files, project = self.files(), directory / "pyproject.toml"
        try:
            for file in files:
                if (directory / file.path).exists():
                    raise ConfigurationError(f"{directory / file.path} is there already. Choose another name.")
            text = with_plugin(project.read_text(encoding="utf-8"), self, project)
            for file in files:
                place = directory / file.path
                place.parent.mkdir(parents=True, exist_ok=True)
                with place.open("x", encoding="utf-8", newline="\n") as handle:
                    handle.write(file.text)
            project.write_text(text, encoding="utf-8", newline="\n")
        except OSError as error:
            raise ConfigurationError(f"The folder {directory} cannot be written: {error.strerror}.") from error
        return [*files, GeneratedFile("pyproject.toml", text, "has its entry point now")]


def existing(directory: Path) -> str:
    """The name of the distribution in a folder, whose package is `src/` and that name.

    Raises:
        ConfigurationError: There is none, or it keeps its package elsewhere.
    """
    project = directory / "pyproject.toml"
    try:
        name = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"--into {directory}: {project} is not there, or names no project. Give the folder of a distribution."
        ) from error
    package = directory / "src" / package_of(str(name))
    if not package.is_dir():
        raise ConfigurationError(
            f"--into {directory}: plugins are put into the package {package}, which is not there. Make the plugin "
            "apart and copy its module and its test; its entry point goes into pyproject.toml."
        )
    return checked_distribution(str(name))


def with_plugin(text: str, new: NewDistribution, project: Path) -> str:
    """The text of a pyproject.toml with one more entry point, and nothing else changed.

    Raises:
        ConfigurationError: The plugin is in it already, or the entry points are written in another way.
    """
    group, label = GROUPS[WORDS[new.kind]], LABELS[WORDS[new.kind]]
    points = tomllib.loads(text)["project"].get("entry-points", {}).get(group, {})
    if new.name in points:
        raise ConfigurationError(f"{project} has a {label} {new.name!r} already. Choose another name.")
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
    major, minor = int(numbers[1]), int(numbers[2])
    return f"trl-grpo-ext>={major}.{minor},<{major + 1}"
