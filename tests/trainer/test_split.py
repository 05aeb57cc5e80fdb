"""The same rollouts, cut into processes and micro-batches in every way, give one gradient under any weights.

The cuts differ in the rows that meet (TRL shuffles the generation batch, here with a seed of each cut's own), in the
padding (each process pads to its own longest completion, one cut to a multiple of 16 besides) and in the processes,
which are real ones with gloo and DDP. Plain SGD with a KL penalty, two hooks, and completions that the truncation mask
empties; the aggregation changes at every step. In float64 nothing but the order of sums differs; float32 is what
training has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import arguments, length_reward, prompts, relative_gap, scripted_rollout
from tests.trainer.launch import Results, launch
from tests.trainer.process_worker import Float64ExtTrainer, Job, run_job
from trl_grpo_ext import load_loss_aggregation
from trl_grpo_ext.plugins.loading import available, implements

BY_WEIGHTS = [
    info.name
    for info in available("loss_aggregation")
    if info.builtin and implements(load_loss_aggregation(info.name), "weights")
]
CUTS: dict[str, tuple[int, Job]] = {
    "1x1": (1, {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "seed": 1}),
    "1x4": (1, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "seed": 2}),
    "1x8 padded": (
        1,
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "seed": 3, "pad_to_multiple_of": 16},
    ),
    "2x2": (2, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "seed": 4}),
}
"""Processes x accumulation: 16 completions, four groups of four."""
FOUR_RANKS: Job = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "seed": 5}

TOLERANCE = {"float64": 1e-9, "float32": 1e-5}

COMMON: Job = {
    "learning_rate": 0.01,
    "prompt_count": 8,
    "beta": 0.04,
    "hooks": ["leave_one_out", "entropy_shaping"],
    "mask_truncated_completions": True,
}
EXACT = [*BY_WEIGHTS, "token_mean_step"]
"""A `reduce` that divides by the counts of the whole step does not depend on the cut either."""

# At the first step the policy is its own reference, and the KL penalty has no gradient: a step to warm up.
IN_TURN = ["token_mean", *EXACT]


def jobs_of(cut: Job) -> dict[str, Job]:
    common = {**COMMON, **cut}
    skipping = [{"name": name, "skip_zero_variance": True} for name in ["token_mean", *BY_WEIGHTS]]
    stock = {**common, "stock": True, "hooks": None, "float64": True, "max_steps": 2}
    return {
        "float64": {**common, "aggregations": IN_TURN, "float64": True},
        # Small steps: by rounding the weights of the cuts drift apart, which a late step's gradient would show.
        "float32": {**common, "aggregations": IN_TURN, "learning_rate": 0.001},
        "skipping": {**common, "aggregations": skipping, "float64": True, "flat_groups": True},
        "trl bnpo": {**stock, "loss_type": "bnpo"},
        "trl dapo": {**stock, "loss_type": "dapo"},
    }


@pytest.fixture(scope="module")
def all_cuts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    results: dict[str, Results] = {}
    for name, (processes, cut) in CUTS.items():
        folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
        if processes == 1:
            results[name] = {job_name: run_job(tiny_model, folder, job) for job_name, job in jobs_of(cut).items()}
        else:
            results[name] = launch(jobs_of(cut), tiny_model, folder)[0]
    return results


def gaps(all_cuts: dict[str, Results], job: str, step: int) -> dict[str, float]:
    """The gap of a step's gradient to the uncut batch's, by cut."""
    whole = all_cuts["1x1"][job]["gradients"][step]
    return {
        cut: relative_gap(results[job]["gradients"][step], whole) for cut, results in all_cuts.items() if cut != "1x1"
    }


def test_all_of_the_catalogue_is_here() -> None:
    assert len(BY_WEIGHTS) >= 11


@pytest.mark.slow
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("aggregation", EXACT)
def test_one_gradient_however_the_batch_is_cut(all_cuts: dict[str, Results], aggregation: str, precision: str) -> None:
    measured = gaps(all_cuts, precision, 1 + EXACT.index(aggregation))
    assert measured.keys() == CUTS.keys() - {"1x1"}
    assert max(measured.values()) < TOLERANCE[precision], measured


@pytest.mark.nightly
def test_one_gradient_on_four_ranks(all_cuts: dict[str, Results], tiny_model: Path, tmp_path: Path) -> None:
    four = launch(jobs_of(FOUR_RANKS), tiny_model, tmp_path, 4)[0]
    for precision, allowed in TOLERANCE.items():
        for ours, whole in list(
            zip(four[precision]["gradients"], all_cuts["1x1"][precision]["gradients"], strict=True)
        )[1:]:
            assert relative_gap(ours, whole) < allowed


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", BY_WEIGHTS)
def test_the_same_without_the_groups_that_have_no_signal(all_cuts: dict[str, Results], aggregation: str) -> None:
    measured = gaps(all_cuts, "skipping", 1 + BY_WEIGHTS.index(aggregation))
    assert max(measured.values()) < TOLERANCE["float64"], measured
    for results in all_cuts.values():
        assert {log["groups/zero_variance"] for log in results["skipping"]["logs"][:-1]} == {0.5}


@pytest.mark.slow
def test_trls_local_token_mean_depends_on_the_cut_and_its_global_one_does_not(all_cuts: dict[str, Results]) -> None:
    # The contrast: these cuts do have something to disagree about.
    for step in (0, 1):
        assert min(gaps(all_cuts, "trl bnpo", step).values()) > 0.05
        assert max(gaps(all_cuts, "trl dapo", step).values()) < TOLERANCE["float64"]


@pytest.mark.slow
def test_the_weights_differ_from_each_other(all_cuts: dict[str, Results]) -> None:
    # Or else one that is silently not used would agree with itself, too.
    bias = [log["loss_weight/length_q1"] for log in all_cuts["1x1"]["float64"]["logs"] if "loss" in log]
    assert len(bias) == len(IN_TURN)
    alike = {name for name, value in zip(IN_TURN, bias, strict=True) if value == pytest.approx(1.0, abs=1e-6)}
    assert alike <= {
        *("token_mean", "token_mean_step", "token_sum", "constant_length", "seq_mean_token_sum", "prefix_share")
    }
    losses = [log["loss"] for log in all_cuts["1x1"]["float64"]["logs"] if "loss" in log]
    assert len({round(loss, 9) for loss in losses}) == len(losses)


@pytest.mark.parametrize("aggregation", BY_WEIGHTS)
@pytest.mark.parametrize("parts", [(1, 15), (3, 5, 8), (2, 0, 13, 1)])
def test_micro_batches_of_unequal_size(
    tiny_model: Path, tmp_path: Path, aggregation: str, parts: tuple[int, ...]
) -> None:
    """TRL cuts evenly; a trainer that packs rows by their length does not. The weighted sum does not mind."""
    args = arguments(
        tmp_path,
        loss_aggregation=aggregation,
        per_device_train_batch_size=16,
        beta=0.04,
        num_iterations=2,
        model_init_kwargs={"dtype": torch.float64},
    )
    trainer = Float64ExtTrainer(
        str(tiny_model), length_reward, args, train_dataset=prompts(8), rollout_func=scripted_rollout
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    batch = trainer._prepare_inputs([row for row in prompts(4) for _ in range(4)])
    # Off the reference and the old policy, so that every term has a gradient.
    with torch.no_grad():
        for number, parameter in enumerate(trainer.model.parameters()):
            parameter += 0.01 * torch.sin(number + torch.arange(parameter.numel(), dtype=torch.float64)).view_as(
                parameter
            )

    def gradient_of(rows: slice) -> dict[str, torch.Tensor]:
        part = {k: v[rows] if isinstance(v, torch.Tensor) and v.dim() > 0 else v for k, v in batch.items()}
        trainer.model.zero_grad()
        trainer.compute_loss(trainer.model, part).backward()
        return {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}

    whole = gradient_of(slice(0, 16))
    total: dict[str, Any] = {name: torch.zeros_like(gradient) for name, gradient in whole.items()}
    start = 0
    for size in parts:
        if size:
            for name, gradient in gradient_of(slice(start, start + size)).items():
                total[name] += gradient
        start += size
    assert start == 16
    assert relative_gap(total, whole) < 1e-9
