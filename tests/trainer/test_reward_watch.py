"""Every form of reward is read as TRL reads it, what gave no value is counted, and a limit interrupts what hangs."""

import asyncio
import functools
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from tests.judge_server import judge_server
from tests.support import length_reward, train
from tests.trainer.launch import launch
from tests.trainer.process_worker import Job, run_job
from trl_grpo_ext import GRPOExtConfig
from trl_grpo_ext.errors import ConfigurationError, RewardError
from trl_grpo_ext.guard.reward_watch import RewardWatch, reward_limit


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
    assert other.losses == listed.losses
    assert other.gradients[0].keys() == listed.gradients[0].keys()
    assert all(torch.equal(other.gradients[0][name], gradient) for name, gradient in listed.gradients[0].items())


def half_nan(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    half = len(completion_ids) // 2
    return [None] * (half // 2) + [float("nan")] * (half - half // 2) + [1.0] * (len(completion_ids) - half)


@pytest.mark.slow
def test_reward_watch_counts_none_and_nan(tiny_model: Path, tmp_path: Path) -> None:
    run = train(tiny_model, tmp_path, max_steps=1, reward_funcs=[length_reward, half_nan])
    assert run.logs[0]["rewards/half_nan/none"] == pytest.approx(2 / 8)
    assert run.logs[0]["rewards/half_nan/nan"] == pytest.approx(2 / 8)
    assert not [name for name in run.logs[0] if name.startswith("rewards/length_reward/n")]


def scaled(completion_ids: list[list[int]], factor: float, **columns: Any) -> list[float]:
    return [factor * reward for reward in length_reward(completion_ids)]


@pytest.mark.slow
def test_two_partials_of_one_function_have_metrics_of_their_own(tiny_model: Path, tmp_path: Path) -> None:
    rewards = [functools.partial(scaled, factor=factor) for factor in (1.0, 10.0)]
    run = train(tiny_model, tmp_path, max_steps=1, reward_funcs=rewards)
    first, second = run.logs[0]["rewards/scaled/mean"], run.logs[0]["rewards/scaled_2/mean"]
    assert second == pytest.approx(10 * first)
    assert run.trainer.reward_func_names == ["scaled", "scaled_2"]
    theirs = train(tiny_model, tmp_path / "trl", GRPOTrainer, max_steps=1, reward_funcs=rewards)
    assert "rewards/scaled_2/mean" not in theirs.logs[0]
    assert theirs.losses == run.losses


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


def sleeps(**columns: Any) -> list[float]:
    time.sleep(30)
    return []


def test_the_limit_leaves_those_alone_that_are_in_time() -> None:
    watch = RewardWatch(limit=0.3)
    quick = watch.wrap(lambda completions: [1.0] * len(completions), "quick")
    with watch.time_limit():
        assert quick(completions=["a"]) == [1.0]
        time.sleep(0.6)  # the limit passes while no reward runs: this rank waits for another
    with pytest.raises(RewardError, match="reward slow"), watch.time_limit():
        watch.wrap(sleeps, "slow")(completions=["a"])


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
