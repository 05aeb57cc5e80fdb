"""Checks for plugins' parameters and rewards' columns. A `label` is `<plugin>: <parameter>`.

A plugin that is `Checked` declares its parameters as fields, as in
`positive: float = number(0.1, "at least 0", lambda v: v >= 0)`, which are checked when it is made.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import MISSING, dataclass, field, fields
from numbers import Real
from types import ModuleType
from typing import Any, NoReturn, dataclass_transform

from ..errors import ConfigurationError, RewardError
from .calls import PASSED_BY_TRL


def checked_number(label: str, value: object, wanted: str, accept: Callable[[float], bool] = lambda _: True) -> float:
    """Return a parameter that must be a finite number (booleans are none) in the range that `wanted` describes."""
    highest = sys.float_info.max  # `isfinite` raises for whole numbers that no float can hold
    number: Any = None if isinstance(value, bool) or not isinstance(value, Real) else value
    if number is None or not -highest <= number <= highest or not accept(float(number)):
        _refuse(label, wanted, value)
    return float(number)


def checked_whole(label: str, value: object, lowest: int) -> int:
    """Return a parameter that must be a whole number, `lowest` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        _refuse(label, f"a whole number, {lowest} or more", value)
    return value


def checked_choice(label: str, value: object, choices: Sequence[str]) -> str:
    """Return a parameter that must be one of a few words."""
    wanted = " or ".join(map(repr, choices)) or "left out"
    return value if isinstance(value, str) and value in choices else _refuse(label, wanted, value)


def checked_flag(label: str, value: object) -> bool:
    """Return a parameter that must be true or false."""
    return value if isinstance(value, bool) else _refuse(label, "true or false", value)


def checked_text(label: str, value: object) -> str:
    """Return a parameter that must be a non-empty string."""
    return value if isinstance(value, str) and value else _refuse(label, "a text that is not empty", value)


def _refuse(label: str, wanted: str, value: object) -> NoReturn:
    raise ConfigurationError(f"{label} must be {wanted}, got {value!r:.200}.")


@dataclass_transform(eq_default=False, kw_only_default=True, field_specifiers=(field,))
class Checked:
    """A plugin whose parameters are fields, as in a dataclass; None passes unchecked where it is the default."""

    def __init_subclass__(cls, kw_only: bool = True) -> None:
        dataclass(kw_only=kw_only, eq=False)(cls)

    def __post_init__(self) -> None:
        """Check the parameters, and keep numbers as floats."""
        for one in fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            if "check" in one.metadata and not (value is None and one.default is None):
                setattr(self, one.name, one.metadata["check"](f"{self.__name__}: {one.name}", value))  # type: ignore[attr-defined]


def _parameter(check: Callable[[str, object], object], default: Any = MISSING) -> Any:
    return field(default=default, metadata={"check": check})


flag = functools.partial(_parameter, checked_flag)  # a field for `checked_flag`
text = functools.partial(_parameter, checked_text)  # a field for `checked_text`


def number(default: Any, wanted: str, accept: Callable[[float], bool] = lambda _: True) -> Any:
    """A field for `checked_number`."""
    return _parameter(lambda label, value: checked_number(label, value, wanted, accept), default)


def whole(default: Any = MISSING, *, lowest: int) -> Any:
    """A field for `checked_whole`."""
    return _parameter(lambda label, value: checked_whole(label, value, lowest), default)


def seconds(default: float | None) -> Any:
    """A field for a positive number of seconds."""
    return number(default, "a positive number of seconds", lambda value: value > 0)


def amount(default: float) -> Any:
    """A field for a number that is 0 or more."""
    return number(default, "0 or more", lambda value: value >= 0)


def choice(default: str, *others: str) -> Any:
    """A field for `checked_choice`: one of these words."""
    return _parameter(lambda label, value: checked_choice(label, value, (default, *others)), default)


def column(reward: str, name: str, columns: Mapping[str, Any], count: int, advice: str = "") -> Sequence[Any]:
    """Return a required column of a reward, with `count` entries; `advice` says what to do if it is missing."""
    values = columns.get(name)
    if values is None:
        present = sorted(columns.keys() - PASSED_BY_TRL - {name})
        raise RewardError(f"{reward} needs the column {name!r}; the columns present are {present}. {advice}".rstrip())
    listed = isinstance(values, Sized) and hasattr(values, "__getitem__") and not isinstance(values, str | Mapping)
    if not listed or len(values) != count:
        entries = len(values) if listed else f"{type(values).__name__}, no list of"
        raise RewardError(f"{reward} got {count} completions but {entries} entries in {name!r}.")
    return values  # type: ignore[no-any-return]


def optional_module(reward: str, name: str) -> ModuleType:
    """Import a module of an optional package when it is first needed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0].replace("_", "-")
        raise ConfigurationError(f"{reward} needs a package that is not installed: pip install {package}") from error
