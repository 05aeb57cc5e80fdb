"""Shapes: exact counts from the real classes, LoRA by PEFT's own rules, configs that are missing or hostile."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, Qwen2Config

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.launch.doctor.known_models import KNOWN_MODELS, known_config
from trl_grpo_ext.launch.doctor.model_shape import (
    adapted_modules,
    load_config,
    lora_parameters,
    missing_targets,
    shape_of,
)

EMBEDDED = Path(__file__).parents[3] / "recipes" / "embedded" / "model"
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

TINY = Qwen2Config(
    hidden_size=16,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=50,
    tie_word_embeddings=True,
)


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_the_table_gives_the_published_number_of_parameters(name: str) -> None:
    published = {
        "Qwen/Qwen2.5-0.5B": 494_032_768,
        "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
        "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
        "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
        "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
        "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711_376_384,
    }
    shape = shape_of(known_config(name), from_table=True)
    assert shape.parameters == published[name] == KNOWN_MODELS[name].parameters
    assert shape.from_table


def test_a_tiny_model_is_counted_by_hand() -> None:
    shape = shape_of(TINY)
    attention = (16 * 16 + 16) + 2 * (16 * 8 + 8) + 16 * 16  # Qwen2: biases on q, k and v
    layer = attention + 3 * 16 * 40 + 2 * 16
    assert shape.layer_parameters == layer
    assert shape.parameters == 50 * 16 + 3 * layer + 16
    assert (shape.tied, shape.embedding_parameters, shape.head_parameters) == (True, 800, 0)
    assert (shape.hidden, shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (16, 3, 4, 2, 4)
    assert (shape.intermediate, shape.vocabulary, shape.experts) == (40, 50, 0)
    assert {(kind.name, kind.inputs, kind.outputs, kind.count) for kind in shape.linears} == {
        ("q_proj", 16, 16, 3),
        ("k_proj", 16, 8, 3),
        ("v_proj", 16, 8, 3),
        ("o_proj", 16, 16, 3),
        ("gate_proj", 16, 40, 3),
        ("up_proj", 16, 40, 3),
        ("down_proj", 40, 16, 3),
        ("lm_head", 16, 50, 1),
    }
    assert shape.quantisable_parameters == 3 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 40)


def test_an_untied_head_counts_for_itself() -> None:
    config = Qwen2Config(**{**TINY.to_dict(), "tie_word_embeddings": False})
    shape = shape_of(config)
    assert not shape.tied
    assert shape.head_parameters == 800
    assert shape.parameters == shape_of(TINY).parameters + 800


def test_experts_are_counted_and_are_no_linear_layers() -> None:
    config = MixtralConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=30,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    shape = shape_of(config)
    assert (shape.experts, shape.experts_per_token) == (4, 2)
    assert shape.expert_parameters == 2 * 4 * 3 * 16 * 24
    model = AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())


def test_counting_takes_no_memory_for_weights() -> None:
    shape = shape_of(known_config("Qwen/Qwen2.5-7B-Instruct"))
    assert shape.quantisable_parameters == 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    assert torch.get_default_device().type != "meta"


@pytest.mark.parametrize(
    "targets",
    [
        "all-linear",
        "ALL-LINEAR",
        ["q_proj"],
        ["q_proj", "down_proj"],
        ["self_attn.v_proj"],
        ["layers.1.mlp.up_proj"],
        r".*\.(q|o)_proj",
        ["embed_tokens", "q_proj"],
        ["lm_head"],
        ["c_attn", "q_proj"],
        None,
    ],
    ids=str,
)
@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.filterwarnings("ignore")
def test_lora_parameters_are_those_that_peft_makes(targets: str | list[str] | None, rank: int) -> None:
    shape = shape_of(Qwen2Config(**{**TINY.to_dict(), "tie_word_embeddings": False}))
    model = AutoModelForCausalLM.from_config(Qwen2Config(**{**TINY.to_dict(), "tie_word_embeddings": False}))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules=targets, task_type="CAUSAL_LM"))
    trainable = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert lora_parameters(shape, rank, targets) == trainable
    assert set(adapted.targeted_module_names) == {module.name for module in adapted_modules(shape, targets)}


@pytest.mark.parametrize("targets", [["qproj"], "q_proj", ["mlp"], ["c_attn"], r"model\.q_proj", "(", ["nothing", "x"]])
def test_where_every_target_is_missing_peft_refuses_too(targets: str | list[str]) -> None:
    found = missing_targets(shape_of(TINY), targets)
    assert [missing.target for missing in found] == ([targets] if isinstance(targets, str) else targets)
    with pytest.raises(Exception):  # noqa: B017, PT011 - ValueError, re.error or PEFT's own: any refusal
        peft.get_peft_model(AutoModelForCausalLM.from_config(TINY), peft.LoraConfig(target_modules=targets))


def test_near_names_are_given() -> None:
    shape = shape_of(TINY)
    assert missing_targets(shape, ["qproj"])[0].near[0] == "q_proj"
    assert "q_proj" in missing_targets(shape, "q_proj")[0].near
    assert "whole name" in missing_targets(shape, "q_proj")[0].reason
    assert "gate_proj" in missing_targets(shape, ["gate"])[0].near
    assert "no linear layer" in missing_targets(shape, ["mlp"])[0].reason


def test_one_missing_name_of_several_is_told_though_peft_says_nothing() -> None:
    found = missing_targets(shape_of(TINY), ["q_proj", "w1"])
    assert [missing.target for missing in found] == ["w1"]


@pytest.mark.parametrize("targets", ["all-linear", PROJECTIONS, None, r".*proj"])
def test_targets_that_fit_are_not_missing(targets: str | list[str] | None) -> None:
    assert missing_targets(shape_of(TINY), targets) == []


def test_conv1d_counts_as_linear() -> None:
    shape = shape_of(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=16))
    assert missing_targets(shape, ["c_attn"]) == []
    assert lora_parameters(shape, 2, ["c_attn"]) == 2 * 2 * (16 + 48)


@settings(max_examples=25, deadline=None)
@given(
    heads=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([4, 8]),
    layers=st.integers(1, 4),
    intermediate=st.integers(1, 40),
    vocabulary=st.integers(3, 60),
    tied=st.booleans(),
)
def test_every_llama_is_counted_as_it_is_built(
    heads: int, head_dim: int, layers: int, intermediate: int, vocabulary: int, tied: bool
) -> None:
    config = LlamaConfig(
        hidden_size=heads * head_dim,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=1,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    shape, model = shape_of(config), AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.parameters == (
        shape.embedding_parameters + shape.head_parameters + layers * shape.layer_parameters + heads * head_dim
    )


# ---------------------------------------------------------------------------------------------- configs


def test_a_folder_is_read() -> None:
    loaded = load_config(str(EMBEDDED))
    assert (loaded.source, loaded.reason) == ("folder", "")
    assert shape_of(loaded.config).parameters == 878_720


def test_without_network_and_cache_the_table_helps_and_says_so() -> None:
    known = load_config("Qwen/Qwen2.5-7B-Instruct")
    if known.source != "cache or hub":  # a machine that has the model reads the model
        assert known.source == "table"
        assert "published sizes" in known.reason
    assert shape_of(known.config).parameters == 7_615_616_512
    unknown = load_config("nobody/no-such-model-7c41")
    assert unknown.config is None
    assert unknown.source == "none"
    assert "nobody/no-such-model-7c41" in unknown.reason


HOSTILE = [
    "",
    "{",
    "[]",
    "null",
    '"text"',
    "[1, 2]",
    '{"model_type": 3}',
    '{"model_type": "no_such_type"}',
    '{"model_type": ["llama"]}',
    "\x00\x01",
    '{"model_type": "llama", "hidden_size": "wide"}',
    '{"model_type": "llama", "num_hidden_layers": 1e12}',
    "[" * 20_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:30]))
def test_a_hostile_config_is_a_reason_or_a_configuration_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    loaded = load_config(str(tmp_path))
    if loaded.config is None:
        assert loaded.reason
        return
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        shape_of(loaded.config)


def test_the_models_own_code_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}})
    )
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').write('x')\nclass Config: ...\n")
    assert load_config(str(tmp_path)).config is None
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("layers", [0, -1, 2_001, 10**9, "many", None])
def test_a_number_of_layers_that_cannot_be_is_refused(layers: object) -> None:
    config = LlamaConfig(hidden_size=8, num_attention_heads=1, vocab_size=10)
    object.__setattr__(config, "num_hidden_layers", layers)
    with pytest.raises(ConfigurationError, match="num_hidden_layers"):
        shape_of(config)
