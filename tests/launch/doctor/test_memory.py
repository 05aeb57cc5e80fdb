"""Estimates against what real training steps of tiny models hold and write, and against sums by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments
from transformers.trainer import Trainer

from tests.launch.doctor.cases import GIB, adapters, case, launched, machine
from tests.support import prompts, save_tiny_model
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer
from trl_grpo_ext.launch.doctor.case import Case
from trl_grpo_ext.launch.doctor.environment import Device
from trl_grpo_ext.launch.doctor.memory import MemoryEstimate, estimate, memory_problems, optimizer_bytes
from trl_grpo_ext.launch.doctor.model import adapters_of, known_config, on_meta, sizes_of

ROWS, COMPLETION = 8, 24
LORA = {"use_peft": True, "lora_target_modules": "all-linear"}
TINY = LlamaConfig(
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=43,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=1,
    max_position_embeddings=128,
    tie_word_embeddings=False,
)


def estimated(run: Case, prompt_length: int | None = None) -> MemoryEstimate:
    found = estimate(run, prompt_length)
    assert found is not None
    return found


def item(result: MemoryEstimate, name: str, stage: str = "update") -> int:
    return sum(i.bytes for i in result.items if i.name == name and stage in i.stages)


def storages(tensors: list[torch.Tensor]) -> int:
    """Bytes; shared storages count once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


class AtTheStep(TrainerCallback):
    gradients = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.gradients = storages([p.grad for p in model.parameters() if p.grad is not None])


def weights_of(model: Any) -> tuple[int, int]:
    """Bytes of the base's weights, with the constants of 4-bit ones, and of the adapters."""
    base, added = [], []
    for name, parameter in model.named_parameters():
        (added if "lora_" in name else base).append(parameter.data)
        if (state := getattr(parameter, "quant_state", None)) is not None:
            base += [state.absmax, *([state.state2.absmax] if state.nested else [])]
    return storages(base), storages(added)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "bfloat16"},
        {**LORA, "dtype": "bfloat16"},
        {**LORA, "dtype": "bfloat16", "bf16": True, "load_in_4bit": True},
        {**LORA, "dtype": "bfloat16", "bf16": True, "load_in_4bit": True, "use_bnb_nested_quant": True},
    ],
    ids=["float32", "bfloat16", "lora", "qlora", "nested"],
)
@pytest.mark.filterwarnings("ignore")
def test_a_real_step_holds_and_writes_what_was_estimated(settings: dict[str, Any], tmp_path: Path) -> None:
    model, dtype, bf16 = tmp_path / "model", settings.get("dtype", "float32"), settings.get("bf16", False)
    save_tiny_model(model)
    LlamaForCausalLM(TINY).save_pretrained(model)
    nested = settings.get("use_bnb_nested_quant", False)
    quantised = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nested,
    )  # fmt: skip
    lora = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    sizes: dict[str, Any] = {"per_device_train_batch_size": ROWS, "num_generations": 4}
    sizes |= {"max_completion_length": COMPLETION, "max_steps": 1, "save_steps": 1, "bf16": bf16}
    step = AtTheStep()
    trainer = GRPOExtTrainer(
        model=str(model),
        args=GRPOExtConfig(
            output_dir=str(tmp_path / "out"),
            use_cpu=True,
            model_init_kwargs={"dtype": dtype},
            report_to="none",
            disable_tqdm=True,
            **sizes,
        ),
        reward_funcs=[lambda completions, **_: [float(i) for i in range(len(completions))]],
        train_dataset=prompts(),
        quantization_config=quantised if "load_in_4bit" in settings else None,
        peft_config=lora if settings.get("use_peft") else None,
        callbacks=[step],
    )
    for module in trainer.model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # else bitsandbytes packs 4-bit weights for inference alone
    trainer.train()

    shape = on_meta(TINY)
    adapted = adapters_of(on_meta(TINY), lora) if settings.get("use_peft") else None
    run = case(
        sizes=sizes_of(shape), adapters=adapted, built=True, use_cpu=True, **{**sizes, "dtype": dtype, **settings}
    )
    result = estimated(run, 8)
    base, added = weights_of(trainer.model)
    assert item(result, "weights") == pytest.approx(base, rel=0.01)
    assert item(result, "LoRA adapters") == added
    assert item(result, "gradients") == step.gradients
    assert result.trainable == sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    states = [value for state in trainer.optimizer.state.values() for value in state.values() if value.dim() > 0]
    assert item(result, "optimizer states") == storages(states)

    trainer.model.eval()
    ids = torch.full((ROWS, 8), 5)
    lengths = {"max_new_tokens": COMPLETION + 1, "min_new_tokens": COMPLETION + 1}  # the last token is never held
    done = trainer.model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **lengths
    )
    held = sum(tensor.nbytes for layer in done.past_key_values.layers for tensor in (layer.keys, layer.values))
    assert item(result, "KV cache", "generation") == held

    files = {file.name: file.stat().st_size for file in (tmp_path / "out" / "checkpoint-1").iterdir()}
    written = files.get("model.safetensors", 0) + files.get("adapter_model.safetensors", 0) + files["optimizer.pt"]
    # Beyond the numbers a file holds their names, as many for a large model as for a small one.
    assert 0 <= written - result.checkpoint_bytes < 48_000


ON_THE_CPU = [
    *("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad", "adamw_bnb_8bit", "lion_8bit", "lion_32bit"),
    *("paged_adamw_32bit", "paged_adamw_8bit", "ademamix", "ademamix_8bit", "rmsprop_bnb"),
]


@pytest.mark.parametrize("name", ON_THE_CPU)
@pytest.mark.filterwarnings("ignore")
def test_a_real_optimizer_keeps_what_was_estimated(name: str, tmp_path: Path) -> None:
    # Without embeddings, of which transformers keeps 32 bits; below 4,096 entries bitsandbytes does so too.
    model = torch.nn.Sequential(torch.nn.Linear(128, 256, bias=False), torch.nn.Linear(256, 128, bias=False))
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=False, optim=name, report_to="none")
    optimizer = Trainer(model=model, args=args).create_optimizer()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    # Not the tables of 256 values that all 8-bit states share.
    kept = [value for state in optimizer.state.values() for key, value in state.items() if not key.startswith("qmap")]
    held = storages([value for value in kept if torch.is_tensor(value) and value.dim() > 0])
    assert optimizer_bytes(name, 4) * 2 * 128 * 256 == pytest.approx(held, rel=0.01)


# --------------------------------------------------------------------------------------------------------- by hand

P = 7_615_616_512
SEVEN = sizes_of(on_meta(known_config("Qwen/Qwen2.5-7B-Instruct")))


def seven(engine: str = "one_process", processes: int = 1, **settings: Any) -> Case:
    facts = {key: settings.pop(key) for key in ("machines", "deepspeed", "fsdp") if key in settings}
    return case(launched(engine, processes, **facts), sizes=SEVEN, built=True, **settings)


@pytest.mark.parametrize(
    ("engine", "weights", "gradients", "states"),
    [
        ("one_process", 4 * P, 4 * P, 8 * P),
        ("ddp", 4 * P, 4 * P, 8 * P),
        ("zero1", 2 * P, 2 * P, 8 * P // 4),
        ("zero2", 2 * P, 2 * P // 4, 8 * P // 4),
        ("zero3", 2 * P // 4, 2 * P // 4, 8 * P // 4),
        ("fsdp2", 4 * P // 4, 4 * P // 4, 8 * P // 4),
        ("fsdp2_hybrid", 4 * P // 2, 4 * P // 2, 8 * P // 2),
    ],
)
def test_what_each_engine_splits(engine: str, weights: int, gradients: int, states: int) -> None:
    result = estimated(seven(engine, 4, machines=2, dtype="float32"))
    assert (item(result, "weights"), item(result, "gradients")) == (weights, gradients)
    assert item(result, "optimizer states") == states
    assert item(result, "master weights") == (4 * P // 4 if engine.startswith("zero") else 0)
    assert item(result, "16-bit copies") == (2 * SEVEN.linear if engine in ("one_process", "ddp") else 0)
    buckets = {"ddp": 4 * P, "zero1": 10**9, "zero2": 10**9, "zero3": 10**9}
    assert item(result, "gradient buckets") == buckets.get(engine, 0)
    gathered = {"zero3": 2 * P, "fsdp2": 2 * SEVEN.linear // 28 * 2 + 2 * SEVEN.embeddings}
    gathered["fsdp2_hybrid"] = gathered["fsdp2"]
    assert item(result, "gathered weights", "generation") == gathered.get(engine, 0)
    copies = {"one_process": 12, "ddp": 12, "zero1": 16, "zero2": 16, "zero3": 14}  # model, states, DeepSpeed's own
    assert result.checkpoint_bytes == copies.get(engine, 16) * P


def test_quantised_weights_by_hand() -> None:
    linear = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    rest = 2 * (P - linear)
    run = replace(seven(dtype="bfloat16", load_in_4bit=True, use_peft=True), adapters=adapters("q_proj", "v_proj"))
    assert item(estimated(run), "weights") == linear // 2 + linear // 64 * 4 + rest
    eight = replace(
        run, run=replace(run.run, settings={**run.run.settings, "load_in_4bit": False, "load_in_8bit": True})
    )
    assert item(estimated(eight), "weights") == linear + 4 * 28 * (2 * 3584 + 2 * 512 + 2 * 18944 + 3584) + rest
    # Under FSDP only floating-point storage is split.
    whole = replace(run, launch=launched("fsdp2", 4))
    stored = {**run.run.settings, "bnb_4bit_quant_storage": "bfloat16"}
    split = replace(whole, run=replace(run.run, settings=stored))
    quantised = linear // 2 + linear // 64 * 4
    assert item(estimated(whole), "weights") - item(estimated(split), "weights") == pytest.approx(
        quantised * 3 / 4, abs=4
    )


def test_vllm_takes_its_share_and_gives_it_back_asleep() -> None:
    settings = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.25, "dtype": "bfloat16"}
    awake, asleep = (estimated(seven(**settings, vllm_enable_sleep_mode=sleeps)) for sleeps in (False, True))
    share = 20 * GIB
    assert item(awake, "vLLM") == item(asleep, "vLLM", "generation") == share
    assert awake.device_bytes["update"] - asleep.device_bytes["update"] == share
    assert item(awake, "KV cache", "generation") == 0
    server = estimated(seven(**{**settings, "vllm_mode": "server"}))
    assert item(server, "vLLM") == item(server, "KV cache", "generation") == 0


def test_items_add_up_and_only_a_gpu_has_a_reserve() -> None:
    result = estimated(seven("ddp", 2, dtype="bfloat16"))
    for stage, total in result.device_bytes.items():
        assert total == sum(i.bytes for i in result.items if stage in i.stages)
    assert result.peak_bytes == max(result.device_bytes.values()) == result.device_bytes[result.peak_stage]
    assert all(i.bytes > 0 and i.formula.endswith(".") for i in result.items)
    others = sum(i.bytes for i in result.items if "update" in i.stages) - 10**9 - item(result, "reserve")
    assert item(result, "reserve") == pytest.approx(0.1 * others, rel=1e-6)
    assert not {"reserve", "CUDA context", "NCCL"} & {i.name for i in estimated(seven("ddp", 2, use_cpu=True)).items}


def test_what_may_not_fit_is_a_warning_and_never_an_error() -> None:
    small = Device("A10", 24 * GIB, (8, 6))
    tight = replace(seven(dtype="float32"), machine=machine(small, disk_free=GIB))
    memory, disk = memory_problems(tight, estimated(tight))
    assert (memory.severity, disk.severity) == ("warning", "warning")
    assert "most goes to optimizer states (60.9 GB)" in memory.message
    assert "An estimate" in memory.message
    assert "save_total_limit" in disk.fix
    roomy = replace(tight, machine=machine(Device("H", 1000 * GIB)))
    assert memory_problems(roomy, estimated(roomy)) == []
    model_only = estimated(seven(dtype="bfloat16", save_only_model=True))
    assert model_only.checkpoint_bytes == 2 * P
