"""In a run: plugins that write to what they are given, needs that nobody listed, the line with the plugins, metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import length_reward, train
from trl_grpo_ext.errors import PluginOutputError, PluginRunError


class Writes:
    """Changes what it is given, at some place."""

    role = "transform"

    def __init__(self, what: str) -> None:
        self.what = what

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        if self.what == "advantages":
            advantages_B_T.mul_(2.0)
        elif self.what == "mask":
            rollout.mask_B_T[0] = 0.0
        elif self.what == "texts":
            rollout.texts[0] = "another"
        return advantages_B_T * 1.0


class ForgetsItsNeeds:
    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return advantages_B_T * rollout.ref_logps_B_T.exp()


def pops(completions: list[Any], **columns: Any) -> list[float]:
    scores = [float(len(text)) for text in completions]
    completions.pop(0)
    return scores


def silent(completions: list[Any], **columns: Any) -> list[None]:
    return [None for _ in completions]


@pytest.mark.parametrize(
    ("hook", "error", "message"),
    [
        (Writes("advantages"), PluginOutputError, r"'Writes': on_rollout changed advantages_B_T, which others read"),
        (Writes("mask"), PluginOutputError, r"changed (completion_)?mask_B_T"),
        (Writes("texts"), PluginOutputError, r"changed (texts|completions)"),
        (ForgetsItsNeeds(), PluginRunError, r"What the class does not list in its `needs` is None; here .*ref_logps"),
    ],
)
def test_a_hook_is_stopped_where_it_happens_and_named(
    tiny_model: Path, tmp_path: Path, hook: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        train(tiny_model, tmp_path, trainer_arguments={"advantage_hooks": [hook]}, max_steps=1)


def test_a_reward_that_changes_the_completions_is_stopped(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(PluginOutputError, match=r"The reward 'pops' changed 'completions'"):
        train(tiny_model, tmp_path, reward_funcs=[length_reward, pops], max_steps=1)


def test_the_plugins_are_named_at_the_start_and_metrics_without_a_value_left_out(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(
        tiny_model,
        tmp_path,
        reward_funcs=[length_reward, silent],
        trainer_arguments={"advantage_hooks": ["clip_advantages"], "loss_aggregation": "token_mean"},
        max_steps=1,
    )
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("trl-grpo-ext: ")]
    assert "rewards length_reward (the module tests.support), silent (the module" in line
    assert "advantage hook clip_advantages (trl-grpo-ext 0" in line
    assert "loss aggregation token_mean (trl-grpo-ext 0" in line
    logs = [json.loads(text) for text in (tmp_path / "trl_grpo_ext_log.jsonl").read_text().splitlines()]
    assert any("rewards/length_reward/mean" in entry for entry in logs)
    assert all(value is not None for entry in logs for value in entry.values())
