"""A model's shapes without its weights: transformers builds it on torch's meta device, and PEFT adapts it."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from ...errors import ConfigurationError

MOST_LAYERS = 2_000
"""A config with more layers is taken for a mistake: building it would take minutes."""
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ImportError, RuntimeError, ArithmeticError)


@dataclass(frozen=True)
class KnownModel:
    """Published sizes: the model type, the sizes as `PretrainedConfig` names them, and the number of parameters."""

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
"""The models of the run files by their name on the hub, for machines that reach neither a copy nor the hub."""


def known_config(name: str) -> Any | None:
    """Return the `PretrainedConfig` of a known model, or None."""
    known = KNOWN_MODELS.get(name)
    return None if known is None else AutoConfig.for_model(known.model_type, **known.sizes)


def load_config(model_name_or_path: str, revision: str = "main") -> tuple[Any | None, str]:
    """Find a model's config in its folder, the hub's cache or our table, and its source or why there is none.

    Runs no code of the model and uses no network.
    """
    here = Path(model_name_or_path).is_dir()
    try:
        config = AutoConfig.from_pretrained(
            model_name_or_path, revision=revision, local_files_only=True, trust_remote_code=False
        )
    # A config is an untrusted file: a malformed one has raised each of these.
    except (*_MALFORMED, OSError, StrictDataclassError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    else:
        return config, "its folder" if here else "the hub's cache"
    if not here and (known := known_config(model_name_or_path)) is not None:
        return known, "the doctor's table of published sizes"
    where = "the folder" if here else "the hub's cache"
    return None, f"No config of {model_name_or_path!r} could be read from {where}: {reason}"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a causal language model. Shared parameters count once.

    Attributes:
        parameters: All of them.
        embeddings: Of these, the input embedding and the output head.
        layers: Decoder layers.
        hidden: Width of the residual stream.
        kv_width: Numbers that one token adds to a layer's cache: keys and values together.
        vocabulary: Rows of the head.
        context: Longest context that the config declares; 0 if none.
        linear: Weights of all linear layers but the head, which bitsandbytes replaces.
        linear_outputs: Rows of these matrices.
        linear_ends: Inputs and outputs of these layers for one token, of all layers together.
    """

    parameters: int
    embeddings: int
    layers: int
    hidden: int
    kv_width: int
    vocabulary: int
    context: int
    linear: int
    linear_outputs: int
    linear_ends: int


@dataclass(frozen=True)
class Adapters:
    """What PEFT makes of the LoRA settings.

    Attributes:
        trainable: Weights of the adapters; 0 if PEFT refuses.
        refusal: Why it refuses, if it does.
        missing: Targets that match nothing, which PEFT silently drops if others match.
        names: Last names of the modules that could be adapted.
    """

    trainable: int
    refusal: str | None
    missing: tuple[str, ...]
    names: tuple[str, ...]


def on_meta(config: Any) -> Any:
    """Build the model without memory for a single weight.

    Raises:
        ConfigurationError: No causal language model can be built from the config.
    """
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if not isinstance(layers, int) or not 0 < layers <= MOST_LAYERS:
        raise ConfigurationError(
            f"The model's config has num_hidden_layers {layers!r}: expected a number from 1 to {MOST_LAYERS} . Check "
            f"its config.json."
        )
    try:
        with torch.device("meta"):
            # Eager: an attention kernel that is not installed here does not change the count.
            return AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except (*_MALFORMED, StrictDataclassError) as error:
        raise ConfigurationError(
            f"transformers builds no causal language model from the config of type {config.model_type!r}: "
            f"{' '.join(str(error).split())[:300]}. Check the model's config.json."
        ) from error


def sizes_of(model: Any) -> Sizes:
    """Count a model that `on_meta` built."""
    text = model.config.get_text_config()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    ends = {id(m.weight): m.weight.numel() for m in (head, embedding) if m is not None}
    linear = [(m.in_features, m.out_features) for m in model.modules() if _is_linear(m, torch.nn.Linear, head)]
    linear += [(m.nx, m.nf) for m in model.modules() if _is_linear(m, Conv1D, head)]
    heads = int(text.num_attention_heads)
    head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    return Sizes(
        parameters=sum(p.numel() for p in model.parameters()),
        embeddings=sum(ends.values()),
        layers=int(text.num_hidden_layers),
        hidden=int(text.hidden_size),
        kv_width=2 * int(getattr(text, "num_key_value_heads", None) or heads) * head_dim,
        vocabulary=int(embedding.weight.shape[0] if head is None else head.weight.shape[0]),
        context=int(getattr(text, "max_position_embeddings", 0) or 0),
        linear=sum(width * rows for width, rows in linear),
        linear_outputs=sum(rows for _, rows in linear),
        linear_ends=sum(width + rows for width, rows in linear),
    )


def adapters_of(model: Any, peft_config: Any) -> Adapters:
    """Let PEFT adapt, in place, a model that `on_meta` built."""
    import peft

    kinds: tuple[type, ...] = (torch.nn.Linear, Conv1D, torch.nn.Embedding)
    names = dict.fromkeys(
        name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, kinds)
    )
    try:
        with warnings.catch_warnings(action="ignore"):
            adapted: Any = peft.get_peft_model(model, peft_config)
    except (*_MALFORMED, re.error) as error:
        return Adapters(0, " ".join(str(error).split())[:400], (), tuple(names))
    targets = peft_config.target_modules
    found = adapted.targeted_module_names
    missing = [] if targets is None or isinstance(targets, str) else sorted(targets)
    missing = [t for t in missing if not any(name == t or name.endswith(f".{t}") for name in found)]
    return Adapters(adapted.get_nb_trainable_parameters()[0], None, tuple(missing), tuple(names))


def _is_linear(module: Any, kind: type, head: Any) -> bool:
    return isinstance(module, kind) and module is not head
