"""What the conformance kit found out about a plugin: kept and broken rules, and how people and programs read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from textwrap import indent
from typing import Any

from ..errors import TRLGRPOExtError
from ..guard.untrusted import one_line, printable
from ..plugins.kinds import LABELS, Kind
from .rules import Rule

_LISTED = 6


class ConformanceError(AssertionError, TRLGRPOExtError):
    """A plugin breaks a rule of its kind; the message is the report."""


@dataclass(frozen=True)
class Violation:
    """A rule that a plugin breaks.

    Attributes:
        rule: The rule.
        message: What was wrong, with the values.
        example: An input on which it breaks the rule, as printable text.
        cause: An exception and its line, or a part of the contract; empty if two results differ.
        follows: The name of the broken rule that causes this one, if any.
    """

    rule: Rule
    message: str
    example: str
    cause: str = ""
    follows: str = ""

    def __str__(self) -> str:
        example = [f"example: {self.example}"] if self.example else []
        said = "\n".join([self.message, *example, f"why: {self.rule.why}"])
        return f"broken: {self.rule.name}: {self.rule.summary}\n{indent(said, '  ')}"


@dataclass(frozen=True)
class Report:
    """The kit's report on one plugin.

    Attributes:
        subject: The plugin's name.
        kind: Its kind.
        passed: The rules that it keeps.
        violations: The rules that it breaks, in the order of the rules.
        skipped: The rules that were not checked, with the reason.
        no_effect: Why the checks do not show that the plugin does anything (all texts got one score, say); else empty.
        printed: The first lines that the plugin printed (untrusted text).
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

    @property
    def roots(self) -> tuple[Violation, ...]:
        """The broken rules that do not follow from another one."""
        return tuple(broken for broken in self.violations if not broken.follows)

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
                    "message": broken.message,
                    "example": broken.example,
                    "why": broken.rule.why,
                    "follows": broken.follows or None,
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
        for root in self.roots:
            yield 2, [("broken ", "red"), (root.rule.name, "bold red")]
            said = {"found": root.message, "example": root.example, "rule": root.rule.summary}
            for label, text in {**said, "why": root.rule.why}.items():
                for place, line in enumerate(printable(text).split("\n") if text else ()):
                    yield 4, [("" if place else f"{label}: ", "dim"), (line, "")]
            if followers := [broken.rule.name for broken in self.violations if broken.follows == root.rule.name]:
                yield 4, [("and what follows from it: ", "red"), (_listed(followers), "")]
        reasons: dict[str, list[str]] = {}
        for rule, reason in self.skipped:
            reasons.setdefault(reason, []).append(rule.short)
        not_checked = "; ".join(f"{reason} ({_listed(names)})" for reason, names in reasons.items())
        for label, text, style in (
            ("not shown to work: ", self.no_effect, "bold yellow"),
            ("not checked: ", not_checked, "yellow"),
            ("it printed: ", self.printed[0] if self.printed else "", "dim"),
        ):
            if text:
                yield 2, [(label, style), (one_line(text), "")]

    def __str__(self) -> str:
        return "\n".join(" " * width + "".join(text for text, _ in parts) for width, parts in self.lines())


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def with_roots(violations: Sequence[Violation]) -> tuple[Violation, ...]:
    """Set for each violation which other one it follows from.

    A violation follows from an earlier one of the same cause (the same exception at the same line, the same part of the
    contract). A difference between two results also follows from any broken rule that its own rests on, directly or
    indirectly.
    """
    broken = {violation.rule.short: violation for violation in violations}
    first_of: dict[str, Violation] = {}
    for violation in violations:
        first_of.setdefault(violation.cause or violation.rule.name, violation)

    def root(violation: Violation, seen: frozenset[str] = frozenset()) -> str:
        """The rule at the root of it; empty if that is its own."""
        if violation.cause:
            above = [one for one in [first_of[violation.cause]] if one is not violation]
        else:
            above = [broken[one] for one in violation.rule.rests_on if one in broken and one not in seen]
        return (root(above[0], seen | {violation.rule.short}) or above[0].rule.name) if above else ""

    return tuple(replace(violation, follows=root(violation)) for violation in violations)
