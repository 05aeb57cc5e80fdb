"""Worked examples of the group filters: the same four groups of two completions for all of them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from trl_grpo_ext import load_group_filter
from trl_grpo_ext.credit.flow import group_verdicts
from trl_grpo_ext.testing.builders import make_rollout
from trl_grpo_ext.types import FilterDeclaration

from .worked import Worked, completions

GROUPS = (0, 0, 1, 1, 2, 2, 3, 3)
TEXTS = ("18", "17", "18", "18", "one", "two", "18", "I do not")
REWARDS = (1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0)
TRUNCATED = (False, False, False, False, True, True, False, True)


def verdicts(selection: Any) -> Mapping[str, Any]:
    """What a filter says of each completion, with advantages that are the reward minus the group's mean."""
    group_filter = load_group_filter(selection)
    rollout = make_rollout([2] * len(GROUPS), REWARDS, GROUPS)
    advantages_B = rollout.rewards_B - rollout.group_baselines_B
    reads = "advantages" in FilterDeclaration.of(group_filter).needs
    rollout = replace(
        rollout,
        texts=list(TEXTS),
        truncated_B=torch.tensor(TRUNCATED),
        advantages_B_T=advantages_B.unsqueeze(1) * rollout.mask_B_T if reads else None,
    )
    said = group_verdicts(group_filter, rollout)
    return {"its group is": ["kept" if one is True else one or "dropped" for one in said]}


def _example(selection: Any, note: str = "") -> Worked:
    given = {
        "prompt": [f"prompt {group + 1}" for group in GROUPS],
        "text": TEXTS,
        "reward": REWARDS,
        "cut off": ["yes" if one else "no" for one in TRUNCATED],
    }
    return Worked(selection, completions(len(GROUPS)), given, verdicts, note)


_BOTH = {"filters": ["not_all_truncated", "signal"]}

EXAMPLES: dict[str, Worked] = {
    "signal": _example("signal", "The advantages are the reward minus the mean of the group."),
    "accuracy_between": _example({"name": "accuracy_between", "low": 0.0, "high": 1.0}),
    "not_all_truncated": _example("not_all_truncated"),
    "all_of": _example({"name": "all_of", **_BOTH}),
}
