"""Are two tensors the same, and if not, where? Copies of plugins that share nothing with the original."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .running import Broken, raised

RELATIVE, ABSOLUTE = 1e-5, 1e-6
"""How far two numbers may be apart that ought to be the same: a plugin may well compute in float32."""


def same(
    ours: torch.Tensor, theirs: torch.Tensor, what: str, example: object, live: torch.Tensor, *, exactly: bool = False
) -> None:
    """Compare two tensors `(B, T)` where `live` is not zero.

    Raises:
        Broken: They differ; `what` says which two they are, as in "with padding and without".
    """
    relative, absolute = (0.0, 0.0) if exactly else (RELATIVE, ABSOLUTE)
    close = torch.isclose(ours, theirs, rtol=relative, atol=absolute, equal_nan=True) | (live == 0)
    if not bool(close.all()):
        row, token = (int(i) for i in (~close).nonzero()[0])
        digits = 17 if exactly else 6
        one, other = number(ours[row, token], digits), number(theirs[row, token], digits)
        raise Broken(f"{what}: {one} and {other} at row {row}, token {token}", str(example))


def number(value: torch.Tensor | float, digits: int = 6) -> str:
    """A number for a message."""
    return f"{float(value):.{digits}g}"


def tensors_in(context: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in the fields of a context, with the fields' names."""
    for field in dataclasses.fields(context):
        value = getattr(context, field.name)
        if isinstance(value, torch.Tensor):
            yield field.name, value
        elif isinstance(value, Mapping):
            yield from ((f"{field.name}[{key!r}]", item) for key, item in value.items() if torch.is_tensor(item))


class Unchanged:
    """Looks whether tensors, and the lists of a context, are as they were."""

    def __init__(self, context: Any, **others: torch.Tensor) -> None:
        self._tensors = [*others.items(), *tensors_in(context)]
        self._before = [(tensor.clone(), tensor._version) for _, tensor in self._tensors]
        self._context = context
        self._lists = {name: copy.deepcopy(value) for name, value in self._plain()}

    def check(self, example: object) -> None:
        """Raise `Broken` where one of them has changed."""
        for (name, tensor), (value, version) in zip(self._tensors, self._before, strict=True):
            untouched = tensor._version == version and torch.equal(tensor.nan_to_num(), value.nan_to_num())
            if not untouched:
                raise Broken(f"it wrote to {name}, in place", str(example))
        for name, value in self._plain():
            if value != self._lists[name]:
                raise Broken(f"it changed {name}", str(example))

    def _plain(self) -> list[tuple[str, Any]]:
        fields = [field.name for field in dataclasses.fields(self._context)]
        names = [name for name in fields if name in ("prompts", "completions", "texts", "columns", "reward_spans")]
        return [(name, getattr(self._context, name)) for name in names]


def fresh(plugin: Any) -> Any:
    """A copy that remembers what the plugin remembers and shares nothing with it; itself where it cannot be copied."""
    try:
        return copy.deepcopy(plugin)
    except Exception:  # whatever a plugin's own __deepcopy__ or __reduce__ raises
        return plugin


def pickled(plugin: Any) -> Any:
    """A plugin after pickling and unpickling.

    Raises:
        Broken: It does not pickle.
    """
    try:
        return pickle.loads(pickle.dumps(plugin))
    except Exception as error:  # pickle raises whatever the object's own methods raise
        hint = ". Define functions and classes at the top of a module, and open files, locks and models on first use."
        raise Broken(f"pickling it {raised(error)}{hint}") from error
