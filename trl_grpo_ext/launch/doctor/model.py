"""A model's shapes without its weights: transformers builds it on torch's meta device, and PEFT adapts it."""

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


def load_config(model_name_or_path: str, revision: str = "main") -> tuple[Any | None, str]:
    """A model's config from its folder or the hub's cache, and its source or why there is none.

    Runs no code of the model and uses no network.
    """
    where = "its folder" if Path(model_name_or_path).is_dir() else "the hub's cache"
    try:
        return AutoConfig.from_pretrained(
            model_name_or_path, revision=revision, local_files_only=True, trust_remote_code=False
        ), where
    except (*_MALFORMED, OSError, StrictDataclassError) as error:
        reason = f"{type(error).__name__}: {one_line(error, 300)}"
    return None, f"No config of {model_name_or_path!r} could be read from {where}: {reason}"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a causal language model. Shared parameters count once."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int  # width of an MLP
    kv_width: int  # numbers that one token adds to a layer's cache: keys and values together
    vocabulary: int
    context: int  # the longest that the config declares; 0 if none
    linear: int  # weights of all linear layers but the head, which bitsandbytes replaces


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
    modules = [module for module in model.modules() if module is not head]
    heads = int(text.num_attention_heads)
    head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    return Sizes(
        parameters=sum(p.numel() for p in model.parameters()),
        layers=int(text.num_hidden_layers),
        hidden=int(text.hidden_size),
        intermediate=int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size),
        kv_width=2 * int(getattr(text, "num_key_value_heads", None) or heads) * head_dim,
        vocabulary=int(embedding.weight.shape[0] if head is None else head.weight.shape[0]),
        context=int(getattr(text, "max_position_embeddings", 0) or 0),
        linear=sum(m.weight.numel() for m in modules if isinstance(m, torch.nn.Linear | Conv1D)),
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
