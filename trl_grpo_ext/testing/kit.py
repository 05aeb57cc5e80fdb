"""Checking a plugin against the rules of its kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..errors import ConfigurationError
from ..plugins.selection import KINDS, Kind
from . import aggregation_rules, hook_rules, reward_rules
from .aggregation_rules import AggregationChecks
from .hook_rules import HookChecks
from .options import Subject, as_columns, as_texts, subject
from .report import ConformanceError, Report
from .reward_batches import Form, ordinary_batch
from .reward_manners import MannersChecks
from .reward_rules import ContractChecks, RewardCase
from .rules import rules_of
from .running import run_rules
from .scenes import Setting


def check(kind: Kind, plugin_or_selection: Any, **options: Any) -> Report:
    """Check a plugin against every rule of its kind.

    Args:
        kind: "reward", "advantage_hook" or "loss_aggregation".
        plugin_or_selection: A plugin object, or what selects one: a name, a dotted path, a mapping with parameters.
        **options: As `check_reward`, `check_advantage_hook` and `check_loss_aggregation` take them; and `parameters`,
            to build the plugin with where the selection has none.

    Raises:
        ConfigurationError: There is no such kind, rule or option.
        PluginError: The plugin cannot be loaded.
    """
    if kind not in KINDS:
        raise ConfigurationError(f"{kind!r} is not a kind of plugin; the kinds are {', '.join(KINDS)}.")
    found = subject(kind, plugin_or_selection, options)
    report = {"reward": _reward_report, "advantage_hook": _hook_report, "loss_aggregation": _aggregation_report}
    return report[kind](found)


def assert_conforms(kind: Kind, plugin_or_selection: Any, **options: Any) -> None:
    """Check a plugin as `check` does, and raise where it breaks a rule: for tests.

    Raises:
        ConformanceError: It breaks a rule. The message is the report.
        ConfigurationError, PluginError: As `check`.
    """
    __tracebackhide__ = True
    report = check(kind, plugin_or_selection, **options)
    if not report.ok:
        raise ConformanceError(str(report))


def check_reward(
    reward: Any,
    *,
    columns: Mapping[str, Any] | None = None,
    completions: Sequence[Any] | None = None,
    prompts: Sequence[Any] | None = None,
    deterministic: bool | None = None,
    seed: int | None = None,
    rules: Iterable[str] | None = None,
    required: Sequence[str] | None = None,
    unreadable: Sequence[Any] | None = None,
    formats: Sequence[Form] | None = None,
    per_completion: bool | None = None,
    seconds_per_completion: float | None = None,
) -> Report:
    """Check a reward.

    What is left out follows the reward's own declaration, then the default.

    Args:
        reward: A reward function, or what selects one.
        columns: The data set's columns that it reads: one value for all rows, or a list of values, repeated. Beside
            them there are always some that many data sets have (`answer`, `solution`, ...), since TRL passes all.
        completions: Completions to score; by default a few of several kinds.
        prompts: Prompts, repeated.
        deterministic: False for a reward that draws random numbers on purpose.
        seed: Not used by rewards; all batches are the same in every run.
        rules: Names of rules; all by default.
        required: Columns that are never None in the data, so that None need not be tried.
        unreadable: References, beside None, that it cannot read, for `reward.outcomes`.
        formats: The forms of completions that it takes, "text" and "messages".
        per_completion: False for a reward that compares completions with each other on purpose.
        seconds_per_completion: The limit of `reward.time`.

    Raises:
        ConfigurationError, PluginError: As `check`.
    """
    return check(
        "reward",
        reward,
        columns=columns,
        completions=completions,
        prompts=prompts,
        deterministic=deterministic,
        seed=seed,
        rules=rules,
        required=required,
        unreadable=unreadable,
        formats=formats,
        per_completion=per_completion,
        seconds_per_completion=seconds_per_completion,
    )


def check_advantage_hook(
    hook: Any,
    *,
    columns: Mapping[str, Any] | None = None,
    completions: Sequence[str] | None = None,
    prompts: Sequence[Any] | None = None,
    tokenizer: Any = None,
    deterministic: bool | None = None,
    seed: int | None = None,
    rules: Iterable[str] | None = None,
) -> Report:
    """Check an advantage hook.

    Args:
        hook: A hook, or what selects one.
        columns: Columns of the rollout, as for `check_reward`.
        completions: Texts of the rollout, repeated; each is cut into as many tokens as the batch wants. By default
            they are made of `<think>` and the like.
        prompts: Prompts of the rollout, repeated.
        tokenizer: `rollout.tokenizer`; None by default.
        deterministic: False for a hook that draws random numbers on purpose.
        seed: What log-probabilities, tokens and losses are drawn with.
        rules: Names of rules; all by default.

    Raises:
        ConfigurationError, PluginError: As `check`.
    """
    return check(
        "advantage_hook",
        hook,
        columns=columns,
        completions=completions,
        prompts=prompts,
        tokenizer=tokenizer,
        deterministic=deterministic,
        seed=seed,
        rules=rules,
    )


def check_loss_aggregation(
    aggregation: Any,
    *,
    columns: Mapping[str, Any] | None = None,
    completions: Sequence[str] | None = None,
    prompts: Sequence[Any] | None = None,
    tokenizer: Any = None,
    deterministic: bool | None = None,
    seed: int | None = None,
    rules: Iterable[str] | None = None,
) -> Report:
    """Check a loss aggregation; the options are those of `check_advantage_hook`.

    Raises:
        ConfigurationError, PluginError: As `check`.
    """
    return check(
        "loss_aggregation",
        aggregation,
        columns=columns,
        completions=completions,
        prompts=prompts,
        tokenizer=tokenizer,
        deterministic=deterministic,
        seed=seed,
        rules=rules,
    )


def _reward_report(found: Subject) -> Report:
    options = found.options
    columns = as_columns(options.get("columns"))
    formats = _formats(found.name, options.get("formats", ("text", "messages")))
    completions = as_texts("completions", options.get("completions"))
    prompts = as_texts("prompts", options.get("prompts"))
    case = RewardCase(
        found.plugin,
        ordinary_batch(completions, prompts, columns, formats[0]),
        formats=formats,
        **{
            key: options[key]
            for key in ("deterministic", "per_completion", "required", "unreadable", "seconds_per_completion")
            if key in options
        },
    )
    contract, manners = ContractChecks(case), MannersChecks(case)
    rules = rules_of("reward", options.get("rules"))
    checks: dict[str, Callable[[], None]] = {}
    for rule in rules:
        method = rule.name.partition(".")[2]
        checks[rule.name] = getattr(contract if hasattr(contract, method) else manners, method)
    findings = run_rules(rules, checks, reward_rules.GATES)
    measured: dict[str, float | str] = {}
    if case.seconds:
        measured = {"seconds_per_completion": min(case.seconds), "seconds_of_first_call": case.first_call}
    return Report(found.name, "reward", findings.passed, findings.violations, findings.skipped, measured)


def _hook_report(found: Subject) -> Report:
    checks = HookChecks(found.plugin, _setting(found), bool(found.options.get("deterministic", True)))
    rules = rules_of("advantage_hook", found.options.get("rules"))
    findings = run_rules(rules, checks.by_rule(), hook_rules.GATES)
    broken = {violation.rule.name for violation in findings.violations}
    measured = {} if broken & {*hook_rules.GATES} else {"share_of_tokens_changed": checks.share_changed()}
    return Report(found.name, "advantage_hook", findings.passed, findings.violations, findings.skipped, measured)


def _aggregation_report(found: Subject) -> Report:
    checks = AggregationChecks(found.plugin, _setting(found), bool(found.options.get("deterministic", True)))
    rules = rules_of("loss_aggregation", found.options.get("rules"))
    findings = run_rules(rules, checks.by_rule(), aggregation_rules.GATES)
    return Report(found.name, "loss_aggregation", findings.passed, findings.violations, findings.skipped)


def _setting(found: Subject) -> Setting:
    options = found.options
    return Setting(
        seed=int(options.get("seed", 0)),
        texts=as_texts("completions", options.get("completions")),
        prompts=as_texts("prompts", options.get("prompts")),
        columns=as_columns(options.get("columns")),
        tokenizer=options.get("tokenizer"),
    )


def _formats(name: str, formats: Any) -> tuple[Form, ...]:
    known = ("text", "messages")
    listed = [formats] if isinstance(formats, str) else formats
    if not isinstance(listed, Sequence) or not listed or any(form not in known for form in listed):
        raise ConfigurationError(f"{name}: formats must be some of {', '.join(known)}, got {formats!r}.")
    return tuple(listed)
