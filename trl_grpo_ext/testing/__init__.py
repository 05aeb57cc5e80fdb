"""The conformance kit: does a plugin keep the rules that training relies on?

    from trl_grpo_ext.testing import assert_conforms

    def test_it_conforms() -> None:
        assert_conforms("reward", "polite", columns={"answer": "yes"})

The same checks run as `trl-grpo-ext check NAME`. A reward without torch is checked without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .kit import ConformanceError, Report, Violation, assert_conforms, check
from .rules import RULES, Rule

if TYPE_CHECKING:
    from .builders import make_forward, make_rollout, make_terms

__all__ = [
    "RULES",
    "ConformanceError",
    "Report",
    "Rule",
    "Violation",
    "assert_conforms",
    "check",
    "make_forward",
    "make_rollout",
    "make_terms",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import builders  # which needs torch

    return getattr(builders, name)
