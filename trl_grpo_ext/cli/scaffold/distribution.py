"""A new distribution with one plugin in it, from the templates beside this file, written where nothing is.

A plugin's name becomes an entry point, a module, a class, a file of tests and a word in YAML; a distribution's name
becomes a package. Both are held to what all of these take.
"""

import importlib.metadata
import keyword
import re
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Literal

from ...errors import ConfigurationError
from ...plugins.discovery import installed_distributions, normalise, owner_of
from ...plugins.kinds import GROUPS, LABELS, WORDS, with_article
from ...types import CONTRACT_VERSION

PluginKind = Literal["reward", "hook", "aggregation", "filter", "token-loss", "sampler"]
_NAME = re.compile(r"(?=.{1,28}\Z)[a-z][a-z0-9]*(_[a-z0-9]+)*")
_DISTRIBUTION = re.compile(r"(?=.{1,38}\Z)[A-Za-z][A-Za-z0-9]*([._-]+[A-Za-z0-9]+)*")  # PEP 508, no digit in front
"""No line of the templates is then longer than 120 characters."""
_RESERVED = {"yes", "no", "on", "off", "true", "false", "null", "none", *keyword.kwlist}  # to YAML, Python and us
_DESCRIPTIONS: dict[PluginKind, str] = {
    "reward": "Pays completions that say a phrase.",
    "hook": "Credits the tokens that wrote a match of a pattern.",
    "sampler": "Leaves out prompts whose mean reward was above a limit when they were last drawn.",
    "filter": "Keep groups whose completions are short enough.",
    "token-loss": "Hold improbable tokens near the policy that sampled them.",
    "aggregation": "A mean of token means in which very short completions count as if they were longer.",
}


@dataclass
class NewDistribution:
    """What an author chose, checked."""

    kind: PluginKind
    name: str
    distribution: str = ""

    def __post_init__(self) -> None:
        """Check the words, and fill in those that were left out."""
        if not _NAME.fullmatch(self.name) or self.name in _RESERVED:
            what = "at most 28 small letters, digits and single underscores, with a letter in front"
            raise ConfigurationError(f"A plugin's name has {what}, and is no word of YAML; got {self.name!r}.")
        self.distribution = self.distribution or f"grpo-{self.name.replace('_', '-')}"
        self.package = re.sub(r"[-_.]+", "_", self.distribution).lower()
        if not _DISTRIBUTION.fullmatch(self.distribution) or self.package in _RESERVED:
            what = "at most 38 letters, digits and dashes, with a letter in front, and is no word of Python"
            raise ConfigurationError(f"A distribution's name has {what}; got {self.distribution!r}.")
        there = {key for key, _ in installed_distributions()}
        taken = normalise(self.distribution) in there or self.package in sys.stdlib_module_names
        if taken or owner_of(self.package) is not None:
            raise ConfigurationError(f"{self.distribution!r} is here already: choose another --distribution.")

    def files(self) -> dict[str, str]:
        """Render every file, by its path, in the order in which a reader wants them."""
        import jinja2  # slow to import

        kind = WORDS[self.kind]
        # The kind at its end keeps it apart from what the templates import and from what Python has.
        class_name = f"{self.name}_{self.kind}".replace("-", "_").title().replace("_", "")
        major, minor, *_ = importlib.metadata.version("trl-grpo-ext").split(".")
        values = {
            **vars(self),
            "class_name": class_name,
            "target": f"{self.package}.{self.name}:{class_name}",
            "description": _DESCRIPTIONS[self.kind],
            "author": f"The {self.distribution} developers",
            "year": date.today().year,
            "group": GROUPS[kind],
            "label": LABELS[kind],
            "label_with_article": with_article(kind),
            "requirement": f"trl-grpo-ext>={major}.{minor},<{int(major) + 1}",
            "contract_version": CONTRACT_VERSION,
        }
        templates = {
            f"src/{self.package}/{self.name}.py": f"{self.kind}/module",
            f"tests/test_{self.name}.py": f"{self.kind}/test",
            "pyproject.toml": "common/pyproject",
            "README.md": "common/readme",
            "CHANGELOG.md": "common/changelog",
            f"src/{self.package}/__init__.py": "common/package",
            ".gitignore": "common/gitignore",
            ".github/workflows/ci.yml": "common/ci",
            ".github/workflows/publish.yml": "common/publish",
            "LICENSE": "common/LICENSE",
        }
        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("trl_grpo_ext.cli.scaffold"),
            undefined=jinja2.StrictUndefined,
            autoescape=False,  # nothing here is HTML, and every word was checked
            keep_trailing_newline=True,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        files = {path: environment.get_template(f"{name}.jinja").render(values) for path, name in templates.items()}
        return {**files, f"src/{self.package}/py.typed": ""}

    def write(self, directory: Path) -> list[str]:
        """Write the distribution into a new folder, and return the files' paths."""
        files = self.files()
        try:
            directory.mkdir(parents=True)
            for path, text in files.items():
                place = directory / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text, encoding="utf-8", newline="\n")
        except OSError as error:
            raise ConfigurationError(f"The folder {directory} cannot be made: {error.strerror}.") from error
        return list(files)
