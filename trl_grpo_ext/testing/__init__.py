"""The conformance kit: does a plugin keep the rules that training relies on?

    from trl_grpo_ext.testing import assert_conforms

    def test_it_conforms() -> None:
        assert_conforms("reward", "polite", columns={"answer": "yes"})

The same checks run as `pytest --trl-grpo-ext` and as `trl-grpo-ext check NAME`. What is in here is loaded on first use,
so that pytest, which imports the plugin of this package at every start, pays nothing for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .builders import make_forward as make_forward
    from .builders import make_rollout as make_rollout
    from .kit import assert_conforms as assert_conforms
    from .kit import check as check
    from .kit import check_advantage_hook as check_advantage_hook
    from .kit import check_group_filter as check_group_filter
    from .kit import check_loss_aggregation as check_loss_aggregation
    from .kit import check_reward as check_reward
    from .reports import ConformanceError as ConformanceError
    from .reports import Report as Report
    from .reports import Violation as Violation
    from .rules import RULES as RULES
    from .rules import Rule as Rule

_HOMES = {
    "builders": ("make_forward", "make_rollout"),
    "kit": (
        *("assert_conforms", "check", "check_advantage_hook", "check_group_filter", "check_loss_aggregation"),
        "check_reward",
    ),
    "reports": ("ConformanceError", "Report", "Violation"),
    "rules": ("RULES", "Rule"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
