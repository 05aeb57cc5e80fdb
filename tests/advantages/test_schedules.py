"""reward_schedule: weights by hand, the rewards that it makes, what it refuses, and its state."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contexts import make_rollout
from tests.support import length_reward, train
from trl_grpo_ext.advantages.schedules import RewardSchedule
from trl_grpo_ext.credit.flow import run_shaper
from trl_grpo_ext.errors import ConfigurationError

POINTS = {"form": [[10, 1.0], [20, 3.0], [40, 0.0]]}


def two_rewards(step: int = 0, **settings: Any) -> Any:
    columns = {
        "rewards_B_K": torch.tensor([[1.0, 4.0], [0.0, math.nan], [math.nan, math.nan]], dtype=torch.float64),
        "reward_names": ("right", "form"),
        "reward_weights_K": torch.tensor([1.0, 0.5], dtype=torch.float64),
    }
    return make_rollout([1, 1, 1], (3.0, 0.0, math.nan), (0, 0, 0), step=step, **columns, **settings)


@pytest.mark.parametrize(
    ("form", "weights"),
    [("linear", [1.0, 1.0, 2.0, 3.0, 1.5, 0.0, 0.0]), ("step", [1.0, 1.0, 1.0, 3.0, 3.0, 0.0, 0.0])],
)
def test_weights_by_hand(form: str, weights: list[float]) -> None:
    schedule = RewardSchedule(weights=POINTS, form=form)
    assert [schedule.weight("form", step) for step in (0, 10, 15, 20, 30, 40, 1000)] == weights


def test_rewards_by_hand() -> None:
    schedule = RewardSchedule(weights={**POINTS, "right": [[0, 2.0]]})
    added_B = run_shaper(schedule, two_rewards(step=15))  # form 2 and not 0.5, right 2 and not 1
    assert added_B.tolist() == [4.0 * 1.5 + 1.0, 0.0, 0.0]


def test_unknown_rewards_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="no reward 'from'"):
        RewardSchedule(weights={"from": [[0, 1.0]]}).on_rewards(two_rewards())


@pytest.mark.parametrize(
    "weights",
    [
        {},
        None,
        *({"a": points} for points in ([], 1.0, "01", [1.0], [[0]])),
        *({"a": [[step, 1.0]]} for step in (-1, 0.5, True)),
        *({"a": [[0, weight]]} for weight in (math.nan, True, "1")),
        {"a": [[5, 1.0], [5, 2.0]]},
    ],
)
def test_schedules_that_are_none_are_refused(weights: Any) -> None:
    with pytest.raises(ConfigurationError, match="reward_schedule"):
        RewardSchedule(weights=weights)


def test_training_resumes_to_the_bit_and_weighs_as_scheduled(tiny_model: Path, tmp_path: Path) -> None:
    hook = {"name": "reward_schedule", "weights": {"length_reward": [[0, 1.0], [4, -1.0]]}}
    settings: dict[str, Any] = {"advantage_hooks": [hook], "max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    whole = train(tiny_model, tmp_path, **settings, reward_funcs=[length_reward])
    for log, weight in zip((log for log in whole.logs if "reward" in log), (1.0, 0.5, 0.0, -0.5), strict=True):
        mean = log["rewards/length_reward/mean"]
        assert log["reward"] == pytest.approx(weight * mean, abs=1e-6)
        assert log["rewards/reward_schedule/mean"] == pytest.approx((weight - 1.0) * mean, abs=1e-6)
    for step in (1, 3):
        checkpoint = str(tmp_path / f"checkpoint-{step}")
        resumed = train(tiny_model, tmp_path / str(step), **settings, reward_funcs=[length_reward], resume=checkpoint)
        assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items())
