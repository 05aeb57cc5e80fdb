"""A reward that raises, lies or never returns on one rank stops all ranks with one error, in time.

As in `test_hostile`, one launch runs them all in turn, with trainings that work in between.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.hostile_rewards import ASYNC, MODELS, ON_FIRST, SYNC
from tests.trainer.launch import Results, launch
from tests.trainer.process_worker import Job, run_job

pytestmark = pytest.mark.slow

LIMIT = 1.0
SETTINGS: Job = {"max_steps": 1, "per_device_train_batch_size": 4}
NEVER_RETURN = ("sleeps", "sleeps_and_swallows", "spins", "sleeps_async", "blocks_the_loop")
LATE = f"did not finish within {LIMIT:g} s (reward_timeout)"

EXPECTED: dict[str, tuple[str, str]] = {
    "raises_at_a_row": ("PluginRunError", "raised ZeroDivisionError: float division by zero (at row 2 of 4, whose "),
    "raises_everywhere": ("PluginRunError", "raised KeyError: 'difficulty' (no single one of the 4 completions is at"),
    "leaves": ("PluginRunError", "raised SystemExit: 3"),
    "leaves_async": ("PluginRunError", "raised SystemExit: 3"),
    "ends_the_process": ("PluginRunError", "raised SystemExit: os._exit(0) was called"),
    "is_interrupted": ("KeyboardInterrupt", "interrupted"),
    "empties": ("PluginOutputError", "changed 'prompts'"),
    "empties_and_raises": ("PluginRunError", "raised KeyError: 'gone'"),
    "logs_a_lock": ("PluginOutputError", "gave log_extra '[<unlocked"),
    "logs_words": ("PluginOutputError", "gave log_metric"),
    "too_few": ("PluginOutputError", "returned 3 values for 4 completions"),
    "a_short_generator": ("PluginOutputError", "returned 3 values for 4 completions"),
    "one_number": ("PluginOutputError", "returned float, 1.0; it must return a list"),
    "forgot_the_return": ("PluginOutputError", "Did the function forget its return?"),
    "infinite": ("PluginOutputError", "returned -inf at row 2; it must be finite"),
    "text": ("PluginOutputError", "returned str, '1.0', at row 0; it must be a number or None"),
    "a_column": ("PluginOutputError", "returned Tensor of shape (4, 1); it must be (4,)"),
    "raises_async": ("PluginRunError", "raised KeyError: 'judge'"),
    "infinite_model": ("PluginOutputError", "The reward 'infinite_model' returned inf at row"),
    "model_out_of_memory": ("PluginRunError", "RuntimeError: out of memory"),
    **dict.fromkeys(NEVER_RETURN, ("RewardError", LATE)),
}
EITHER = ("leaves", "ends_the_process", "is_interrupted", "empties", "empties_and_raises", "too_few", "raises_async")
EXPECTED |= {name + ON_FIRST: EXPECTED[name] for name in EITHER}
FOLLOWED = (
    *("is_interrupted", "empties", "raises_at_a_row", "raises_async"),
    *("sleeps", "sleeps_async", "model_out_of_memory"),
)


def job(name: str) -> Job:
    limit = {"reward_timeout": LIMIT} if name in NEVER_RETURN else {}
    return {**SETTINGS, "hostile_reward": name, **limit}


@pytest.fixture(scope="module")
def ranks(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    jobs: dict[str, Job] = {}
    for name in EXPECTED:
        jobs[name] = job(name)
        if name in FOLLOWED:
            jobs[f"after {name}"] = {**SETTINGS, "reward_timeout": 60.0}
    return launch(jobs, tiny_model, tmp_path_factory.mktemp("hostile_rewards"), timeout=240)


def test_every_hostile_reward_is_expected() -> None:
    assert {name for name in EXPECTED if not name.endswith(ON_FIRST)} == {*SYNC, *ASYNC, *MODELS}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_all_ranks_raise_what_one_did(ranks: list[Results], name: str) -> None:
    kind, message = EXPECTED[name]
    first, last = (results[name] for results in ranks)
    assert first["error"] == last["error"] == kind
    assert first["message"] == last["message"]
    on_first = name == "infinite_model" or name.endswith(ON_FIRST)  # both see the former
    assert last["message"].startswith("On rank 0: " if on_first else "On rank 1: ")
    assert message in last["message"]
    if kind != "KeyboardInterrupt" and name != "model_out_of_memory":
        assert name in last["message"]


@pytest.mark.slow
def test_the_ranks_still_work_together_afterwards(ranks: list[Results]) -> None:
    runs = [result for results in ranks for name, result in results.items() if name.startswith("after ")]
    assert len(runs) == 2 * len(FOLLOWED)
    for run in runs:
        assert run["logs"] == runs[0]["logs"]


@pytest.mark.parametrize("name", ["raises_at_a_row", "leaves_async", "is_interrupted", "empties", "spins"])
def test_the_same_with_one_process(tiny_model: Path, tmp_path: Path, name: str) -> None:
    kind, message = EXPECTED[name]
    result = run_job(tiny_model, tmp_path, job(name))
    assert result["error"] == kind
    if kind != "KeyboardInterrupt":  # Ctrl-C passes through
        assert result["message"].startswith("On rank 0: ")
        assert message in result["message"]
