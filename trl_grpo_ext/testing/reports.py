"""What the conformance kit found out about a plugin: kept and broken rules, and how people and programs read it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import TRLGRPOExtError
from ..guard.untrusted import one_line, printable
from ..plugins.kinds import LABELS, Kind
from .rules import Rule


class ConformanceError(AssertionError, TRLGRPOExtError):
    """A plugin breaks a rule of its kind; the message is the report."""


@dataclass(frozen=True)
class Violation:
    """A rule that a plugin breaks."""

    rule: Rule
    message: str  # what was wrong, with the values
    example: str  # an input on which it breaks the rule, as printable text


@dataclass(frozen=True)
class Report:
    """The kit's report on one plugin: the rules that it keeps, breaks, and that were not checked, with the reason.

    `no_effect` says why the checks do not show that the plugin does anything (all texts got one score, say), else it is
    empty; `printed` has the lines that the plugin printed (untrusted text).
    """

    subject: str
    kind: Kind
    passed: tuple[Rule, ...] = ()
    violations: tuple[Violation, ...] = ()
    skipped: tuple[tuple[Rule, str], ...] = ()
    no_effect: str = ""
    printed: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no rule is broken."""
        return not self.violations

    def plain(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {
            "subject": self.subject,
            "kind": self.kind,
            "ok": self.ok,
            "passed": [rule.name for rule in self.passed],
            "violations": [
                {
                    "rule": broken.rule.name,
                    "summary": broken.rule.summary,
                    "why": broken.rule.why,
                    "message": broken.message,
                    "example": broken.example,
                }
                for broken in self.violations
            ],
            "skipped": [{"rule": rule.name, "reason": reason} for rule, reason in self.skipped],
            "no_effect": self.no_effect or None,
            "printed": list(self.printed),
        }

    def lines(self) -> Iterator[tuple[int, list[tuple[str, str]]]]:
        """The report for people: each line's indentation, and its parts with their styles as `rich` names them."""
        kept = f"{len(self.passed)} rule{'s' * (len(self.passed) != 1)} kept"
        counts = f"{kept}, {len(self.violations)} broken, {len(self.skipped)} not checked"
        style = "bold red" if not self.ok else "bold yellow" if self.no_effect else "bold green"
        yield 0, [(one_line(f"{LABELS[self.kind]} {self.subject}"), "bold"), (": ", ""), (counts, style)]
        for broken in self.violations:
            rule = broken.rule
            yield 2, [("broken ", "red"), (rule.name, "bold red")]
            said = {"found": broken.message, "example": broken.example, "rule": rule.summary, "why": rule.why}
            for label, text in said.items():
                for place, line in enumerate(printable(text).split("\n") if text else ()):
                    yield 4, [("" if place else f"{label}: ", "dim"), (line, "")]
        reasons: dict[str, list[str]] = {}
        for rule, reason in self.skipped:
            reasons.setdefault(reason, []).append(rule.short)
        not_checked = "; ".join(f"{reason} ({', '.join(names)})" for reason, names in reasons.items())
        for label, text, style in (
            ("not shown to work: ", self.no_effect, "bold yellow"),
            ("not checked: ", not_checked, "yellow"),
            ("it printed: ", self.printed[0] if self.printed else "", "dim"),
        ):
            if text:
                yield 2, [(label, style), (one_line(text), "")]

    def __str__(self) -> str:
        return "\n".join(" " * width + "".join(text for text, _ in parts) for width, parts in self.lines())
