"""Two processes with `compact_updates: exact` have the gradient of `off`, also where one of them has nothing to do."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.support import relative_gap, train
from tests.trainer.compact.runs import EXACT
from tests.trainer.launch import Results, launch
from tests.trainer.process_worker import Job
from trl_grpo_ext.errors import ConfigurationError

PROCESSES: Job = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "prompt_count": 8,
    "uneven": True,
    "float64": True,
    "max_steps": 2,
}
SHARED: dict[str, Job] = {
    "flat groups": {"flat_groups": True, "loss_type": "grpo"},
    "a quiet rank": {"quiet_rank": True, "loss_type": "bnpo"},
    "a quiet rank, global mean": {"quiet_rank": True, "loss_type": "dapo"},
    "a kl penalty": {"quiet_rank": True, "beta": 0.04, "loss_type": "dapo", "mask_truncated_completions": True},
    "fixed rows": {"flat_groups": True, "beta": 0.04, "loss_type": "grpo", "num_iterations": 2},
    "weights": {"quiet_rank": True, "loss_aggregation": "seq_mean_token_mean", "beta": 0.04, "steps_per_generation": 4},
    "a budget": {"quiet_rank": True, "loss_type": "grpo", "max_tokens_per_micro_batch": 20},
    "a budget of nothing": {"flat_groups": True, "beta": 0.04, "max_tokens_per_micro_batch": 1},
    "shared": {"flat_groups": True, "loss_type": "grpo", "share_prompts": True},
    "shared, a quiet rank": {"quiet_rank": True, "beta": 0.04, "num_iterations": 2, "share_prompts": True},
    "shared within a budget": {"quiet_rank": True, "max_tokens_per_micro_batch": 30, "share_prompts": True},
    "balanced": {"quiet_rank": True, "loss_type": "grpo", "balance_ranks": True},
    "balanced, global mean": {"flat_groups": True, "num_iterations": 2, "balance_ranks": True},
    "balanced weights": {
        "quiet_rank": True,
        "loss_aggregation": "seq_mean_token_mean",
        "beta": 0.04,
        "steps_per_generation": 4,
        "balance_ranks": True,
    },
    "balanced within a budget": {"quiet_rank": True, "max_tokens_per_micro_batch": 20, "balance_ranks": True},
}
OURS = ("max_tokens_per_micro_batch", "balance_ranks", "share_prompts")


@pytest.fixture(scope="module")
def two(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    jobs: dict[str, Job] = {}
    for name, job in SHARED.items():
        jobs[f"exact {name}"] = {**PROCESSES, **job, "compact_updates": "exact"}
        plain = {key: value for key, value in job.items() if key not in OURS}
        jobs[f"off {name}"] = {**PROCESSES, **plain}
    return launch(jobs, tiny_model, tmp_path_factory.mktemp("two"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
def test_two_processes_have_the_same_gradient(two: list[Results], name: str) -> None:
    ours, theirs = ([rank[f"{updates} {name}"] for rank in two] for updates in ("exact", "off"))
    assert all(bool(g.any()) for step in theirs[0]["gradients"] for n, g in step.items() if "embed" in n)
    for our_rank, their_rank in zip(ours, theirs, strict=True):
        measured = [relative_gap(*step) for step in zip(our_rank["gradients"], their_rank["gradients"], strict=True)]
        assert len(measured) == 2
        assert max(measured) < EXACT["float64"]
        assert relative_gap(our_rank["weights"], their_rank["weights"]) < EXACT["float64"]
    losses = [[log["loss"] for log in found[0]["logs"] if "loss" in log] for found in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6, abs=1e-6)
    assert not [key for log in ours[0]["logs"] for key, value in log.items() if math.isnan(value)]


@pytest.mark.slow
def test_rows_move_to_a_quiet_rank(two: list[Results]) -> None:
    alone, balanced = (
        [log for log in two[0][f"exact {name}"]["logs"] if "loss" in log] for name in ("a quiet rank", "balanced")
    )
    for own, moved in zip(alone, balanced, strict=True):
        assert moved["compact/rows_dropped"] == own["compact/rows_dropped"] == 0.5
        assert moved["compact/live_tokens"] == own["compact/live_tokens"]
        assert moved["compact/micro_steps_skipped"] == 0.0
        assert moved["compact/computed_tokens"] < own["compact/computed_tokens"]  # no placeholders


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"loss_type": "bnpo"}, "bnpo is a mean over the tokens of each rank's micro-batch"),
        ({"loss_type": "grpo", "beta": 0.04}, "with a KL penalty grpo counts rows"),
        ({"token_records": 4}, "token_records are kept on the rank"),
        ({"entropy_coef": 0.01}, "the entropy bonus is a mean over each micro-batch"),
    ],
)
def test_rows_do_not_move_where_that_is_not_exact(
    tiny_model: Path, tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"balance_ranks moves rows to other ranks.*{reason}"):
        train(tiny_model, tmp_path, max_steps=1, compact_updates="exact", balance_ranks=True, **settings)


@pytest.mark.slow
def test_a_quiet_rank_runs_placeholders(two: list[Results]) -> None:
    for name in ("a quiet rank", "a quiet rank, global mean", "a budget"):
        logs = [log for log in two[0][f"exact {name}"]["logs"] if "loss" in log]
        assert {log["compact/rows_dropped"] for log in logs} == {0.5}
        assert {log["compact/micro_steps_skipped"] for log in logs} == {2.0}
