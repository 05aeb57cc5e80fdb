"""Reading YAML and JSON files of settings, which may hold anything, and quoting from them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ...errors import ConfigurationError
from .problem import Problem

MOST_BYTES = 1_000_000
"""Settings are a page or two; what is longer is the wrong file."""
MOST_VALUES = 10_000
"""Aliases counted out: a short YAML file can stand for more values than fit into memory."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class SettingsFile:
    """What a file holds.

    Attributes:
        path: Where it was read.
        settings: Its top-level mapping.
        problems: What is odd about it although it could be read, such as a key that is there twice.
    """

    path: str
    settings: Mapping[str, Any]
    problems: tuple[Problem, ...] = field(default=())


def read_settings(path: str | Path) -> SettingsFile:
    """Read a mapping from a YAML or JSON file.

    Raises:
        ConfigurationError: The file is missing, too long, no text, no YAML, or holds something else than settings.
    """
    name = shown(str(path))
    try:
        if not Path(path).is_file():
            raise ConfigurationError(f"There is no file {name}.")
        size = Path(path).stat().st_size
        if size > MOST_BYTES:
            raise ConfigurationError(f"{name} has {size:,} bytes, too many for settings: is it the right file?")
        text = Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{name} is no text file: byte {error.start} is not UTF-8.") from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise ConfigurationError(f"{name} cannot be read: {shown(error)}") from error
    problems: list[Problem] = []
    try:
        if Path(path).suffix == ".json":
            settings = json.loads(text)
        else:
            loader = _Loader(text)
            loader.found, loader.file = problems, name
            try:
                settings = loader.get_single_data()
            finally:
                loader.dispose()
    except RecursionError as error:
        raise ConfigurationError(f"{name} is nested too deeply for settings: is it the right file?") from error
    except (yaml.YAMLError, ValueError, TypeError) as error:  # PyYAML leaks the last two on odd scalars and keys
        raise ConfigurationError(f"{name} cannot be read: {shown(error)}") from error
    if _values(settings) > MOST_VALUES:
        raise ConfigurationError(f"{name} stands for more than {MOST_VALUES:,} values: is it the right file?")
    if not isinstance(settings, dict):
        raise ConfigurationError(f"{name} holds {shown(repr(settings), 60)}, not settings (`name: value`).")
    return SettingsFile(str(path), {str(key): value for key, value in settings.items()}, tuple(problems))


class _Loader(yaml.SafeLoader):
    """`yaml.SafeLoader` that notices keys that are given twice and refuses files made of aliases."""

    found: list[Problem]
    file: str

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen and key.value != "<<":
                    message = f"{self.file} has {shown(key.value)!r} twice (again in line {key.start_mark.line + 1})."
                    self.found.append(
                        Problem("warning", "yaml", f"{message} YAML takes the last one.", "Keep one of them.")
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _values(value: Any, known: dict[int, int] | None = None) -> int:
    """How many values these are, each alias counted out; more than allowed for a value that contains itself."""
    known = {} if known is None else known
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        known[id(value)] = MOST_VALUES + 1  # while it is counted
        inner = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_values(item, known) for item in inner)
    return known[id(value)]


def shown(value: object, length: int = 300) -> str:
    """A text from elsewhere on one line, without control characters, not too long."""
    text = " ".join(_CONTROL.sub("\ufffd", str(value)[: 4 * length].replace("\r", " ")).split())
    return text if len(text) <= length else f"{text[: length - 1]}…"
