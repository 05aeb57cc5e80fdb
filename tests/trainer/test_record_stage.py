"""Logged equals trained: TRL's table, its parquet files and the token records show what the loss used.

What the loss used is read off the loss itself: its slope in the advantages, and the log-probabilities that it got.
"""

import math
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet
import pytest
from trl import GRPOTrainer

from tests.support import length_reward, prompts, scripted_rollout, train
from trl_grpo_ext import GRPOExtTrainer
from trl_grpo_ext.credit import flow
from trl_grpo_ext.trainer.reductions import LossForward
from trl_grpo_ext.types import HookDeclaration

CHAIN: list[Any] = [
    "centred",
    {"name": "sign_scaling", "positive": 0.5},
    {"name": "entropy_shaping", "alpha": 0.3},
    {"name": "low_probability", "alpha": 0.5},
]
STAGES = ["trl", "centred", "sign_scaling", "entropy_shaping", "low_probability"]


class Trained(GRPOExtTrainer):
    """Keeps, of every row of every training forward, what reached TRL's loss."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.used: list[dict[str, Any]] = []
        super().__init__(*arguments, **keywords)
        records = self._trl_grpo_ext.records
        self.saw_loss, records.saw_loss = records.saw_loss, self.keeping

    def keeping(self, forward: LossForward, reduced: Any) -> None:
        self.saw_loss(forward, reduced)
        advantages_B_T = flow.expand_advantages(forward.inputs["advantages"], forward.mask_B_T).detach()
        for row, mask in enumerate(forward.mask_B_T):
            ids = forward.inputs["completion_ids"][row][mask > 0].tolist()
            advantage = advantages_B_T[row][mask > 0].tolist()
            logp = forward.policy().logps_B_T[row][mask > 0].tolist()
            self.used.append({"step": self.state.global_step, "ids": ids, "advantage": advantage, "logp": logp})


def run(model: Path, folder: Path, **settings: Any) -> Any:
    hooks = settings.pop("hooks", CHAIN)
    settings = {"log_completions": True, "max_steps": 2, **settings}
    return train(model, folder, Trained, hooks=hooks, **settings).trainer


def table(folder: Path, step: int) -> pd.DataFrame:
    return pd.read_parquet(folder / "completions" / f"completions_{step:05d}.parquet")


def records(folder: Path, step: int) -> list[dict[str, Any]]:
    file = folder / "token_records" / f"step_{step:05d}.parquet"
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(file).to_pylist()
    return rows


def used_at(trainer: Any, step: int) -> dict[tuple[int, ...], dict[str, Any]]:
    """What the loss of that optimizer step (counted from 0) used, by the completion's tokens."""
    return {tuple(row["ids"]): row for row in trainer.used if row["step"] == step}


ACCUMULATED = {"gradient_accumulation_steps": 2, "prompt_count": 8, "beta": 0.04, "loss_aggregation": "prompt_mean"}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"num_iterations": 2}, ACCUMULATED, {"loss_aggregation": "tail_mean"}])
def test_records_have_what_was_used(tiny_model: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    trainer = run(tiny_model, tmp_path, token_records=16, **settings)
    for step in (1, 2):
        used, shown, recorded = used_at(trainer, step - 1), table(tmp_path, step), records(tmp_path, step)
        assert len(shown) == len(recorded) == 8 * settings.get("gradient_accumulation_steps", 1)
        by_text = {trainer.processing_class.decode(ids, skip_special_tokens=True): row for ids, row in used.items()}
        for _, row in shown.iterrows():
            advantages = by_text[row["completion"]]["advantage"]
            assert row["advantage"] == pytest.approx(sum(advantages) / len(advantages), abs=1e-6)
        for row in recorded:
            trained = used[tuple(row["token_ids"])]
            assert row["step"] == step
            assert row["stages"] == STAGES
            assert row["advantage"] == pytest.approx(trained["advantage"], abs=1e-6)
            assert row["logp"] == pytest.approx(trained["logp"], abs=1e-5)
            assert row["advantages"][-1] == pytest.approx(row["advantage"], abs=1e-6)
            assert [name for name, _ in row["rewards"]] == ["length_reward"]
            assert row["rewards"][0][1] == pytest.approx(length_reward([row["token_ids"]])[0])


class Counts:
    """Counts the calls of its stages."""

    declares = HookDeclaration(role="transform", independent=True)

    def __init__(self) -> None:
        self.metrics = {"batches": 0.0, "forwards": 0.0}

    def on_rollout(self, advantages_B_T: Any, rollout: Any) -> Any:
        self.metrics["batches"] += 1
        return advantages_B_T

    def on_forward(self, advantages_B_T: Any, forward: Any) -> Any:
        self.metrics["forwards"] += 1
        return advantages_B_T


def test_a_forward_hooks_metrics_are_those_of_the_steps_forwards(tiny_model: Path, tmp_path: Path) -> None:
    cut = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    logs = train(tiny_model, tmp_path, hooks=[Counts()], **cut).logs
    found = [[log[f"advantage/Counts/{name}"] for name in ("batches", "forwards")] for log in logs[:2]]
    assert found == [[1, 1.5], [2, 3.5]]  # the means over two micro-batches


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
    plugins: dict[str, Any] = {"reward_funcs": reward, "loss_aggregation": "token_mean", "hooks": [InTheUpdate()]}
    settings: dict[str, Any] = {"rollout_func": rollout, "gradient_accumulation_steps": 2, "num_iterations": 2}
    settings |= {"eval_dataset": prompts(2), "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
    run = train(tiny_model, tmp_path, **plugins, **settings)
    history = run.trainer.state.log_history
    steps = [log for log in history if "step_time" in log]
    assert [[log[name] for name in ("time/generation", "time/rewards", "time/update")] for log in steps] == [
        pytest.approx([0.3, 0.9, 0.4]),
        pytest.approx([0, 0, 0.4]),
    ]
    assert [log["step_time"] for log in steps] == pytest.approx([1.6, 0.4])
    evaluations = [log for log in history if "eval_runtime" in log]
    assert len(evaluations) == 2
    assert not [key for log in evaluations for key in log if "time/" in key]


def test_nothing_selected_logs_what_trl_logs_and_missing_rewards(tiny_model: Path, tmp_path: Path) -> None:
    def some(completions: list[str], **columns: Any) -> list[float | None]:
        return [None, math.nan, 0.5, 1.0] * (len(completions) // 4)

    given: dict[str, Any] = {"reward_funcs": [length_reward, some], "max_steps": 1}
    ours, theirs = (train(tiny_model, tmp_path / of.__name__, of, **given) for of in (GRPOExtTrainer, GRPOTrainer))
    assert ours.logs[0] == {**theirs.logs[0], "rewards/some/none": 0.25, "rewards/some/nan": 0.25}
