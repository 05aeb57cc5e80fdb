"""Check a plugin against the rules of its kind, one after the other, in this process.

A plugin declares what its checks need as `conformance`, a mapping. The caller's options win over it.
"""

import contextlib
import io
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ConfigurationError, TRLGRPOExtError
from ..guard.calls import reward_name
from ..guard.parameters import checked_number
from ..guard.untrusted import one_line, printable
from ..plugins.building import import_plugin
from ..plugins.discovery import find
from ..plugins.kinds import FACTS, LABELS, Kind, kind_of
from ..plugins.loading import resolve
from ..plugins.selection import Selection, parse_selection
from .rules import GATES, Broken, Checks, Finding, NotChecked, Rule, rules_of

TIMEOUT = 60.0  # seconds for each rule, unless the caller or the plugin sets another limit
OPTIONS = ("parameters", "columns", "completions", "prompts", "rules", "timeout", "unreadable", "tokenizer")


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
    """The kit's report on one plugin."""

    subject: str
    kind: Kind
    passed: tuple[Rule, ...] = ()  # the rules that it keeps
    violations: tuple[Violation, ...] = ()
    skipped: tuple[tuple[Rule, str], ...] = ()  # rules that were not checked, with the reason
    no_effect: str = ""  # why the checks do not show that the plugin does anything (all texts got one score, say)
    printed: tuple[str, ...] = ()  # lines that the plugin printed (untrusted text)

    @property
    def ok(self) -> bool:
        return not self.violations

    def plain(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        violations = [
            {"rule": one.rule.name, "summary": one.rule.summary, "why": one.rule.why}
            | {"message": one.message, "example": one.example}
            for one in self.violations
        ]
        return {
            "subject": self.subject,
            "kind": self.kind,
            "ok": self.ok,
            "passed": [rule.name for rule in self.passed],
            "violations": violations,
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


def check(kind: str, plugin_or_selection: Any, **options: Any) -> Report:
    """Check a plugin against every rule of its kind.

    Args:
        kind: One of `KINDS`, or a word that the commands take, such as "hook".
        plugin_or_selection: A plugin object or a selection: a name, a dotted path, a mapping with parameters.
        **options: `OPTIONS`, which docs/writing_plugins.md explains; None leaves it to the plugin's declaration.

    Raises:
        ConfigurationError: There is no such kind, rule or option.
        PluginError: The plugin cannot be loaded, or is not of the form of its kind.
    """
    of_kind = kind_of(kind)
    given = {key: value for key, value in options.items() if value is not None}
    _check_keys(given, "check")
    rules = rules_of(of_kind, given.get("rules"))

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        checks = _checks(of_kind, plugin_or_selection, given)
        found = _findings(rules, checks)
        broken = {rule: one for rule, one in found.items() if isinstance(one, Broken)}
        no_effect = ""
        with contextlib.suppress(Exception):  # of the plugin's, where the rules that report it were left out
            no_effect = "" if broken else checks.no_effect()
    return Report(
        subject=checks.name,
        kind=of_kind,
        passed=tuple(rule for rule, one in found.items() if one is None),
        violations=tuple(Violation(rule, one.message, one.example) for rule, one in broken.items()),
        skipped=tuple((rule, str(one)) for rule, one in found.items() if isinstance(one, NotChecked)),
        no_effect=no_effect,
        printed=tuple(printed.getvalue().splitlines()),
    )


def assert_conforms(kind: str, plugin_or_selection: Any, **options: Any) -> None:
    """Check a plugin like `check`, and raise if it breaks a rule: for tests.

    Raises:
        ConformanceError: It breaks a rule. The message is the report.
        ConfigurationError, PluginError: As `check`.
    """
    __tracebackhide__ = True
    report = check(kind, plugin_or_selection, **options)
    if not report.ok:
        raise ConformanceError(str(report))


def _findings(rules: Sequence[Rule], checks: Checks) -> dict[Rule, Finding]:
    found: dict[Rule, Finding] = {}
    shut = ""
    for rule in rules:
        if shut:
            found[rule] = NotChecked(f"{shut} is broken")
            continue
        with _time_limit(checks.timeout, checks):
            found[rule] = checks.check(rule)
        if isinstance(found[rule], Broken) and rule.short in GATES:
            shut = rule.name
    return found


@contextlib.contextmanager
def _time_limit(seconds: float, checks: Checks) -> Iterator[None]:
    """Raise `Broken` in what takes longer, again and again until it ends; in the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: Any) -> None:
        raise Broken(f"it did not return within {seconds:g} s", checks.example)

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _checks(kind: Kind, plugin_or_selection: Any, given: Mapping[str, Any]) -> Checks:
    """The checks of a plugin. The modules of its kind are imported here, since most import torch."""
    plugin, name, options = _subject(kind, plugin_or_selection, given)
    texts, prompts = (as_texts(options.get(what)) for what in ("completions", "prompts"))
    columns = as_columns(options.get("columns"))
    checks: Checks
    if kind == "reward":
        from .rewards import RewardChecks, ordinary_call

        checks = RewardChecks(plugin, ordinary_call(plugin, texts, prompts, columns), options)
    elif kind == "prompt_sampler":
        from .samplers import SamplerChecks

        checks = SamplerChecks(plugin, columns)
    else:
        from . import tensor_checks
        from .batches import Setting

        of_kind: dict[Kind, Callable[..., Checks]] = {
            "advantage_hook": tensor_checks.HookChecks,
            "loss_aggregation": tensor_checks.AggregationChecks,
            "group_filter": tensor_checks.FilterChecks,
            "token_loss": tensor_checks.TokenLossChecks,
        }
        checks = of_kind[kind](plugin, Setting(texts, prompts, columns, options.get("tokenizer")))
    checks.name = name
    timeout = options.get("timeout", TIMEOUT)
    checks.timeout = checked_number("timeout", timeout, "a positive number of seconds", lambda x: x > 0)
    checks.deterministic = FACTS[kind].declaration.of(plugin).deterministic
    return checks


def _subject(kind: Kind, asked: Any, given: Mapping[str, Any]) -> tuple[Any, str, dict[str, Any]]:
    """A plugin, loaded if need be, by default with the parameters it declares for checks; its name; its options."""
    options: Mapping[str, Any] = {}
    if isinstance(asked, str | Mapping | Selection):
        asked = parse_selection(kind, asked)
        options = _declared(kind, import_plugin(find(kind, asked)), asked.name)
        if not asked.parameters:
            asked = replace(asked, parameters=dict({**options, **given}.get("parameters", {})))
    plugin = resolve(kind, asked).object
    name = asked.name if isinstance(asked, Selection) else reward_name(plugin)
    return plugin, name, {**options, **_declared(kind, plugin, name), **given}


def _declared(kind: Kind, exported: Any, name: str) -> Mapping[str, Any]:
    declared = FACTS[kind].declaration.of(exported).conformance
    _check_keys(declared, f"{name}, conformance")
    return declared


def _check_keys(options: Mapping[str, Any], place: str) -> None:
    for key in options:
        if key not in OPTIONS:
            raise ConfigurationError(f"{place} has no option {key!r}; there are {', '.join(OPTIONS)}.")


def as_columns(columns: Any) -> dict[str, list[Any]]:
    """Columns as lists of values: a list is one already, anything else is one value for every row."""
    if not isinstance(columns, Mapping | None) or any(value in ([], ()) for value in (columns or {}).values()):
        raise ConfigurationError(f"columns must map names to values, as in {{answer: [18, 7]}}, got {columns!r:.200}.")
    given = columns or {}
    return {name: list(one) if isinstance(one, list | tuple) else [one] for name, one in given.items()}


def as_texts(texts: Any) -> tuple[Any, ...] | None:
    """Prompts or completions; a single string is one of them."""
    if isinstance(texts, str):
        return (texts,)
    if texts is not None and (not isinstance(texts, Sequence) or not texts):
        raise ConfigurationError(f"completions and prompts are lists with at least one entry, got {texts!r:.200}.")
    return None if texts is None else tuple(texts)
