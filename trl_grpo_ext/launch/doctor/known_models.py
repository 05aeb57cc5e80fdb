"""Published shapes of the models in the run configs, for machines that can reach neither a copy nor the hub.

Values as in each model's published `config.json`. A test counts the parameters that transformers makes of them and
compares the totals with the published ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KnownModel:
    """One row: the model type, the sizes as `PretrainedConfig` names them, and the published number of parameters."""

    model_type: str
    sizes: dict[str, Any]
    parameters: int


def _qwen2(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, parameters: int) -> KnownModel:
    tied = parameters < 7_000_000_000
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 151_936 if tied else 152_064,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32_768,
    }
    return KnownModel("qwen2", sizes, parameters)


KNOWN_MODELS: dict[str, KnownModel] = {
    "Qwen/Qwen2.5-0.5B": _qwen2(896, 4_864, 24, 14, 2, 494_032_768),
    "Qwen/Qwen2.5-0.5B-Instruct": _qwen2(896, 4_864, 24, 14, 2, 494_032_768),
    "Qwen/Qwen2.5-1.5B-Instruct": _qwen2(1_536, 8_960, 28, 12, 2, 1_543_714_304),
    "Qwen/Qwen2.5-3B-Instruct": _qwen2(2_048, 11_008, 36, 16, 2, 3_085_938_688),
    "Qwen/Qwen2.5-7B-Instruct": _qwen2(3_584, 18_944, 28, 28, 4, 7_615_616_512),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": KnownModel(
        "llama",
        {
            "hidden_size": 2_048,
            "intermediate_size": 8_192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 49_152,
            "tie_word_embeddings": True,
            "max_position_embeddings": 8_192,
        },
        1_711_376_384,
    ),
}
"""By the name on the hub."""


def known_config(name: str) -> Any | None:
    """Return the `PretrainedConfig` of a known model, or None. Imports transformers only for a known one."""
    known = KNOWN_MODELS.get(name)
    if known is None:
        return None
    from transformers import AutoConfig

    return AutoConfig.for_model(known.model_type, **known.sizes)
