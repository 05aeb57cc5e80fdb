"""Each pitfall: one setup that it speaks of and one that it does not."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import peft
import pytest
from accelerate.utils import DistributedType
from transformers import BitsAndBytesConfig

from tests.launch.doctor.cases import A100, adapted, case, launched, lora, qwen
from trl_grpo_ext.launch.doctor import Machine, Severity
from trl_grpo_ext.launch.doctor.case import Case
from trl_grpo_ext.launch.doctor.pitfalls import problems_of

DDP = launched("ddp", 2)
ZERO2 = launched("zero2", 2)
FSDP2 = launched("fsdp2", 2, environment={"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"})
FOUR_BIT = BitsAndBytesConfig(load_in_4bit=True)
SHARDED_4_BIT = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage="bfloat16")
NODES = launched("ddp", 16, machines=2, ranked=False)


class Pair(NamedTuple):
    """What a pitfall speaks of, how gravely, with which word, and what it leaves alone."""

    severity: Severity
    word: str
    wrong: Callable[[], Case]
    right: Callable[[], Case]


def qlora(launch: Any = None, quantisation: Any = FOUR_BIT, **more: Any) -> Case:
    known = {"learning_rate": 1e-4, **lora(), **more}
    return case(launch, dtype="bfloat16", quantisation=quantisation, trainer=object(), **known)


def state(kind: str, processes: int) -> Any:
    return SimpleNamespace(distributed_type=DistributedType(kind), num_processes=processes)


FOUR = {"per_device_train_batch_size": 16, "num_generations": 4}

# fmt: off
PAIRS: dict[str, Pair] = {
    "fewer_gpus_than_processes": Pair("error", "starts 2 processes",
        lambda: case(DDP, devices=(A100,)), lambda: case(DDP)),
    "fewer_machines_than_launched": Pair("error", "there are 1",
        lambda: case(NODES, machine=Machine(machines=1)), lambda: case(NODES, machine=Machine(machines=2))),
    "several_gpus_for_one_process": Pair("warning", "spreads the model of one process",
        lambda: case(devices=(A100, A100), sizes=qwen()), lambda: case(DDP, sizes=qwen())),
    "other_engine": Pair("error", "but Accelerate runs DDP in its place",
        lambda: case(FSDP2, distributed_state=state("MULTI_CPU", 2)),
        lambda: case(FSDP2, distributed_state=state("MULTI_GPU", 2))),
    "one_process_in_place_of_several": Pair("error", "asks for 4 processes, and the launcher starts 1",
        lambda: case(launched(asked_processes=4)), lambda: case(launched("ddp", 4))),
    "machines_without_ranks": Pair("warning", "no job forms",
        lambda: case(NODES), lambda: case(replace(NODES, ranked=True))),
    "quantised_with_vllm": Pair("error", "trl#4973",
        lambda: qlora(use_vllm=True), lambda: case(**lora(), use_vllm=True)),
    "storage_that_fsdp_cannot_divide": Pair("error", "uint8",
        lambda: qlora(FSDP2), lambda: qlora(FSDP2, SHARDED_4_BIT)),
    "low_precision_weights_hardly_move": Pair("warning", "1e-06",
        lambda: case(DDP, dtype="bfloat16", learning_rate=1e-6),
        lambda: case(ZERO2, dtype="bfloat16", learning_rate=1e-6)),
    "adapters_of_quantised_models_hardly_move": Pair("warning", "learning_rate 2e-05 are lost",
        lambda: qlora(FSDP2, learning_rate=2e-5),
        lambda: replace(qlora(learning_rate=1e-6), trainer=SimpleNamespace(adapters_in_float32=True))),
    "one_target_read_as_a_pattern": Pair("error", "Target modules q_proj not found",
        lambda: case(**adapted(peft.LoraConfig(target_modules="q_proj"))), lambda: case(**lora("q_proj"))),
    "no_lora_target_is_there": Pair("error", "not found in the base model",
        lambda: case(**lora("query", "quer")), lambda: case(**lora("q_proj", "v"))),
    "lora_target_that_the_model_lacks": Pair("warning", "lacks: v_porj",
        lambda: case(**lora("q_proj", "v_porj")), lambda: case(**lora("q_proj", "v_proj"))),
    "completions_longer_than_the_model": Pair(
        "error", "32768 positions", lambda: case(sizes=qwen(), max_completion_length=32768),
        lambda: case(sizes=qwen(), max_completion_length=None)),
    "vllm_without_cuda": Pair("error", "NCCL, which needs one",
        lambda: case(devices=(), use_vllm=True, vllm_mode="server"),
        lambda: case(devices=(), use_vllm=True, vllm_max_model_length=2048)),
    "sampling_that_biases_the_correction": Pair("warning", "top_p 0.9, top_k 50",
        lambda: case(use_vllm=True, top_p=0.9, top_k=50),
        lambda: case(use_vllm=True, top_p=0.9, vllm_importance_sampling_correction=False)),
    "no_prompt_fills_a_batch": Pair("error", "3 training prompt(s) fill no generation batch, which takes 4",
        lambda: case(prompts=3, **FOUR), lambda: case(prompts=4, **FOUR)),
    "impossible_value": Pair("error", "gradient_accumulation_steps is 0, and must be 1 or more, and finite; num",
        lambda: case(gradient_accumulation_steps=0, num_iterations=-1), lambda: case(gradient_accumulation_steps=1)),
    "unknown_loss_type": Pair("error", "'gspo'", lambda: case(loss_type="gspo"), lambda: case(loss_type="vespo")),
}
# fmt: on


@pytest.mark.parametrize("name", PAIRS)
def test_pitfall_speaks_of_what_is_wrong_alone(name: str) -> None:
    severity, word, wrong, right = PAIRS[name]
    assert [problem.severity for problem in problems_of(wrong()) if word in problem.message] == [severity]
    assert not any(word in problem.message for problem in problems_of(right()))


def test_problems_of_a_usual_run() -> None:
    assert problems_of(case(**lora(), sizes=qwen())) == []
