"""Running rules: what a broken one says, which ones it makes pointless, and the smallest input that breaks it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..guard.outcomes import shown
from .report import Violation
from .rules import Rule

_TRIES = 300
_SECONDS = 10.0

T = TypeVar("T")


class Broken(Exception):  # noqa: N818
    """A rule is broken.

    Args:
        message: What was wrong, with the values.
        example: The input, as text.
    """

    def __init__(self, message: str, example: str = "") -> None:
        super().__init__(message)
        self.message, self.example = message, example


class NotChecked(Exception):  # noqa: N818
    """A rule says nothing about this plugin; the message is the reason."""


@dataclass(frozen=True)
class Findings:
    """What became of the rules."""

    passed: tuple[Rule, ...]
    violations: tuple[Violation, ...]
    skipped: tuple[tuple[Rule, str], ...]


def run_rules(rules: Sequence[Rule], checks: Mapping[str, Callable[[], None]], gates: Collection[str] = ()) -> Findings:
    """Run the checks of rules in order.

    Args:
        rules: The rules.
        checks: By a rule's name, its check, which returns, or raises `Broken` or `NotChecked`.
        gates: Rules without which the others make no sense: where one is broken, those behind it are not checked.
    """
    passed, violations, skipped = [], [], []
    closed: str | None = None
    for rule in rules:
        if closed is not None:
            skipped.append((rule, f"{closed} is broken"))
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a plugin's warnings are for its users
                checks[rule.name]()
        except NotChecked as reason:
            skipped.append((rule, str(reason)))
            continue
        except Broken as broken:
            violations.append(Violation(rule, broken.message, broken.example))
        else:
            passed.append(rule)
            continue
        if rule.name in gates:
            closed = rule.name
    return Findings(tuple(passed), tuple(violations), tuple(skipped))


def raised(error: BaseException) -> str:
    """An exception of a plugin in words."""
    text = str(error)
    return f"raised {type(error).__name__}: {text if text.isprintable() and len(text) < 400 else shown(text)}"


def over(items: Iterable[T], judge: Callable[[T], None], smaller: Callable[[T], Iterable[T]]) -> None:
    """Judge inputs; of the first on which the rule is broken, report the smallest that still breaks it.

    Args:
        items: Inputs, in the order in which they are tried.
        judge: Returns where all is well and raises `Broken` where not. An exception of the plugin is the judge's to
            catch.
        smaller: What an input can be made smaller to, the greatest steps first.
    """
    for item in items:
        broken = _broken(judge, item)
        if broken is not None:
            raise smallest(item, broken, judge, smaller)


def smallest(item: T, broken: Broken, judge: Callable[[T], None], smaller: Callable[[T], Iterable[T]]) -> Broken:
    """Greedily take any smaller input that is still broken, until none is. The same in every run."""
    until, tries = time.monotonic() + _SECONDS, 0
    going = True
    while going:
        going = False
        for candidate in smaller(item):
            tries += 1
            if tries > _TRIES or time.monotonic() > until:
                return broken
            again = _broken(judge, candidate)
            if again is not None:
                item, broken, going = candidate, again, True
                break
    return broken


def _broken(judge: Callable[[T], None], item: T) -> Broken | None:
    try:
        judge(item)
    except Broken as broken:
        return broken
    return None
