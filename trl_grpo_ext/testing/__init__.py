"""The conformance kit: does a plugin keep the rules that training relies on?

    from trl_grpo_ext.testing import assert_conforms

    def test_it_conforms() -> None:
        assert_conforms("reward", "polite", columns={"answer": "yes"})

The same checks run as `trl-grpo-ext check NAME`. What is in here is loaded on first use, so that a reward without torch
is checked without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .builders import make_forward as make_forward
    from .builders import make_rollout as make_rollout
    from .builders import make_terms as make_terms
    from .kit import assert_conforms as assert_conforms
    from .kit import check as check
    from .reports import ConformanceError as ConformanceError
    from .reports import Report as Report
    from .reports import Violation as Violation
    from .rules import RULES as RULES
    from .rules import Rule as Rule

_HOME_OF = {
    **dict.fromkeys(("make_forward", "make_rollout", "make_terms"), "builders"),
    **dict.fromkeys(("assert_conforms", "check"), "kit"),
    **dict.fromkeys(("ConformanceError", "Report", "Violation"), "reports"),
    **dict.fromkeys(("RULES", "Rule"), "rules"),
}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
