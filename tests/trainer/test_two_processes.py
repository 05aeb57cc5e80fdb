"""Two real processes (gloo, DDP) train as one process does on the same generation batch.

All trainings of this file share one launch. Everything is float32. Measured largest relative gaps of a gradient over
all cuts and aggregations: 2e-7 at the first step (4e-7 with split groups), 2e-6 at the second, whose weights already
differ by rounding.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import OWN_AGGREGATION, relative_gap, trl_metrics
from tests.trainer.launch import Results, launch
from tests.trainer.process_worker import Job, run_job
from trl_grpo_ext import Totals

WEIGHTED = ["token_mean", "seq_mean_token_mean"]  # the others are in test_split
HOOKS = ["leave_one_out", "entropy_shaping"]
CUTS = [(4, 2)]
"""Rows per micro-batch of each of the two processes, accumulation."""
ONE_PROCESS_CUTS = [(16, 1)]
TOLERANCE = 1e-5


def cut(rows: int, accumulation: int) -> Job:
    return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation, "prompt_count": 8}


def weighted(aggregation: str, rows: int, accumulation: int) -> Job:
    # Two steps: at the first the policy is its own reference, so the KL penalty has neither value nor gradient.
    return {**cut(rows, accumulation), "loss_aggregation": aggregation, "hooks": HOOKS, "beta": 0.04, "max_steps": 2}


def split_groups(aggregation: str, rows: int) -> Job:
    # Groups of 4 in rows 0-3, 4-7, 8-11; with 6 rows per process the second one is cut in the middle.
    return {**cut(rows, 1), "loss_aggregation": aggregation, "hooks": HOOKS, "max_steps": 1}


def halves(rows: int, accumulation: int, steps_per_generation: int) -> Job:
    # Each optimizer step takes one part of the generation batch; at learning rate 0 the parts' mean is the whole.
    settings = {"steps_per_generation": steps_per_generation, "learning_rate": 0.0, "beta": 0.0, "max_steps": 2}
    return {**weighted("token_mean", rows, accumulation), **settings}


def evaluated(rows: int) -> Job:
    job = {**cut(rows, 1), "loss_aggregation": "token_mean", "hooks": HOOKS, "beta": 0.04, "max_steps": 1}
    return {**job, "evaluate": True, "per_device_eval_batch_size": rows}


def loss_type(name: str, **settings: Any) -> Job:
    return {**cut(2, 4), "loss_type": name, "beta": 0.04, "max_steps": 1, "num_iterations": 1, **settings}


SAMPLED: Job = {**cut(4, 2), "scripted": False, "beta": 0.04, "num_iterations": 2, "max_steps": 3}

JOBS: dict[str, Job] = {
    **{f"{name} {rows}x{steps}": weighted(name, rows, steps) for name in WEIGHTED for rows, steps in CUTS},
    **{f"split groups {name}": split_groups(name, 6) for name in WEIGHTED},
    "halves": halves(2, 2, 4),
    "evaluated": evaluated(8),
    **{f"trl {name}": loss_type(name, stock=True) for name in OWN_AGGREGATION},
    **{f"ext {name}": loss_type(name, loss_aggregation=own) for name, own in OWN_AGGREGATION.items()},
    "trl sampled": {**SAMPLED, "stock": True},
    "ext sampled": SAMPLED,
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What rank 0 saved of every job."""
    results, other = launch(JOBS, tiny_model, tmp_path_factory.mktemp("two_processes"))
    for name, result in results.items():
        assert result["processes"] == 2
        assert result["model_class"] == "DistributedDataParallel"
        for mine, others in zip(result["gradients"], other[name]["gradients"], strict=True):
            assert all(torch.equal(mine[parameter], others[parameter]) for parameter in mine)
    return results


@pytest.fixture(scope="module")
def one(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Job], dict[str, Any]]:
    """The same jobs in this process."""
    cache: Results = {}

    def run(job: Job) -> dict[str, Any]:
        key = json.dumps(job)
        if key not in cache:
            cache[key] = run_job(tiny_model, tmp_path_factory.mktemp("one_process"), job)
            assert cache[key]["processes"] == 1
        return cache[key]

    return run


One = Callable[[Job], dict[str, Any]]


def gaps(ours: dict[str, Any], theirs: dict[str, Any]) -> list[float]:
    return [relative_gap(*pair) for pair in zip(ours["gradients"], theirs["gradients"], strict=True)]


@pytest.mark.parametrize(("rows", "accumulation"), CUTS)
@pytest.mark.parametrize("aggregation", WEIGHTED)
def test_weights_do_not_depend_on_the_number_of_processes(
    two: Results, one: One, aggregation: str, rows: int, accumulation: int
) -> None:
    result = two[f"{aggregation} {rows}x{accumulation}"]
    for reference in (one(weighted(aggregation, *single)) for single in ONE_PROCESS_CUTS):
        measured = gaps(result, reference)
        assert len(measured) == 2
        assert max(measured) < TOLERANCE
        assert result["logs"][1]["loss"] == pytest.approx(reference["logs"][1]["loss"], rel=1e-4)
        assert result["advantages"] == pytest.approx(reference["advantages"], abs=1e-5)


def test_that_comparison_sees_hooks_kl_and_aggregation(one: One) -> None:
    # What the trainings above have in common would not be noticed by them, so none of it may be without effect.
    usual = weighted("token_mean", 16, 1)
    for change in ({"hooks": ["leave_one_out"]}, {"beta": 0.0}, {"loss_aggregation": "seq_mean_token_mean"}):
        assert gaps(one({**usual, **change}), one(usual))[1] > 1e-3


@pytest.mark.parametrize("aggregation", WEIGHTED)
def test_a_group_that_is_split_between_processes(two: Results, one: One, aggregation: str) -> None:
    split = two[f"split groups {aggregation}"]
    whole = one(split_groups(aggregation, 12))
    (seen,) = split["rollouts"]
    assert seen["group_ids"] == [0, 0, 0, 0, 1, 1]
    assert seen["local_rows"] == slice(0, 6)
    assert seen["all_group_ids"] == whole["rollouts"][0]["all_group_ids"] == [0] * 4 + [1] * 4 + [2] * 4
    assert seen["all_rewards"] == whole["rollouts"][0]["all_rewards"]  # the same completions in the same order
    tokens = whole["rollouts"][0]["totals"].tokens
    assert seen["totals"] == Totals(tokens=tokens, sequences=12, prompts=3, max_completion_length=10, processes=2)
    assert max(gaps(split, whole)) < TOLERANCE
    # Leave-one-out advantages of a group sum to zero; this rank's part of the split group has those of the whole.
    at_rollout = [row[0] for row in whole["rollouts"][0]["advantages"]]
    assert sum(at_rollout[4:8]) == pytest.approx(0.0, abs=1e-5)
    assert [row[0] for row in seen["advantages"]] == pytest.approx(at_rollout[:6], abs=1e-6)
    # The table of TRL has all ranks' rows, after the forward stage.
    assert split["advantages"] == pytest.approx(whole["advantages"], abs=1e-6)


def test_a_generation_batch_for_two_optimizer_steps(two: Results, one: One) -> None:
    (whole, _) = one({**halves(16, 1, 1), "max_steps": 2})["gradients"]
    first, second = two["halves"]["gradients"]
    assert relative_gap(first, whole) > 0.1
    assert relative_gap({name: (first[name] + second[name]) / 2 for name in first}, whole) < TOLERANCE


def test_evaluation(two: Results, one: One) -> None:
    def losses(result: dict[str, Any]) -> list[float]:
        return [log["eval_loss"] for log in result["logs"] if "eval_loss" in log]

    # 16 prompts: where their number is no multiple of the rows of all processes, the Trainer of transformers drops the
    # losses of the last ranks from eval_loss, because it does not count the repeats of each prompt.
    assert losses(two["evaluated"]) == pytest.approx(losses(one(evaluated(16))), rel=1e-4)
    assert len(losses(two["evaluated"])) == 1


@pytest.mark.parametrize("name", OWN_AGGREGATION)
def test_own_aggregation_is_trls_with_two_processes(two: Results, name: str) -> None:
    assert max(gaps(two[f"ext {name}"], two[f"trl {name}"])) < 1e-6
    assert trl_metrics(two[f"ext {name}"]["logs"][0]) == pytest.approx(
        two[f"trl {name}"]["logs"][0], rel=1e-4, abs=1e-6
    )


def test_nothing_selected_is_trl_to_the_bit(two: Results) -> None:
    ours, theirs = two["ext sampled"], two["trl sampled"]
    assert ours["logs"] == theirs["logs"]
    assert len(theirs["gradients"]) == 3
    for our_step, their_step in zip(ours["gradients"], theirs["gradients"], strict=True):
        assert our_step.keys() == their_step.keys()
        assert any(bool(gradient.any()) for gradient in their_step.values())
        assert all(torch.equal(our_step[name], their_step[name]) for name in their_step)
    assert all(torch.equal(ours["weights"][name], theirs["weights"][name]) for name in theirs["weights"])
