"""Which counts an optimizer step is divided by: those of the generation batch, or its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from tests.support import Run, relative_gap, train
from trl_grpo_ext import GRPOExtTrainer
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.types import StepTotals, Totals

TWO_STEPS: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
TWO_STEPS |= {"steps_per_generation": 4, "max_steps": 2}
"""Sixteen completions in four micro-batches, two for each of two optimizer steps."""


class Recording:
    """The token sum, which keeps what it was shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, Totals]] = []

    def reduce(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Totals) -> torch.Tensor:
        self.seen.append((int(mask_B_T.sum()), totals))
        return (loss_B_T * mask_B_T).sum()


@pytest.mark.slow
def test_the_mean_over_a_step_is_exact_for_each_step(tiny_model: Path, tmp_path: Path) -> None:
    # Weights don't move, so each step of the one trainer can be compared with the other's on the same rows.
    settings = {**TWO_STEPS, "learning_rate": 0.0, "dtype": "float64"}
    recording = Recording()
    by_sum = train(tiny_model, tmp_path / "sum", trainer_arguments={"loss_aggregation": recording}, **settings)
    by_step = train(tiny_model, tmp_path / "step", loss_aggregation="token_mean_step", **settings)
    by_batch = train(tiny_model, tmp_path / "batch", loss_aggregation="token_mean", **settings)
    tokens = [count for count, _ in recording.seen]
    for number in range(2):
        sum_of_step, step, batch = (run.gradients[number] for run in (by_sum, by_step, by_batch))
        totals = recording.seen[2 * number][1]
        assert totals == recording.seen[2 * number + 1][1]
        assert totals.step == StepTotals(tokens=sum(tokens[2 * number :][:2]), sequences=8, micro_batches=2)
        assert (totals.tokens, totals.sequences, totals.prompts, totals.micro_batches) == (sum(tokens), 16, 4, 4)
        assert totals.optimizer_steps == 2.0
        # The trainer took the mean over two micro-batches of the recording's sums.
        mean = {name: gradient * 2 / totals.step.tokens for name, gradient in sum_of_step.items()}
        assert relative_gap(step, mean) < 1e-6
        # token_mean: the batch's tokens, of which one step is taken for half.
        estimate = {name: gradient * 2 / (totals.tokens / 2) for name, gradient in sum_of_step.items()}
        assert relative_gap(batch, estimate) < 1e-6
        assert relative_gap(step, batch) > 0.01


@pytest.mark.slow
def test_the_token_sum_does_not_grow_in_a_short_last_step(tiny_model: Path, tmp_path: Path) -> None:
    # Three micro-batches of 4 rows, each a generation batch: a step of two, and one of one, then the epoch is over.
    settings: dict[str, Any] = {"per_device_train_batch_size": 4, "steps_per_generation": 1, "prompt_count": 3}
    settings |= {"num_train_epochs": 1, "max_steps": -1, "learning_rate": 0.0, "loss_aggregation": "token_sum"}
    alone = train(tiny_model, tmp_path / "alone", gradient_accumulation_steps=1, **settings)
    together = train(tiny_model, tmp_path / "together", gradient_accumulation_steps=2, **settings)
    first, second, third = alone.gradients
    assert len(together.gradients) == 2
    both = {name: first[name] + second[name] for name in first}
    assert relative_gap(together.gradients[0], both) < 1e-5
    assert relative_gap(together.gradients[1], third) < 1e-5
    skipping = {**settings, "loss_aggregation": {"name": "token_sum", "skip_zero_variance": True}}
    skipped = train(tiny_model, tmp_path / "skipped", gradient_accumulation_steps=2, **skipping)
    assert relative_gap(skipped.gradients[1], third) < 1e-5


def test_steps_across_batches_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    for per_generation, per_step in ((2, 4), (3, 2)):
        settings = {"steps_per_generation": per_generation, "gradient_accumulation_steps": per_step}
        settings |= {"per_device_train_batch_size": 4}
        with pytest.raises(ConfigurationError, match=f"steps_per_generation={per_generation}"):
            train(tiny_model, tmp_path, loss_aggregation="token_mean_step", **settings)


@pytest.mark.slow
def test_a_limit_that_a_callback_moves(tiny_model: Path, tmp_path: Path) -> None:
    class Shorter(TrainerCallback):
        trainer: Any = None

        def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            self.trainer.max_completion_length = 16 - 6 * state.global_step

    def trained(trainer_class: type, **settings: Any) -> Run:
        return train(tiny_model, tmp_path, trainer_class, callbacks=[Shorter()], max_steps=2, **settings)

    plain = trained(GRPOTrainer, loss_type="dr_grpo")
    ours = trained(GRPOExtTrainer, loss_type="dr_grpo", loss_aggregation="constant_length")
    tokens = [trained(GRPOExtTrainer, loss_type=name, loss_aggregation="token_mean") for name in ("dapo", "dr_grpo")]
    for one, other in ((ours, plain), tokens):
        assert all(relative_gap(*pair) < 1e-5 for pair in zip(one.gradients, other.gradients, strict=True))
