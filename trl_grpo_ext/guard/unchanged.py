"""Detect plugins that write to their inputs, by fingerprints before and after the call.

A tensor counts its in-place writes, so comparing the counts costs nothing. For a list, the identity of every entry is
compared, and the contents of a few rows (of all rows in a run's first step).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

_FEW = 4


class Fingerprints:
    """Fingerprints of inputs by name; of lists, the contents of all rows if `whole`, else of a few."""

    def __init__(self, inputs: Mapping[str, Any], whole: bool) -> None:
        self._inputs, self._whole = dict(inputs), whole
        self._before = dict(self._taken())

    def changed(self) -> str | None:
        """The name of an input that has changed, or None."""
        return next((name for name, now in self._taken() if now != self._before[name]), None)

    def _taken(self) -> Iterator[tuple[str, Any]]:
        for name, value in self._inputs.items():
            if isinstance(value, list):
                rows = range(0, len(value), 1 if self._whole else max(1, len(value) // _FEW))
                yield name, (len(value), [id(entry) for entry in value], [_of(value[row]) for row in rows])
            elif _is_tensor(value) and not value.is_inference():
                yield name, value._version


def _of(value: Any) -> Any:
    """The value as immutable parts: lists and mappings taken apart, strings as they are."""
    if isinstance(value, list | tuple):
        return tuple(map(_of, value)) if value and not isinstance(value[0], int) else tuple(value)
    if isinstance(value, dict):
        return tuple((name, _of(item)) for name, item in value.items())
    if _is_tensor(value):
        return id(value), value._version
    return value if isinstance(value, str | int | float | bool | bytes) else id(value)


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
