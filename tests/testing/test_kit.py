"""The kit's functions: what may be passed, how options are found, and what a report says."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from docs.site.rule_tables import with_rules
from tests.testing import wrong_aggregations, wrong_rewards
from trl_grpo_ext import available
from trl_grpo_ext.errors import ConfigurationError, TRLGRPOExtError
from trl_grpo_ext.testing import RULES, ConformanceError, assert_conforms, check
from trl_grpo_ext.types import HookDeclaration, RewardDeclaration


class Wants:
    """A reward of one word and one column."""

    declares = RewardDeclaration(conformance={"parameters": {"word": "please"}, "columns": {"polite": [True, False]}})

    def __init__(self, word: str) -> None:
        self.word = word

    def __call__(self, completions: list[Any], polite: list[Any], **columns: Any) -> list[float | None]:
        texts = [wrong_rewards.text_of(completion) for completion in completions]
        return [None if p is None else float((self.word in text) == p) for text, p in zip(texts, polite, strict=True)]


class AnyReference(wrong_rewards.Right):
    """Only None is unreadable to it."""

    def score(self, text: str, answer: Any) -> float | None:
        return None if answer is None else float("18" in str(answer) and "18" in text)


WANTS = f"{__name__}:Wants"


@pytest.mark.parametrize("kind", ["aggregation", "loss-aggregation", "loss_aggregation"])
def test_check_knows_a_kind_by_the_command_lines_word(kind: str) -> None:
    report = check(kind, "token_mean", rules=["aggregation.run"])
    assert (report.kind, report.ok, len(report.passed)) == ("loss_aggregation", True, 1)
    assert [info.name for info in available(kind)] == [info.name for info in available("loss_aggregation")] != []
    with pytest.raises(ConfigurationError, match=r"'agregation' is not .* kinds are reward, hook \(advantage_hook\),"):
        assert_conforms("agregation", "token_mean")


def test_the_site_lists_every_rule_with_its_reason() -> None:
    page = Path(__file__).parents[2] / "docs" / "writing_plugins.md"
    text = with_rules(page.read_text(encoding="utf-8"))
    assert all(f"| `{rule.name}` | {rule.summary} | {rule.why} |" in text for rule in RULES)


def test_report_is_json_and_text() -> None:
    report = check("reward", wrong_rewards.in_words, rules=["reward.run", "reward.threads"])
    plain = json.loads(json.dumps(report.plain()))
    assert (plain["ok"], plain["passed"]) == (False, [])
    assert [broken["rule"] for broken in plain["violations"]] == ["reward.run"]
    assert plain["skipped"] == [{"rule": "reward.threads", "reason": "reward.run is broken"}]
    text = str(report)
    for part in ("reward By", "0 rules kept, 1 broken, 1 not checked", "'1.0'", "example: completions=[", "why: TRL"):
        assert part in text


def test_assert_conforms_raises_with_the_report() -> None:
    assert_conforms("loss_aggregation", wrong_aggregations.Right())
    with pytest.raises(ConformanceError, match=r"aggregation\.ranks") as failed:
        assert_conforms("loss_aggregation", wrong_aggregations.tokens_of_this_rank)
    assert isinstance(failed.value, AssertionError)
    assert isinstance(failed.value, TRLGRPOExtError)


def test_check_builds_a_selection_with_what_its_plugin_declares() -> None:
    assert check("reward", WANTS).ok
    given = check("reward", WANTS, columns={"polite": [None]}, parameters={"word": "x"})
    assert "None" in given.no_effect, str(given)  # what the caller gives wins
    with pytest.raises(TRLGRPOExtError, match="word"):
        check("reward", {"name": WANTS, "colour": 1})


def test_declared_exemptions_skip_their_rules_and_unreadable_references_are_tried() -> None:
    skipped = {rule.name for rule, _ in check("reward", wrong_rewards.Declared()).skipped}
    assert {"reward.determinism", "reward.neighbours"} <= skipped
    assert check("reward", AnyReference()).ok
    report = check("reward", AnyReference(), unreadable=["see the appendix"])
    assert [broken.rule.name for broken in report.violations] == ["reward.outcomes"]
    assert "see the appendix" in report.violations[0].message


def compares(completions: list[Any], **columns: Any) -> list[float]:
    return [1.0 for _ in completions]


compares.declares = RewardDeclaration(reference_column="answer")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("rule", "options", "reason"),
    [
        ("reward.formats", {"completions": [[{"role": "assistant", "content": "18"}]]}, "that were given are messages"),
        ("reward.outcomes", {}, "no completion scores better than the others"),
    ],
)
def test_rule_that_cannot_be_checked_says_why(rule: str, options: dict[str, Any], reason: str) -> None:
    report = check("reward", compares, rules=[rule], **options)
    assert report.ok
    assert not report.passed
    ((_, said),) = report.skipped
    assert reason in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"colums": {}}, "'colums'"),
        ({"rules": ["reward.speed"]}, r"'reward\.speed'"),
        ({"columns": {"a": []}}, "columns"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check("reward", wrong_rewards.Simple(), **options)


class Uncopyable:
    """Counts its calls, and has a lock, so that no copy can be made."""

    declares = HookDeclaration(role="transform")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls = 0

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        self.calls += 1
        return advantages_B_T * self.calls


def test_uncopyable_plugins_are_not_compared() -> None:
    report = check("advantage_hook", Uncopyable())
    assert report.ok, str(report)
    skipped = {rule.short for rule, reason in report.skipped if "cannot be copied" in reason}
    assert {"determinism", "padding", "order", "evaluation"} <= skipped


def test_rewards_for_messages_alone_are_tried_with_messages() -> None:
    def last(completions: list[Any], **columns: Any) -> list[float]:
        return [float("18" in (completion[-1]["content"] or "" if completion else "")) for completion in completions]

    report = check("reward", last)
    assert report.ok, str(report)
    assert "it takes messages alone: with strings it raised TypeError" in str(report)
    assert check("reward", "trl.rewards:accuracy_reward", rules=["reward.run"]).ok


def test_importing_the_kit_imports_no_torch() -> None:
    code = "import sys, trl_grpo_ext.testing\nassert not {'torch', 'transformers', 'trl', 'numpy'} & {*sys.modules}"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
