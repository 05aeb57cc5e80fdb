"""Detect plugins that write to their inputs, by fingerprints before and after the call."""

import sys
from collections.abc import Mapping
from typing import Any


class Fingerprints:
    """Fingerprints of inputs by name."""

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self._inputs = dict(inputs)
        self._before = {name: _fingerprint(value) for name, value in self._inputs.items()}

    def changed(self) -> str | None:
        """The name of an input that has changed, or None."""
        return next((name for name, value in self._inputs.items() if _fingerprint(value) != self._before[name]), None)


def _fingerprint(value: Any) -> Any:
    if isinstance(value, str | int | float | bytes):
        return value
    if isinstance(value, list | tuple):
        of_tokens = bool(value) and isinstance(value[0], int)
        return tuple(value) if of_tokens else tuple(map(_fingerprint, value))
    if isinstance(value, dict):
        return tuple((name, _fingerprint(item)) for name, item in value.items())
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and not value.is_inference():
        return id(value), value._version
    return id(value)
