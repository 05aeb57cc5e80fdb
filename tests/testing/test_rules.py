"""One wrong plugin for each rule, at least: the kit finds that rule broken, and the right plugins pass."""

from typing import Any

import pytest

from tests.testing import (
    wrong_aggregations,
    wrong_filters,
    wrong_hooks,
    wrong_rewards,
    wrong_samplers,
    wrong_token_losses,
)
from trl_grpo_ext.plugins.kinds import Kind
from trl_grpo_ext.testing import RULES, check
from trl_grpo_ext.testing.rules import GATES, rules_of

ROOMS: dict[Kind, Any] = {
    "reward": wrong_rewards,
    "advantage_hook": wrong_hooks,
    "loss_aggregation": wrong_aggregations,
    "group_filter": wrong_filters,
    "token_loss": wrong_token_losses,
    "prompt_sampler": wrong_samplers,
}
WRONG = [(kind, rule, plugin) for kind, room in ROOMS.items() for rule, plugin in room.BREAKS]
HANGS = [(kind, rule, plugin) for kind, room in ROOMS.items() for rule, plugin in getattr(room, "HANGS", ())]
RIGHT = [(kind, plugin) for kind, room in ROOMS.items() for plugin in room.SOUND]


@pytest.fixture(autouse=True)
def _clean_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_BY_A_REWARD", "0")


def assert_broken(kind: Kind, name: str, plugin: Any, **options: Any) -> str:
    """Check a rule and the gates before it: the rule alone is broken, and this is why."""
    rules = [rule.name for rule in rules_of(kind) if rule.short in GATES or rule.name == name]
    report = check(kind, plugin() if isinstance(plugin, type) else plugin, rules=rules, **options)
    assert [broken.rule.name for broken in report.violations] == [name], str(report)
    return report.violations[0].message


@pytest.mark.parametrize(("kind", "rule", "plugin"), WRONG)
def test_the_planted_defect_breaks_its_rule(kind: Kind, rule: str, plugin: Any) -> None:
    assert_broken(kind, rule, plugin)


def test_rules_after_a_broken_gate_are_not_checked() -> None:
    report = check("reward", wrong_rewards.RemembersOnItself())
    assert [rule.short for rule in report.passed] == ["run"]
    assert [broken.rule.short for broken in report.violations] == ["determinism"]
    assert {reason for _, reason in report.skipped} == {"reward.determinism is broken"}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rule", "plugin"), HANGS)
def test_what_hangs_breaks_the_rule_that_it_hangs_in(kind: Kind, rule: str, plugin: Any) -> None:
    assert "did not return within 2 s" in assert_broken(kind, rule, plugin, timeout=2.0)


def test_every_rule_has_a_wrong_plugin_and_right_ones_that_keep_it() -> None:
    assert {rule for _, rule, _ in WRONG} == {rule.name for rule in RULES}
    passed = set()
    for kind, plugin in RIGHT:
        report = check(kind, plugin)
        assert report.ok, str(report)
        passed |= {rule.name for rule in report.passed}
        assert not report.no_effect or kind == "advantage_hook", str(report)
    assert passed == {rule.name for rule in RULES}
