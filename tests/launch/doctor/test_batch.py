"""Batch arithmetic against the real GRPOConfig, RepeatSampler and Trainer, and by hand."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from trl import GRPOConfig
from trl.trainer.utils import RepeatSampler

from tests.support import prompts, save_tiny_model
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer
from trl_grpo_ext.launch.doctor.batch import BatchPlan, BatchSetup, batch_arithmetic

SIZES = st.integers(1, 12)
MAYBE = st.none() | SIZES


def errors(plan: BatchPlan) -> list[str]:
    return [problem.message for problem in plan.problems if problem.severity == "error"]


def warnings(plan: BatchPlan) -> list[str]:
    return [problem.message for problem in plan.problems if problem.severity == "warning"]


SETUPS = st.builds(
    BatchSetup,
    per_device_train_batch_size=SIZES,
    processes=st.integers(1, 4),
    gradient_accumulation_steps=SIZES,
    steps_per_generation=MAYBE,
    generation_batch_size=st.none() | st.integers(1, 96),
    num_generations=SIZES,
    num_generations_eval=MAYBE,
    num_iterations=st.integers(1, 3),
    per_device_eval_batch_size=SIZES,
    evaluates=st.booleans(),
)


def real_config(setup: BatchSetup) -> GRPOConfig:
    """One process that has the batch of all: TRL's rules see only the product of the two."""
    return GRPOConfig(
        output_dir="unused",
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=setup.per_device_train_batch_size * setup.processes,
        gradient_accumulation_steps=setup.gradient_accumulation_steps,
        steps_per_generation=setup.steps_per_generation,
        generation_batch_size=setup.generation_batch_size,
        num_generations=setup.num_generations,
        num_generations_eval=setup.num_generations_eval,
        num_iterations=setup.num_iterations,
        per_device_eval_batch_size=setup.per_device_eval_batch_size * setup.processes,
        eval_strategy="steps" if setup.evaluates else "no",
        eval_steps=10,
    )


@settings(max_examples=300, deadline=None)
@given(setup=SETUPS)
def test_we_report_an_error_exactly_where_grpoconfig_raises(setup: BatchSetup) -> None:
    plan = batch_arithmetic(setup)
    if not plan.fits:
        with pytest.raises(ValueError, match=r"generation|divisible"):
            real_config(setup)
        return
    real = real_config(setup)  # raises where we have missed something
    assert plan.generation_batch_size == real.generation_batch_size
    assert plan.steps_per_generation == real.steps_per_generation
    assert plan.num_generations == real.num_generations
    assert plan.rows_per_process * setup.processes == real.generation_batch_size


@settings(max_examples=200, deadline=None)
@given(setup=SETUPS)
def test_a_value_that_we_suggest_for_the_generation_batch_divides(setup: BatchSetup) -> None:
    assume(setup.steps_per_generation is None or setup.generation_batch_size is None)
    assume(setup.num_generations >= 2)
    plan = batch_arithmetic(setup)
    for problem in plan.problems:
        if problem.severity != "error":
            continue
        for name, values in re.findall(r"(\w+) to ((?:\d+(?: or )?)+)", problem.fix):
            for value in values.split(" or "):
                # The other problems of this setup stay, so only this one's sentence must go.
                start = problem.message.split(" of ")[0] if " of " in problem.message else problem.message[:24]
                repaired = batch_arithmetic(BatchSetup(**{**setup.__dict__, name: int(value)}))
                assert not [message for message in errors(repaired) if message.startswith(start)], (name, value)


def test_sizes_by_hand() -> None:
    plan = batch_arithmetic(
        BatchSetup(
            per_device_train_batch_size=16,
            processes=2,
            gradient_accumulation_steps=4,
            num_generations=8,
            num_iterations=2,
            steps_per_generation=8,
            prompts=100,
            num_train_epochs=3,
            max_completion_length=300,
            prompt_length=212,
        )
    )
    assert plan.fits
    assert plan.generation_batch_size == 16 * 2 * 8 == 256
    assert plan.prompts_per_generation_batch == 32
    assert plan.rows_per_process == 128
    assert plan.micro_batch == 32
    assert plan.completions_per_optimizer_step == 128
    assert plan.tokens_per_optimizer_step == 128 * 512
    assert plan.micro_batches_per_generation == 16
    assert plan.optimizer_steps_per_generation == Fraction(4)
    assert plan.optimizer_steps_per_epoch == 3 * 4  # 100 prompts fill three batches of 32
    assert plan.prompts_left_out == 4
    assert plan.optimizer_steps == 36
    assert plan.generation_batches == 9
    assert plan.completions_generated == 9 * 256
    assert plan.completions_trained_on == 36 * 128 == 9 * 256 * 2  # each in two iterations
    assert plan.old_log_probabilities


def test_max_steps_beats_epochs() -> None:
    setup = BatchSetup(prompts=64, max_steps=10, num_train_epochs=1.0)
    plan = batch_arithmetic(setup)
    assert plan.optimizer_steps == 10
    assert plan.optimizer_steps_per_epoch == 64
    assert plan.epochs == pytest.approx(10 / 64)
    assert batch_arithmetic(BatchSetup(max_steps=10)).optimizer_steps == 10
    assert batch_arithmetic(BatchSetup()).optimizer_steps is None


@settings(max_examples=100, deadline=None)
@given(setup=SETUPS, count=st.integers(0, 60))
def test_an_epoch_is_what_the_real_sampler_yields(setup: BatchSetup, count: int) -> None:
    group = max(2, setup.num_generations)
    whole = {"num_generations": group, "per_device_train_batch_size": group, "generation_batch_size": None}
    setup = BatchSetup(**{**setup.__dict__, **whole, "prompts": count, "evaluates": False})
    plan = batch_arithmetic(setup)
    sampler = RepeatSampler(
        data_source=range(count),
        mini_repeat_count=setup.num_generations,
        batch_size=plan.prompts_per_generation_batch,
        repeat_count=setup.num_iterations * plan.steps_per_generation,
    )
    micro_batches = len(sampler) // plan.generation_batch_size
    assert len(sampler) % plan.generation_batch_size == 0
    assert plan.optimizer_steps_per_epoch == -(-micro_batches // setup.gradient_accumulation_steps)
    assert (len(sampler) == 0) == (not plan.fits)


@pytest.mark.parametrize(
    ("accumulation", "steps", "iterations", "count"), [(1, None, 1, 8), (2, 4, 1, 9), (2, 2, 2, 4), (3, 2, 1, 6)]
)
def test_a_real_run_takes_as_many_steps(
    tmp_path: Path, accumulation: int, steps: int | None, iterations: int, count: int
) -> None:
    sizes = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": steps,
        "num_iterations": iterations,
        "num_generations": 2,
        "num_train_epochs": 2,
        "max_completion_length": 2,
    }
    calls: list[int] = []

    def reward(completions: list[str], **_: object) -> list[float]:
        calls.append(len(completions))
        return [float(number) for number in range(len(completions))]

    trainer = GRPOExtTrainer(
        model=str(save_tiny_model(tmp_path / "model")),
        args=GRPOExtConfig(
            output_dir=str(tmp_path / "out"), use_cpu=True, bf16=False, report_to="none", save_strategy="no", **sizes
        ),
        reward_funcs=[reward],
        train_dataset=prompts(count),
    )
    trainer.train()
    plan = batch_arithmetic(BatchSetup(**sizes, prompts=count))
    assert trainer.state.global_step == plan.optimizer_steps
    assert calls[0] == plan.generation_batch_size
    if plan.optimizer_steps_per_generation.denominator == 1 or steps is None:
        assert len(calls) == plan.generation_batches


def test_several_problems_come_at_once() -> None:
    plan = batch_arithmetic(
        BatchSetup(
            per_device_train_batch_size=3,
            gradient_accumulation_steps=5,
            generation_batch_size=16,
            num_generations=7,
            per_device_eval_batch_size=4,
            evaluates=True,
            prompts=1,
            auto_find_batch_size=True,
        )
    )
    assert len(errors(plan)) == 5
    assert all(problem.fix and problem.subject == "batch" for problem in plan.problems)


def test_the_nearest_values_are_offered() -> None:
    (problem,) = batch_arithmetic(BatchSetup(per_device_train_batch_size=10, num_generations=8)).problems
    assert "10 completions" in problem.message
    assert "num_generations to 10 or 5" in problem.fix
    assert "per_device_train_batch_size to 8 or 16" in problem.fix
    assert "gradient_accumulation_steps to 4" in problem.fix


@pytest.mark.parametrize("name", ["per_device_train_batch_size", "processes", "num_generations", "num_iterations"])
@pytest.mark.parametrize("value", [0, -3])
def test_sizes_below_one_are_problems_and_no_crash(name: str, value: int) -> None:
    plan = batch_arithmetic(BatchSetup(**{name: value}, evaluates=True, prompts=4))
    assert any(f"{name} is {value}" in message for message in errors(plan))


@pytest.mark.parametrize(("batch", "steps"), [(0, None), (-8, None), (None, 0), (None, -1)])
def test_a_generation_batch_below_one_is_a_problem(batch: int | None, steps: int | None) -> None:
    assert errors(batch_arithmetic(BatchSetup(generation_batch_size=batch, steps_per_generation=steps)))


def test_a_checkpoint_inside_a_generation_batch_is_a_warning() -> None:
    setup = BatchSetup(gradient_accumulation_steps=2, steps_per_generation=4, num_iterations=2, save_steps=6)
    plan = batch_arithmetic(setup)
    assert plan.optimizer_steps_per_generation == 4
    (message,) = warnings(plan)
    assert "every 6 optimizer steps" in message
    assert "4 or 8" in plan.problems[-1].fix
    assert not warnings(batch_arithmetic(BatchSetup(**{**setup.__dict__, "save_steps": 8})))
    assert not warnings(batch_arithmetic(BatchSetup(**{**setup.__dict__, "save_steps": None})))


def test_a_share_of_the_steps_is_counted_as_the_trainer_counts_it() -> None:
    setup = BatchSetup(steps_per_generation=4, save_steps=0.1, max_steps=95)  # ceil(9.5) = 10, not a multiple of 4
    assert "every 10 optimizer steps" in warnings(batch_arithmetic(setup))[0]
    assert not warnings(batch_arithmetic(BatchSetup(**{**setup.__dict__, "max_steps": 80})))


def test_where_each_step_has_its_own_completions_every_checkpoint_is_clean() -> None:
    for steps in (None, 1, 2):
        setup = BatchSetup(gradient_accumulation_steps=4, steps_per_generation=steps, save_steps=7)
        assert not batch_arithmetic(setup).problems
        assert not batch_arithmetic(setup).old_log_probabilities


def test_two_rhythms_that_do_not_fit_are_a_warning() -> None:
    plan = batch_arithmetic(BatchSetup(gradient_accumulation_steps=4, steps_per_generation=6))
    assert "mix completions of two policies" in warnings(plan)[0]
    assert plan.old_log_probabilities


def test_an_evaluation_that_does_not_divide_and_one_that_leaves_a_rest() -> None:
    setup = BatchSetup(per_device_eval_batch_size=6, num_generations_eval=4, evaluates=True)
    assert "groups of 4 (num_generations_eval)" in errors(batch_arithmetic(setup))[0]
    assert not errors(batch_arithmetic(BatchSetup(**{**setup.__dict__, "evaluates": False})))
    rest = batch_arithmetic(
        BatchSetup(per_device_eval_batch_size=8, num_generations_eval=2, evaluates=True, eval_prompts=10)
    )
    assert [problem.severity for problem in rest.problems] == ["note"]
    assert "Evaluate on 8 prompts" in rest.problems[0].fix
