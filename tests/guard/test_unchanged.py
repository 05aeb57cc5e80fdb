"""What a plugin changed in its inputs is noticed at any depth, and what it left alone is not."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trl_grpo_ext.errors import PluginOutputError
from trl_grpo_ext.guard.reward_watch import RewardWatch
from trl_grpo_ext.guard.unchanged import Fingerprints

INPUTS: dict[str, Any] = {
    "prompts": [[{"role": "user", "content": "2?"}], [{"role": "user", "content": [{"type": "text", "text": "?"}]}]],
    "completion_ids": [[1, 2, 3], [], [4]],
    "answer": ["4", None, float("nan")],
    "options": {"a": [1, 2], "b": {"c": "d"}},
    "logps": torch.zeros(3),
    "nested": ([torch.ones(2)], 5),
}

CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "prompts": lambda inputs: inputs["prompts"][1][0]["content"][0].update(text="!"),
    "completion_ids": lambda inputs: inputs["completion_ids"][0].reverse(),
    "answer": lambda inputs: inputs["answer"].pop(),
    "options": lambda inputs: inputs["options"]["b"].pop("c"),
    "nested": lambda inputs: inputs["nested"][0][0].mul_(2.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_at_any_depth_is_named(name: str) -> None:
    inputs = copy.deepcopy(INPUTS)
    prints = Fingerprints(inputs)
    assert prints.changed() is None
    CHANGES[name](inputs)
    assert prints.changed() == name


def test_inputs_that_stay_as_they_were() -> None:
    with torch.inference_mode():
        made_there = torch.zeros(2)
    inputs = {**copy.deepcopy(INPUTS), "made_there": made_there, "objects": [object(), ["a", object()]]}
    prints = Fingerprints(inputs)
    _ = [sorted(row) for row in inputs["completion_ids"]], inputs["logps"] + 1.0
    assert prints.changed() is None


def test_a_reward_that_edits_a_message_is_refused() -> None:
    def strips(completions: list[Any], **columns: Any) -> list[float]:
        completions[-1][0]["content"] = completions[-1][0]["content"].strip()
        return [0.0] * len(completions)

    with pytest.raises(PluginOutputError, match="'strips' changed 'completions'"):
        RewardWatch().wrap(strips, "strips")(completions=[[{"role": "assistant", "content": "8 "}]], prompts=["?"])
