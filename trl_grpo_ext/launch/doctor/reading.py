"""What all parts of the doctor share: findings, and reading and quoting untrusted settings files."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from ...errors import ConfigurationError

Severity = Literal["error", "warning", "note"]
"""error: the run will fail or differ from the request; warning: it runs, but not as meant; note: worth knowing."""

MOST_BYTES = 1_000_000
"""Settings are a page or two; a longer file is the wrong one."""
MOST_VALUES = 10_000
"""With aliases expanded: a short YAML file can stand for more values than fit into memory."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Problem:
    """One finding.

    Attributes:
        severity: How severe it is.
        subject: A short key of what the finding is about, such as "launch" or "qlora+vllm".
        message: What is wrong, with the values.
        fix: What to do about it.
    """

    severity: Severity
    subject: str
    message: str
    fix: str


def read_settings(path: str | Path) -> dict[str, Any]:
    """Read a mapping from a YAML or JSON file.

    Raises:
        ConfigurationError: The file is missing, too long, not text, not YAML, or holds no settings.
    """
    name = one_line(path)
    try:
        if not Path(path).is_file():
            raise ConfigurationError(f"There is no file {name}.")
        if (size := Path(path).stat().st_size) > MOST_BYTES:
            raise ConfigurationError(f"{name} has {size:,} bytes, too many for settings: is it the right file?")
        text = Path(path).read_bytes().decode("utf-8")
        settings = json.loads(text) if Path(path).suffix == ".json" else yaml.safe_load(text)
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{name} is no text file: byte {error.start} is not UTF-8.") from error
    except RecursionError as error:
        raise ConfigurationError(f"{name} is nested too deeply for settings: is it the right file?") from error
    # ValueError: a null byte in the path. PyYAML leaks it and TypeError on odd scalars and keys.
    except (yaml.YAMLError, OSError, ValueError, TypeError) as error:
        raise ConfigurationError(f"{name} cannot be read: {one_line(error)}") from error
    if _values(settings) > MOST_VALUES:
        raise ConfigurationError(f"{name} stands for more than {MOST_VALUES:,} values: is it the right file?")
    if not isinstance(settings, dict):
        raise ConfigurationError(f"{name} holds {one_line(repr(settings), 60)}, not settings (`name: value`).")
    return {str(key): value for key, value in settings.items()}


def _values(value: Any, known: dict[int, int] | None = None) -> int:
    """The number of values with aliases expanded; more than allowed if a value contains itself."""
    known = {} if known is None else known
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        known[id(value)] = MOST_VALUES + 1  # while it is counted
        inner = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_values(item, known) for item in inner)
    return known[id(value)]


def one_line(value: object, length: int = 300) -> str:
    """Untrusted text on one line, shortened, without control characters."""
    text = " ".join(_CONTROL.sub("\ufffd", str(value)[: 4 * length].replace("\r", " ")).split())
    return text if len(text) <= length else f"{text[: length - 1]}…"
