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


def with_those_it_rests_on(kind: Kind, name: str) -> list[str]:
    """A rule, those on which its comparisons rest, and the gates before it."""
    by_short = {rule.short: rule for rule in rules_of(kind)}
    wanted = {name.partition(".")[2], *(GATES & by_short.keys())}
    while more := {one for short in wanted for one in by_short[short].rests_on} - wanted:
        wanted |= more
    return [rule.name for short, rule in by_short.items() if short in wanted]


@pytest.mark.parametrize(("kind", "rule", "plugin"), WRONG)
def test_the_planted_defect_breaks_its_rule(kind: Kind, rule: str, plugin: Any) -> None:
    report = check(kind, made(plugin), rules=with_those_it_rests_on(kind, rule))
    assert [broken.rule.name for broken in report.violations] == [rule], str(report)


@pytest.mark.parametrize(
    ("kind", "rule", "plugin"),
    [
        ("reward", "reward.determinism", wrong_rewards.RemembersOnItself),
        ("advantage_hook", "hook.order", wrong_hooks.By(wrong_hooks.first_of_a_group)),
        ("loss_aggregation", "aggregation.mask", wrong_aggregations.ReducesEverything),
        ("group_filter", "filter.ranks", wrong_filters.Keeps(wrong_filters.own_rows)),
    ],
)
def test_of_all_rules_one_is_broken_and_those_that_rest_on_it_are_not_checked(
    kind: Kind, rule: str, plugin: Any
) -> None:
    report = check(kind, made(plugin))
    assert [broken.rule.name for broken in report.violations] == [rule], str(report)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rule", "plugin"), HANGS)
def test_what_hangs_breaks_the_rule_that_it_hangs_in(kind: Kind, rule: str, plugin: Any) -> None:
    report = check(kind, made(plugin), timeout=2.0, rules=with_those_it_rests_on(kind, rule))
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
