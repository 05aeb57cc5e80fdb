"""What the kit found out about one plugin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import TRLGRPOExtError
from ..plugins.selection import LABELS, Kind
from .rules import Rule


class ConformanceError(AssertionError, TRLGRPOExtError):
    """A plugin breaks a rule of its kind; the message is the report."""


@dataclass(frozen=True)
class Violation:
    """A rule that a plugin breaks.

    Attributes:
        rule: The rule.
        message: What was wrong, with the values.
        example: The smallest input found on which it breaks the rule, as text that can be printed.
    """

    rule: Rule
    message: str
    example: str

    def __str__(self) -> str:
        lines = [f"broken: {self.rule.name}: {self.rule.summary}", *_indented(self.message)]
        if self.example:
            lines += _indented(f"smallest example: {self.example}")
        return "\n".join([*lines, *_indented(f"why: {self.rule.why}")])


@dataclass(frozen=True)
class Report:
    """What the kit found out about one plugin.

    Attributes:
        subject: The plugin's name.
        kind: Its kind.
        passed: The rules that it keeps.
        violations: Those that it breaks.
        skipped: Those that were not checked, with the reason.
        measured: What was measured by the way, such as `seconds_per_completion`.
    """

    subject: str
    kind: Kind
    passed: tuple[Rule, ...] = ()
    violations: tuple[Violation, ...] = ()
    skipped: tuple[tuple[Rule, str], ...] = ()
    measured: Mapping[str, float | str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether no rule is broken."""
        return not self.violations

    def plain(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        return {
            "subject": self.subject,
            "kind": self.kind,
            "ok": self.ok,
            "passed": [rule.name for rule in self.passed],
            "violations": [
                {
                    "rule": broken.rule.name,
                    "summary": broken.rule.summary,
                    "message": broken.message,
                    "example": broken.example,
                    "why": broken.rule.why,
                }
                for broken in self.violations
            ],
            "skipped": [{"rule": rule.name, "reason": reason} for rule, reason in self.skipped],
            "measured": dict(self.measured),
        }

    def __str__(self) -> str:
        counts = f"{len(self.passed)} rules kept, {len(self.violations)} broken, {len(self.skipped)} not checked"
        lines = [f"{LABELS[self.kind]} {self.subject}: {counts}"]
        lines += _indented("\n".join(str(violation) for violation in self.violations)) if self.violations else []
        lines += [f"  not checked: {rule.name}: {reason}" for rule, reason in self.skipped]
        lines += [f"  measured: {name}: {_shown(value)}" for name, value in self.measured.items()]
        return "\n".join(lines)


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.split("\n")]


def _shown(value: float | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
