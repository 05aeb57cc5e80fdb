"""What must not change TRL's gradient does not: aggregations that are its own reductions, compact updates, sharing.

Of the grid in `parity_grid`, `make test` runs so many cells that any two of loss type, settings and ours meet, `make
nightly` so many that any three do. Below it is what does not fit a grid of two levels.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from trl import GRPOTrainer

from tests.support import OWN_AGGREGATION, Run, prompts, relative_gap, train
from tests.trainer import parity_grid
from tests.trainer.compact.test_updates import COMMON
from tests.trainer.parity_grid import FACTORS, TOLERANCE, Cell
from tests.trainer.process_worker import Float64Trainer, uneven_rollout
from trl_grpo_ext import GRPOExtTrainer

CELLS = parity_grid.all_cells()
BY_STRENGTH = {strength: parity_grid.covering(CELLS, strength) for strength in (2, 3)}


def marked(number: int, cell: Cell) -> Any:
    tested = cell in BY_STRENGTH[2]
    quick = tested and BY_STRENGTH[2].index(cell) < 2
    marks = [] if quick else [pytest.mark.slow] if tested else [pytest.mark.nightly]
    return pytest.param(cell, id=f"{cell.loss_type}-{number % 32:02}-{cell.ours}", marks=marks)


@pytest.mark.parametrize(
    "cell", [marked(*one) for one in enumerate(CELLS) if one[1] in BY_STRENGTH[3] + BY_STRENGTH[2]]
)
def test_the_gradient_is_trls(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: Cell) -> None:
    monkeypatch.setattr(parity_grid, "scripted_rollout", uneven_rollout)
    # With log-probabilities in float64, or the order of float32 sums would hide what is wrong by less.
    theirs = parity_grid.train_trl(tiny_model, tmp_path / "trl", cell, Float64Trainer)
    ours = parity_grid.train_ours(tiny_model, tmp_path / "ext", cell, Float64Trainer)
    assert parity_grid.gradient_gap(ours, theirs) < 1e-9, cell
    least = 1e-9 if cell.ours == "aggregation" else 1e-6  # transformers adds losses in float32
    assert parity_grid.loss_gap(ours, theirs) < least, cell


# With these on every setting has something to act on: a KL penalty, and ratios off 1 at the second step.
BASE = frozenset({"beta", "num_iterations"})


@pytest.mark.slow
def test_parity_settings_change_the_gradient(tiny_model: Path, tmp_path: Path) -> None:
    base = parity_grid.train_trl(tiny_model, tmp_path, Cell("grpo", BASE))
    first, second, *_ = base.logs
    assert first["clip_ratio/region_mean"] == 0 < 0.1 < second["clip_ratio/region_mean"] < 0.9
    for name in FACTORS:
        flipped = parity_grid.train_trl(tiny_model, tmp_path, Cell("grpo", BASE ^ {name}))
        assert relative_gap(flipped.gradients[1], base.gradients[1]) > 1e-3, name
    ours = parity_grid.train_ours(tiny_model, tmp_path, Cell("grpo", BASE), loss_aggregation="token_mean")
    assert min(parity_grid.gradient_gap(ours, base), parity_grid.loss_gap(ours, base)) > 1e-3


UNSELECTED: dict[str, dict[str, Any]] = {
    "defaults": {},
    "accumulation, two iterations, KL": {"gradient_accumulation_steps": 2, "num_iterations": 2, "beta": 0.04},
    "sequence ratios, entropy bonus": {"importance_sampling_level": "sequence", "entropy_coef": 0.01},
    "evaluation in between": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8},
}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(settings, id=name, marks=[pytest.mark.slow] * ("iterations" not in name))
        for name, settings in UNSELECTED.items()
    ],
)
def test_three_steps_are_trls_to_the_bit(tiny_model: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    # Nothing is scripted: the completions are sampled, so even the random numbers drawn have to be the same.
    common: dict[str, Any] = {"scripted": False, "max_steps": 3, "prompt_count": 8, **settings}
    if "eval_strategy" in settings:
        common["eval_dataset"] = prompts(2)
    theirs = train(tiny_model, tmp_path / "trl", GRPOTrainer, **common)
    ours = train(tiny_model, tmp_path / "ext", GRPOExtTrainer, **common)

    assert ours.logs == theirs.logs
    assert len(theirs.gradients) == 3
    for our_step, their_step in zip(ours.gradients, theirs.gradients, strict=True):
        assert relative_gap(our_step, their_step) == 0.0 < max(g.abs().max() for g in their_step.values())
    assert all(torch.equal(ours.weights[name], theirs.weights[name]) for name in theirs.weights)


def both(model: Path, folder: Path, loss_type: str, aggregation: str, **settings: Any) -> tuple[Run, Run]:
    settings = {"num_iterations": 2, "prompt_count": 8, "dtype": "float64", "loss_type": loss_type, **settings}
    torch.manual_seed(0)  # for what a trainer initializes itself, an adapter
    theirs = train(model, folder / "trl", GRPOTrainer, **settings)
    torch.manual_seed(0)
    return train(model, folder / "ext", **settings, loss_aggregation=aggregation), theirs


def assert_same(ours: Run, theirs: Run) -> None:
    assert parity_grid.gradient_gap(ours, theirs) < TOLERANCE
    assert parity_grid.loss_gap(ours, theirs) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["bnpo", "dapo", "dr_grpo", "grpo", "luspo"])
def test_parity_of_aggregations_with_loss_types(tiny_model: Path, tmp_path: Path, reduction: str) -> None:
    # These loss types share the clipped objective and differ in the reduction alone, so TRL itself is the oracle of
    # a changed aggregation, with the KL penalty under the same weights.
    settings = {"num_iterations": 2, "prompt_count": 8, "dtype": "float64", "beta": 0.04}
    theirs = train(tiny_model, tmp_path / "trl", GRPOTrainer, loss_type=reduction, **settings)
    aggregation = OWN_AGGREGATION[reduction]
    ours = train(tiny_model, tmp_path / "ext", loss_type="grpo", loss_aggregation=aggregation, **settings)
    assert_same(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["bnpo", "grpo"])  # one aggregation by `reduce`, one by `weights`
def test_the_auxiliary_loss_of_a_mixture_of_experts_stays_trls(tiny_moe: Path, tmp_path: Path, loss_type: str) -> None:
    # Two micro-batches, over which TRL averages the auxiliary loss. float32: torch has no grouped product of doubles.
    settings = {"dtype": "float32", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    settings |= {"max_steps": 1, "beta": 0.04, "num_iterations": 1}
    aggregation = OWN_AGGREGATION[loss_type]
    ours, theirs = both(tiny_moe, tmp_path, loss_type, aggregation, router_aux_loss_coef=0.1, **settings)
    assert_same(ours, theirs)
    without = train(tiny_moe, tmp_path, GRPOTrainer, loss_type=loss_type, router_aux_loss_coef=0.0, **settings)
    assert relative_gap(without.gradients[0], theirs.gradients[0]) > 1e-3
    assert theirs.logs[0]["aux_loss"] == ours.logs[0]["aux_loss"] > 0


# In bfloat16 a sum depends on its order: TRL's gradient in float32 is as far from its own in bfloat16 as rounding takes
# it. Compact updates cut the rows differently and are as far from float32 as TRL is; the others change no bit.
REENTRANT: dict[str, Any] = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
MODES: dict[str, dict[str, Any]] = {
    "autocast": {},
    "bfloat16 weights": {"dtype": "bfloat16"},
    "autocast, checkpointing": {"gradient_checkpointing": True},
    "bfloat16 weights, reentrant checkpointing": {"dtype": "bfloat16", "gradient_checkpointing": True, **REENTRANT},
}
COMPACT: list[dict[str, Any]] = [{"compact_updates": "exact"}, {"compact_updates": "exact", "share_prompts": True}]


def trained(model: Path, folder: Path, trainer_class: type, lora: bool = False, **settings: Any) -> Run:
    more: dict[str, Any] = {"rollout_func": uneven_rollout}
    if lora:
        more["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)  # the adapters' weights
    found = {**COMMON, "beta": 0.04, "max_steps": 1, **settings}
    return train(model, folder, trainer_class, **found, trainer_arguments=more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "lora"),
    [pytest.param(mode, bool(number % 2), id=name) for number, (name, mode) in enumerate(MODES.items())],
)
def test_within_bfloat16s_own_noise(tiny_model: Path, tmp_path: Path, mode: Mapping[str, Any], lora: bool) -> None:
    def gap(ours: Run, theirs: Run) -> float:
        return relative_gap(ours.gradients[0], theirs.gradients[0])

    mode = {"bf16": True, **mode}
    exact = trained(tiny_model, tmp_path / "float32", GRPOTrainer, lora)
    theirs = trained(tiny_model, tmp_path / "trl", GRPOTrainer, lora, **mode)
    noise = gap(theirs, exact)
    assert noise > 1e-3, "bfloat16 is on"
    for selected in ({}, {"loss_aggregation": "token_mean"}):
        ours = trained(tiny_model, tmp_path / "ours", GRPOExtTrainer, lora, **mode, **selected)
        assert gap(ours, theirs) == 0.0, selected
    for number, selected in enumerate(COMPACT):
        compact = trained(tiny_model, tmp_path / f"compact{number}", GRPOExtTrainer, lora, **mode, **selected)
        assert gap(compact, exact) < 1.5 * noise
        assert 0 < gap(compact, theirs) < 2 * noise, "two errors of one size, in other directions"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trained_with", "aggregation", "evaluated_with"),
    [("dapo", "token_mean", "dapo"), ("bnpo", "token_mean_local", "bnpo"), ("dapo", "seq_mean_token_sum", "luspo")],
)
def test_evaluated_loss(
    tiny_model: Path, tmp_path: Path, trained_with: str, aggregation: str, evaluated_with: str
) -> None:
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "beta": 0.04, "entropy_coef": 0.05}
    # What training divides by and evaluation does not.
    settings |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    settings |= {"max_steps": 1, "eval_dataset": prompts(2)}
    theirs = train(tiny_model, tmp_path / "trl", GRPOTrainer, loss_type=evaluated_with, **settings)
    chosen = {"loss_type": trained_with, "loss_aggregation": aggregation}
    ours = train(tiny_model, tmp_path / "ext", **chosen, **settings)
    losses = [next(log["eval_loss"] for log in run.logs if "eval_loss" in log) for run in (ours, theirs)]
    assert abs(losses[1]) > 1e-2
    assert losses[0] == pytest.approx(losses[1], rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["sum_then_normalize", "normalize_then_sum"])
def test_signal_of_rounding(tiny_model: Path, tmp_path: Path, setting: str) -> None:
    settings: dict[str, Any] = {"multi_objective_aggregation": setting, "max_steps": 1}
    settings |= {"num_generations": 7, "per_device_train_batch_size": 14}

    def always(value: float) -> Any:
        return lambda completion_ids, **columns: [value] * len(completion_ids)

    settings["reward_funcs"] = [always(0.3), always(100.1)]
    selections: list[dict[str, Any]] = [{}, {"loss_aggregation": "token_mean"}, {"compact_updates": "exact"}]
    runs = [train(tiny_model, tmp_path / str(n), **settings, **selected) for n, selected in enumerate(selections)]
    learns = [any(bool(gradient.any()) for gradient in run.gradients[0].values()) for run in runs]
    assert learns == [True, False, False]  # TRL's own does, where nothing is selected
