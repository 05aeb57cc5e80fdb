"""Every form of reward is read as TRL reads it, what gave no value is counted, and a limit interrupts what hangs."""

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.judge_server import judge_server
from tests.support import length_reward, relative_gap, train
from tests.trainer.launch import launch
from tests.trainer.process_worker import Job, run_job
from trl_grpo_ext import GRPOExtConfig
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.guard.reward_watch import reward_limit


def as_generator(completion_ids: list[list[int]], **columns: Any) -> Iterator[float]:
    yield from length_reward(completion_ids)


def as_tensor(completion_ids: list[list[int]], **columns: Any) -> torch.Tensor:
    return torch.tensor(length_reward(completion_ids))


class AsyncCallable:
    __name__ = "async_callable"

    async def __call__(self, completion_ids: list[list[int]], **columns: Any) -> list[float]:
        await asyncio.sleep(0)
        return length_reward(completion_ids)


@pytest.mark.slow
@pytest.mark.parametrize("reward", [as_generator, as_tensor, AsyncCallable()], ids=["generator", "tensor", "async"])
def test_every_form_trains_as_the_list_does(tiny_model: Path, tmp_path: Path, reward: Any) -> None:
    listed = train(tiny_model, tmp_path / "list", max_steps=1, reward_timeout=60.0)
    other = train(tiny_model, tmp_path / "other", max_steps=1, reward_funcs=reward)
    assert relative_gap(other.gradients[0], listed.gradients[0]) == 0.0


EARLY: Job = {"max_steps": 1, "per_device_train_batch_size": 4}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_judge_is_asked_before_a_slower_reward_ends(tiny_model: Path, tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("openai", reason="the extra `judge` is not installed")
    with judge_server() as server:
        job = {**EARLY, "judge": server.url}
        if ranks == 1:
            results = [run_job(tiny_model, tmp_path, job)]
        else:
            results = [jobs["early"] for jobs in launch({"early": job}, tiny_model, tmp_path)]
        assert {request["model"] for request in server.requests} == {f"rank{rank}" for rank in range(ranks)}
    assert [result["logs"][0]["rewards/waits/mean"] for result in results] == [1.0] * ranks


@pytest.mark.slow
def test_reward_watch_ends_a_held_interpreter(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import trl_grpo_ext.guard.reward_watch as reward_watch

        reward_watch._GRACE_SECONDS = 1.0

        def tower(**columns):
            return [float(9 ** 9 ** 9)]

        watch = reward_watch.RewardWatch(limit=0.5)
        with watch.time_limit():
            watch.wrap(tower, "tower")(completions=["a"])
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "in tower" in done.stderr


def test_reward_limit_bounds(tmp_path: Path) -> None:
    assert GRPOExtConfig(str(tmp_path), use_cpu=True, bf16=False).reward_timeout == 3600
    assert reward_limit(3600, 1800.0, 1) == 3600
    assert reward_limit(3600, 1800.0, 2) == 1440
    assert reward_limit(5, 100.0, 1) == reward_limit(5, 100.0, 2) == 5
    assert reward_limit(None, 100.0, 1) is reward_limit(None, 100.0, 2) is None
    for value in (0, -1.0, True, "5", float("nan")):
        with pytest.raises(ConfigurationError, match="reward_timeout"):
            GRPOExtConfig(str(tmp_path), use_cpu=True, bf16=False, reward_timeout=value)
