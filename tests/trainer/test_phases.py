"""Where the time of a step goes: the phases are what really takes it, they add up, and TRL's own run has none.

Time is what these tests say it is, so that a busy machine changes nothing.
"""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import length_reward, prompts, scripted_rollout, train

NAMES = ("time/generation", "time/rewards", "time/update")


def test_phases_add_up(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class InTheUpdate:
        def on_forward(self, advantages: Any, context: Any) -> Any:
            now[0] += 0.2
            return advantages

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        now[0] += 0.9
        return length_reward(completion_ids)

    def rollout(prompts_: list[str], trainer: Any) -> dict[str, Any]:
        now[0] += 0.3
        return scripted_rollout(prompts_, trainer)

    # Two optimizer steps use one generation batch, so the second neither generates nor rewards.
    run = train(
        tiny_model,
        tmp_path,
        reward_funcs=reward,
        loss_aggregation="token_mean",
        rollout_func=rollout,
        eval_dataset=prompts(2),
        hooks=[InTheUpdate()],
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
