"""Every hook, and a chain of four, in two real processes that share a group: the same advantages as in one process."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests.support import relative_gap
from tests.test_every_plugin import documented_example
from tests.trainer.launch import Results, launch
from tests.trainer.process_worker import Job, run_job
from trl_grpo_ext import available

CHAIN: list[Any] = [
    "leave_one_out",
    {"name": "kl_in_reward", "coefficient": 0.2, "gamma": 0.9},
    {"name": "clip_advantages", "low": -0.5, "high": 1.0},
    "entropy_shaping",
]
LAST_TURN = {"name": "masked_turns", "pick": "last"}
SCALE = {"name": "sign_scaling", "positive": 0.5}
FITTING: dict[str, Any] = {
    "pass_at_k": {"k": 2, "threshold": 4.0},
    "process_rewards": {"reward": "vowels"},
    "reward_schedule": {"weights": {"vowels": [[0, 1.0], [2, 3.0]]}},
    "self_distilled": {"teacher": "reference", "prompt": "prompt"},
    "teacher_log_ratio": {"teacher": "reference", "prompt": None, "mode": "add"},
}
"""Parameters in place of the documented examples': groups have four members with rewards from 2 to 6, two functions
return spans, and the policy begins as its own reference."""


def fitting(selection: Any) -> dict[str, Any]:
    chosen = {"name": selection} if isinstance(selection, str) else dict(selection)
    return {**chosen, **FITTING.get(chosen["name"], {})}


def job(hooks: Any, rows: int) -> Job:
    plugins = {"hooks": hooks, "part_rewards": True, "loss_aggregation": "token_mean"}
    off_policy = {"num_iterations": 2, "max_steps": 2, "beta": 0.04, "learning_rate": 0.02}
    return {**plugins, **off_policy, "per_device_train_batch_size": rows, "prompt_count": 6}


BUILT_IN = [info for info in available("advantage_hook") if info.builtin]
EXAMPLES: dict[str, Any] = {info.name: [*map(fitting, documented_example(info))] for info in BUILT_IN}

SHAPER = "tests.trainer.process_worker:Shapes"
WITH_SHAPERS = {"shaper, TRL's estimator": [SHAPER], "shaper, transform, estimator": [SHAPER, SCALE, "centred"]}

WITH_TURNS = {
    "returns of turns": ["turn_rewards"],
    "turns plus outcome": [{"name": "turn_rewards", "form": "turn_plus_outcome"}, LAST_TURN],
    "states of turns": [SHAPER, {"name": "gigpo", "normalise": True}],
}
"""With what an environment wrote in the completions, and rewards of turns."""
JOBS = {**EXAMPLES, "chain of four": CHAIN, **WITH_SHAPERS, **WITH_TURNS}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chains")


@pytest.fixture(scope="module")
def two(tiny_model: Path, folder_of_two: Path) -> list[Results]:
    jobs = {name: {**job(hooks, 6), "turns": name in WITH_TURNS} for name, hooks in JOBS.items()}
    jobs["uneven parts"] = {"hooks": ["part_credit"], "uneven_parts": True, "max_steps": 1, "prompt_count": 6}
    jobs["uneven parts"]["per_device_train_batch_size"] = 4
    jobs["records"] = {**job(CHAIN, 6), "token_records": 99}
    return launch(jobs, tiny_model, folder_of_two)


@pytest.fixture(scope="module")
def one(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("one")

    def run(name: str) -> dict[str, Any]:
        settings = {**job(JOBS[name], 12), "turns": name in WITH_TURNS}
        return run_job(tiny_model, folder / name, json.loads(json.dumps(settings)))

    return functools.cache(run)


def test_every_rank_knows_the_parts_of_all(two: list[Results]) -> None:
    tables = [result["uneven parts"]["rollouts"][0]["parts"] for result in two]
    (first, ones), (second, nans) = (table["first_prompts_only"] for table in tables)
    assert first == second == ("first",)
    assert ones == [[1.0]] * 4
    assert all(score != score for (score,) in nans)


def test_token_records_of_all_ranks(two: list[Results], folder_of_two: Path, tiny_model: Path, tmp_path: Path) -> None:
    run_job(tiny_model, tmp_path, {**job(CHAIN, 12), "token_records": 99})
    number = list(two[0]).index("records")
    for step in (1, 2):
        file = f"token_records/step_{step:05d}.parquet"
        together = pyarrow.parquet.read_table(folder_of_two / str(number) / file).to_pylist()
        alone = pyarrow.parquet.read_table(tmp_path / file).to_pylist()
        assert [(row["group"], row["member"]) for row in together] == [(g, m) for g in range(3) for m in range(4)]
        for row, expected in zip(together, alone, strict=True):
            same = ("step", "group", "member", "prompt", "completion", "rewards", "token_ids", "stages", "live")
            assert {name: row[name] for name in same} == {name: expected[name] for name in same}
            for name in ("advantage", "weight", "logp", "entropy"):
                assert row[name] == pytest.approx(expected[name], abs=1e-3)
            for stage, expected_stage in zip(row["advantages"], expected["advantages"], strict=True):
                assert stage == pytest.approx(expected_stage, abs=1e-3)


@pytest.mark.parametrize("name", JOBS)
def test_advantages_and_gradient_of_split_groups(
    two: list[Results], one: Callable[[str], dict[str, Any]], name: str
) -> None:
    alone = one(name)
    first, second = (result[name] for result in two)
    assert first["rollouts"][0]["group_ids"] == [0, 0, 0, 0, 1, 1]  # the group is really cut
    together = first["rollouts"][0]["advantages"] + second["rollouts"][0]["advantages"]
    expected = alone["rollouts"][0]["advantages"]
    assert any(any(row) for row in expected)
    for row, expected_row in zip(together, expected, strict=True):
        assert row == pytest.approx(expected_row, abs=2e-5)
    # after the forward stage, as TRL's table shows it
    assert first["advantages"] == pytest.approx(alone["advantages"], abs=2e-4)
    assert relative_gap(first["gradients"][0], alone["gradients"][0]) < 1e-5
    assert relative_gap(first["gradients"][1], alone["gradients"][1]) < 1e-3  # from weights that differ by rounding
    for logged, value in alone["logs"][0].items():
        if logged.startswith(("advantage/", "reward", "parts/")):
            assert first["logs"][0][logged] == pytest.approx(value, abs=1e-4), logged
