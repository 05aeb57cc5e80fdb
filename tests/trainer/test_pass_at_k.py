"""pass@k of evaluations: by hand, by enumeration, and by what an evaluation's rewards say themselves."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from tests.support import arguments, length_reward, prompts, scripted_rollout, train
from tests.trainer.launch import launch
from tests.trainer.process_worker import run_job
from trl_grpo_ext import GRPOExtTrainer
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.trainer.pass_at_k import PassAtK, estimate_pass_at_k

NAN = math.nan


def test_it_is_the_share_of_all_choices() -> None:
    worked_by_hand = {(1, 4, 2): 1 / 2, (2, 8, 4): 11 / 14, (0, 8, 8): 0.0, (1, 8, 8): 1.0, (5, 8, 4): 1.0}
    for chosen, value in worked_by_hand.items():
        assert estimate_pass_at_k(*chosen) == pytest.approx(value, abs=1e-15)
    for passed, failed in itertools.product(range(4), range(4)):
        for k in range(1, passed + failed + 1):
            choices = list(itertools.combinations([True] * passed + [False] * failed, k))
            assert estimate_pass_at_k(passed, passed + failed, k) == pytest.approx(
                sum(map(any, choices)) / len(choices)
            )


def collected(table: list[list[float]], problems: int | None = None, **settings: Any) -> dict[str, Any]:
    chosen: dict[str, Any] = {"ks": [1, 2], "thresholds": {(0, "a"): 0.9}, "group_size": 4, **settings}
    pass_at_k = PassAtK(**chosen)
    with pass_at_k.evaluating():
        for rewards in table:
            pass_at_k.add(torch.tensor(rewards).unsqueeze(1))
        return pass_at_k.metrics(problems)


def test_pass_at_k_over_batches_and_at_the_threshold() -> None:
    found = collected([[0.9, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0]])
    assert found == {"pass@1": pytest.approx((1 / 4 + 2 / 4 + 0) / 3), "pass@2": pytest.approx((1 / 2 + 5 / 6 + 0) / 3)}
    # What fills up the last batch does not count.
    alone = collected([[1, 1, 1, 1, 0, 0, 0, 0]])
    assert collected([[1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1]], problems=2) == alone
    assert collected([[1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1]]) != alone


def test_completions_that_were_not_judged_are_none_of_the_n() -> None:
    with pytest.warns(UserWarning, match="pass@2: 2 of 3"):
        found = collected([[1, 0, NAN, NAN, 1, NAN, NAN, NAN, NAN, NAN, NAN, NAN]])
    assert found == {"pass@1": pytest.approx(0.75), "pass@2": 1.0}
    with pytest.warns(UserWarning, match="left out"):
        assert collected([[NAN] * 4]) == {"pass@1": None, "pass@2": None}


def held_out(count: int) -> Dataset:
    return prompts(count).map(lambda row: {"answer": row["answer"] + 100})


SETTINGS: dict[str, Any] = {
    "per_device_eval_batch_size": 8,
    "pass_at_k": [1, 3],
    "pass_thresholds": {"remembered": 0.9},
    "eval_strategy": "steps",
    "eval_steps": 1,
    "max_steps": 1,
}


def test_an_evaluation_says_what_its_own_completions_say(tiny_model: Path, tmp_path: Path) -> None:
    # Five problems in batches of two: the last batch is half as large.
    evaluated: list[float] = []

    def remembered(completion_ids: list[list[int]], answer: list[int], **columns: Any) -> list[float]:
        rewards = length_reward(completion_ids)
        if answer[0] >= 100:  # in an evaluation
            evaluated.extend(rewards)
        return rewards

    run = train(tiny_model, tmp_path, reward_funcs=[length_reward, remembered], eval_dataset=held_out(5), **SETTINGS)
    groups = [evaluated[i : i + 4] for i in range(0, 20, 4)]
    assert len(evaluated) == 20
    passed = [[value >= 0.9 for value in group] for group in groups]
    for k in (1, 3):
        chosen = [[any(c) for c in itertools.combinations(group, k)] for group in passed]
        expected = sum(sum(c) / len(c) for c in chosen) / 5
        logged = [log[f"eval_pass@{k}"] for log in run.trainer.state.log_history if f"eval_pass@{k}" in log]
        assert logged == [pytest.approx(expected)]
        assert 0 < expected < 1
    metrics = run.trainer.evaluate({"one": held_out(2), "two": held_out(3)})
    assert {name for name in metrics if "@" in name} == {
        f"eval_{data}_{name}" for data in ("one", "two") for name in ("pass@1", "pass@3")
    }
    history = json.loads(json.dumps(run.trainer.state.log_history))
    assert not any("pass@" in name for log in history for name in log if not name.startswith("eval_"))


@pytest.mark.slow
def test_the_trainer_asks_which_reward_is_meant(tiny_model: Path, tmp_path: Path) -> None:
    def other(completions: list[str], **columns: Any) -> list[float]:
        return [0.0] * len(completions)

    def build(**settings: Any) -> GRPOExtTrainer:
        args = arguments(tmp_path, pass_at_k=[2], **settings)
        data = {"train_dataset": prompts(4), "eval_dataset": prompts(4), "rollout_func": scripted_rollout}
        return GRPOExtTrainer(str(tiny_model), [length_reward, other], args, **data)

    with pytest.warns(UserWarning, match="no eval_dataset"):
        GRPOExtTrainer(str(tiny_model), length_reward, arguments(tmp_path, pass_at_k=[2]), train_dataset=prompts(4))
    for thresholds in (None, {"accuracy": 1.0}):
        with pytest.raises(ConfigurationError, match="length_reward, other"):
            build(pass_thresholds=thresholds)
    metrics = build(pass_thresholds={"other": 0.0, "length_reward": 99.0}).evaluate()
    assert (metrics["eval_pass@2/other"], metrics["eval_pass@2/length_reward"]) == (1.0, 0.0)


@pytest.mark.slow
def test_pass_at_k_in_two_processes(tiny_model: Path, tmp_path: Path) -> None:
    # Five problems on two processes of one and a half groups each: three in a batch, and the sixth is the first again.
    def logged(result: dict[str, Any]) -> list[float]:
        (found,) = [[log["eval_pass@1"], log["eval_pass@3"]] for log in result["logs"] if "eval_pass@1" in log]
        return found

    job: dict[str, Any] = {"pass_at_k": [1, 3], "pass_thresholds": {"length_reward": 0.3}, "evaluate": 5}
    job |= {"max_steps": 1, "num_generations": 4}
    cut = {"per_device_train_batch_size": 6, "per_device_eval_batch_size": 6}
    ranks = launch({"five": {**job, **cut}}, tiny_model, tmp_path / "two")
    whole = {"per_device_train_batch_size": 12, "per_device_eval_batch_size": 4}
    expected = logged(run_job(tiny_model, tmp_path / "one", {**job, **whole}))
    assert 0 < expected[0] < expected[1] < 1
    for rank in ranks:
        assert logged(rank["five"]) == pytest.approx(expected, abs=1e-6)
