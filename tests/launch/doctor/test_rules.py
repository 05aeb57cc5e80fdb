"""Each rule: one setup that it speaks of and one that it does not. And the known pitfalls, caught from real files."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch.doctor.cases import A100, RECIPE, adapters, case, launched, machine, qwen
from trl_grpo_ext.launch.doctor import Severity
from trl_grpo_ext.launch.doctor.case import Case, Plugins
from trl_grpo_ext.launch.doctor.rules import RULES, _movable, problems_of

DDP = launched("ddp", 2)
ZERO2, ZERO3 = launched("zero2", 2), launched("zero3", 2)
FSDP2 = launched("fsdp2", 2, fsdp={"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "cpu_ram_efficient_loading": False})
QLORA: dict[str, Any] = {"load_in_4bit": True, "use_peft": True, "dtype": "bfloat16", "learning_rate": 1e-4}
LORA: dict[str, Any] = {"use_peft": True, "lora_target_modules": "all-linear"}
NODES = launched("ddp", 16, machines=2)


@dataclass(frozen=True)
class Pair:
    """What a rule speaks of, how gravely, with which word, and what it leaves alone."""

    severity: Severity
    word: str
    wrong: Callable[[], Case]
    right: Callable[[], Case]


def fsdp(**settings: Any) -> Any:
    return replace(FSDP2, fsdp={**FSDP2.fsdp, **settings})


class Forward:
    def on_forward(self, advantages_B_T: Any, forward: Any) -> Any:
        return advantages_B_T


def hook() -> Plugins:
    return Plugins(hooks={"mine": Forward()})


def trl(version: str | None) -> dict[str, str | None]:
    return {"trl": version}


def raw(engine: str = "ddp", processes: int = 2, machines: int = 1, **keys: Any) -> Any:
    return launched(engine, processes, machines=machines, raw=keys)


def ds(machines: int = 1, **keys: Any) -> Any:
    return launched("zero3", 16, machines=machines, raw={"deepspeed_config": keys})


ACCUMULATES = {"gradient_accumulation_steps": 1}
HERE = Path(__file__).parent
NOTHING = machine(A100, versions=dict.fromkeys(("deepspeed", "vllm", "liger-kernel", "flash-attn")))
FOUR_PROMPTS: dict[str, Any] = {"per_device_train_batch_size": 16, "num_generations": 4}

# fmt: off
PAIRS: dict[str, Pair] = {
    "no_gpu_for_bf16": Pair("error", "bf16: true",
        lambda: case(environment=machine(), bf16=True), lambda: case(bf16=True)),
    "no_gpu_here": Pair("warning", "CUDA_VISIBLE_DEVICES is '7'",
        lambda: case(environment=machine(variables={"CUDA_VISIBLE_DEVICES": "7"}), bf16=False),
        lambda: case(environment=machine(), bf16=False, use_cpu=True)),
    "trl_that_needs_triton": Pair("error", "Triton",
        lambda: case(environment=machine(versions=trl("1.15.1"))),
        lambda: case(environment=machine(A100, versions=trl("1.15.1")))),
    "no_lora_target_is_there": Pair("error", "not found in the base model",
        lambda: case(use_peft=True, lora_target_modules=["query", "quer"], adapters=adapters("query", "quer")),
        lambda: case(use_peft=True, lora_target_modules=["q_proj", "v"], adapters=adapters("q_proj", "v"))),
    "lora_target_that_the_model_lacks": Pair("warning", "v_porj: no such module (there are v_proj",
        lambda: case(use_peft=True, lora_target_modules=["q_proj", "v_porj"], adapters=adapters("q_proj", "v_porj")),
        lambda: case(use_peft=True, lora_target_modules=["q_proj", "v_proj"], adapters=adapters("q_proj", "v_proj"))),
    "no_prompt_fills_a_batch": Pair("error", "3 training prompt(s) fill no generation batch, which takes 4",
        lambda: case(built=True, own={"dataset_path": "3.jsonl"}, **FOUR_PROMPTS),
        lambda: case(built=True, own={"dataset_path": "4.jsonl"}, **FOUR_PROMPTS)),
    "impossible_value": Pair("error", "gradient_accumulation_steps is 0, and must be 1 or more; num_iterations is -1",
        lambda: case(gradient_accumulation_steps=0, num_iterations=-1), lambda: case(gradient_accumulation_steps=1)),
    "fewer_gpus_than_processes": Pair("error", "starts 2 processes",
        lambda: case(DDP), lambda: case(DDP, machine(A100, A100))),
    "several_gpus_for_one_process": Pair("error", "spreads the model over them",
        lambda: case(launched(), machine(A100, A100)), lambda: case(DDP, machine(A100, A100))),
    "package_that_is_missing": Pair("error", "asks for deepspeed vllm liger-kernel flash-attn, not installed",
        lambda: case(ZERO2, NOTHING, use_vllm=True, use_liger_kernel=True, attn_implementation="flash_attention_2"),
        lambda: case(DDP, NOTHING)),
    "nowhere_to_save": Pair("error", "a file",
        lambda: case(environment=machine(A100, output_problem="it is a file, not a folder")), case),
    "output_over_the_model": Pair("error", "both output_dir and the model",
        lambda: case(environment=machine(A100, output_dir=str(HERE)), model_name_or_path=str(HERE / ".")),
        lambda: case(environment=machine(A100, output_dir=str(HERE / "out")), model_name_or_path=str(HERE))),
    "inside_another_launch": Pair("warning", "WORLD_SIZE RANK in the environment",
        lambda: case(environment=machine(A100, variables={"WORLD_SIZE": "8", "RANK": "3"})),
        lambda: case(environment=machine(A100, variables={"CUDA_VISIBLE_DEVICES": "0"}))),
    "multi_cpu_is_one_process": Pair("error", "one process, silently",
        lambda: case(launched("one_process", 2, distributed_type="MULTI_CPU"), use_cpu=True),
        lambda: case(DDP, use_cpu=True)),
    "use_cpu_in_the_launch_file": Pair("error", "independent runs",
        lambda: case(launched("ddp", 2, use_cpu=True)), lambda: case(launched("one_process", 1, use_cpu=True))),
    "one_process_file_with_several": Pair("error", "not 4",
        lambda: case(launched("one_process", 4)), lambda: case(launched("ddp", 4))),
    "fsdp_on_the_cpu": Pair("error", "DDP", lambda: case(FSDP2, use_cpu=True), lambda: case(DDP, use_cpu=True)),
    "other_engine_in_the_environment": Pair("error", "DDP in place of DeepSpeed",
        lambda: case(ZERO2, machine(A100, variables={"ACCELERATE_USE_CPU": "true"})),
        lambda: case(ZERO2, machine(A100, variables={"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_USE_CPU": "0"}))),
    "processes_do_not_divide_into_machines": Pair("error", "no multiple",
        lambda: case(launched("ddp", 15, machines=2)), lambda: case(NODES)),
    "machines_without_ranks": Pair("warning", "no job forms",
        lambda: case(NODES), lambda: case(replace(NODES, machine_rank=1))),
    "rendezvous_that_is_ignored": Pair("warning", "rdzv_backend",
        lambda: case(raw(machines=2, rdzv_backend="c10d")), lambda: case(raw(machines=2))),
    "deepspeed_starts_through_ssh": Pair("warning", "pdsh",
        lambda: case(ds(machines=2)), lambda: case(ds(machines=2, deepspeed_multinode_launcher="standard"))),
    "accumulation_in_two_places": Pair("error", "is 1 in launch.yaml and 4 in the run",
        lambda: case(launched("zero2", 2, deepspeed=ACCUMULATES), gradient_accumulation_steps=4),
        lambda: case(launched("zero2", 2, deepspeed=ACCUMULATES), gradient_accumulation_steps=1)),
    "deepspeed_in_the_run_too": Pair("warning", "own `deepspeed`", lambda: case(DDP, deepspeed="ds.json"), case),
    "other_launch_than_expected": Pair("error", "the launch is ddp. The settings were made for `processes: 8`",
        lambda: case(DDP, own={"engine": "zero2", "processes": 8}),
        lambda: case(launched("fsdp2_hybrid", 4), own={"engine": "fsdp2", "processes": "4"})),
    "impossible_quantisation": Pair("error", "use_peft", lambda: case(load_in_4bit=True), lambda: case(**QLORA)),
    "quantised_with_vllm": Pair("error", "trl#4973",
        lambda: case(**QLORA, use_vllm=True), lambda: case(**LORA, use_vllm=True)),
    "storage_that_fsdp_cannot_divide": Pair("error", "uint8",
        lambda: case(FSDP2, **QLORA), lambda: case(FSDP2, **QLORA, bnb_4bit_quant_storage="bfloat16")),
    "quantised_loading_by_one_process": Pair("warning", "cpu_ram_efficient_loading",
        lambda: case(fsdp(cpu_ram_efficient_loading=True), **QLORA), lambda: case(FSDP2, **QLORA)),
    "reentrant_checkpointing_under_ddp": Pair("error", "ready only once",
        lambda: case(DDP, **QLORA, gradient_checkpointing_kwargs={"use_reentrant": True}),
        lambda: case(**QLORA, gradient_checkpointing_kwargs={"use_reentrant": True})),
    "low_precision_weights_hardly_move": Pair("warning", "1e-06",
        lambda: case(DDP, dtype="bfloat16", learning_rate=1e-6),
        lambda: case(ZERO2, dtype="bfloat16", learning_rate=1e-6)),
    "adapters_of_quantised_models_hardly_move": Pair("error", "it can change 50% of lora_A's entries",
        lambda: case(FSDP2, **{**QLORA, "learning_rate": 2e-5}),
        lambda: case(script=RECIPE, **{**QLORA, "learning_rate": 1e-6})),
    "half_precision_weights_with_scaler": Pair("error", "unscale",
        lambda: case(fp16=True, bf16=False, dtype="float16"), lambda: case(fp16=True, bf16=False, dtype="float32")),
    "one_target_read_as_a_pattern": Pair("error", "regular expression",
        lambda: case(use_peft=True, lora_target_modules=["q_proj"]),
        lambda: case(use_peft=True, lora_target_modules=["q_proj", "v_proj"])),
    "completions_longer_than_the_model": Pair(
        "error", "32768 positions", lambda: case(sizes=qwen(), max_completion_length=32768),
        lambda: case(sizes=qwen(), max_completion_length=None)),
    "vllm_without_cuda": Pair("error", "NCCL, which needs one",
        lambda: case(environment=machine(), use_vllm=True, vllm_mode="server"),
        lambda: case(environment=machine(), use_vllm=True, vllm_max_model_length=2048)),
    "sampling_that_biases_the_correction": Pair("warning", "top_p 0.9, top_k 50",
        lambda: case(use_vllm=True, top_p=0.9, top_k=50),
        lambda: case(use_vllm=True, top_p=0.9, vllm_importance_sampling_correction=False)),
    "liger_replaces_the_loss": Pair("error", "before TRL 1.16",
        lambda: case(environment=machine(A100, versions=trl("1.14.2")), use_liger_kernel=True, plugins=hook()),
        lambda: case(use_liger_kernel=True, plugins=hook())),
    "unknown_loss_type": Pair("error", "'gspo'", lambda: case(loss_type="gspo"), lambda: case(loss_type="vespo")),
}
# fmt: on


BY_NAME = {rule.name: rule for rule in RULES}


@pytest.mark.parametrize("name", PAIRS)
def test_a_rule_speaks_of_what_is_wrong_and_of_nothing_else(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for prompts in (3, 4):
        Path(f"{prompts}.jsonl").write_text('{"question": "a", "answer": "1"}\n' * prompts)
    pair, rule = PAIRS[name], BY_NAME[name]
    found = rule(pair.wrong())
    assert found is not None
    assert found.severity == pair.severity, found
    assert pair.word in found.message, found.message
    assert found.subject
    assert len(found.fix) >= 10
    assert rule(pair.right()) is None


@pytest.mark.parametrize("width", [896, 3584])
@pytest.mark.parametrize("learning_rate", [1e-6, 1e-5, 2e-5, 5e-5, 1e-4, 1e-3])
def test_the_share_that_a_step_can_change_is_what_bfloat16_keeps(width: int, learning_rate: float) -> None:
    torch.manual_seed(0)
    lora_A = torch.nn.init.kaiming_uniform_(torch.empty(64, width), a=math.sqrt(5)).bfloat16()  # as PEFT starts it
    changed = float(((lora_A - learning_rate * torch.randn_like(lora_A).sign()) != lora_A).float().mean())
    expected = _movable(case(sizes=replace(qwen(), hidden=width), learning_rate=learning_rate))
    assert changed == pytest.approx(expected, abs=0.02 + 0.25 * expected)


def test_every_rule_has_a_pair_and_a_name_of_its_own() -> None:
    assert Counter(rule.name for rule in RULES) == Counter(PAIRS.keys())


def test_a_usual_run_has_no_problem() -> None:
    assert problems_of(case(**LORA, model_name_or_path="somebody/a-model", bf16=True)) == []
