"""What a launch is and what it was meant to be, compared without launching anything; the launches are in recipes/."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import PartialState
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.support import arguments, length_reward, prompts, scripted_rollout
from trl_grpo_ext import GRPOExtTrainer
from trl_grpo_ext.errors import EngineError
from trl_grpo_ext.launch.engine import ENGINES, EngineCheck, ExpectedRun, check_launch, differences, launched_engine

PARAMETERS = {"parameters": 1000, "parameters_here": 1000, "bits": 0, "quantised_layers": 0, "dtype": "float32"}
RUNS = {"engine": "ddp", "processes": 4, "wrapper": "DistributedDataParallel", **PARAMETERS}
SHARDED = {**RUNS, "engine": "fsdp2", "parameters_here": 250}


@pytest.mark.parametrize(
    ("environment", "engine"),
    [
        ({}, "one_process"),
        ({"WORLD_SIZE": "2"}, "ddp"),
        ({"WORLD_SIZE": "1", "ACCELERATE_USE_DEEPSPEED": "true"}, "zero2"),
        ({"WORLD_SIZE": "2", "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, "zero3"),
        ({"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "fsdp2"),
        ({"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "1"}, "fsdp1"),
    ],
)
def test_launched_engine(environment: dict[str, str], engine: str) -> None:
    assert launched_engine(environment) == engine
    assert engine in ENGINES


def test_launched_engine_of_deepspeeds_own_file(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    by_launcher = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    assert launched_engine(by_launcher) == "zero1"
    assert launched_engine({}, SimpleNamespace(deepspeed=str(file))) == "zero1"
    assert launched_engine({}, SimpleNamespace(deepspeed={"zero_optimization": {"stage": 3}})) == "zero3"
    assert launched_engine({"WORLD_SIZE": "2"}, SimpleNamespace(fsdp="full_shard")) is None  # left open
    file.write_text('{\n\t"zero_optimization": {"stage": 3}}')
    assert launched_engine({}, SimpleNamespace(deepspeed=file.rename(tmp_path / "ds"))) == "zero3"
    file.write_text("{")
    with pytest.raises(EngineError, match=r"ds\.json"):
        launched_engine(by_launcher)


def problems(expected: ExpectedRun | None = None, **environment: str) -> str:
    try:
        check_launch(PartialState(cpu=True), expected, environment=environment)
    except EngineError as error:
        return str(error)
    return ""


def test_a_launch_that_is_what_was_asked_for_passes() -> None:
    assert problems() == ""
    assert problems(ExpectedRun("one_process", 1), ACCELERATE_MIXED_PRECISION="no", ACCELERATE_USE_CPU="true") == ""
    assert problems(SLURM_STEP_NUM_NODES="2") == ""  # started by hand on the first node
    assert problems(SLURM_STEP_NUM_NODES="1", GROUP_WORLD_SIZE="1", WORLD_SIZE="1") == ""


def test_check_launch_names_all_differences_at_once() -> None:
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    said = problems(ExpectedRun("zero3", 8), **fsdp, WORLD_SIZE="2", ACCELERATE_USE_CPU="True")
    for part in ("started 2 processes", "`processes: 8`", "engine zero3", "launch is fsdp2", "runs one process in its"):
        assert part in said
    assert "2 jobs of 1 node(s)" in problems(SLURM_STEP_NUM_NODES="2", GROUP_WORLD_SIZE="1", WORLD_SIZE="1")
    assert "FSDP on the CPU or with one process" in problems(**fsdp)


def test_a_run_that_is_what_was_asked_for_has_no_differences() -> None:
    assert differences(ExpectedRun(), RUNS) == []
    assert differences(ExpectedRun("ddp", 4, "float32", 0), RUNS) == []
    assert differences(ExpectedRun("ddp", 4, "auto", 0), RUNS | {"dtype": "bfloat16"}) == []
    assert differences(ExpectedRun("fsdp2", 4, "float32", 0), SHARDED) == []
    assert differences(ExpectedRun("fsdp2"), SHARDED | {"parameters_here": 300}) == []  # uneven rows
    assert differences(ExpectedRun("ddp"), RUNS | {"engine": "xla", "wrapper": "Llama"}) == []  # not ours to judge


@pytest.mark.parametrize(
    ("expected", "run", "says"),
    [
        (ExpectedRun("zero3"), RUNS, "asked for is zero3; what runs is ddp (a DistributedData"),
        (ExpectedRun("ddp"), RUNS | {"engine": "apart"}, "what runs is 4 processes that train apart"),
        (ExpectedRun(processes=8), RUNS, "8 process(es) were requested; 4 run."),
        (ExpectedRun(bits=4), RUNS, "4-bit weights were asked for (0: not quantised); the model has 0 layers"),
        (ExpectedRun(bits=0), RUNS | {"bits": 4, "quantised_layers": 7}, "the model has 7 layers of 4 bits"),
        (ExpectedRun(dtype="bfloat16"), RUNS, "in bfloat16 were asked for (dtype); those of the model are float32"),
        (ExpectedRun(), SHARDED | {"parameters_here": 1000}, "holds 1,000 of 1,000."),
        (ExpectedRun(), SHARDED | {"parameters_here": 640}, "this one holds 640 of 1,000"),
    ],
)
def test_each_difference_has_its_sentence(expected: ExpectedRun, run: dict[str, Any], says: str) -> None:
    (sentence,) = differences(expected, run)
    assert says in sentence


def trainer(tmp_path: Path, model: Any, **settings: Any) -> GRPOExtTrainer:
    args = arguments(tmp_path / "out", max_steps=1, **settings)
    return GRPOExtTrainer(model, length_reward, args, train_dataset=prompts(), rollout_func=scripted_rollout)


def test_engine_check(tmp_path: Path, tiny_model: Path) -> None:
    run = trainer(tmp_path, str(tiny_model))
    facts = EngineCheck(run, ExpectedRun("one_process", 1, "float32", 0))
    EngineCheck(run, ExpectedRun("one_process", 1, "bfloat16", 4))
    with pytest.raises(EngineError, match=r"4-bit weights.*in bfloat16"):
        run.train()
    assert run.state.global_step == 0
    elements = sum(parameter.numel() for parameter in run.model.parameters())
    assert [facts.facts[name] for name in ("parameters", "parameters_here", "trained")] == [elements] * 3
    others = [facts.facts[name] for name in ("engine", "processes", "backend", "wrapper", "bits", "dtype", "device")]
    assert others == ["one_process", 1, None, "LlamaForCausalLM", 0, "float32", "cpu"]
    run.model.requires_grad_(False)
    with pytest.raises(EngineError, match="frozen"):
        EngineCheck(run)


@pytest.mark.slow
def test_engine_check_stops_an_unreached_adapter(tmp_path: Path, tiny_model: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))
    run = trainer(tmp_path, model, gradient_checkpointing=False)
    run.model.enable_input_require_grads()  # so there is a graph, and a backward pass, without the adapter
    for module in run.model.modules():
        if hasattr(module, "_disable_adapters"):
            module._disable_adapters = True
    EngineCheck(run)
    with pytest.raises(EngineError, match=r"4 .*gradient"):
        run.train()
