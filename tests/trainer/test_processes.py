"""The same rollouts give one gradient, however they are cut into processes and micro-batches; with gloo and DDP."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import OWN_AGGREGATION, relative_gap, trl_metrics
from tests.trainer.launch import Results, launch
from tests.trainer.process_worker import Job, run_job
from trl_grpo_ext import Totals, load_loss_aggregation
from trl_grpo_ext.plugins.loading import available, implements

BY_WEIGHTS = [
    info.name
    for info in available("loss_aggregation")
    if info.builtin and implements(load_loss_aggregation(info.name), "weights")
]
EXACT = [*BY_WEIGHTS, "token_mean_step"]
"""A `reduce` that divides by the counts of the whole step does not depend on the cut either."""
IN_TURN = ["token_mean", *EXACT]
"""At the first step the policy is its own reference, and the KL penalty has no gradient: a step to warm up."""

TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
HOOKS = ["leave_one_out", "entropy_shaping"]
WHOLE: Job = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "seed": 1}
"""One process, one micro-batch: 16 completions, four groups of four. The other cuts have as many."""
CUTS: dict[str, tuple[int, Job]] = {
    "1x4 padded": (1, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "pad_to_multiple_of": 16}),
    "2x2": (2, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "seed": 4}),
    "4x1": (4, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "seed": 5}),
}
COMMON: Job = {"learning_rate": 0.01, "prompt_count": 8, "beta": 0.04, "hooks": HOOKS}
COMMON["mask_truncated_completions"] = True
POOL = {"name": "difficulty_pool", "fails_at": -1.0, "solved_at": 2.0}
STOCK: Job = {"prompt_count": 8, "stock": True, "float64": True, "max_steps": 2}


def jobs_of(cut: Job) -> dict[str, Job]:
    skipping = [{"name": name, "skip_zero_variance": True} for name in ["token_mean", *BY_WEIGHTS]]
    return {
        "float64": {**COMMON, **cut, "aggregations": IN_TURN, "float64": True},
        # Small steps: by rounding the weights of the cuts drift apart, which a late step's gradient would show.
        "float32": {**COMMON, **cut, "aggregations": IN_TURN, "learning_rate": 0.001},
        "skipping": {**COMMON, **cut, "aggregations": skipping, "float64": True, "flat_groups": True},
        # A reward of length_reward lies between -1 and 2.
        "drawn": {**COMMON, **cut, "seed": 1, "float64": True, "max_steps": 5, "prompt_sampler": POOL},
        "trl bnpo": {**STOCK, **cut, "loss_type": "bnpo"},
        "trl dapo": {**STOCK, **cut, "loss_type": "dapo"},
    }


ROWS: Job = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "prompt_count": 8}
# Groups of 4 in rows 0-3, 4-7, 8-11; with 6 rows per process the second one is cut in the middle.
SPLIT: Job = {**ROWS, "per_device_train_batch_size": 6, "gradient_accumulation_steps": 1, "hooks": HOOKS}
SPLIT |= {"aggregations": BY_WEIGHTS, "beta": 0.04, "learning_rate": 0.01}
SAMPLED: Job = {**ROWS, "scripted": False, "beta": 0.04, "num_iterations": 2, "max_steps": 3}

UNEVEN: Job = {**ROWS, "uneven": True, "float64": True, "max_steps": 2}
# Both look at the generation batch of all ranks; how far the policy has moved shows at the second step.
TOKEN_LOSSES: Job = {"num_iterations": 2, "learning_rate": 0.5}
TOKEN_LOSSES["token_losses"] = [{"name": "kl_cov", "share": 0.2}, {"name": "clip_cov", "share": 0.3, "low": 0.0}]
COMPACT: dict[str, Job] = {
    "flat groups": {"flat_groups": True, "loss_type": "grpo"},
    "a quiet rank": {"quiet_rank": True, "loss_type": "grpo"},
    "a quiet rank, local mean": {"quiet_rank": True, "loss_type": "bnpo"},
    "a kl penalty": {"quiet_rank": True, "beta": 0.04, "loss_type": "dapo", "mask_truncated_completions": True},
    "fixed rows": {"flat_groups": True, "beta": 0.04, "loss_type": "grpo", "num_iterations": 2},
    "weights": {"quiet_rank": True, "loss_aggregation": "seq_mean_token_mean", "beta": 0.04, "steps_per_generation": 4},
    "shared": {"flat_groups": True, "loss_type": "grpo", "share_prompts": True},
    "token losses, a quiet rank": {"quiet_rank": True, **TOKEN_LOSSES},
    "shared, a quiet rank": {"quiet_rank": True, "beta": 0.04, "num_iterations": 2, "share_prompts": True},
    "shared, a rank without a token that counts": {"masked_rank": True, "loss_type": "grpo", "share_prompts": True},
}
TYPES = ("bnpo", "dapo", "grpo")

JOBS: dict[str, Job] = {
    **jobs_of(CUTS["2x2"][1]),
    "split groups": SPLIT,
    **{f"trl {name}, kl": {**STOCK, **ROWS, "loss_type": name, "beta": 0.04} for name in TYPES},
    **{
        f"ext {name}, kl": {**STOCK, **ROWS, "stock": False, "loss_type": name, "beta": 0.04}
        | {"loss_aggregation": OWN_AGGREGATION[name]}
        for name in TYPES
    },
    "trl sampled": {**SAMPLED, "stock": True},
    "ext sampled": SAMPLED,
}
for _name, _job in COMPACT.items():
    JOBS[f"exact {_name}"] = {**UNEVEN, **_job, "compact_updates": "exact"}
    JOBS[f"off {_name}"] = {**UNEVEN, **{key: value for key, value in _job.items() if key != "share_prompts"}}

One = Callable[[Job], dict[str, Any]]


@pytest.fixture(scope="module")
def two(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What rank 0 saved of every job; the other has the same gradients."""
    results, other = launch(JOBS, tiny_model, tmp_path_factory.mktemp("two_processes"), timeout=900)
    for name, result in results.items():
        assert (result["processes"], result["model_class"]) == (2, "DistributedDataParallel")
        for mine, others in zip(result["gradients"], other[name]["gradients"], strict=True):
            assert all(torch.equal(mine[parameter], others[parameter]) for parameter in mine)
    return results


@pytest.fixture(scope="module")
def one(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> One:
    """A job in this process."""
    cache: Results = {}

    def run(job: Job) -> dict[str, Any]:
        key = json.dumps(job)
        if key not in cache:
            cache[key] = run_job(tiny_model, tmp_path_factory.mktemp("one_process"), job)
        return cache[key]

    return run


def prompts_drawn(logs: list[dict[str, float]]) -> list[dict[str, float]]:
    drawn = [log for log in logs if "prompts/drawn" in log]
    return [{name: value for name, value in log.items() if name.startswith("prompts/")} for log in drawn]


def gaps(ours: dict[str, Any], theirs: dict[str, Any]) -> list[float]:
    return [relative_gap(*pair) for pair in zip(ours["gradients"], theirs["gradients"], strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("cut", [pytest.param(cut, marks=[pytest.mark.nightly] * (cut == "4x1")) for cut in CUTS])
def test_gradient_however_cut(
    request: pytest.FixtureRequest, one: One, tiny_model: Path, tmp_path: Path, cut: str
) -> None:
    processes, chosen = CUTS[cut]
    jobs, whole = jobs_of(chosen), {name: one(job) for name, job in jobs_of(WHOLE).items()}
    if processes == 2:
        results = request.getfixturevalue("two")
    else:
        results = {name: one(job) for name, job in jobs.items()} if processes == 1 else {}
        results = results or launch(jobs, tiny_model, tmp_path, processes)[0]
    for job, allowed in {**TOLERANCE, "skipping": 1e-9}.items():
        measured = gaps(results[job], whole[job])[1:]
        assert len(measured) == len(EXACT if job in TOLERANCE else BY_WEIGHTS)
        assert max(measured) < allowed, (job, measured)
    # Rank 0 alone draws, from what came of the prompts on all ranks.
    assert max(gaps(results["drawn"], whole["drawn"])) < 1e-9
    drawn = [prompts_drawn(run["logs"]) for run in (results["drawn"], whole["drawn"])]
    assert drawn[0] == drawn[1]
    assert drawn[0][-1]["prompts/unseen"] < 0.5
    assert {log["groups/zero_variance"] for log in results["skipping"]["logs"][:-1]} == {0.5}
    # The contrast: TRL's local token mean depends on the cut, so these cuts do have something to disagree about.
    assert min(gaps(results["trl bnpo"], whole["trl bnpo"])) > 0.05
    assert max(gaps(results["trl dapo"], whole["trl dapo"])) < 1e-9


@pytest.mark.slow
def test_a_group_that_is_split_between_processes(two: Results, one: One) -> None:
    split, whole = two["split groups"], one({**SPLIT, "per_device_train_batch_size": 12})
    assert max(gaps(split, whole)) < TOLERANCE["float32"]
    seen, all_seen = split["rollouts"][0], whole["rollouts"][0]
    assert seen["group_ids"] == [0, 0, 0, 0, 1, 1]
    assert seen["local_rows"] == slice(0, 6)
    assert seen["all_group_ids"] == all_seen["all_group_ids"] == [0] * 4 + [1] * 4 + [2] * 4
    assert seen["all_rewards"] == all_seen["all_rewards"]  # the same completions in the same order
    tokens = all_seen["totals"].tokens
    assert seen["totals"] == Totals(tokens=tokens, sequences=12, prompts=3, max_completion_length=10, processes=2)
    # Leave-one-out advantages of a group sum to zero; this rank's part of the split group has those of the whole.
    at_rollout = [row[0] for row in all_seen["advantages"]]
    assert sum(at_rollout[4:8]) == pytest.approx(0.0, abs=1e-5)
    assert [row[0] for row in seen["advantages"]] == pytest.approx(at_rollout[:6], abs=1e-6)
    # The table of TRL has all ranks' rows, after the forward stage.
    assert split["advantages"] == pytest.approx(whole["advantages"], abs=1e-5)


@pytest.mark.slow
def test_token_losses_that_look_at_all_ranks(two: Results, one: One) -> None:
    split, job = two["off token losses, a quiet rank"], {**UNEVEN, **COMPACT["token losses, a quiet rank"]}
    assert max(gaps(split, one({**job, **WHOLE}))) < TOLERANCE["float64"]
    without = one({**job, **WHOLE, "token_losses": [{"name": "clip_cov", "share": 1e-9, "low": 4.0}]})
    assert min(gaps(split, without)) > 1e-3
    logged = [log for log in split["logs"] if "loss" in log]
    assert all(0.0 < log["token_loss/kl_cov/held"] <= 0.2 for log in logged)


@pytest.mark.slow
def test_own_aggregation_and_nothing_selected_are_trl(two: Results) -> None:
    for name in TYPES:
        ours, theirs = two[f"ext {name}, kl"], two[f"trl {name}, kl"]
        assert max(gaps(ours, theirs)) < 1e-6
        assert trl_metrics(ours["logs"][0]) == pytest.approx(theirs["logs"][0], rel=1e-4, abs=1e-6)
    ours, theirs = two["ext sampled"], two["trl sampled"]
    assert ours["logs"] == theirs["logs"]
    assert all(any(bool(gradient.any()) for gradient in step.values()) for step in theirs["gradients"])
    assert gaps(ours, theirs) == [0.0] * 3
    assert all(torch.equal(ours["weights"][name], theirs["weights"][name]) for name in theirs["weights"])


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPACT)
def test_compact_updates_have_the_gradient_of_off(two: Results, one: One, name: str) -> None:
    ours, theirs = two[f"exact {name}"], two[f"off {name}"]
    assert all(bool(g.any()) for step in theirs["gradients"] for n, g in step.items() if "embed" in n)
    assert len(gaps(ours, theirs)) == 2
    assert max(gaps(ours, theirs)) < TOLERANCE["float64"]
    assert relative_gap(ours["weights"], theirs["weights"]) < TOLERANCE["float64"]
    losses = [[log["loss"] for log in found["logs"] if "loss" in log] for found in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6, abs=1e-6)
    assert not [key for log in ours["logs"] for key, value in log.items() if math.isnan(value)]
    if "shared" in name:
        planned = [log for log in ours["logs"] if "compact/live_tokens" in log]
        assert all(log["compact/computed_tokens"] < log["compact/live_tokens"] for log in planned)
    if name == "shared":  # as on one rank, but for TRL's means over micro-batches
        job = {**JOBS[f"exact {name}"], "per_device_train_batch_size": 8, "loss_type": "dapo"}
        alone = one({**job, "share_prompts": False})
        assert relative_gap(one(job)["weights"], alone["weights"]) < TOLERANCE["float64"]
    if "a quiet rank" in name and "shared" not in name and "token losses" not in name:  # it runs placeholders
        logs = [log for log in ours["logs"] if "loss" in log]
        assert {log["compact/rows_dropped"] for log in logs} == {0.5}
        assert {log["compact/micro_steps_skipped"] for log in logs} == {2.0}
