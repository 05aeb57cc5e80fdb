"""Sizes are counted on the real classes, LoRA by PEFT itself; configs that are missing or hostile end in a sentence."""

import json
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.launch.doctor.model import Adapters, adapters_of, load_config, on_meta, sizes_of

TINY = Qwen2Config(
    hidden_size=16,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=50,
    tie_word_embeddings=True,
)


def test_a_tiny_model_is_counted_by_hand() -> None:
    sizes = sizes_of(on_meta(TINY))
    attention = (16 * 16 + 16) + 2 * (16 * 8 + 8) + 16 * 16  # Qwen2: biases on q, k and v
    assert sizes.parameters == 50 * 16 + 3 * (attention + 3 * 16 * 40 + 2 * 16) + 16
    assert (sizes.hidden, sizes.layers, sizes.kv_width, sizes.vocabulary) == (16, 3, 2 * 2 * 4, 50)
    assert sizes.linear == 3 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 40)
    untied = sizes_of(on_meta(Qwen2Config(**{**TINY.to_dict(), "tie_word_embeddings": False})))
    assert (untied.parameters, untied.linear) == (sizes.parameters + 800, sizes.linear)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"], None, r".*(q|k)_proj"])
def test_adapters_are_those_that_peft_would_train(targets: str | list[str] | None) -> None:
    def config() -> LoraConfig:
        return LoraConfig(r=3, target_modules=targets, task_type="CAUSAL_LM")

    found = adapters_of(on_meta(TINY), config())
    real = get_peft_model(AutoModelForCausalLM.from_config(TINY), config())
    assert found.trainable == sum(p.numel() for p in real.parameters() if p.requires_grad) > 0
    assert (found.refusal, found.missing) == (None, ())


def test_adapters_that_peft_refuses_or_drops_without_a_word() -> None:
    def found(targets: str | list[str]) -> Adapters:
        return adapters_of(on_meta(TINY), LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))

    for targets in (["qproj"], "q_proj", "(", []):
        assert found(targets).refusal
        assert found(targets).trainable == 0
    assert found(["q_proj", "w1", "self_attn.k_proj", "proj"]).missing == ("proj", "w1")


HOSTILE = [
    "",
    '{"model_type": "no_such_type"}',
    '{"model_type": "llama", "hidden_size": "wide"}',
    '{"model_type": "llama", "num_hidden_layers": 1e12}',
    "[" * 20_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:30]))
def test_a_hostile_config_is_a_reason_or_a_configuration_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    config, reason = load_config(str(tmp_path))
    if config is None:
        assert str(tmp_path) in reason
        return
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        on_meta(config)


def test_the_models_own_code_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}})
    )
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').write('x')\nclass Config: ...\n")
    assert load_config(str(tmp_path))[0] is None
    assert not (tmp_path / "ran").exists()
