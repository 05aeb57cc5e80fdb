"""A run's settings mean what TRL's parser would make of them, and what it lets pass is told."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trl import ModelConfig, TrlParser

from trl_grpo_ext import GRPOExtConfig
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.launch.doctor.run_file import RunPlan, build_configs, read_run, read_script

RECIPES = Path(__file__).parents[3] / "recipes"


def read(tmp_path: Path, text: str, *words: str, script: Path | None = None) -> RunPlan:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return read_run([file], words, script=None if script is None else read_script(script))


def said(plan: RunPlan) -> list[str]:
    return [problem.message for problem in plan.problems]


RIGHT = """
learning_rate: 1e-6
bf16: "false"
num_generations: 4
reward_weights: [1, 0.5]
save_strategy: "no"
lora_target_modules: all-linear
dtype: bfloat16
loss_aggregation: {name: tail_mean}
model_init_kwargs: {a: 1}
temperature: 1
output_dir: out
per_device_train_batch_size: 4
"""


def test_right_settings_are_what_trls_own_parser_makes_of_them(tmp_path: Path) -> None:
    words = ["--num_generations", "2", "--rewards", "gsm8k_accuracy", "--no_log_multimodal", "--use-peft"]
    plan = read(tmp_path, RIGHT, *words)
    assert plan.problems == ()
    parser = TrlParser([GRPOExtConfig, ModelConfig])
    args, model = parser.parse_args_and_config(["--config", str(tmp_path / "run.yaml"), "--use_cpu", *words])
    built = build_configs(plan, processes=1)
    assert built.config is not None
    assert built.model is not None
    for name in ("learning_rate", "bf16", "num_generations", "reward_weights", "temperature", "log_multimodal"):
        assert getattr(built.config, name) == getattr(args, name), name
    assert built.config.loss_aggregation == args.loss_aggregation
    assert (built.model.lora_target_modules, built.model.use_peft) == (model.lora_target_modules, True)
    assert built.config.save_strategy == args.save_strategy


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("per_device_train_batch_size: 12.5", "per_device_train_batch_size: invalid int value: '12.5'"),
        ("dtype: bf16", "dtype: invalid choice: 'bf16' (choose from 'auto', 'bfloat16', 'float16', 'float32')"),
        ("save_strategy: no", "save_strategy: invalid choice: 'False' (choose from 'no', 'steps', 'epoch', 'best')"),
        ("learning_rate:", "learning_rate has no value"),
        ("learning_rate: .nan", "learning_rate is nan, which is not finite"),
        ("learning_rate: [1, 2]", "learning_rate is [1, 2], not a single value"),
        ("reward_weights: 1.0", "reward_weights is 1.0, which is not a list"),
        ("bf16: 2", "bf16: Truthy value expected: got 2"),
        ("optim: adamw", "optim: invalid choice: 'adamw'"),
        ("env: 3", "`env` is 3, not a mapping"),
    ],
)
def test_values_that_trls_parser_lets_pass_are_found(tmp_path: Path, line: str, words: str) -> None:
    (problem,) = read(tmp_path, line).problems
    assert problem.severity == "error"
    assert words in problem.message


def test_all_mistakes_are_found_at_once(tmp_path: Path) -> None:
    text = "dtype: bf16\nlerning_rate: 1\nmax_steps: 1.5\nmy_own: 3\nbeta: 0.2\n"
    plan = read(tmp_path, text, "--num_generations", "x", "--blah", "1", "--config=more.yaml", "--seed", "7")
    assert [problem.severity for problem in plan.problems].count("error") == 6
    all_of_it = " ".join(said(plan))
    for words in ("'x'", "'--blah'", "--config=more.yaml", "'bf16'", "'lerning_rate'", "1.5"):
        assert words in all_of_it
    assert plan["seed"] == 7
    assert plan.own["my_own"] == 3


def test_the_command_line_beats_the_later_file_which_beats_the_earlier(tmp_path: Path) -> None:
    for name, text in (("a.yaml", "seed: 1\nbeta: 0.1\nmax_steps: 5"), ("b.yaml", "seed: 2\nbeta: 0.2")):
        (tmp_path / name).write_text(text)
    plan = read_run([tmp_path / "a.yaml", tmp_path / "b.yaml"], ["--seed=3"])
    assert (plan["seed"], plan["beta"], plan["max_steps"]) == (3, 0.2, 5)


def test_what_a_script_names_is_known_and_the_script_is_not_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import does_not_exist\nraise SystemExit('it ran')\nclass Mine:\n    colour: str\n    size: int = 3\n"
    )
    plan = read(tmp_path, "colour: blue\nbeta: 0.4\nhue: 1\n", "--size", "4", "--weight", "2", script=script)
    assert (plan.own, plan["beta"]) == ({"colour": "blue", "size": "4", "hue": 1}, 0.4)
    assert [problem.severity for problem in plan.problems] == ["error", "error"]
    assert "'--weight'" in plan.problems[0].message
    assert "'hue' in TRL, transformers or trl-grpo-ext, nor in train.py" in plan.problems[1].message
    script.write_text("\x00(" * 5000)
    assert read(tmp_path, "beta: 0.4\n", script=script).problems == ()
    assert read_script(RECIPES / "gsm8k_grpo.py").is_recipe


# ------------------------------------------------------------------------------------------ real configurations


def test_a_gpu_run_is_described_from_a_laptop_for_as_many_processes_as_it_has(tmp_path: Path) -> None:
    plan = build_configs(read(tmp_path, "bf16: true\ntf32: true\noutput_dir: out\n"), processes=64)
    assert plan.problems == ()
    assert plan.config is not None
    assert (plan.config.bf16, plan.config.generation_batch_size) == (True, 8 * 64)


def test_variables_of_a_launcher_do_not_make_the_doctor_wait_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    surroundings = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "9"}
    surroundings |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_MIXED_PRECISION": "fp16"}
    for name, value in surroundings.items():
        monkeypatch.setenv(name, value)
    plan = build_configs(read(tmp_path, "output_dir: out\n"), processes=2)
    assert plan.problems == ()
    assert plan.config is not None
    assert plan.config.world_size == 2
    assert {name: os.environ[name] for name in surroundings} == surroundings


SCALARS: Any = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES: Any = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
NAMES = (
    "dtype",
    "rewards",
    "learning_rate",
    "bf16",
    "save_strategy",
    "max_steps",
    "optim",
    "reward_weights",
    "env",
    "x",
)


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4))
@example({"learning_rate": 0})
def test_any_values_at_all_end_in_a_plan_with_problems(tmp_path_factory: Any, values: dict[str, Any]) -> None:
    import yaml

    file = tmp_path_factory.mktemp("run") / "run.yaml"
    file.write_text(yaml.safe_dump(values, allow_unicode=True))
    try:
        plan = read_run([file])
    except ConfigurationError:
        return
    assert all(len(problem.message) < 1500 and "\x1b" not in problem.message for problem in plan.problems)
    assert type(plan["learning_rate"]) in (int, float)  # TRL leaves a whole number as it is
    assert isinstance(plan["max_steps"], int)
    assert isinstance(plan["bf16"], bool | None)
