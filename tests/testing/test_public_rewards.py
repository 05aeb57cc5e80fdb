"""What the kit says of public rewards: no rule is broken that the reward keeps in a real run."""

from typing import Any

import pytest
from trl.rewards import think_format_reward

from tests.testing import public_rewards
from tests.testing.public_rewards import REWARDS
from trl_grpo_ext.testing import check

NEEDS_COLUMNS = {"boxed", "equation", "from_kwargs"}
TRUE: dict[str, list[str]] = {"reward_len": ["formats"], "equation": ["formats"], "len_reward": ["neighbours"]}
"""One measures the length of a list, one catches what messages raise, and one compares completions undeclared."""


def broken_by(reward: Any, **options: Any) -> list[str]:
    return [broken.rule.short for broken in check("reward", reward, **options).violations]


@pytest.mark.parametrize("name", [*REWARDS, "think_format_reward"])
def test_public_rewards_are_believed(name: str) -> None:
    reward = think_format_reward if name == "think_format_reward" else getattr(public_rewards, name)
    expected = TRUE.get(name, [])
    report = check("reward", reward)
    assert [one.rule.short for one in report.violations] == expected * (name not in NEEDS_COLUMNS), str(report)
    assert (report.passed == ()) == (name in NEEDS_COLUMNS), str(report)
    assert (report.no_effect == "none of its rules could be tried") == (name in NEEDS_COLUMNS)
    if columns := REWARDS.get(name):
        assert broken_by(reward, columns=columns) == expected


def test_texts_alone_is_said_once() -> None:
    report = check("reward", public_rewards.boxed, columns=REWARDS["boxed"])
    assert str(report).count("it takes texts alone, so prompts must be no conversations: it raised TypeError") == 1
