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


def made(plugin: Any) -> Any:
    return plugin() if isinstance(plugin, type) else plugin


def with_the_gates(kind: Kind, name: str) -> list[str]:
    """A rule, and the gates before it."""
    return [rule.name for rule in rules_of(kind) if rule.short in GATES or rule.name == name]


@pytest.mark.parametrize(("kind", "rule", "plugin"), WRONG)
def test_the_planted_defect_breaks_its_rule(kind: Kind, rule: str, plugin: Any) -> None:
    report = check(kind, made(plugin), rules=with_the_gates(kind, rule))
    assert [broken.rule.name for broken in report.violations] == [rule], str(report)


def test_rules_after_a_broken_gate_are_not_checked() -> None:
    report = check("reward", wrong_rewards.RemembersOnItself())
    assert [rule.short for rule in report.passed] == ["run"]
    assert [broken.rule.short for broken in report.violations] == ["determinism"]
    assert {reason for _, reason in report.skipped} == {"reward.determinism is broken"}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rule", "plugin"), HANGS)
def test_what_hangs_breaks_the_rule_that_it_hangs_in(kind: Kind, rule: str, plugin: Any) -> None:
    report = check(kind, made(plugin), timeout=2.0, rules=with_the_gates(kind, rule))
    assert [broken.rule.name for broken in report.violations] == [rule], str(report)
    assert "did not return within 2 s" in report.violations[0].message


def test_every_rule_has_a_wrong_plugin() -> None:
    assert {rule for _, rule, _ in WRONG} == {rule.name for rule in RULES}


def test_right_plugins_keep_all_rules_and_between_them_have_every_rule_checked() -> None:
    passed = set()
    for kind, plugin in RIGHT:
        report = check(kind, plugin)
        assert report.ok, str(report)
        passed |= {rule.name for rule in report.passed}
        assert not report.no_effect or kind == "advantage_hook", str(report)
    assert passed == {rule.name for rule in RULES}
