"""The aggregation that equals TRL's own reduction gives TRL's loss and gradient, for every loss type and setting.

The grid, and how its runs are made, is `parity_grid`. Of its cells `make quick` runs so many that any two of
loss type and settings meet, `make test` so many that any three do, and `make nightly` all. Below it are what does not
fit a grid of two levels: another precision, another aggregation, TRL's metrics, evaluation, an auxiliary loss, an
adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOTrainer

from tests.support import OWN_AGGREGATION, Run, prompts, relative_gap, train
from tests.trainer import parity_grid
from tests.trainer.parity_grid import CORRECTION, CORRECTION_MODES, FACTORS, TOLERANCE, Cell
from tests.trainer.process_worker import Float64ChunkedTrainer
from trl_grpo_ext.trainer import upstream

CELLS = parity_grid.all_cells()
BY_STRENGTH = {strength: parity_grid.covering(CELLS, strength) for strength in (2, 3)}


def marked(number: int, cell: Cell) -> Any:
    quick, tested = (cell in BY_STRENGTH[strength] for strength in (2, 3))
    marks = [] if quick else [pytest.mark.slow] if tested else [pytest.mark.nightly]
    return pytest.param(cell, id=f"{cell.loss_type}-{number % 32:02}", marks=marks)


# ---------------------------------------------------------------------------------------------------- the grid


@pytest.mark.parametrize("cell", [marked(*one) for one in enumerate(CELLS)])
def test_own_aggregation_gives_trls_loss_and_gradient(tiny_model: Path, tmp_path: Path, cell: Cell) -> None:
    # With log-probabilities in float64, or the order of float32 sums would hide what is wrong by less.
    assert max(parity_grid.gaps(tiny_model, tmp_path, cell, Float64ChunkedTrainer)) < 1e-9, cell


@pytest.mark.parametrize("cell", BY_STRENGTH[2], ids=lambda cell: cell.loss_type)
def test_the_same_with_trls_own_forward_pass(tiny_model: Path, tmp_path: Path, cell: Cell) -> None:
    assert max(parity_grid.gaps(tiny_model, tmp_path, cell)) < TOLERANCE, cell


def combinations_in(cells: Sequence[Cell], names: Sequence[str]) -> set[tuple[bool, ...]]:
    return {tuple(name in cell.on for name in names) for cell in cells}


def test_any_two_settings_and_loss_type_occur_together_in_quick_any_three_in_test_any_four_in_nightly() -> None:
    settings = [factor.name for factor in FACTORS]
    assert OWN_AGGREGATION.keys() == upstream.LOSS_TYPES
    for strength, cells in {**BY_STRENGTH, 4: CELLS}.items():
        for loss_type in OWN_AGGREGATION:
            of_type = [cell for cell in cells if cell.loss_type == loss_type]
            for names in combinations(settings, strength - 1):
                assert len(combinations_in(of_type, names)) == 2 ** (strength - 1), (strength, loss_type, names)
        for names in combinations(settings, min(strength, 3)):
            assert len(combinations_in(cells, names)) == 2 ** len(names), (strength, names)
    assert len(BY_STRENGTH[2]) <= 20
    assert len(BY_STRENGTH[3]) <= 80
    assert set(BY_STRENGTH[2]) <= set(CELLS)


def test_every_correction_mode_that_trl_allows_occurs() -> None:
    for strength, cells in {**BY_STRENGTH, 4: CELLS}.items():
        corrected = [cell for cell in cells if CORRECTION in cell.on]
        assert {cell.correction_mode for cell in corrected} == set(CORRECTION_MODES)
        for loss_type in OWN_AGGREGATION if strength > 2 else ():
            modes = {cell.correction_mode for cell in corrected if cell.loss_type == loss_type}
            assert modes == set(parity_grid.correction_modes(loss_type))
        for mode, factor in product(CORRECTION_MODES, FACTORS) if strength > 2 else ():
            of_mode = [cell for cell in corrected if cell.correction_mode == mode]
            levels = combinations_in(of_mode, [factor.name])
            assert len(levels) == (1 if factor.name == CORRECTION else 2), (mode, factor.name)


# -------------------------------------------------------------------------------- each setting changes what TRL does

# With these on every setting has something to act on: a KL penalty, and ratios off 1 at the second step.
BASE = frozenset({"beta", "num_iterations"})


def second_step(run: Run) -> dict[str, torch.Tensor]:
    return run.gradients[1]


@pytest.fixture(scope="module")
def trl_alone(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Runs of TRL's trainer, each made once."""

    @cache
    def run(loss_type: str, on: frozenset[str], mode: str = CORRECTION_MODES[0]) -> Run:
        return parity_grid.train_trl(tiny_model, tmp_path_factory.mktemp("trl"), Cell(loss_type, on, mode))

    return run


@pytest.mark.parametrize("name", [factor.name for factor in FACTORS])
def test_a_setting_changes_trls_gradient(trl_alone: Callable[..., Run], name: str) -> None:
    base, flipped = trl_alone("grpo", BASE), trl_alone("grpo", BASE ^ {name})
    assert relative_gap(second_step(flipped), second_step(base)) > 1e-3


def test_every_correction_mode_changes_trls_gradient(trl_alone: Callable[..., Run]) -> None:
    runs = [trl_alone("grpo", BASE | {CORRECTION}, mode) for mode in CORRECTION_MODES]
    for one, other in pairwise([*runs, runs[0]]):
        assert relative_gap(second_step(one), second_step(other)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", OWN_AGGREGATION)
def test_the_losses_without_clipping_do_not_read_delta(trl_alone: Callable[..., Run], loss_type: str) -> None:
    # `parity_grid.EXCEPTIONS` says so.
    gap = relative_gap(second_step(trl_alone(loss_type, BASE | {"delta"})), second_step(trl_alone(loss_type, BASE)))
    assert gap == 0 if loss_type in ("cispo", "sapo", "vespo") else gap > 1e-3


def test_tokens_are_clipped_at_the_second_step(trl_alone: Callable[..., Run]) -> None:
    first, second, *_ = trl_alone("grpo", BASE).logs
    assert first["clip_ratio/region_mean"] == 0 < 0.1 < second["clip_ratio/region_mean"] < 0.9


def test_an_aggregation_that_is_not_trls_is_seen(
    trl_alone: Callable[..., Run], tiny_model: Path, tmp_path: Path
) -> None:
    theirs = trl_alone("grpo", BASE)
    ours = parity_grid.train_ours(tiny_model, tmp_path, Cell("grpo", BASE), "token_mean")
    assert parity_grid.gradient_gap(ours, theirs) > 1e-3
    assert parity_grid.loss_gap(ours, theirs) > 1e-3


# ------------------------------------------------------------------------------------------------ beyond the grid


def both(model: Path, folder: Path, loss_type: str, aggregation: str, **settings: Any) -> tuple[Run, Run]:
    settings = {"num_iterations": 2, "prompt_count": 8, "dtype": "float64", "loss_type": loss_type, **settings}
    torch.manual_seed(0)  # for what a trainer initializes itself, an adapter
    theirs = train(model, folder / "trl", GRPOTrainer, **settings)
    torch.manual_seed(0)
    return train(model, folder / "ext", **settings, loss_aggregation=aggregation), theirs


def assert_same(ours: Run, theirs: Run) -> None:
    assert parity_grid.gradient_gap(ours, theirs) < TOLERANCE
    assert parity_grid.loss_gap(ours, theirs) < TOLERANCE


@pytest.mark.parametrize("loss_type", OWN_AGGREGATION)
def test_the_same_in_the_precision_of_training(tiny_model: Path, tmp_path: Path, loss_type: str) -> None:
    # One step: after it, float32 runs would differ by what rounding does to the weights.
    settings: dict[str, Any] = {"num_iterations": 1, "max_steps": 1, "dtype": "float32"}
    assert_same(*both(tiny_model, tmp_path, loss_type, OWN_AGGREGATION[loss_type], **settings))


@pytest.mark.parametrize("reduction", ["bnpo", "dapo", "dr_grpo", "grpo", "luspo"])
def test_another_aggregation_is_the_loss_type_that_trl_has_for_it(
    tiny_model: Path, tmp_path: Path, reduction: str
) -> None:
    # These loss types share the clipped objective and differ in the reduction alone, so TRL itself is the oracle of
    # a changed aggregation, with the KL penalty under the same weights.
    settings = {"num_iterations": 2, "prompt_count": 8, "dtype": "float64", "beta": 0.04}
    theirs = train(tiny_model, tmp_path / "trl", GRPOTrainer, loss_type=reduction, **settings)
    aggregation = OWN_AGGREGATION[reduction]
    ours = train(tiny_model, tmp_path / "ext", loss_type="grpo", loss_aggregation=aggregation, **settings)
    assert_same(ours, theirs)


def test_the_metrics_of_the_loss_are_trls(tiny_model: Path, tmp_path: Path) -> None:
    ours, theirs = both(tiny_model, tmp_path, "dapo", "token_mean", beta=0.04)
    assert any(log.get("clip_ratio/region_mean", 0) > 0 for log in theirs.logs)
    for our_log, their_log in zip(ours.logs, theirs.logs, strict=True):
        assert {name: our_log[name] for name in their_log} == pytest.approx(their_log, rel=1e-4, abs=1e-6)


EVALUATION: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "per_device_eval_batch_size": 8,
    "beta": 0.04,
    "entropy_coef": 0.05,
    "max_steps": 1,
    # What training divides by and evaluation does not.
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
}


def evaluation_loss(run: Run) -> float:
    return next(log["eval_loss"] for log in run.logs if "eval_loss" in log)


@pytest.mark.parametrize("loss_type", OWN_AGGREGATION)
def test_evaluation_reports_trls_loss(tiny_model: Path, tmp_path: Path, loss_type: str) -> None:
    settings = {**EVALUATION, "trainer_arguments": {"eval_dataset": prompts(2)}}
    ours, theirs = both(tiny_model, tmp_path, loss_type, OWN_AGGREGATION[loss_type], **settings)
    assert abs(evaluation_loss(theirs)) > 1e-2
    assert evaluation_loss(ours) == pytest.approx(evaluation_loss(theirs), rel=TOLERANCE, abs=TOLERANCE)


def test_evaluation_reports_the_loss_that_is_trained(tiny_model: Path, tmp_path: Path) -> None:
    settings = {**EVALUATION, "trainer_arguments": {"eval_dataset": prompts(2)}}
    theirs = train(tiny_model, tmp_path / "trl", GRPOTrainer, loss_type="luspo", **settings)
    ours = train(tiny_model, tmp_path / "ext", loss_type="dapo", loss_aggregation="seq_mean_token_sum", **settings)
    assert abs(evaluation_loss(theirs)) > 1e-2
    assert evaluation_loss(ours) == pytest.approx(evaluation_loss(theirs), rel=TOLERANCE, abs=TOLERANCE)


@pytest.fixture(scope="module")
def tiny_moe(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer mixture of four experts with the tiny model's tokenizer."""
    folder = tmp_path_factory.mktemp("tiny_moe")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
        initializer_range=0.3,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


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


def test_an_adapter_with_the_disabled_adapter_as_its_reference(tiny_model: Path, tmp_path: Path) -> None:
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"])
    settings = {"beta": 0.04, "learning_rate": 0.5, "trainer_arguments": {"peft_config": adapter}}
    ours, theirs = both(tiny_model, tmp_path, "dapo", "token_mean", **settings)
    assert theirs.trainer.ref_model is None
    assert theirs.logs[0]["kl"] == 0 < 0.1 < theirs.logs[1]["kl"]
    assert all("lora" in name for name in theirs.gradients[0])
    assert_same(ours, theirs)
