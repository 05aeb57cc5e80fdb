"""A plugin that breaks its contract on one rank stops all ranks with one error, and none of them hangs.

One launch runs them all in turn, with trainings that work in between: had a rank been left in a collective, or one
exchange too few been made, the next one would not work.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.hostile import FORWARD, REDUCE, ROLLOUT, WEIGHTS
from tests.trainer.launch import Results, launch
from tests.trainer.process_worker import Job, run_job

SETTINGS: Job = {"max_steps": 1, "per_device_train_batch_size": 4}
GOOD: Job = {**SETTINGS, "loss_aggregation": "prompt_mean"}

EXPECTED: dict[str, tuple[str, str]] = {
    "negative": ("PluginOutputError", "weights must not be negative; got -0.5 at row 1, token 0"),
    "nan": ("PluginOutputError", "weights must be finite; got nan at row 1, token 0"),
    "misshaped": ("PluginOutputError", "expected shape (4, "),
    "integer": ("PluginOutputError", "expected a floating point tensor, got torch.int64"),
    "nothing": ("PluginOutputError", "got NoneType"),
    "off_the_mask": ("PluginOutputError", "weights must be zero where rollout.mask_B_T is zero"),
    "raises": ("PluginRunError", "raised KeyError: 'difficulty'"),
    "leaves": ("PluginRunError", "raised SystemExit: 3"),
    "gathers_a_list": ("PluginOutputError", "rollout.gather takes a tensor (B,) or (B, T), got list"),
    "vector": ("PluginOutputError", "reduce must return a scalar tensor, got shape (4,)"),
    "detached": ("PluginOutputError", "without a gradient"),
    "of_something_else": ("PluginOutputError", "was not computed from loss_B_T"),
    "nan_loss": ("PluginOutputError", "reduce returned nan from finite losses"),
    "infinite_slope": ("PluginOutputError", "the gradient of reduce must be finite; got nan at row 0, token 0"),
    "ignores_the_mask": ("PluginOutputError", "the gradient of reduce must be zero where mask_B_T is zero"),
    "hook_raises": ("PluginRunError", "advantage hook 'hook_raises': on_forward raised ZeroDivisionError: no tokens"),
    "hook_infinite": ("PluginOutputError", "on_rollout must return finite advantages; got inf at row 2, token 0"),
    "hook_infinite_at_forward": ("PluginOutputError", "on_forward must return finite advantages; got inf at row 2"),
    "hook_per_completion": ("PluginOutputError", "(completions, tokens), got (4,)"),
    "hook_spans_off_the_text": ("PluginOutputError", "the span (0, 1000000, 1.0) at row 0 must lie within"),
    "hook_too_few_spans": ("PluginOutputError", "expected spans for 4 completions, got 1"),
    "hook_cannot_align": ("AlignmentError", "on_rollout: these tokens wrote another text"),
}
ALONE = ("gathers_alone", "gathers_and_goes_on", "hook_gathers_alone")
"""Wrong only where there are other ranks."""
FOLLOWED = ("nan", "raises", "infinite_slope", "hook_raises", "hook_spans_off_the_text", *ALONE)


@pytest.fixture(scope="module")
def ranks(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    jobs: dict[str, Job] = {}
    for name in [*EXPECTED, *ALONE]:
        jobs[name] = {**SETTINGS, "hostile": name}
        if name in FOLLOWED:
            jobs[f"after {name}"] = GOOD
    jobs |= {"loss": {**GOOD, "hostile_loss": True}, "after loss": GOOD}
    return launch(jobs, tiny_model, tmp_path_factory.mktemp("hostile"), timeout=240)


def test_every_hostile_plugin_is_expected() -> None:
    assert {*EXPECTED, *ALONE} == {*WEIGHTS, *REDUCE, *ROLLOUT, *FORWARD}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_all_ranks_raise_what_one_did(ranks: list[Results], name: str) -> None:
    kind, message = EXPECTED[name]
    first, last = (results[name] for results in ranks)
    assert first["error"] == last["error"] == kind
    assert first["message"] == last["message"]
    assert last["message"].startswith("On rank 1: ")
    assert message in last["message"]
    if "gather" not in name:
        assert repr(name) in last["message"]
    if name == "raises":  # the traceback leads to the plugin on the rank where it was, and only there
        assert last["cause"] == "KeyError('difficulty')"
        assert first["cause"] == "None"


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_a_gather_on_one_rank_alone(ranks: list[Results], name: str) -> None:
    for results in ranks:
        assert results[name]["error"] == "PluginOutputError"
        assert "rollout.gather was called on rank 1 but not on rank 0" in results[name]["message"]


@pytest.mark.slow
def test_a_loss_that_is_another_one_on_one_rank(ranks: list[Results]) -> None:
    for results in ranks:
        assert results["loss"]["error"] == "SelfCheckError"
        assert results["loss"]["message"].startswith("On rank 1: The loss of DoubledExtTrainer")
        assert "weight of a token" in results["loss"]["message"]


@pytest.mark.slow
def test_the_ranks_still_work_together_afterwards(ranks: list[Results]) -> None:
    runs = [result for results in ranks for name, result in results.items() if name.startswith("after ")]
    assert len(runs) == 2 * (len(FOLLOWED) + 1)
    for run in runs:
        assert run["logs"] == runs[0]["logs"]


@pytest.mark.parametrize("name", ["negative", "raises", "nan_loss", "ignores_the_mask", "hook_raises", "hook_infinite"])
def test_the_same_with_one_process(tiny_model: Path, tmp_path: Path, name: str) -> None:
    kind, message = EXPECTED[name]
    result = run_job(tiny_model, tmp_path, {**SETTINGS, "hostile": name})
    assert result["error"] == kind
    assert result["message"].startswith("On rank 0: ")
    assert message in result["message"]
