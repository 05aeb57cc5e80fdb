"""Batch sizes are the real configuration's, by hand and in a real run; plugins are built and the broken ones named."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tests.launch.doctor.cases import case
from tests.support import prompts, save_tiny_model
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer
from trl_grpo_ext.launch.doctor.case import Batch, columns_of, load_plugins, prompts_of
from trl_grpo_ext.launch.doctor.run_file import RunPlan, build_configs, read_run


def run_of(folder: Path, count: int, processes: int = 1, **settings: Any) -> RunPlan:
    data, file = folder / "train.jsonl", folder / "run.yaml"
    data.write_text('{"question": "a", "answer": "1"}\n' * count)
    file.write_text(f"dataset_path: {data}\n" + "".join(f"{name}: {value}\n" for name, value in settings.items()))
    return build_configs(read_run([file]), processes=processes)


def test_sizes_by_hand(tmp_path: Path) -> None:
    sizes = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4, "steps_per_generation": 8}
    run = run_of(tmp_path, 100, 2, **sizes, num_generations=8, num_iterations=2, num_train_epochs=3)
    assert Batch.of(run) == Batch(
        generation_batch_size=16 * 2 * 8,
        prompts_per_generation_batch=32,
        rows_per_process=128,
        completions_per_optimizer_step=128,
        optimizer_steps_per_generation=Fraction(4),
        optimizer_steps=3 * 3 * 4,  # 100 prompts fill three batches of 32
        prompts=100,
        eval_batch=16,
    )


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"num_generations": 7}, "divisible by num_generations"),
        ({"generation_batch_size": 12}, "divisible by the global batch size (16)"),
        ({"generation_batch_size": 16, "steps_per_generation": 1}, "can not be both configured"),
        ({"num_generations": 1}, "at least 2 generations"),
        (
            {"eval_strategy": "steps", "eval_steps": 5, "per_device_eval_batch_size": 3},
            "global eval batch size (3 * 2)",
        ),
        ({"auto_find_batch_size": "true"}, "auto_find_batch_size is not supported"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_in_trls_own_words(
    settings: dict[str, Any], refusal: str, tmp_path: Path
) -> None:
    run = run_of(tmp_path, 8, 2, **settings)
    (problem,) = run.problems[-1:]
    assert problem.severity == "error"
    assert refusal in problem.message
    assert Batch.of(run) is None


@pytest.mark.parametrize("name", ["per_device_train_batch_size", "num_generations", "gradient_accumulation_steps"])
@pytest.mark.parametrize("value", [0, -3])
def test_sizes_below_one_are_no_crash(name: str, value: int, tmp_path: Path) -> None:
    assert Batch.of(run_of(tmp_path, 8, **{name: value})) is None


@pytest.mark.parametrize(
    ("accumulation", "steps", "iterations", "count"), [(1, None, 1, 8), (2, 4, 1, 9), (2, 2, 2, 4), (3, 2, 1, 6)]
)
def test_a_real_run_takes_as_many_steps(
    tmp_path: Path, accumulation: int, steps: int | None, iterations: int, count: int
) -> None:
    sizes: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": accumulation,
        "num_iterations": iterations,
        "num_generations": 2,
        "num_train_epochs": 2,
        "max_completion_length": 2,
        **({} if steps is None else {"steps_per_generation": steps}),
    }
    calls: list[int] = []

    def reward(completions: list[str], **_: object) -> list[float]:
        calls.append(len(completions))
        return [float(number) for number in range(len(completions))]

    args = {"output_dir": str(tmp_path / "out"), "use_cpu": True, "bf16": False, "report_to": "none"}
    trainer = GRPOExtTrainer(
        model=str(save_tiny_model(tmp_path / "model")),
        args=GRPOExtConfig(**args, save_strategy="no", **sizes),
        reward_funcs=[reward],
        train_dataset=prompts(count),
    )
    trainer.train()
    batch = Batch.of(run_of(tmp_path, count, **sizes))
    assert batch is not None
    assert trainer.state.global_step == batch.optimizer_steps
    assert calls[0] == batch.generation_batch_size


def test_the_data_are_counted_and_their_columns_read(tmp_path: Path) -> None:
    run = run_of(tmp_path, 40)
    assert (prompts_of(run), columns_of(run)) == (40, {"question", "answer"})
    (tmp_path / "train.jsonl").write_text("[" * 5_000)
    assert (prompts_of(run), columns_of(run)) == (1, None)
    (tmp_path / "train.jsonl").unlink()
    assert (prompts_of(run), columns_of(run)) == (None, None)
    assert prompts_of(case(dataset_name="openai/gsm8k").run) == 7473
    assert columns_of(case(own={"dataset_path": "a.csv"}).run) is None


def test_a_plugin_that_does_not_load_is_named_with_all_the_others() -> None:
    settings = {
        "rewards": ["gsm8k_accuracy", "gsm8k_acuracy", {"name": "cosine_length", "no_such": 1}],
        "advantage_hooks": ["leave_one_out", "os.path:join"],
        "loss_aggregation": {"name": "tail_mean", "alpha": "x"},
    }
    plugins = load_plugins(case(**settings).run)
    assert list(plugins.rewards) == ["gsm8k_accuracy"]
    assert list(plugins.hooks) == ["leave_one_out"]
    assert plugins.aggregation is None
    assert [problem.severity for problem in plugins.problems] == ["error"] * 4
    everything = " ".join(problem.message for problem in plugins.problems)
    assert all(word in everything for word in ("Did you mean 'gsm8k_accuracy'", "no_such", "os.path", "tail_mean"))
    assert load_plugins(case(rewards=["none"], loss_aggregation="none").run).problems == ()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"resample": {"filter": {"name": "accuracy_between", "lowest": 0.1}}}, "lowest"),
        ({"resample": "{filter: signl}"}, "Did you mean 'signal'"),
        ({"resample": {"filter": "signal", "max_round": 2}}, "max_round"),
        ({"advantage_hooks": ["centred", "leave_one_out"]}, "both estimators"),
        ({"advantage_hooks": ["whiten"], "resample": "signal"}, "reads advantages"),
        ({"resample": "none"}, ""),
        ({"advantage_hooks": ["leave_one_out"], "resample": "{filter: {name: accuracy_between, low: 0.1}}"}, ""),
    ],
)
def test_filters_are_built_and_what_the_chain_refuses_is_a_problem(settings: dict[str, Any], words: str) -> None:
    problems = load_plugins(case(**settings).run).problems
    assert [problem.severity for problem in problems] == ["error"] * bool(words), problems
    assert words in "".join(problem.message for problem in problems)
