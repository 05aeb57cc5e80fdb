"""Check a plugin against the rules of its kind.

A plugin declares what its checks need in an attribute `conformance`, a mapping; a distribution in its pyproject.toml
under `[tool.trl-grpo-ext.check."NAME"]`, with the same keys. The caller's options win over pyproject.toml, which wins
over the attribute.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from ..errors import ConfigurationError
from ..guard.calls import reward_name
from ..guard.parameters import checked_number
from ..plugins.building import import_plugin
from ..plugins.discovery import find, find_and_explain
from ..plugins.kinds import KINDS, Kind
from ..plugins.loading import resolve
from ..plugins.metadata import documentation, installed_distributions, normalise
from ..plugins.selection import Selection, parse_selection
from .processes import Progress, run_here, run_in_process
from .reports import ConformanceError, Report, with_roots
from .rules import Checks, CopyError, fresh_copy, rules_of

ATTRIBUTE = "conformance"
TABLE = ("tool", "trl-grpo-ext", "check")

TIMEOUT = 10.0
"""Seconds for each rule, unless the caller or the plugin sets another limit."""


class Options(TypedDict, total=False):
    """Options for any plugin. Those left out follow the plugin's own declaration, then the default."""

    parameters: Mapping[str, Any] | None
    """Parameters to build the plugin with, if the selection has none."""

    columns: Mapping[str, Any] | None
    """The data set's columns: one value for all rows, or a list of values, repeated. A reward is given some beside them
    that many data sets have (`answer`, `solution`, ...), since TRL passes all."""

    completions: Sequence[Any] | None
    """What a reward scores, by default a few of several kinds. Of a rollout its texts, repeated, each cut into as many
    tokens as the batch wants; by default they are made of `<think>` and the like."""

    prompts: Sequence[Any] | None
    """Prompts, repeated."""

    deterministic: bool | None
    """False for plugins that draw random numbers on purpose."""

    seed: int | None
    """The seed for log-probabilities, tokens and losses. Batches for rewards are the same in every run."""

    rules: Iterable[str] | None
    """Names of rules; all by default."""

    timeout: float | None
    """Seconds per rule, 10 by default; twice that for the first, which may load a model."""


class RewardOptions(Options, total=False):
    """Options for a reward."""

    required: Sequence[str] | None
    """Columns that are never None in the data, so that None need not be tried."""

    unreadable: Sequence[Any] | None
    """References, besides None, that it cannot read, for `reward.outcomes`."""

    formats: Sequence[str] | None
    """The forms of completions that it takes, "text" and "messages"."""

    per_completion: bool | None
    """False for a reward that compares completions with each other on purpose."""

    seconds_per_completion: float | None
    """The limit of `reward.time`."""


class ContextOptions(Options, total=False):
    """Options for an advantage hook, a loss aggregation or a group filter."""

    tokenizer: Any
    """`rollout.tokenizer`; None by default. Only the caller can give it, since a file holds no object."""


def check(
    kind: Kind, plugin_or_selection: Any, *, isolated: bool = True, progress: Progress | None = None, **options: Any
) -> Report:
    """Check a plugin against every rule of its kind.

    Args:
        kind: One of `KINDS`.
        plugin_or_selection: A plugin object or a selection: a name, a dotted path, a mapping with parameters.
        isolated: Whether it runs in a separate process, so that a plugin that hangs, exits or crashes only breaks a
            rule. Use False for a debugger or to measure coverage. If CUDA is in use in this process, it cannot be
            forked, and the checks run here.
        progress: Called before each rule with its name, its number and the number of rules.
        **options: Those of `check_reward`, `check_advantage_hook`, `check_loss_aggregation` and
            `check_group_filter`.

    Raises:
        ConfigurationError: There is no such kind, rule or option.
        PluginError: The plugin cannot be loaded.
    """
    if kind not in KINDS:
        raise ConfigurationError(f"{kind!r} is not a kind of plugin; the kinds are {', '.join(KINDS)}.")
    given = {key: value for key, value in options.items() if value is not None}
    _check_keys(kind, given, f"check({kind!r}, ...)", by_caller=True)
    rules = rules_of(kind, given.get("rules"))
    timeout = checked_number("timeout", given.get("timeout", TIMEOUT), "a positive number of seconds", lambda x: x > 0)

    def prepare() -> tuple[str, Checks]:
        subject = load_subject(kind, plugin_or_selection, given)
        return subject.name, _checks(kind, subject)

    if isolated and _may_fork():
        found = run_in_process(rules, prepare, timeout, progress)
    else:
        found = run_here(rules, prepare, progress)
    return Report(
        subject=found.name,
        kind=kind,
        passed=tuple(found.passed),
        violations=with_roots(found.violations),
        skipped=tuple(found.skipped),
        measured=found.measured,
        no_effect=found.no_effect,
        printed=found.printed,
        documentation=_documentation(kind, plugin_or_selection),
        because=found.because,
    )


def _documentation(kind: Kind, plugin_or_selection: Any) -> str:
    """Where the distribution of a selected plugin documents it; an object is of no distribution."""
    if not isinstance(plugin_or_selection, str | Mapping | Selection):
        return ""
    info = find(kind, plugin_or_selection)
    if info.builtin:
        return "docs/plugins.md"  # which has them all: `tests/test_every_plugin.py`
    distribution = dict(installed_distributions()).get(normalise(info.distribution or ""))
    return "" if distribution is None else documentation(distribution, (info.name, *info.aliases))


def _may_fork() -> bool:
    torch = sys.modules.get("torch")
    return hasattr(os, "fork") and (torch is None or not torch.cuda.is_initialized())


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


def check_reward(reward: Any, **options: Unpack[RewardOptions]) -> Report:
    """Check a reward, given as a function or a selection, like `check`."""
    return check("reward", reward, **options)


def check_advantage_hook(hook: Any, **options: Unpack[ContextOptions]) -> Report:
    """Check an advantage hook, given as an object or a selection, like `check`."""
    return check("advantage_hook", hook, **options)


def check_loss_aggregation(aggregation: Any, **options: Unpack[ContextOptions]) -> Report:
    """Check a loss aggregation, given as an object or a selection, like `check`."""
    return check("loss_aggregation", aggregation, **options)


def check_group_filter(group_filter: Any, **options: Unpack[ContextOptions]) -> Report:
    """Check a group filter, given as an object or a selection, like `check`."""
    return check("group_filter", group_filter, **options)


def _checks(kind: Kind, subject: Subject) -> Checks:
    """The checks of a kind, whose modules are imported here, since most import torch."""
    options = subject.options
    texts, prompts = (as_texts(name, options.get(name)) for name in ("completions", "prompts"))
    columns = as_columns(options.get("columns"))
    checks: Checks
    if kind == "reward":
        from .reward_calls import ordinary_call
        from .rewards import RewardChecks

        forms = _forms(subject.name, options.get("formats", ("text", "messages")))
        ordinary = ordinary_call(subject.plugin, texts, prompts, columns, forms[0])
        checks = RewardChecks(subject.plugin, ordinary, forms, options, subject.again)
    else:
        from .aggregations import AggregationChecks
        from .batches import Setting
        from .filters import FilterChecks
        from .hooks import HookChecks

        setting = Setting(int(options.get("seed", 0)), texts, prompts, columns, options.get("tokenizer"))
        of_kind: dict[Kind, Callable[..., Checks]] = {
            "advantage_hook": HookChecks,
            "loss_aggregation": AggregationChecks,
            "group_filter": FilterChecks,
        }
        checks = of_kind[kind](subject.plugin, setting, bool(options.get("deterministic", True)))
    if "timeout" in options:
        checks.timeout = float(options["timeout"])
    return checks


def _forms(name: str, formats: Any) -> tuple[Any, ...]:
    known = ("text", "messages")
    listed = [formats] if isinstance(formats, str) else formats
    if not isinstance(listed, Sequence) or not listed or any(form not in known for form in listed):
        raise ConfigurationError(f"{name}: formats must be some of {', '.join(known)}, got {formats!r}.")
    return tuple(listed)


@dataclass(frozen=True)
class Subject:
    """A plugin to check, its name in reports, its options, and what builds another one (None if nothing can)."""

    plugin: Any
    name: str
    options: Mapping[str, Any]
    again: Callable[[], Any] | None


def load_subject(kind: Kind, plugin_or_selection: Any, given: Mapping[str, Any]) -> Subject:
    """Load a plugin, unless it is already one, and collect its options; the caller's come first.

    A selection without parameters gets those that the plugin declares for its checks.
    """
    if isinstance(plugin_or_selection, str | Mapping | Selection):
        asked = parse_selection(kind, plugin_or_selection)
        info, why_not = find_and_explain(kind, asked)
        exported = import_plugin(info, asked, why_not)
        options = {**declared(kind, exported, asked.name), **given}
        if not asked.parameters:
            asked = replace(asked, parameters=dict(options.get("parameters", {})))
        plugin, wanted = resolve(kind, asked).object, asked
        options = {**options, **declared(kind, plugin, asked.name), **given}
        return Subject(plugin, asked.name, options, lambda: resolve(kind, wanted).object)
    if isinstance(plugin_or_selection, type):
        plugin_or_selection = resolve(kind, plugin_or_selection).object  # which says what to pass instead
    name = reward_name(plugin_or_selection)
    options = {**declared(kind, plugin_or_selection, name), **given}
    try:
        unused = fresh_copy(plugin_or_selection)
    except CopyError:
        return Subject(plugin_or_selection, name, options, None)
    return Subject(plugin_or_selection, name, options, lambda: fresh_copy(unused))


def declared(kind: Kind, exported: Any, name: str) -> dict[str, Any]:
    """The options that a plugin, or its class, declares."""
    options: dict[str, Any] = {}
    attribute = getattr(exported, ATTRIBUTE, None)
    if attribute is not None:
        if not isinstance(attribute, Mapping):
            raise ConfigurationError(f"{name}: `{ATTRIBUTE}` must be a mapping, and is {attribute!r:.200}.")
        _check_keys(kind, attribute, f"{name}.{ATTRIBUTE}")
        options |= attribute
    for key in ("deterministic", "per_completion") if kind == "reward" else ("deterministic",):
        value = getattr(exported, key, None)
        if isinstance(value, bool):
            options.setdefault(key, value)
    return options


def project_options(folder: Path) -> dict[str, dict[str, Any]]:
    """The options of each plugin in a folder's pyproject.toml, by name."""
    table: Any = _project(folder)
    for key in TABLE:
        table = table.get(key, {}) if isinstance(table, dict) else {}
    wrong = [name for name, value in table.items() if not isinstance(value, dict)] if isinstance(table, dict) else [""]
    if wrong:
        raise ConfigurationError(f"{folder / 'pyproject.toml'}: [{'.'.join(TABLE)}.{wrong[0]}] must be a table.")
    return dict(table)


def project_name(folder: Path) -> str | None:
    """The name of the distribution whose pyproject.toml is in a folder, or None."""
    project = _project(folder).get("project", {})
    name = project.get("name") if isinstance(project, dict) else None
    return name if isinstance(name, str) else None


def _project(folder: Path) -> dict[str, Any]:
    file = folder / "pyproject.toml"
    try:
        return tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from error


def as_columns(columns: Any) -> dict[str, list[Any]]:
    """Columns as lists of values: a list is one already, anything else is one value for every row."""
    if columns is None:
        return {}
    if not isinstance(columns, Mapping) or not all(isinstance(name, str) for name in columns):
        raise ConfigurationError(f"columns must map names to values, as in {{answer: [18, 7]}}, got {columns!r:.200}.")
    lists = {name: list(value) if isinstance(value, list | tuple) else [value] for name, value in columns.items()}
    empty = [name for name, values in lists.items() if not values]
    if empty:
        raise ConfigurationError(f"the column {empty[0]!r} has no values; give one, or leave it out.")
    return lists


def as_texts(what: str, texts: Any) -> tuple[Any, ...] | None:
    """Prompts or completions; a single string is one of them."""
    if texts is None:
        return None
    if isinstance(texts, str):
        return (texts,)
    if not isinstance(texts, Sequence) or not texts:
        raise ConfigurationError(f"{what} must be a list with at least one entry, got {texts!r:.200}.")
    return tuple(texts)


def _check_keys(kind: Kind, options: Mapping[str, Any], place: str, by_caller: bool = False) -> None:
    more = RewardOptions if kind == "reward" else ContextOptions if by_caller else Options
    known = [*Options.__annotations__, *(key for key in more.__annotations__ if key not in Options.__annotations__)]
    unknown = [key for key in options if key not in known]
    if unknown:
        raise ConfigurationError(f"{place} has no option {unknown[0]!r}; there are {', '.join(known)}.")
