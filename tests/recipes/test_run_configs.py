"""`recipes/configs/*.yaml`: each through the recipe's own parser and checks, launched as its own comment says."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.recipes.config_objects import RUN_FILES, commands, launches, option, resolve

pytestmark = pytest.mark.nightly  # the doctor looks at every file daily

OF_OTHER_RECIPES = {"sort.yaml", "detox.yaml", "detox_workflow.yaml", "tools.yaml"}
FILES = {path.name: path for path in RUN_FILES if path.name not in OF_OTHER_RECIPES}
PROCESSES = {  # engine and processes
    "qwen2.5_0.5b.yaml": ("one_process", 1),
    "qwen2.5_1.5b_zero2.yaml": ("zero2", 4),
    "qwen2.5_3b_zero3.yaml": ("zero3", 4),
    "qwen2.5_7b_qlora_24gb.yaml": ("one_process", 1),
    "qwen2.5_7b_8gpus.yaml": ("zero3", 8),
    "smollm2_1.7b_tutorial.yaml": ("one_process", 1),
    "vllm_colocate.yaml": ("one_process", 1),
    "vllm_server.yaml": ("one_process", 1),
    "no_reference.yaml": ("one_process", 1),
    "with_reference.yaml": ("one_process", 1),
    "plugins.yaml": ("one_process", 1),
}
ANYWHERE = {"qwen2.5_0.5b.yaml", "plugins.yaml"}  # the default of the recipe, and plugins for any run
SIZED = sorted(PROCESSES.keys() - {"plugins.yaml"})
WRONG = {
    "another engine": "--config_file recipes/accelerate/ddp.yaml --num_processes 4 recipes/gsm8k_grpo.py "
    "--config recipes/configs/qwen2.5_3b_zero3.yaml",
    "another number": "--config_file recipes/accelerate/zero3.yaml --num_processes 2 recipes/gsm8k_grpo.py "
    "--config recipes/configs/qwen2.5_3b_zero3.yaml",
    "another key": "--config_file recipes/accelerate/one_process.yaml recipes/gsm8k_grpo.py "
    "--config recipes/configs/no_reference.yaml --learnin_rate 1",
}


@pytest.fixture(scope="module")
def resolved() -> dict[str, dict[str, Any]]:
    cases = {f"{name}: {n}": words for name, path in FILES.items() for n, words in enumerate(launches(path))}
    return resolve(cases | {name: words.split() for name, words in WRONG.items()})


@pytest.fixture
def facts(name: str, resolved: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found = resolved[f"{name}: 0"]
    assert "error" not in found, found["traceback"]
    return found


def of_each(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", names or list(PROCESSES))


def settings(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load(FILES[name].read_text()))


# ----------------------------------------------------------------------------------------------------------- the files


def test_no_file_is_left_out() -> None:
    assert set(FILES) == set(PROCESSES)
    assert {path.name for path in RUN_FILES} <= set(PROCESSES) | OF_OTHER_RECIPES


@of_each()
def test_the_command_line_runs_what_the_file_is_made_for(name: str, facts: dict[str, Any]) -> None:
    engine, processes = PROCESSES[name]
    assert facts["world"] == processes
    expected = {"one_process": "NO"}.get(engine, "DEEPSPEED")
    assert facts["distributed_type"] == expected
    if name in ANYWHERE:
        assert "engine" not in settings(name)
    else:
        assert (facts["recipe"]["engine"], facts["recipe"]["processes"]) == (engine, processes)
        assert facts["recipe"]["embedded"] is False


@of_each(*SIZED)
def test_every_setting_of_a_file_arrives(name: str, facts: dict[str, Any]) -> None:
    for key, value in settings(name).items():
        arrived = {**facts["model"], **facts["recipe"], **facts["training"]}.get(key, facts["plugins"].get(key))
        if key == "rewards":
            selected = [{"name": one} if isinstance(one, str) else one for one in value]
            assert arrived == {one["name"].rpartition(":")[2]: one.get("weight", 1.0) for one in selected}
        else:
            assert str(arrived) == str(value) or arrived == pytest.approx(value), key


@of_each("smollm2_1.7b_tutorial.yaml")
def test_the_tutorial_s_settings_are_the_published_ones(name: str, facts: dict[str, Any]) -> None:
    published = {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "max_completion_length": 300, "num_generations": 8}
    published |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "max_steps": 200}
    published |= {"steps_per_generation": 4, "generation_batch_size": 32}  # 4 problems between two updates, 800 in all
    published |= {"learning_rate": 5e-5, "lr_scheduler_type": "linear", "warmup_steps": 0, "max_grad_norm": 1.0}
    published |= {"beta": 0.04, "epsilon": 0.2, "num_iterations": 1, "loss_type": "grpo", "num_generations_eval": 8}
    found = {key: facts["training"][key] for key in published}
    assert found == published
    assert (facts["recipe"]["eval_temperature"], facts["recipe"]["eval_problems"]) == (0.7, 1319)
    assert facts["recipe"]["user_prompt"] == "Question: {question}"
    assert facts["plugins"]["rewards"] == {"tutorial_accuracy": 1.0, "tutorial_format": 1.0}
    assert facts["plugins"]["hooks"] == []
    assert facts["plugins"]["aggregation"] is None
    assert facts["model"]["model_name_or_path"] == "HuggingFaceTB/SmolLM2-1.7B-Instruct"


@of_each("vllm_colocate.yaml", "vllm_server.yaml")
def test_vllm_is_set_up_as_the_trainer_needs_it(name: str, facts: dict[str, Any]) -> None:
    training = facts["training"]
    assert training["use_vllm"] is True
    assert training["vllm_mode"] == name.removeprefix("vllm_").removesuffix(".yaml")
    assert facts["model"]["load_in_4bit"] == "False"
    if training["vllm_mode"] == "colocate":
        assert training["vllm_enable_sleep_mode"] is True
        assert training["vllm_max_model_length"] >= training["max_completion_length"] + 512
        assert PROCESSES[name][1] % training["vllm_tensor_parallel_size"] == 0
        return
    server = next(words for words in commands(FILES[name]) if "serve" in words)
    assert server[server.index("serve") + 1] == facts["model"]["model_name_or_path"]
    assert option(server, "--host") == training["vllm_server_host"] == "127.0.0.1"
    assert training["vllm_server_port"] == 8000  # the server's default
    assert option(server, "--logprobs-mode") == "processed_logprobs"
    assert json.loads(option(server, "--weight-transfer-config") or "") == {"backend": "nccl"}
    assert int(option(server, "--max-model-len") or 0) >= training["max_completion_length"] + 512
    gpus = [words[0] for words in commands(FILES[name])]
    assert gpus == ["CUDA_VISIBLE_DEVICES=1", "CUDA_VISIBLE_DEVICES=0"]  # not one GPU for both


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("another engine", "made for engine zero3, but the launch is ddp"),
        ("another number", "made for `processes: 4`, but the launch has 2"),
        ("another key", "'--learnin_rate'"),
    ],
)
def test_a_file_launched_as_something_else_stops(name: str, says: str, resolved: dict[str, dict[str, Any]]) -> None:
    assert says in resolved[name]["error"]


# ------------------------------------------------------------------------------------------------------ one really runs
