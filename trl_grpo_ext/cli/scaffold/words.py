"""The words that an author gives: names that work everywhere they are used, texts that break nothing.

A plugin's name becomes an entry point, a module, a class, a file of tests and a word in YAML; a distribution's name
becomes a package. So both are held to what all of these take. Descriptions and authors may be anything that fits on a
line; `templates.py` escapes them for where they go.
"""

from __future__ import annotations

import builtins
import importlib.util
import keyword
import re
import sys
import unicodedata
from typing import Literal

from ...errors import ConfigurationError

PluginKind = Literal["reward", "hook", "aggregation", "filter"]
Made = Literal[PluginKind, "all"]
Role = Literal["transform", "estimator", "shaper", "forward"]
License = Literal["apache-2.0", "mit", "bsd-3-clause", "none"]
Ci = Literal["github", "none"]
"""What can be made, alone or one of each; the roles of hooks, the licences that come with their text, and whose
continuous integration gets a file."""

NAME_LIMIT = 40
DISTRIBUTION_LIMIT = 60
TEXT_LIMIT = 300

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_DISTRIBUTION = re.compile(r"[A-Za-z][A-Za-z0-9]*([._-]+[A-Za-z0-9]+)*")  # PEP 508, without a digit in front
_READ_BY_YAML = frozenset({"yes", "no", "on", "off", "true", "false", "null"})
_BIDIRECTIONAL = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_IMPORTED = frozenset({"Any", "Sequence", "ConfigurationError", "Rollout", "Span"})
"""What the templates import: a class of that name would hide it."""


def checked_name(name: str) -> str:
    """Return a plugin's name that can be used.

    Raises:
        ConfigurationError: It is not in small letters, digits and single underscores, is a keyword of Python or a
            truth value of YAML, or is longer than `NAME_LIMIT`.
    """
    if not _NAME.fullmatch(name):
        hint = _snake(name)
        hint = f" Perhaps {hint!r}?" if _NAME.fullmatch(hint) and hint != name else ""
        raise ConfigurationError(
            f"A plugin's name is made of small letters, digits and single underscores, with a letter in front, such as "
            f"'answer_length'; got {name!r}.{hint}"
        )
    if keyword.iskeyword(name):
        raise ConfigurationError(
            f"{name!r} is a keyword of Python, so no module can have that name. Choose another, such as '{name}_words'."
        )
    if name in _READ_BY_YAML:
        raise ConfigurationError(
            f"YAML reads {name!r} as a value and not as a word, so nobody could select it. Choose another name, such "
            f"as '{name}_words'."
        )
    if len(name) > NAME_LIMIT:
        raise ConfigurationError(f"A plugin's name has {NAME_LIMIT} characters at most; {name!r} has {len(name)}.")
    return name


def checked_distribution(distribution: str) -> str:
    """Return a distribution's name that can be used.

    Raises:
        ConfigurationError: It is no name for a distribution (PEP 508), begins with a digit, is longer than
            `DISTRIBUTION_LIMIT`, or means something else to a variable or to Python.
    """
    if not _DISTRIBUTION.fullmatch(distribution):
        raise ConfigurationError(
            f"--distribution: the name is made of letters, digits and dashes, with a letter in front, such as "
            f"'grpo-manners'; got {distribution!r}."
        )
    if len(distribution) > DISTRIBUTION_LIMIT:
        raise ConfigurationError(
            f"--distribution: {DISTRIBUTION_LIMIT} characters at most; {distribution!r} has {len(distribution)}."
        )
    if distribution.lower() == "none" or keyword.iskeyword(package_of(distribution)):
        raise ConfigurationError(f"--distribution: {distribution!r} is a word with another meaning. Choose another.")
    return distribution


def checked_package(distribution: str) -> str:
    """Return the import package of a distribution that is about to be made.

    Raises:
        ConfigurationError: A module of that name is there, and one of the two would hide the other.
    """
    package = package_of(distribution)
    if package in sys.stdlib_module_names or _is_there(package):
        raise ConfigurationError(
            f"--distribution: {distribution!r} would have the package {package!r}, and there is a module of that name "
            "already; one of the two would hide the other. Choose another name."
        )
    return package


def checked_text(option: str, text: str) -> str:
    """Return a text on one line: all white space, line ends among it, becomes single spaces.

    Raises:
        ConfigurationError: It is blank, longer than `TEXT_LIMIT`, or holds control characters, lone surrogates or
            characters that turn the direction of writing.
    """
    line = " ".join(text.split())
    if not line:
        raise ConfigurationError(f"{option} is blank; give some text, or leave the option out.")
    bad = [c for c in line if unicodedata.category(c) in ("Cc", "Cs") or c in _BIDIRECTIONAL]
    if bad:
        raise ConfigurationError(
            f"{option} holds the character U+{ord(bad[0]):04X}, which is for terminals and not for text. Leave it out."
        )
    if len(line) > TEXT_LIMIT:
        raise ConfigurationError(f"{option} has {len(line)} characters; {TEXT_LIMIT} at most.")
    return line


def package_of(distribution: str) -> str:
    """The import package of a distribution: `Grpo-Manners` has `grpo_manners`."""
    return re.sub(r"[-_.]+", "_", distribution).lower()


def class_of(name: str, kind: str) -> str:
    """The class of a plugin: `answer_length` has `AnswerLength`; `any` has `AnyReward`, for `Any` is taken."""
    camel = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    return camel + kind.capitalize() if camel in _IMPORTED or hasattr(builtins, camel) else camel


def _snake(name: str) -> str:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")


def _is_there(package: str) -> bool:
    """Whether such a module can be imported; nothing is. A mere folder of that name does not count."""
    if package in sys.modules:
        return True
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    return found is not None and found.origin is not None
