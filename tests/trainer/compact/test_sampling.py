"""Prompts that are read once for all their completions are answered as if each completion had read its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    Gemma2Config,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.support import SIZES as TINY
from tests.support import arguments
from trl_grpo_ext import GRPOExtTrainer
from trl_grpo_ext.trainer.compact.sampling import copies_exactly, shared_prompts

SIZES: dict[str, Any] = {**TINY, "vocab_size": 42}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "experts": Qwen3MoeConfig(**SIZES, **EXPERTS),
    "compressed keys": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": SIZES["num_attention_heads"]}, moe_intermediate_size=32, **MLA, **ROUTED
    ),
    "learned positions": GPT2Config(vocab_size=42, n_embd=32, n_layer=2, n_head=2, n_positions=64),
}
IDS = torch.tensor([[0, 0, 5, 9, 8], [3, 4, 5, 6, 7], [0, 0, 5, 9, 8], [3, 4, 5, 6, 7], [0, 0, 5, 9, 9]])


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def answered(model: Any, cache: str | None, **more: Any) -> Any:
    ends = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": 41}
    config = GenerationConfig(do_sample=False, cache_implementation=cache, **ends)
    kept = {"output_logits": True, "return_dict_in_generate": True, **more}
    return model.generate(input_ids=IDS, attention_mask=(IDS > 0).long(), generation_config=config, **kept)


def rows_of_first_pass(model: Any, cache: str | None) -> tuple[int, Any]:
    computed: list[int] = []
    hook = model.get_decoder().register_forward_hook(lambda *called: computed.append(called[-1][0].size(0)))
    with shared_prompts(model):
        shared = answered(model, cache)
    hook.remove()
    return computed[0], shared


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", CONFIGS)
def test_shared_prompts_are_answered_as_before(name: str, cache: str | None) -> None:
    model = model_of(CONFIGS[name])
    assert copies_exactly(model)
    once = answered(model, cache)
    rows, shared = rows_of_first_pass(model, cache)
    assert rows == 3  # distinct prompts
    assert torch.equal(shared.sequences, once.sequences)
    torch.testing.assert_close(torch.stack(shared.logits), torch.stack(once.logits))
    assert "generate" not in vars(model)


def test_shared_prompts_leave_calls_with_more_than_texts_alone() -> None:
    model, seen = model_of(CONFIGS["llama"]), []
    model.generate = lambda **given: seen.append(given)
    with shared_prompts(model):
        answered(model, None, pixel_values=torch.zeros(5, 3))
        answered(model, None)
    assert "past_key_values" not in seen[0]
    assert "past_key_values" in seen[1]
    assert "generate" in vars(model)  # the user's own


def test_copies_exactly_refuses_what_sees_more_than_a_prompts_keys() -> None:
    mamba = MambaConfig(vocab_size=42, hidden_size=32, num_hidden_layers=2, state_size=4)
    dynamic = LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    for config in (MistralConfig(**SIZES, sliding_window=4), Gemma2Config(**SIZES), mamba, dynamic):
        assert not copies_exactly(model_of(config))
    prefix = PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    for adapter in (prefix, LoraConfig(alora_invocation_tokens=[5], task_type="CAUSAL_LM")):
        assert not copies_exactly(get_peft_model(model_of(CONFIGS["llama"]), adapter))


LORA: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "r": 2, "init_lora_weights": False}
SAMPLINGS: dict[str, tuple[bool, dict[str, Any] | None]] = {
    "float32": (False, None),
    "bf16": (True, None),
    "bf16, lora": (True, LORA),  # TRL samples from an adapted model in float32
    "dropout": (False, {**LORA, "lora_dropout": 0.5}),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_sharing_samples_the_completions_of_plain_sampling(tiny_model: Path, tmp_path: Path, name: str) -> None:
    bf16, lora = SAMPLINGS[name]
    found: list[Any] = []
    read: list[tuple[int, bool]] = []  # rows of each pass, and whether it ran in autocast

    def see(*called: Any) -> None:
        read.append((len(called[-1][0]), torch.is_autocast_enabled("cpu")))

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        found.append(([list(ids) for ids in completion_ids], set(read)))
        return [float(len(ids) % 3) for ids in completion_ids]

    for share in (False, True):
        chosen = {"compact_updates": "exact", "share_prompts": share, "bf16": bf16}
        args = arguments(tmp_path / str(share), max_steps=1, max_completion_length=6, **chosen)
        given: dict[str, Any] = {"processing_class": AutoTokenizer.from_pretrained(tiny_model)}
        given["train_dataset"] = Dataset.from_dict({"prompt": ["one two", "three"]})
        given["peft_config"] = None if lora is None else LoraConfig(**lora, task_type="CAUSAL_LM")
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        model.get_decoder().register_forward_hook(see)
        read.clear()
        GRPOExtTrainer(model, reward, args, **given).train()
    (plain, passes), (shared, more) = found
    assert shared == plain
    assert passes == {(8, name == "bf16")}
    assert more - passes == (set() if name == "dropout" else {(2, name == "bf16")})  # distinct prompts
