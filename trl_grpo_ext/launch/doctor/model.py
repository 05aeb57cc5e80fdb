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
from ...guard.untrusted import one_line

MOST_LAYERS = 2_000
"""A config with more layers is taken for a mistake: building it would take minutes."""
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ImportError, RuntimeError, ArithmeticError)
"""A config is an untrusted file: a malformed one has raised each of these."""

_SIZES: dict[str, tuple[str, int, int, int, int, int, int, int]] = {
    "Qwen/Qwen2.5-0.5B": ("qwen2", 896, 4_864, 24, 14, 2, 151_936, 32_768),
    "Qwen/Qwen2.5-0.5B-Instruct": ("qwen2", 896, 4_864, 24, 14, 2, 151_936, 32_768),
    "Qwen/Qwen2.5-1.5B-Instruct": ("qwen2", 1_536, 8_960, 28, 12, 2, 151_936, 32_768),
    "Qwen/Qwen2.5-3B-Instruct": ("qwen2", 2_048, 11_008, 36, 16, 2, 151_936, 32_768),
    "Qwen/Qwen2.5-7B-Instruct": ("qwen2", 3_584, 18_944, 28, 28, 4, 152_064, 32_768),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": ("llama", 2_048, 8_192, 24, 32, 32, 49_152, 8_192),
}
"""Of the run files' models, for machines that reach neither a copy nor the hub: type, width, width of the MLP, layers,
heads, heads for keys and values, vocabulary, context. Only the 7B has a head of its own."""


def known_config(name: str) -> Any | None:
    """The `PretrainedConfig` of a model of the run files, or None."""
    if name not in _SIZES:
        return None
    kind, hidden, intermediate, layers, heads, kv_heads, vocabulary, context = _SIZES[name]
    return AutoConfig.for_model(
        kind,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=hidden < 3_584,
        max_position_embeddings=context,
    )


def load_config(model_name_or_path: str, revision: str = "main") -> tuple[Any | None, str]:
    """A model's config from its folder, the hub's cache or our table, and its source or why there is none.

    Runs no code of the model and uses no network.
    """
    here = Path(model_name_or_path).is_dir()
    try:
        config = AutoConfig.from_pretrained(
            model_name_or_path, revision=revision, local_files_only=True, trust_remote_code=False
        )
    except (*_MALFORMED, OSError, StrictDataclassError) as error:
        reason = f"{type(error).__name__}: {one_line(error, 300)}"
    else:
        return config, "its folder" if here else "the hub's cache"
    if not here and (known := known_config(model_name_or_path)) is not None:
        return known, "the doctor's table of published sizes"
    where = "the folder" if here else "the hub's cache"
    return None, f"No config of {model_name_or_path!r} could be read from {where}: {reason}"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a causal language model. Shared parameters count once."""

    parameters: int
    embeddings: int  # of these, the input embedding and the output head
    layers: int
    hidden: int
    kv_width: int  # numbers that one token adds to a layer's cache: keys and values together
    vocabulary: int
    context: int  # the longest that the config declares; 0 if none
    linear: int  # weights of all linear layers but the head, which bitsandbytes replaces
    linear_outputs: int  # rows of these matrices
    linear_ends: int  # inputs and outputs of these layers for one token, of all layers together


@dataclass(frozen=True)
class Adapters:
    """What PEFT makes of the LoRA settings."""

    trainable: int
    refusal: str | None
    missing: tuple[str, ...]  # targets that match nothing, which PEFT silently drops if others match
    names: tuple[str, ...]  # last names of the modules that could be adapted


def on_meta(config: Any) -> Any:
    """Build the model without memory for a single weight."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if not isinstance(layers, int) or not 0 < layers <= MOST_LAYERS:
        raise ConfigurationError(
            f"The model's config has num_hidden_layers {layers!r}: expected a number from 1 to {MOST_LAYERS}. Check "
            "its config.json."
        )
    try:
        with torch.device("meta"):
            # Eager: an attention kernel that is not installed here does not change the count.
            return AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except (*_MALFORMED, StrictDataclassError) as error:
        raise ConfigurationError(
            f"transformers builds no causal language model from the config of type {config.model_type!r}: "
            f"{one_line(error, 300)}. Check the model's config.json."
        ) from error


def sizes_of(model: Any) -> Sizes:
    """Count a model that `on_meta` built."""
    text = model.config.get_text_config()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    ends = {id(m.weight): m.weight.numel() for m in (head, embedding) if m is not None}
    modules = [module for module in model.modules() if module is not head]
    linear = [(m.in_features, m.out_features) for m in modules if isinstance(m, torch.nn.Linear)]
    linear += [(m.nx, m.nf) for m in modules if isinstance(m, Conv1D)]
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

    kinds = (torch.nn.Linear, Conv1D, torch.nn.Embedding)
    modules = {name.rpartition(".")[2]: None for name, module in model.named_modules() if isinstance(module, kinds)}
    try:
        with warnings.catch_warnings(action="ignore"):
            adapted: Any = peft.get_peft_model(model, peft_config)
    except (*_MALFORMED, re.error) as error:
        return Adapters(0, one_line(error, 400), (), tuple(modules))
    targets = peft_config.target_modules
    found = adapted.targeted_module_names
    missing = [] if targets is None or isinstance(targets, str) else sorted(targets)
    missing = [t for t in missing if not any(name == t or name.endswith(f".{t}") for name in found)]
    return Adapters(adapted.get_nb_trainable_parameters()[0], None, tuple(missing), tuple(modules))
