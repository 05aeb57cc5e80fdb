"""Another policy that a hook compares with: the reference that TRL keeps, or a model of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from ..types import Rollout

REFERENCE = "reference"
"""The policy that TRL keeps as the reference; any other name is a model's id or path."""


def checked_model(label: str, name: object) -> str:
    """Return a parameter that names a model.

    Args:
        label: `<plugin>: <parameter>`.
        name: What the parameter was set to.

    Raises:
        ConfigurationError: It is no name.
    """
    if not isinstance(name, str) or not name.strip():
        raise ConfigurationError(f"{label} must be a model's id or path, or {REFERENCE!r}, got {name!r}.")
    return name


def needs_of(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The `needs` and the `teachers` of a hook that compares the policy that generated with this one."""
    return (("old_logps", "ref_logps"), ()) if name == REFERENCE else (("old_logps",), (name,))


def logps_of(label: str, name: str, rollout: Rollout) -> torch.Tensor:
    """Log-probabilities `(B, T)` under it.

    Raises:
        ConfigurationError: The rollout does not have them.
    """
    found = rollout.ref_logps_B_T if name == REFERENCE else rollout.teacher_logps_B_T.get(name)
    return needed(label, "ref_logps_B_T" if name == REFERENCE else f"teacher_logps_B_T[{name!r}]", found)


def needed(label: str, field: str, tensor: torch.Tensor | None) -> torch.Tensor:
    """Return what a hook has among its `needs`; the trainer provides it, a rollout made by hand may lack it.

    Raises:
        ConfigurationError: It is None.
    """
    if tensor is None:
        raise ConfigurationError(f"{label}: rollout.{field} must be given, got None.")
    return tensor
