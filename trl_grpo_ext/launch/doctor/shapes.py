"""The shapes of the models that the shipped run files name, from their public `config.json`, for a machine offline."""

from typing import Any

_QWEN = {"model_type": "qwen2", "vocab_size": 151_936, "num_key_value_heads": 2, "max_position_embeddings": 32_768}
_SMOL = {"model_type": "llama", "vocab_size": 49_152, "max_position_embeddings": 8_192}


def _shape(family: dict[str, Any], layers: int, heads: int, hidden: int, inner: int, **more: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": hidden}
    return {"tie_word_embeddings": True, **family, **sizes, "intermediate_size": inner, "dtype": "bfloat16", **more}


SHAPES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": _shape(_QWEN, 24, 14, 896, 4_864),
    "Qwen/Qwen2.5-1.5B-Instruct": _shape(_QWEN, 28, 12, 1_536, 8_960),
    "Qwen/Qwen2.5-3B-Instruct": _shape(_QWEN, 36, 16, 2_048, 11_008),
    "Qwen/Qwen2.5-7B-Instruct": _shape(
        _QWEN, 28, 28, 3_584, 18_944, num_key_value_heads=4, vocab_size=152_064, tie_word_embeddings=False
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": _shape(_SMOL, 30, 9, 576, 1_536, num_key_value_heads=3),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": _shape(_SMOL, 24, 32, 2_048, 8_192, num_key_value_heads=32),
}
"""Settings of transformers' configs, by the hub's name."""
SHAPES |= {name.removesuffix("-Instruct"): shape for name, shape in SHAPES.items()}
SHAPES["smollm2"] = SHAPES["HuggingFaceTB/SmolLM2-135M-Instruct"]  # the recipes' name for it
