"""A plugin or reward that breaks its contract on one rank stops all ranks with one error, and none of them hangs."""

from pathlib import Path

import pytest

from tests.trainer.hostile import FILTER, KILLED, ON_FIRST, ON_ONE_ALONE, PLUGINS, REWARDS, SAMPLERS, Expected
from tests.trainer.launch import Ranks, Results, launch
from tests.trainer.process_worker import Job, run_jobs

SETTINGS: Job = {"max_steps": 1, "per_device_train_batch_size": 4}
GOOD: Job = {**SETTINGS, "loss_aggregation": "prompt_mean", "reward_timeout": 60.0}
EXPECTED: dict[str, Expected] = {name: expected for name, (*_, expected) in (PLUGINS | REWARDS).items()} | SAMPLERS  # type: ignore[operator]
EXPECTED[FILTER] = ("PluginRunError", "KeyError: 'no such thing'")
del EXPECTED[KILLED]
FOLLOWED = [*[*EXPECTED][::3], "loss"]
"""After these a training follows that has to work."""


@pytest.fixture(scope="module")
def ranks(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    jobs: dict[str, Job] = {}
    for name in [*EXPECTED, "loss"]:
        jobs[name] = {**SETTINGS, "hostile": name}
        if name in FOLLOWED:
            jobs[f"after {name}"] = GOOD
    return launch(jobs, tiny_model, tmp_path_factory.mktemp("hostile"), timeout=480)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_all_ranks_raise_what_one_did(ranks: list[Results], name: str) -> None:
    kind, message = EXPECTED[name]
    first, last = (results[name] for results in ranks)
    assert first["error"] == last["error"] == kind
    assert first["message"] == last["message"]
    assert message in last["message"]
    if EXPECTED[name] == ON_ONE_ALONE:
        return
    assert last["message"].startswith("On rank 0: " if name.endswith(ON_FIRST) else "On rank 1: ")
    if not name.startswith("is_interrupted"):
        assert name in last["message"]
    if name == "raises":  # the traceback leads to the plugin on the rank where it was, and only there
        assert last["cause"] == "KeyError('difficulty')"
        assert first["cause"] == "None"


@pytest.mark.slow
def test_a_loss_that_is_another_one_on_one_rank(ranks: list[Results]) -> None:
    for results in ranks:
        assert results["loss"]["error"] == "SelfCheckError"
        assert results["loss"]["message"].startswith("On rank 1: The loss of DoubledExtTrainer")
        assert "weight of a token" in results["loss"]["message"]


@pytest.mark.slow
def test_the_ranks_still_work_together_afterwards(ranks: list[Results]) -> None:
    runs = [result for results in ranks for name, result in results.items() if name.startswith("after ")]
    assert len(runs) == 2 * len(FOLLOWED)
    for run in runs:
        assert run["logs"] == runs[0]["logs"]


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named(tiny_model: Path, tmp_path: Path) -> None:
    ranks = Ranks(2)
    jobs = {"killed": {**SETTINGS, "hostile": KILLED}}
    [result] = ranks.call(run_jobs, jobs, tiny_model, tmp_path, timeout=120, survivors=[0])
    kind, message = REWARDS[KILLED][1]
    assert result["killed"]["error"] == kind
    assert result["killed"]["message"].startswith(f"{message}{ranks.processes[1].pid}) has ended, and rank 0 cannot")
    assert "RuntimeError" in result["killed"]["cause"]
    ranks.end()
