"""Where the time of a step goes: the phases are what really takes it, they add up, and TRL's own run has none.

Time is what these tests say it is, so that a busy machine changes nothing.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import length_reward, prompts, scripted_rollout, train
from trl_grpo_ext.trainer.phase_times import PhaseClock

NAMES = ("time/generation", "time/rewards", "time/update")


class Watch:
    """A clock that stands still until somebody spends time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def spend(self, seconds: float) -> None:
        self.now += seconds


def test_each_phase_gets_its_own_time_and_they_add_up(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch)

    class InTheUpdate:
        def on_forward(self, advantages: Any, context: Any) -> Any:
            watch.spend(0.2)
            return advantages

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        watch.spend(0.9)
        return length_reward(completion_ids)

    def rollout(prompts_: list[str], trainer: Any) -> dict[str, Any]:
        watch.spend(0.3)
        return scripted_rollout(prompts_, trainer)

    # Two optimizer steps use one generation batch, so the second neither generates nor rewards.
    run = train(
        tiny_model,
        tmp_path,
        reward_funcs=reward,
        loss_aggregation="token_mean",
        trainer_arguments={
            "rollout_func": rollout,
            "eval_dataset": prompts(2),
            "advantage_hooks": [InTheUpdate()],
        },
        scripted=False,
        gradient_accumulation_steps=2,
        num_iterations=2,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=8,
    )
    history = run.trainer.state.log_history
    steps = [log for log in history if "step_time" in log]
    assert [[log[name] for name in NAMES] for log in steps] == [
        pytest.approx([0.3, 0.9, 0.4]),
        pytest.approx([0, 0, 0.4]),
    ]
    assert [log["step_time"] for log in steps] == pytest.approx([1.6, 0.4])
    evaluations = [log for log in history if "eval_runtime" in log]
    assert len(evaluations) == 2
    assert not [key for log in evaluations for key in log if "time/" in key]
    (plain,) = (log for log in train(tiny_model, tmp_path / "plain", max_steps=1).trainer.state.log_history[:1])
    assert not set(NAMES) & set(plain)


def test_the_clock_waits_for_the_device_around_an_optimizer_step(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)

    class Device:
        """Is busy for so many seconds when it is waited for."""

        busy, waits = 0.0, 0

        def synchronize(self) -> None:
            watch.spend(self.busy)
            self.waits += 1

    clock, device = PhaseClock(torch.device("cpu")), Device()
    clock._device = device
    device.busy = 0.5  # with the optimizer's last step
    with clock.during("update"):
        device.busy = 0.0
        with clock.during("generation"):
            watch.spend(0.1)
    with clock.during("update"):  # the next micro-step
        assert device.waits == 1
        device.busy = 0.2  # with the gradient
    assert clock.take() == pytest.approx({"time/generation": 0.1, "time/rewards": 0.0, "time/update": 0.2})
    assert device.waits == 2
