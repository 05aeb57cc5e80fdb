"""A new distribution with one plugin in it, from the templates beside this file, written where nothing is.

A plugin's name becomes an entry point, a module, a class, a file of tests and a word in YAML; a distribution's name
becomes a package. Both are held to what all of these take.
"""

import builtins
import importlib.metadata
import keyword
import re
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from ...errors import ConfigurationError
from ...plugins.kinds import FACTS, GROUPS, LABELS, WORDS, with_article
from ...plugins.metadata import installed_distributions, normalise, owner_of, provenance
from ...types import CONTRACT_VERSION
from . import PluginKind

_LONGEST_NAME = 30
_LONGEST_DISTRIBUTION = 40
"""So that no line of the templates is longer than 120 characters."""
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_DISTRIBUTION = re.compile(r"[A-Za-z][A-Za-z0-9]*([._-]+[A-Za-z0-9]+)*")  # PEP 508, without a digit in front
_READ_BY_YAML = frozenset({"yes", "no", "on", "off", "true", "false", "null"})
_FROM_TYPES = ("LossTerms", "PromptOutcome", "PromptPool", "Rollout", "Span")
_IMPORTED = frozenset({"Any", "Mapping", "Sequence", "ConfigurationError", *_FROM_TYPES}).union(
    facts.declaration.__name__ for facts in FACTS.values()
)
"""What the templates import."""
_DESCRIPTIONS: dict[PluginKind, str] = {
    "reward": "Pays completions that say a phrase.",
    "hook": "Credits the tokens that wrote a match of a pattern.",
    "sampler": "Leaves out prompts whose mean reward was above a limit when they were last drawn.",
    "filter": "Keep groups whose completions are short enough.",
    "token-loss": "Hold improbable tokens near the policy that sampled them.",
    "aggregation": "A mean of token means in which very short completions count as if they were longer.",
}


@dataclass(kw_only=True)
class NewDistribution:
    """What an author chose, checked."""

    kind: PluginKind
    name: str
    distribution: str = ""

    def __post_init__(self) -> None:
        """Check the words, and fill in those that were left out."""
        _check_name(self.name)
        self.distribution = self.distribution or f"grpo-{self.name.replace('_', '-')}"
        _check_distribution(self.distribution)
        self.package = package_of(self.distribution)

    def files(self) -> dict[str, str]:
        """Render every file, by its path, in the order in which a reader wants them."""
        kind = WORDS[self.kind]
        class_name = class_of(self.name, self.kind)
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
            "requirement": requirement(),
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
        environment = Environment(
            loader=PackageLoader("trl_grpo_ext.cli.scaffold"),
            undefined=StrictUndefined,
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


def requirement() -> str:
    """The range of this package's versions that a plugin written today works with: from here to the next major one."""
    major, minor, *_ = importlib.metadata.version("trl-grpo-ext").split(".")
    return f"trl-grpo-ext>={major}.{minor},<{int(major) + 1}"


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


def _check_distribution(name: str) -> None:
    """Refuse what is no name, is installed, or whose package would hide a module or be hidden by it."""
    if not _DISTRIBUTION.fullmatch(name) or len(name) > _LONGEST_DISTRIBUTION:
        raise ConfigurationError(
            f"--distribution: the name has letters, digits and dashes, {_LONGEST_DISTRIBUTION} at most and a letter in "
            f"front, such as 'grpo-manners'; got {name!r}."
        )
    if name.lower() == "none" or keyword.iskeyword(package_of(name)):
        raise ConfigurationError(f"--distribution: {name!r} is a word with another meaning. Choose another.")
    for key, installed in installed_distributions():
        if key == normalise(name):
            called, version = provenance(installed)
            raise ConfigurationError(
                f"The distribution {called} {version or '(version unknown)'} is installed already, and yours would "
                "take its place. Choose another name with --distribution."
            )
    package = package_of(name)
    if package in sys.stdlib_module_names or owner_of(package) is not None:
        raise ConfigurationError(
            f"--distribution: {name!r} would have the package {package!r}, and there is a module of that name "
            "already. Choose another name."
        )


def package_of(distribution: str) -> str:
    """The import package of a distribution: `Grpo-Manners` has `grpo_manners`."""
    return re.sub(r"[-_.]+", "_", distribution).lower()


def class_of(name: str, kind: str) -> str:
    """The class of a plugin: `answer_length` has `AnswerLength`; `any` has `AnyReward`, for `Any` is taken."""
    camel = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    return camel + kind.title().replace("-", "") if camel in _IMPORTED or hasattr(builtins, camel) else camel
