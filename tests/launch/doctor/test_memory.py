"""Estimates against what real training steps of tiny models hold and write, and against sums by hand."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoConfig, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TrainerCallback

from tests.launch.doctor.cases import GIB, case, launched, qwen
from tests.support import train
from trl_grpo_ext.launch.doctor.case import Case
from trl_grpo_ext.launch.doctor.memory import Memory, estimate, memory_problems
from trl_grpo_ext.launch.doctor.model import adapters_of, on_meta, sizes_of

ROWS = 8
COMPLETION = 24


def estimated(run: Case, prompt_length: int = 256) -> Memory:
    found = estimate(run, prompt_length)
    assert found is not None
    return found


def storages(tensors: list[torch.Tensor]) -> int:
    """Bytes; shared storages count once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


class AtTheStep(TrainerCallback):
    gradients = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for module in model.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False  # else bitsandbytes packs 4-bit weights for inference alone

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.gradients = storages([p.grad for p in model.parameters() if p.grad is not None])


def weights_of(model: Any) -> tuple[int, int]:
    """Bytes of the base's weights, with the constants of 4-bit ones, and of the adapters."""
    base, added = [], []
    for name, parameter in model.named_parameters():
        (added if "lora_" in name else base).append(parameter.data)
        if (state := getattr(parameter, "quant_state", None)) is not None:
            base.append(state.absmax)
    return storages(base), storages(added)


NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_type="nf4")


@pytest.mark.parametrize(
    ("dtype", "with_lora", "quantised"),
    [
        pytest.param("float32", False, None, marks=pytest.mark.slow, id="float32"),
        pytest.param("bfloat16", True, None, marks=pytest.mark.slow, id="lora"),
        pytest.param("bfloat16", True, NF4, id="qlora"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_estimate_is_what_a_real_step_holds_and_writes(
    dtype: str, with_lora: bool, quantised: Any, tiny_model: Path, tmp_path: Path
) -> None:
    lora = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM") if with_lora else None
    settings: dict[str, Any] = {"per_device_train_batch_size": ROWS, "num_generations": 4, "save_steps": 1}
    settings |= {"max_completion_length": COMPLETION, "bf16": quantised is not None, "dtype": dtype}
    step = AtTheStep()
    given = {"quantization_config": quantised, "peft_config": lora, "callbacks": [step]}
    once = {"max_steps": 1, "optim": "adamw_torch", "save_strategy": "steps"}
    trainer = train(tiny_model, tmp_path, **once, **settings, trainer_arguments=given).trainer

    config = AutoConfig.from_pretrained(tiny_model)
    adapted = adapters_of(on_meta(config), lora) if with_lora else None
    known = {"sizes": sizes_of(on_meta(config)), "adapters": adapted, "trainer": trainer, "quantisation": quantised}
    result = estimated(case(use_cpu=True, **known, **settings), 8)
    parts = result.parts
    base, added = weights_of(trainer.model)
    assert parts["weights"] == pytest.approx(base, rel=0.01)
    assert parts.get("adapters", 0) == added
    assert parts["gradients"] == step.gradients
    states = [value for state in trainer.optimizer.state.values() for value in state.values() if value.dim() > 0]
    assert parts["optimizer states"] == storages(states)

    trainer.model.eval()
    ids = torch.full((ROWS, 8), 5)
    lengths = {"max_new_tokens": COMPLETION + 1, "min_new_tokens": COMPLETION + 1}  # the last token is never held
    done = trainer.model.generate(ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **lengths)
    held = sum(tensor.nbytes for layer in done.past_key_values.layers for tensor in (layer.keys, layer.values))
    assert parts["the cache"] == held

    files = {file.name: file.stat().st_size for file in (tmp_path / "checkpoint-1").iterdir()}
    written = files.get("model.safetensors", 0) + files.get("adapter_model.safetensors", 0) + files["optimizer.pt"]
    # Beyond the numbers a file holds their names, as many for a large model as for a small one.
    assert 0 <= written - result.checkpoint_bytes < 48_000


def test_what_each_engine_splits_by_hand() -> None:
    P = 494_032_768
    for engine, weights, gradients, states in (
        ("one_process", 4 * P, 4 * P, 8 * P),
        ("ddp", 4 * P, 8 * P, 8 * P),  # DDP's buckets are a second copy
        ("zero1", 2 * P, 2 * P, 8 * P // 4),
        ("zero2", 2 * P, 2 * P // 4, 8 * P // 4),
        ("zero3", 2 * P // 4, 2 * P // 4, 8 * P // 4),
        ("fsdp2", 4 * P // 4, 4 * P // 4, 8 * P // 4),
        ("fsdp2_hybrid", 4 * P // 2, 4 * P // 2, 8 * P // 2),
    ):
        run = case(launched(engine, 1 if engine == "one_process" else 4, 2), sizes=qwen(), dtype="float32", bf16=True)
        parts = estimated(run).parts
        assert (parts["weights"], parts["gradients"], parts["optimizer states"]) == (weights, gradients, states), engine
        assert parts.get("float32 copies", 0) == (P if engine.startswith("zero") else 0)


def test_vllm_takes_its_share_and_gives_it_back_asleep() -> None:
    settings = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.25, "dtype": "bfloat16"}
    awake = estimated(case(sizes=qwen(), **settings, vllm_enable_sleep_mode=False))
    asleep = estimated(case(sizes=qwen(), **settings, vllm_enable_sleep_mode=True))
    assert awake.parts["vLLM"] == asleep.parts["vLLM"] == 20 * GIB
    assert awake.device_bytes["update"] - asleep.device_bytes["update"] == 20 * GIB
    assert awake.device_bytes["generation"] == asleep.device_bytes["generation"]
    assert "the cache" not in awake.parts


def test_what_may_not_fit_is_a_warning_and_never_an_error() -> None:
    tight = case(devices=(4 * GIB,), sizes=qwen())
    (memory,) = memory_problems(tight, estimated(tight))
    assert memory.severity == "warning"
    assert "optimizer states" in memory.message
    roomy = case(sizes=qwen(), save_only_model=True, dtype="bfloat16")
    assert (memory_problems(roomy, estimated(roomy)), estimated(roomy).checkpoint_bytes) == ([], 2 * 494_032_768)
    assert estimated(case(sizes=qwen(), max_completion_length=None)).peak > estimated(roomy).peak


def test_activations_of_llama_are_what_autograd_keeps() -> None:
    shape = {"hidden_size": 32, "intermediate_size": 88, "num_attention_heads": 4}

    def kept(layers: int) -> int:
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, vocab_size=50, **shape)).train()
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
            model.model(torch.ones(2, 64, dtype=torch.long), use_cache=False)
        return storages([tensor for tensor in saved if tensor.untyped_storage().data_ptr() not in own])

    llama = LlamaConfig(num_hidden_layers=2, **shape)
    rows = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 56}
    plain = {"dtype": "float32", "bf16": False, "gradient_checkpointing": False}
    known = {"sizes": sizes_of(on_meta(llama)), "use_cpu": True}
    activations = estimated(case(**known, **plain, **rows), 8).parts["activations"]
    assert activations == pytest.approx(kept(4) - kept(2), rel=0.02)
