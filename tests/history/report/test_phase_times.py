"""Where the time of a step goes: the phases are what really takes it, they add up, and TRL's own run has none."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import length_reward, prompts, scripted_rollout, train
from trl_grpo_ext.trainer.phase_times import PhaseClock

pytestmark = pytest.mark.slow

NAMES = ("time/generation", "time/rewards", "time/update")


def slow_reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    time.sleep(0.9)
    return length_reward(completion_ids)


def slow_rollout(prompts_: list[str], trainer: Any) -> dict[str, Any]:
    time.sleep(0.3)
    return scripted_rollout(prompts_, trainer)


class SlowInTheUpdate:
    """A hook that takes its time at every loss forward, and changes nothing."""

    def on_forward(self, advantages: Any, context: Any) -> Any:
        time.sleep(0.2)
        return advantages


def steps(run: Any) -> list[dict[str, float]]:
    return [log for log in run.trainer.state.log_history if "step_time" in log]


def test_each_phase_gets_its_own_time_and_they_add_up(tiny_model: Path, tmp_path: Path) -> None:
    # Two optimizer steps use one generation batch, so the second neither generates nor rewards.
    run = train(
        tiny_model,
        tmp_path,
        reward_funcs=slow_reward,
        loss_aggregation="token_mean",
        trainer_arguments={
            "rollout_func": slow_rollout,
            "eval_dataset": prompts(2),
            "advantage_hooks": [SlowInTheUpdate()],
        },
        scripted=False,
        gradient_accumulation_steps=2,
        num_iterations=2,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=8,
    )
    first, second = steps(run)
    assert 0.3 <= first["time/generation"] < 0.9 <= first["time/rewards"]
    assert second["time/generation"] + second["time/rewards"] < 0.3
    for step in (first, second):
        assert step["time/update"] >= 0.4  # two micro-batches
        assert sum(step[name] for name in NAMES) == pytest.approx(step["step_time"], abs=0.02)
    evaluations = [log for log in run.trainer.state.log_history if "eval_runtime" in log]
    assert len(evaluations) == 2
    assert not [key for log in evaluations for key in log if "time/" in key]


def test_the_clock_waits_for_the_device_around_an_optimizer_step() -> None:
    waited: list[str] = []

    class Device:
        """Is busy for so many seconds when it is waited for."""

        busy = 0.0

        def synchronize(self) -> None:
            time.sleep(self.busy)
            waited.append("wait")

    clock, device = PhaseClock(torch.device("cpu")), Device()
    clock._device = device
    device.busy = 0.5  # with the optimizer's last step
    with clock.during("update"):
        device.busy = 0.0
        with clock.during("generation"):
            pass
    with clock.during("update"):  # the next micro-step
        assert waited == ["wait"]
        device.busy = 0.2  # with the gradient
    seconds = clock.take()
    assert waited == ["wait", "wait"]
    assert 0.2 <= seconds["time/update"] < 0.5
    assert seconds["time/generation"] < 0.2
    with clock.during("update"):
        assert waited == ["wait"] * 3


@pytest.mark.parametrize(("selection", "there"), [({}, False), ({"token_records": 4}, True)], ids=["none", "records"])
def test_only_a_run_with_something_selected_has_them(
    tiny_model: Path, tmp_path: Path, selection: dict[str, Any], there: bool
) -> None:
    (step,) = steps(train(tiny_model, tmp_path, max_steps=1, **selection))
    assert [name in step for name in NAMES] == [there] * 3
