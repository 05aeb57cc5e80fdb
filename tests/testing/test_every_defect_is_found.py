"""One wrong plugin for each rule: the kit finds that rule broken and no other, and the right ones pass."""

from __future__ import annotations

from collections.abc import Iterator
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
]


@pytest.fixture(autouse=True)
def _clean_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SET_BY_A_REWARD", "0")
    yield
    wrong_rewards.ENOUGH.set()


@pytest.mark.parametrize(("kind", "rule", "plugin"), WRONG, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_wrong_plugin_breaks_its_rule_and_no_other(kind: Kind, rule: str, plugin: type) -> None:
    wrong_rewards.ENOUGH.clear()
    report = check(kind, plugin())
    assert {broken.rule.name for broken in report.violations} == {rule}, str(report)
    assert not report.ok


def test_every_rule_has_a_wrong_plugin() -> None:
    assert {rule for _, rule, _ in WRONG} == {rule.name for rule in RULES}


def test_right_plugins_keep_all_rules_and_between_them_have_every_rule_checked() -> None:
    passed = set()
    for kind, plugin in RIGHT:
        report = check(kind, plugin)
        assert report.ok, str(report)
        passed |= {rule.name for rule in report.passed}
    assert passed == {rule.name for rule in RULES}
