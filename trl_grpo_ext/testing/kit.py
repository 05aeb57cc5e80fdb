"""Check a plugin against the rules of its kind, one after the other, in this process.

A plugin declares what its checks need as `conformance`, a mapping. The caller's options win over it.
"""

from __future__ import annotations

import contextlib
import io
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import ConfigurationError
from ..guard.calls import reward_name
from ..guard.parameters import checked_number
from ..plugins.building import import_plugin
from ..plugins.discovery import find
from ..plugins.kinds import FACTS, Kind, check_kind
from ..plugins.loading import resolve
from ..plugins.selection import Selection, parse_selection
from .reports import ConformanceError, Report, Violation
from .rules import GATES, Broken, Checks, Finding, NotChecked, Rule, rules_of

TIMEOUT = 60.0
"""Seconds for each rule, unless the caller or the plugin sets another limit."""

OPTIONS = ("parameters", "columns", "completions", "prompts", "deterministic", "rules", "timeout")
OF_REWARDS = ("required", "unreadable", "formats", "per_completion")
FORMATS = ("text", "messages")


def check(kind: Kind, plugin_or_selection: Any, **options: Any) -> Report:
    """Check a plugin against every rule of its kind.

    Args:
        kind: One of `KINDS`.
        plugin_or_selection: A plugin object or a selection: a name, a dotted path, a mapping with parameters.
        **options: `OPTIONS`, for a reward also `OF_REWARDS`, for the others `tokenizer`; docs/writing_plugins.md
            explains each. None is as good as leaving one out: the plugin's declaration counts, then the default.

    Raises:
        ConfigurationError: There is no such kind, rule or option.
        PluginError: The plugin cannot be loaded.
    """
    check_kind(kind)
    given = {key: value for key, value in options.items() if value is not None}
    _check_keys(kind, given, f"check({kind!r}, ...)", ("tokenizer",))
    rules = rules_of(kind, given.get("rules"))
    timeout = checked_number("timeout", given.get("timeout", TIMEOUT), "a positive number of seconds", lambda x: x > 0)

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        checks = _checks(kind, plugin_or_selection, given)
        found = _findings(rules, checks, checks.timeout or timeout)
        broken = [(rule, one) for rule, one in found.items() if isinstance(one, Broken)]
        no_effect = "" if broken else checks.no_effect()
    return Report(
        subject=checks.name,
        kind=kind,
        passed=tuple(rule for rule, one in found.items() if one is None),
        violations=tuple(Violation(rule, one.message, one.example) for rule, one in broken),
        skipped=tuple((rule, str(one)) for rule, one in found.items() if isinstance(one, NotChecked)),
        no_effect=no_effect,
        printed=tuple(printed.getvalue().splitlines()),
    )


def assert_conforms(kind: Kind, plugin_or_selection: Any, **options: Any) -> None:
    """Check a plugin like `check`, and raise if it breaks a rule: for tests.

    Raises:
        ConformanceError: It breaks a rule. The message is the report.
        ConfigurationError, PluginError: As `check`.
    """
    __tracebackhide__ = True
    report = check(kind, plugin_or_selection, **options)
    if not report.ok:
        raise ConformanceError(str(report))


def _findings(rules: Sequence[Rule], checks: Checks, timeout: float) -> dict[Rule, Finding]:
    """What comes of each rule; those that rest on a broken one are not checked."""
    found: dict[Rule, Finding] = {}
    root_of: dict[str, str] = {}  # of each rule that is broken, or not checked for that: the broken one
    for rule in rules:
        root = next((root_of[short] for short in (*GATES, *rule.rests_on) if short in root_of), None)
        if root is None:
            with _time_limit(timeout, checks):
                found[rule] = checks.check(rule)
        else:
            found[rule] = NotChecked(f"{root} is broken")
        if root is not None or isinstance(found[rule], Broken):
            root_of[rule.short] = root or rule.name
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
    texts = as_texts("completions", options.get("completions"))
    prompts = as_texts("prompts", options.get("prompts"))
    columns = as_columns(options.get("columns"))
    checks: Checks
    if kind == "reward":
        from .reward_calls import ordinary_call
        from .rewards import RewardChecks

        formats = options.get("formats", FORMATS)
        forms = (formats,) if isinstance(formats, str) else tuple(formats)
        if not forms or not set(forms) <= {*FORMATS}:
            raise ConfigurationError(f"{name}: formats must be some of {', '.join(FORMATS)}, got {formats!r}.")
        checks = RewardChecks(plugin, ordinary_call(plugin, texts, prompts, columns, forms[0]), forms, options)
    elif kind == "prompt_sampler":
        from .samplers import SamplerChecks

        checks = SamplerChecks(plugin, columns)
    else:
        from .aggregations import AggregationChecks
        from .batches import Setting
        from .filters import FilterChecks
        from .hooks import HookChecks
        from .token_losses import TokenLossChecks

        of_kind: dict[Kind, Callable[..., Checks]] = {
            "advantage_hook": HookChecks,
            "loss_aggregation": AggregationChecks,
            "group_filter": FilterChecks,
            "token_loss": TokenLossChecks,
        }
        checks = of_kind[kind](plugin, Setting(texts, prompts, columns, options.get("tokenizer")))
    checks.name = name
    checks.timeout = options.get("timeout")
    checks.deterministic = bool(options.get("deterministic", True))
    return checks


def _subject(kind: Kind, asked: Any, given: Mapping[str, Any]) -> tuple[Any, str, dict[str, Any]]:
    """A plugin, loaded unless it already is; its name; its options.

    A selection without parameters gets those that the plugin declares for its checks.
    """
    if isinstance(asked, str | Mapping | Selection):
        selection = parse_selection(kind, asked)
        name = selection.name
        options = {**_declared(kind, import_plugin(find(kind, selection)), name), **given}
        if not selection.parameters:
            selection = replace(selection, parameters=dict(options.get("parameters", {})))
        plugin = resolve(kind, selection).object
        return plugin, name, {**options, **_declared(kind, plugin, name), **given}
    plugin = resolve(kind, asked).object if isinstance(asked, type) else asked
    name = reward_name(plugin)
    return plugin, name, {**_declared(kind, plugin, name), **given}


def _declared(kind: Kind, exported: Any, name: str) -> dict[str, Any]:
    """The options that a plugin, or its class, declares."""
    declared = FACTS[kind].declaration.of(exported)
    _check_keys(kind, declared.conformance, f"{name}, conformance")
    switches = ("deterministic", "per_completion")
    return {**{key: value for key, value in declared.shown().items() if key in switches}, **declared.conformance}


def _check_keys(kind: Kind, options: Mapping[str, Any], place: str, more: Sequence[str] = ()) -> None:
    known = [*OPTIONS, *(OF_REWARDS if kind == "reward" else more)]
    for key in options:
        if key not in known:
            raise ConfigurationError(f"{place} has no option {key!r}; there are {', '.join(known)}.")


def as_columns(columns: Any) -> dict[str, list[Any]]:
    """Columns as lists of values: a list is one already, anything else is one value for every row."""
    if not isinstance(columns, Mapping | None):
        raise ConfigurationError(f"columns must map names to values, as in {{answer: [18, 7]}}, got {columns!r:.200}.")
    lists = {}
    for name, value in (columns or {}).items():
        lists[name] = list(value) if isinstance(value, list | tuple) else [value]
        if not lists[name]:
            raise ConfigurationError(f"the column {name!r} has no values; give one, or leave it out.")
    return lists


def as_texts(what: str, texts: Any) -> tuple[Any, ...] | None:
    """Prompts or completions; a single string is one of them."""
    if texts is None or isinstance(texts, str):
        return None if texts is None else (texts,)
    if not isinstance(texts, Sequence) or not texts:
        raise ConfigurationError(f"{what} must be a list with at least one entry, got {texts!r:.200}.")
    return tuple(texts)
