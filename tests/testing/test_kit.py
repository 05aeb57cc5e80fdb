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
from tests.testing import wrong_aggregations, wrong_hooks, wrong_rewards
from trl_grpo_ext.errors import ConfigurationError, PluginOutputError, TRLGRPOExtError
from trl_grpo_ext.testing import RULES, ConformanceError, assert_conforms, check, make_rollout
from trl_grpo_ext.testing.builders import Ranks, UnequalGathers, cut
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


SEEN: list[Any] = []


class Looks:
    """Keeps what it saw of row 0."""

    declares = HookDeclaration(role="transform", needs=("offsets",))

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> Any:
        SEEN.append((rollout.texts[0], rollout.columns["level"][0], rollout.offsets(0)))
        return [[(0, len(text), 0.5)] if text else None for text in rollout.texts]


WANTS = f"{__name__}:Wants"


def test_the_site_lists_every_rule_with_its_reason() -> None:
    page = Path(__file__).parents[2] / "docs" / "writing_plugins.md"
    text = with_rules(page.read_text(encoding="utf-8"))
    assert all(f"| `{rule.name}` | {rule.summary} | {rule.why} |" in text for rule in RULES)


def test_a_report_is_json_and_text() -> None:
    report = check("reward", wrong_rewards.in_words, rules=["reward.run", "reward.types", "reward.pickle"])
    plain = json.loads(json.dumps(report.plain()))
    assert plain["ok"] is False
    assert plain["passed"] == ["reward.run"]
    assert [broken["rule"] for broken in plain["violations"]] == ["reward.types"]
    assert plain["skipped"] == [{"rule": "reward.pickle", "reason": "reward.types is broken"}]
    text = str(report)
    for part in ("reward By", "1 rule kept, 1 broken, 1 not checked", "'1.0'", "example: completions=[", "why: TRL"):
        assert part in text


def test_assert_conforms_raises_with_the_report() -> None:
    assert_conforms("loss_aggregation", wrong_aggregations.Right())
    with pytest.raises(ConformanceError, match=r"aggregation\.ranks") as failed:
        assert_conforms("loss_aggregation", wrong_aggregations.tokens_of_this_rank)
    assert isinstance(failed.value, AssertionError)
    assert isinstance(failed.value, TRLGRPOExtError)


def test_a_selection_gets_the_parameters_and_columns_that_its_plugin_declares() -> None:
    assert check("reward", WANTS).ok
    given = check("reward", WANTS, columns={"polite": [1]}, parameters={"word": "x"})
    assert given.ok, str(given)
    with pytest.raises(TRLGRPOExtError, match="word"):
        check("reward", {"name": WANTS, "colour": 1})


def test_what_the_caller_gives_wins_over_the_declaration() -> None:
    def fails_on_false(completions: list[Any], polite: list[Any], **columns: Any) -> list[float]:
        return [1.0 / p for p in polite]

    fails_on_false.declares = RewardDeclaration(conformance={"columns": {"polite": [0]}})  # type: ignore[attr-defined]
    rules = ["reward.run"]
    assert not check("reward", fails_on_false, rules=rules).ok
    assert check("reward", fails_on_false, columns={"polite": 1}, rules=rules).ok


def test_declared_exemptions_skip_their_rules() -> None:
    skipped = {rule.name for rule, _ in check("reward", wrong_rewards.Declared()).skipped}
    assert {"reward.determinism", "reward.neighbours"} <= skipped
    assert not check("reward", wrong_rewards.Declared(), deterministic=True, rules=["reward.determinism"]).ok

    rules = ["reward.neighbours"]
    assert check("reward", wrong_rewards.less_the_mean, per_completion=False, rules=rules).ok
    assert check("reward", wrong_rewards.LowersReferences(), required=["answer"]).ok
    assert check("reward", wrong_rewards.reads_the_brackets, formats=["text"]).ok


def test_rules_that_the_flow_lets_nobody_check_say_which_one_is_broken() -> None:
    report = check("loss_aggregation", wrong_aggregations.detaches)
    reasons = {rule.name: reason for rule, reason in report.skipped}
    for rule in ("mask", "finite", "padding", "order", "determinism"):
        assert reasons[f"aggregation.{rule}"] == "aggregation.gradient is broken"
    report = check("loss_aggregation", wrong_aggregations.advantage)
    assert "aggregation.finite" in {rule.name for rule in report.passed}  # the flow looks at signs later


def test_references_that_are_declared_unreadable_are_tried() -> None:
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
        ("reward.outcomes", {}, "none of the completions scores better than the others"),
        ("reward.none", {"required": ["answer", "solution", "numbers", "tests", "task"]}, "no column may be None"),
    ],
)
def test_a_rule_that_cannot_be_checked_says_why(rule: str, options: dict[str, Any], reason: str) -> None:
    report = check("reward", compares, rules=[rule], **options)
    assert report.ok
    assert not report.passed
    ((_, said),) = report.skipped
    assert reason in said


@pytest.mark.parametrize(
    ("returned", "rule", "message"),
    [
        (lambda count: (0.5 for _ in range(count)), None, ""),
        (lambda count: [float("nan")] * count, "reward.types", "is NaN; return None"),
        (lambda count: [1e39] * count, "reward.types", "finite also in float32"),
        (lambda count: None, "reward.length", "NoneType, None"),
        (lambda count: torch.zeros(count, 2), "reward.length", "one number or None for each"),
    ],
)
def test_what_a_reward_may_return(returned: Any, rule: str | None, message: str) -> None:
    def reward(completions: list[Any], **columns: Any) -> Any:
        return returned(len(completions))

    report = check("reward", reward, rules=["reward.call", "reward.length", "reward.types"])
    assert [broken.rule.name for broken in report.violations] == ([] if rule is None else [rule])
    assert message in "".join(broken.message for broken in report.violations)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"colums": {}}, "no option 'colums'; there are parameters, columns"),
        ({"rules": ["reward.speed"]}, r"no rule 'reward\.speed'.*reward\.length"),
        ({"columns": [1]}, "columns must map names to values"),
        ({"columns": {"a": []}}, "column 'a' has no values"),
        ({"formats": ["html"]}, "formats must be some of text, messages"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check("reward", wrong_rewards.Simple(), **options)


def test_texts_and_columns_of_the_caller_are_in_the_batch() -> None:
    SEEN.clear()
    report = check("advantage_hook", Looks(), completions=["a = 1; b = 2"], columns={"level": [3]})
    assert report.ok, str(report)
    text, level, offsets = SEEN[0]
    assert (text, level) == ("a = 1; b = 2", 3)
    assert [text[start:end] for start, end in offsets] == ["a = ", "1; b", " = 2"]


class Uncopyable:
    """Counts its calls, and has a lock, so that no copy can be made."""

    declares = HookDeclaration(role="transform")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls = 0

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        self.calls += 1
        return advantages_B_T * self.calls


def test_what_cannot_be_copied_is_not_compared_with_what_its_own_trials_made_of_it() -> None:
    report = check("advantage_hook", Uncopyable())
    assert [broken.rule.short for broken in report.violations] == ["pickle"], str(report)
    reasons = {rule.short: reason for rule, reason in report.skipped}
    assert reasons["determinism"].startswith("hook.pickle is broken")
    assert {"padding", "split", "evaluation"} <= reasons.keys()


class RefusesItsResult(wrong_hooks.Transform):
    """Finds out by itself that its result is not finite."""

    def factor(self, rollout: Any) -> Any:
        raise PluginOutputError("the advantages are not finite", "finite")


def test_an_error_that_names_a_part_of_the_contract_breaks_that_rule_in_whatever_words() -> None:
    report = check("advantage_hook", RefusesItsResult(), rules=["hook.shape", "hook.finite", "hook.long"])
    assert [broken.rule.name for broken in report.violations] == ["hook.finite"], str(report)


def test_a_reward_that_takes_messages_alone_is_tried_with_messages_and_the_report_says_so() -> None:
    def last(completions: list[Any], **columns: Any) -> list[float]:
        return [float("18" in (completion[-1]["content"] or "" if completion else "")) for completion in completions]

    report = check(
        "reward",
        last,
        rules=["reward.call", "reward.run", "reward.formats", "reward.hostile_text", "reward.neighbours"],
    )
    assert report.ok, str(report)
    assert "it takes messages alone: with strings it raised TypeError" in str(report)
    assert check("reward", "trl.rewards:accuracy_reward", rules=["reward.run", "reward.length", "reward.types"]).ok


def test_what_makes_a_reward_is_not_told_to_take_columns() -> None:
    def make(target: int, scale: float = 1.0) -> Any:
        return wrong_rewards.Simple()

    (broken,) = check("reward", make, rules=["reward.call"]).violations
    assert "if it makes a reward, call it" in broken.message
    assert "**columns" not in broken.message


def test_ranks_gather_in_their_order_and_one_that_gathers_too_seldom_is_not_waited_for() -> None:
    two = Ranks(cut(make_rollout([1, 2, 3, 4]), [2, 2]))
    sums = two.run(lambda rollout: [float(rollout.gather(rollout.lengths_B * step)[-1]) for step in range(50)])
    assert sums == [[4.0 * step for step in range(50)]] * 2
    assert two.gathers == [50, 50]
    ranks = Ranks(cut(make_rollout([1, 1, 1]), [1, 1, 1]))
    with pytest.raises(UnequalGathers, match=r"\[0, 1, 1\]"):
        ranks.run(lambda rollout: rollout.gather(rollout.lengths_B) if rollout.local_rows.start else None)
    with pytest.raises(ZeroDivisionError):  # what a rank raises is said first
        ranks.run(lambda rollout: rollout.gather(rollout.lengths_B) if rollout.local_rows.start else 1 / 0)


def test_importing_the_kit_imports_no_torch() -> None:
    code = (
        "import sys, trl_grpo_ext.testing, trl_grpo_ext.testing.kit, trl_grpo_ext.testing.rules\n"
        "print([name for name in ('torch', 'transformers', 'trl', 'numpy', 'hypothesis') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
