"""The built-in group filters on groups whose verdicts are known by hand; put together; on several ranks."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.contexts import make_rollout
from trl_grpo_ext import Rollout, load_group_filter
from trl_grpo_ext.credit.flow import group_verdicts
from trl_grpo_ext.errors import ConfigurationError, PluginParameterError, PluginTypeError, UnknownPluginError
from trl_grpo_ext.filters.conditions import AllOf, NotAllTruncated, Signal

NAN = math.nan


def rollout_of(rewards: list[float], size: int, **more: Any) -> Rollout:
    """Groups of so many completions of two tokens, with the reward minus the group's mean as advantages."""
    rollout = make_rollout([2] * len(rewards), rewards, [row // size for row in range(len(rewards))])
    advantages_B = torch.nan_to_num(rollout.rewards_B - rollout.group_baselines_B)
    return replace(rollout, advantages_B_T=advantages_B.unsqueeze(1) * rollout.mask_B_T, **more)


def by_group(selection: Any, rollout: Rollout) -> list[bool | str]:
    said = group_verdicts(load_group_filter(selection) if isinstance(selection, str | dict) else selection, rollout)
    groups = rollout.group_ids_B.tolist()
    assert all(one == said[groups.index(group)] for one, group in zip(said, groups, strict=True))
    return [said[groups.index(group)] for group in dict.fromkeys(groups)]


def test_signal() -> None:
    rollout = rollout_of([1, 0, 1, 1, 0, 0, 0.1, 0.1, NAN, NAN, NAN, 1], 2)
    assert by_group("signal", rollout) == [True, *["equal rewards"] * 5]
    assert rollout.advantages_B_T is not None
    masked = replace(rollout, mask_B_T=rollout.mask_B_T * torch.tensor([0, 0, *[1] * 10]).unsqueeze(1))
    assert by_group(Signal(), masked)[0] == "no advantage"
    in_one_row = torch.zeros_like(rollout.advantages_B_T).index_fill(0, torch.tensor(3), 1)
    assert by_group("dynamic_sampling", replace(rollout, advantages_B_T=in_one_row))[:2] == ["no advantage", True]


def test_accuracy_between() -> None:
    rollout = rollout_of([0, 0, 0, 1, 1, 1, NAN, NAN, NAN, 1], 2)
    assert by_group("accuracy_between", rollout) == ["too hard", True, "too easy", "no reward", "too easy"]
    name = rollout.reward_names[0]
    assert by_group({"name": "accuracy_between", "reward": name}, rollout)[:2] == ["too hard", True]
    with pytest.raises(ConfigurationError, match="'other'"):
        by_group({"name": "accuracy_between", "reward": "other"}, rollout)


def test_not_all_truncated() -> None:
    rollout = rollout_of([0] * 8, 4, truncated_B=torch.tensor([1, 1, 1, 0, 1, 1, 1, 1]).bool())
    assert by_group("not_all_truncated", rollout) == [True, "truncated"]
    assert by_group(NotAllTruncated(below=0.75), rollout) == ["truncated", "truncated"]
    with pytest.raises(ConfigurationError, match="below"):
        NotAllTruncated(below=0)


def test_several_as_one() -> None:
    rollout = rollout_of([1, 0, 1, 1, 0, 0, 1, 0], 2, truncated_B=torch.tensor([0, 1, 0, 1, 1, 1, 1, 1]).bool())
    both = {"name": "all_of", "filters": ["signal", {"name": "not_all_truncated", "below": 1.0}]}
    nested = {"name": "all_of", "filters": [both, "accuracy_between"]}
    for selection in (both, nested):
        assert by_group(selection, rollout) == [True, "equal rewards", "equal rewards", "truncated"]
    assert load_group_filter(nested).declares.needs == ("advantages",)
    assert AllOf(filters=[NotAllTruncated()]).declares.needs == ()
    assert AllOf(filters=[NotAllTruncated(), Signal()]).filters[1].__name__ == "signal"
    with pytest.raises(PluginParameterError):
        load_group_filter({"name": "all_of", "filters": []})
    with pytest.raises(ConfigurationError):
        load_group_filter(["signal", "accuracy_between"])
    with pytest.raises(UnknownPluginError, match=r"all_of.*filters\[1\]: .*'signl'.*'signal'"):
        load_group_filter({"name": "all_of", "filters": ["signal", "signl"]})


def test_what_is_no_filter() -> None:
    class Weights:
        def weights(self, rollout: Rollout) -> Any: ...

    with pytest.raises(PluginTypeError, match="not a group filter"):
        load_group_filter(Weights())
    with pytest.raises(PluginTypeError, match="pass NotAllTruncated"):
        load_group_filter(NotAllTruncated)
