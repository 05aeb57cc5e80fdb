"""One wrong plugin for each rule: the kit finds that rule broken and no other, and the right ones pass."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testing import wrong_aggregations, wrong_filters, wrong_hooks, wrong_rewards
from trl_grpo_ext.plugins.kinds import Kind
from trl_grpo_ext.testing import RULES, check

WRONG: list[tuple[Kind, str, type]] = [
    *(("reward", rule, plugin) for rule, plugin in wrong_rewards.BREAKS),
    *(("advantage_hook", rule, plugin) for rule, plugin in wrong_hooks.BREAKS),
    *(("loss_aggregation", rule, plugin) for rule, plugin in wrong_aggregations.BREAKS),
    *(("group_filter", rule, plugin) for rule, plugin in wrong_filters.BREAKS),
]
RIGHT: list[tuple[Kind, Any]] = [
    ("reward", wrong_rewards.Right()),
    ("reward", wrong_rewards.Simple()),
    ("reward", wrong_rewards.right_async),
    ("reward", wrong_rewards.Declared()),
    ("advantage_hook", wrong_hooks.Right()),
    ("advantage_hook", wrong_hooks.Spans()),
    ("advantage_hook", wrong_hooks.NoNegativeRewards()),
    ("advantage_hook", wrong_hooks.Estimates()),
    ("advantage_hook", wrong_hooks.Masks()),
    ("advantage_hook", wrong_hooks.Shapes()),
    ("loss_aggregation", wrong_aggregations.Right()),
    ("loss_aggregation", wrong_aggregations.RightReduce()),
    ("loss_aggregation", wrong_aggregations.LocalReduce()),
    ("loss_aggregation", wrong_aggregations.DeclaredSquares()),
    ("group_filter", wrong_filters.Right()),
    ("group_filter", wrong_filters.ReadsAdvantages()),
    *(("reward", reward) for reward in wrong_rewards.SOUND),
    *(("advantage_hook", hook) for hook in wrong_hooks.SOUND),
]


@pytest.fixture(autouse=True)
def _clean_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SET_BY_A_REWARD", "0")
    limit, digits = sys.getrecursionlimit(), sys.get_int_max_str_digits()
    yield
    wrong_rewards.ENOUGH.set()
    # Left as a wrong plugin set it, deep JSON in a later test would overrun this process's stack.
    sys.setrecursionlimit(limit)
    sys.set_int_max_str_digits(digits)


@pytest.mark.parametrize(("kind", "rule", "plugin"), WRONG, ids=lambda value: getattr(value, "__name__", str(value)))
def test_the_planted_defect_is_the_cause_that_is_named_first(kind: Kind, rule: str, plugin: type) -> None:
    wrong_rewards.ENOUGH.clear()
    here = Path.cwd()
    try:
        report = check(kind, plugin(), isolated=False)
    finally:
        os.chdir(here)
    assert [broken.rule.name for broken in report.roots] == [rule], str(report)
    assert not report.ok


HANGS: list[tuple[Kind, str, type]] = [
    *(("reward", rule, plugin) for rule, plugin in wrong_rewards.HANGS),
    *(("advantage_hook", rule, plugin) for rule, plugin in wrong_hooks.HANGS),
    *(("loss_aggregation", rule, plugin) for rule, plugin in wrong_aggregations.HANGS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rule", "plugin"), HANGS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_what_hangs_exits_or_crashes_breaks_the_rule_that_it_does_so_in(kind: Kind, rule: str, plugin: type) -> None:
    report = check(kind, plugin(), timeout=2.0)
    assert [broken.rule.name for broken in report.roots] == [rule], str(report)
    said = report.roots[0].message
    assert "did not return within" in said or "ended the process" in said or "crashed the process" in said


def test_there_are_eighty_defects_and_thirty_sound_ones() -> None:
    assert len(WRONG) + len(HANGS) >= 80
    assert len(RIGHT) >= 30


def test_every_rule_has_a_wrong_plugin() -> None:
    assert {rule for _, rule, _ in WRONG} == {rule.name for rule in RULES}


def test_right_plugins_keep_all_rules_and_between_them_have_every_rule_checked() -> None:
    passed = set()
    for kind, plugin in RIGHT:
        report = check(kind, plugin, isolated=False)
        assert report.ok, str(report)
        passed |= {rule.name for rule in report.passed}
        assert not report.unshown or kind == "advantage_hook", str(report)
    assert passed == {rule.name for rule in RULES}
