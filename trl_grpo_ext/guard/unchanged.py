"""Detect plugins that write to their inputs: a tensor counts its in-place writes, a list has other entries."""

from __future__ import annotations

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
    if isinstance(value, list):
        return [id(entry) for entry in value]
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    return value._version if is_tensor and not value.is_inference() else None
