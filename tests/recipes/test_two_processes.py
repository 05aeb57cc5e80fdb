"""Three recipes on two processes, one after the other in one launch."""

import json
from pathlib import Path

import pytest

from tests.recipes.engines.launched import Run, finished, launch, said
from tests.recipes.launching import RECIPES, SMALL, Finished, options
from tests.recipes.test_detox_grpo import STEPS, check_coefficients, hooks, words

pytestmark = pytest.mark.slow

SORT = options(max_steps=4, warmup_steps=0, logging_steps=1, num_iterations=2, per_device_train_batch_size=16)
SORT += options(objective="naive", variant="raw", reward="sort_distance", beta=0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_processes")
    spied = ["--rewards", "gsm8k_accuracy", "{name: 'tests.recipes.spy:spy', weight: 0}", "--log_completions"]
    kl = hooks(coefficient=0.1, target=0.5, horizon=400)
    detox = words(*kl, "--log_completions", max_steps=2 * STEPS)
    runs = [
        Run("sort", ["--output_dir", "{folder}/sort/output", *SORT], RECIPES / "sort_grpo.py"),
        Run("maths", ["--output_dir", "{folder}/maths/output", *options(**SMALL), *spied]),
        Run("detox", ["--output_dir", "{folder}/detox/output", *detox], RECIPES / "detox_grpo.py"),
    ]
    launch("cpu_2_processes.yaml", runs, folder, SPY=str(folder))
    return folder


def finished_run(folder: Path, name: str, held_out: str) -> Finished:
    """A run whose ranks were one: what is said once is said once."""
    finished(folder, name)
    out = said(folder, name)
    run = Finished(0, out, "", folder / name)
    assert (run.metrics["run"]["processes"], run.metrics["run"]["backend"]) == (2, "gloo")
    assert out.count("2 process(es)") == out.count(f"{held_out}, ") == 1
    return run


def test_recipe_divides_batches_among_ranks(folder: Path) -> None:
    run = finished_run(folder, "maths", "16 held-out problems")
    seen = [[json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()] for rank in (0, 1)]
    assert len(seen[0]) == len(seen[1]) > 2
    assert {(call["world"], call["sum"]) for calls in seen for call in calls} == {(2, 3.0)}
    trained = [[call for call in calls if len(call["prompts"]) == 16] for calls in seen]
    for first, second in zip(*trained, strict=True):
        assert not set(first["prompts"]) & set(second["prompts"])
    logged = [row["prompt"] for row in run.completions() if row["step"] == 1]
    assert len(set(logged)) * 4 == len(logged)
    assert {*logged} <= {prompt for calls in seen for call in calls for prompt in call["prompts"]}


def test_the_sorting_recipe_with_everything_else_chosen(folder: Path) -> None:
    run = finished_run(folder, "sort", "128 held-out prompts")
    assert run.out.count("sort_distance, raw advantages, naive objective, KL 0.05") == 1
    training = [log for log in run.metrics["history"] if "loss" in log]
    assert training[0]["kl"] == pytest.approx(0.0, abs=1e-6)  # the reference is the untrained model
    assert all(log["kl"] > 1e-3 for log in training[1:])


def test_the_detox_recipe_steers_by_the_completions_of_both(folder: Path) -> None:
    run = finished_run(folder, "detox", "16 held-out prompts")
    check_coefficients(run.training, 0.1, 0.5, 64, 400)
    # `--log_completions` writes what both ranks sampled: the logged shares are those of all.
    first = [row for row in run.completions() if row["step"] == STEPS]
    assert len(first) == 64
    for name in ("rude", "polite", "neither"):
        mean = sum(row[name] for row in first) / 64
        assert run.training[0][f"rewards/{name}/mean"] == pytest.approx(mean, abs=1e-6)
