"""What has signal is decided once, after the chain: in real trainings, with skipping, compacting and RL-ZVP."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import Run, relative_gap, train
from trl_grpo_ext import Rollout
from trl_grpo_ext.types import HookDeclaration


def run(model: Path, folder: Path, *hooks: Any, **settings: Any) -> Run:
    return train(model, folder, hooks=[*hooks], **{"max_steps": 1, **settings})


def gradient_is_zero(run: Run) -> bool:
    return not any(bool(gradient.any()) for gradient in run.gradients[0].values())


class Penalty:
    """Takes 0.05 from the first token of every other completion."""

    declares = HookDeclaration(role="transform")

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        penalty_B_T = torch.zeros_like(advantages_B_T)
        penalty_B_T[::2, 0] = 0.05
        return advantages_B_T - penalty_B_T


def always(value: float) -> Any:
    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [value] * len(completion_ids)

    return reward


@pytest.mark.slow
def test_skipping_equal_rewards(tiny_model: Path, tmp_path: Path) -> None:
    skipping = {"name": "token_mean", "skip_zero_variance": True}
    settings: dict[str, Any] = {"reward_funcs": always(100.0)}
    skipped = run(tiny_model, tmp_path / "skipped", Penalty(), loss_aggregation=skipping, **settings)
    assert gradient_is_zero(skipped)
    assert skipped.logs[0]["groups/zero_variance"] == 1
    learning = Penalty()
    learning.declares = HookDeclaration(role="transform", makes_signal=True)
    kept = run(tiny_model, tmp_path / "kept", learning, loss_aggregation=skipping, **settings)
    plain = run(tiny_model, tmp_path / "plain", Penalty(), loss_aggregation="token_mean", **settings)
    assert not gradient_is_zero(plain)
    assert relative_gap(kept.gradients[0], plain.gradients[0]) == 0
    assert kept.logs[0]["groups/zero_variance"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["sum_then_normalize", "normalize_then_sum"])
def test_signal_of_rounding(tiny_model: Path, tmp_path: Path, setting: str) -> None:
    settings: dict[str, Any] = {
        "reward_funcs": [always(0.3), always(100.1)],
        "multi_objective_aggregation": setting,
        "num_generations": 7,
        "per_device_train_batch_size": 14,
        "max_steps": 1,
    }
    alone = train(tiny_model, tmp_path / "alone", **settings)
    assert not gradient_is_zero(alone)  # TRL's own, where nothing is selected
    for name, selected in {
        "weighted": {"loss_aggregation": "token_mean"},
        "compact": {"compact_updates": "exact"},
    }.items():
        run = train(tiny_model, tmp_path / name, **settings, **selected)
        assert gradient_is_zero(run), name
