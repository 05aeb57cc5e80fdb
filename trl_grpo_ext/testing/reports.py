"""What the conformance kit found out about a plugin: kept and broken rules, the level that it reached, and a badge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from textwrap import indent
from typing import Any, Literal

from ..errors import TRLGRPOExtError
from ..guard.untrusted import one_line, printable
from ..plugins.kinds import LABELS, Kind
from .rules import GATES, Rule, rules_of

Level = Literal["none", "bronze", "silver", "gold"]
LEVELS: tuple[Level, ...] = ("none", "bronze", "silver", "gold")
"""How much of what is asked of a plugin it has been shown to keep, from nothing to everything; `Report.level`."""

_CONTRACT = GATES | {"inputs", "gradient", "finite", "non_negative", "mask", "groups"}
"""Bronze: what a run stops for when it meets it."""

_ELSEWHERE = frozenset(
    {"determinism", "neighbours", "pickle", "split", "micro_batches", "ranks", "gathers", "state", "evaluation"}
)
"""Gold: what makes a run on several processes, or one that was resumed, the same run. None may be declared away."""

_COLOURS: Mapping[Level, str] = {"none": "c0392b", "bronze": "cd7f32", "silver": "a8a9ad", "gold": "d4af37"}


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
        measured: Measurements, such as `seconds_per_completion`.
        no_effect: Why the checks do not show that the plugin does anything (all texts got one score, say); else empty.
        printed: What the plugin printed (untrusted text), and the total number of lines.
        documentation: Where its distribution documents it: a URL, its README, or docs/plugins.md of this project; empty
            where it does not.
        because: Of rules that were not checked, by name: "Exempt" because of the plugin's declarations, "Unknown"
            because another one is broken. The others do not apply.
    """

    subject: str
    kind: Kind
    passed: tuple[Rule, ...] = ()
    violations: tuple[Violation, ...] = ()
    skipped: tuple[tuple[Rule, str], ...] = ()
    measured: Mapping[str, float | str] = field(default_factory=dict)
    no_effect: str = ""
    printed: tuple[tuple[str, ...], int] = ((), 0)
    documentation: str = ""
    because: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether no rule is broken."""
        return not self.violations

    @property
    def roots(self) -> tuple[Violation, ...]:
        """The broken rules that do not follow from another one."""
        return tuple(broken for broken in self.violations if not broken.follows)

    def following(self, root: Violation) -> tuple[Violation, ...]:
        """The broken rules that follow from this one."""
        return tuple(broken for broken in self.violations if broken.follows == root.rule.name)

    @property
    def level(self) -> Level | None:
        """One of `LEVELS`; None where only some of the rules were asked for."""
        return self._standing[0]

    @property
    def missing(self) -> str:
        """What the next level needs, in words; empty at the highest."""
        return self._standing[1]

    @property
    def _standing(self) -> tuple[Level | None, str]:
        if len(self.passed) + len(self.violations) + len(self.skipped) < len(rules_of(self.kind)):
            return None, ""
        contract = [one.rule.name for one in self.violations if one.rule.short in _CONTRACT]
        contract += self._not_checked_because("Unknown", _CONTRACT)
        if contract:
            return "none", f"keep {_listed(contract)}"
        if self.violations:
            return "bronze", f"keep {_listed([one.rule.name for one in self.violations])}"
        if self.no_effect:
            return "bronze", "show that it works, see above"
        exempt = self._not_checked_because("Exempt", _ELSEWHERE)
        if exempt:
            return "silver", f"{_listed(exempt)} checked; its declarations exempt it"
        if not self.documentation:
            return "silver", "a Documentation URL in its distribution's metadata, or a README that names it"
        return "gold", ""

    def _not_checked_because(self, cause: str, among: frozenset[str]) -> list[str]:
        return [rule.name for rule, _ in self.skipped if rule.short in among and self.because.get(rule.name) == cause]

    def plain(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {
            "subject": self.subject,
            "kind": self.kind,
            "ok": self.ok,
            "level": self.level,
            "missing": self.missing or None,
            "badge": None if self.level is None else badge(self.level),
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
            "measured": dict(self.measured),
            "no_effect": self.no_effect or None,
            "printed": list(self.printed[0]),
        }

    def counts(self) -> str:
        """How many rules are kept, broken and not checked."""
        kept = f"{len(self.passed)} rule{'s' * (len(self.passed) != 1)} kept"
        return f"{kept}, {len(self.violations)} broken, {len(self.skipped)} not checked"

    def not_checked(self) -> str:
        """The rules that were not checked, by reason, in one line; empty where there are none."""
        reasons: dict[str, list[str]] = {}
        for rule, reason in self.skipped:
            reasons.setdefault(reason, []).append(rule.short)
        return "; ".join(f"{reason} ({_listed(names)})" for reason, names in reasons.items())

    def lines(self, verbose: bool = False) -> Iterator[tuple[int, list[tuple[str, str]]]]:
        """The report for people: each line's indentation, and its parts with their styles as `rich` names them."""
        style = "bold red" if not self.ok else "bold yellow" if self.no_effect else "bold green"
        yield 0, [(one_line(f"{LABELS[self.kind]} {self.subject}"), "bold"), (": ", ""), (self.counts(), style)]
        for root in self.roots:
            yield 2, [("broken ", "red"), (root.rule.name, "bold red")]
            said = {"found": root.message, "example": root.example, "rule": root.rule.summary}
            for label, text in {**said, "why": root.rule.why}.items():
                for place, line in enumerate(printable(text).split("\n") if text else ()):
                    yield 4, [("" if place else f"{label}: ", "dim"), (line, "")]
            if followers := [broken.rule.name for broken in self.following(root)]:
                names = f": {', '.join(followers)}" if verbose else ""
                yield 4, [(f"and {len(followers)} that follow{'s' * (len(followers) == 1)} from it{names}", "red")]
        lines, count = self.printed
        kept = ", ".join(rule.name for rule in self.passed) if verbose else ""
        first = f"it printed {count} line{'s' * (count > 1)}, the first: "
        measured = {name: f"{x:.3g}" if isinstance(x, float) else str(x) for name, x in self.measured.items()}
        for label, text, style in (
            ("not shown to work: ", self.no_effect, "bold yellow"),
            ("not checked: ", self.not_checked(), "yellow"),
            ("kept: ", kept, "green"),
            (first, lines[0] if lines else "", "dim"),
            *((f"measured {name}: ", text, "dim") for name, text in measured.items()),
            ("", self.standing() if self.level else "", ""),
        ):
            if text:
                yield 2, [(label, style), (one_line(text), "")]

    def __str__(self) -> str:
        return "\n".join(" " * width + "".join(text for text, _ in parts) for width, parts in self.lines(True))

    def standing(self) -> str:
        """The level and what the next one needs, in a line."""
        following = LEVELS[LEVELS.index(self.level) + 1] if self.level and self.missing else ""
        return f"level: {self.level}" + (f"; for {following}: {self.missing}" if following else "")


def lowest(levels: Iterable[Level]) -> Level:
    """The level of several plugins, such as those of a distribution; "none" where there are none."""
    return min(levels, key=LEVELS.index, default="none")


def badge(level: Level) -> str:
    """A level as an image in Markdown, for a README. Nothing is fetched here; whoever shows the README does."""
    return f"![trl-grpo-ext: {level}](https://img.shields.io/badge/trl--grpo--ext-{level}-{_COLOURS[level]})"


_LISTED = 6


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
