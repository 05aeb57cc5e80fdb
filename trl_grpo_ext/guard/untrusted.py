"""What somebody else wrote, made safe: text for a terminal, values for JSON, and settings files of limited size."""

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError

MOST_BYTES = 1_000_000  # settings are a page or two; a longer file is the wrong one
EXPONENT_WITHOUT_POINT = re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+")
"""A float to YAML 1.2 and to everybody's eyes, but a string to YAML 1.1, which PyYAML reads."""


def escape(text: str, keep: str = "") -> str:
    """Escape invisible characters, line breaks, terminal control codes and changes of text direction, except `keep`."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)


def printable(text: str) -> str:
    """Text for a terminal, with its line breaks."""
    return escape(text, keep="\n")


def one_line(value: object, length: int | None = None) -> str:
    """Text on one line, with white space folded and the rest escaped; cut to a length if one is given."""
    text = escape(" ".join(str(value)[: None if length is None else 4 * length].split()))
    return text if length is None or len(text) <= length else f"{text[: length - 1]}…"


def printable_name(name: object) -> str:
    """A name on one line, escaped, and cut at 40 characters."""
    return one_line(name, 40)


def as_json(value: Any) -> Any:
    """A value as JSON: mappings, sequences, numbers as floats (null if not finite), else its `repr`."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): as_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(inner) for inner in value]
    try:
        number = float(value)  # fractions, tensors and NumPy's numbers too
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return repr(value)
    return number if math.isfinite(number) else None


def read_settings(path: str | Path, *, may_be_empty: bool = False) -> dict[str, Any]:
    """Read a mapping from a YAML or JSON file; a `ConfigurationError` says why that cannot be."""
    name = one_line(path, 300)
    try:
        if (size := Path(path).stat().st_size) > MOST_BYTES:
            raise ConfigurationError(f"{name} has {size:,} bytes, too many for settings: is it the right file?")
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path, or bytes that are no UTF-8
        raise ConfigurationError(f"{name} cannot be read: {one_line(error, 300)}") from error
    settings = parse_yaml(text, name, json_only=Path(path).suffix == ".json")
    if settings is None and may_be_empty:
        return {}
    if not isinstance(settings, dict):
        raise ConfigurationError(f"{name} holds {one_line(repr(settings), 60)}, not settings (`name: value`).")
    return {str(key): value for key, value in settings.items()}


def parse_yaml(text: str, name: str, *, exponents: bool = False, json_only: bool = False) -> Any:
    """Read YAML or JSON in which no key stands twice.

    `exponents` reads 1e-3 as a number, where YAML 1.1 wants 1.0e-3.
    """
    import yaml  # here, because most commands need no YAML

    try:
        return json.loads(text, object_pairs_hook=_unique) if json_only else yaml.load(text, _loader(exponents))
    except ConfigurationError as error:
        raise ConfigurationError(f"{name} has {error}") from error
    except Exception as error:  # PyYAML leaks ValueError, TypeError and others on odd scalars and keys
        problem = one_line(error, 300).replace('in "<unicode string>", ', "at ")
        raise ConfigurationError(f"{name} cannot be read: {problem}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ConfigurationError(f"a key twice: keep one of {one_line([key for key, _ in pairs], 200)}.")
    return found


@cache
def _loader(exponents: bool) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """PyYAML's safe loader; the one in C has no limit to its recursion."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = set()
            for key, _ in node.value:
                if key.id == "scalar" and (key.tag, key.value) in keys:
                    where = f"line {key.start_mark.line + 1}"
                    raise ConfigurationError(f"the key {one_line(key.value, 60)!r} twice ({where}): keep one.")
                keys.add((key.tag, key.value) if key.id == "scalar" else id(key))
            return super().construct_mapping(node, deep)

    if exponents:
        Loader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT_WITHOUT_POINT, list("-+0123456789"))
    return Loader
