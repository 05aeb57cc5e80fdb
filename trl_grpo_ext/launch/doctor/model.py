"""A model's shapes without its weights: transformers builds it on torch's meta device, and PEFT adapts it."""

import re
import warnings
from dataclasses import dataclass
from typing import Any

import peft
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.pytorch_utils import Conv1D

from ...errors import ConfigurationError
from ...guard.untrusted import one_line

_QWEN = {"model_type": "qwen2", "vocab_size": 151_936, "max_position_embeddings": 32_768}
_QWEN_7B = {**_QWEN, "vocab_size": 152_064, "tie_word_embeddings": False}
_SMOL = {"model_type": "llama", "vocab_size": 49_152, "max_position_embeddings": 8_192}
_SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size")
_SHAPES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "Qwen/Qwen2.5-0.5B": (_QWEN, (24, 14, 2, 896, 4_864)),
    "Qwen/Qwen2.5-1.5B": (_QWEN, (28, 12, 2, 1_536, 8_960)),
    "Qwen/Qwen2.5-3B": (_QWEN, (36, 16, 2, 2_048, 11_008)),
    "Qwen/Qwen2.5-7B": (_QWEN_7B, (28, 28, 4, 3_584, 18_944)),
    "HuggingFaceTB/SmolLM2-135M": (_SMOL, (30, 9, 3, 576, 1_536)),
    "HuggingFaceTB/SmolLM2-1.7B": (_SMOL, (24, 32, 32, 2_048, 8_192)),
    "smollm2": (_SMOL, (30, 9, 3, 576, 1_536)),  # the recipes' name for it
}
"""Of the models that the shipped run files name, from their public `config.json`, for a machine that is offline."""


def shipped_config(name: str) -> Any | None:
    """The config of a model whose shapes this package ships; None for others."""
    if (shape := _SHAPES.get(name.removesuffix("-Instruct"))) is None:
        return None
    family, sizes = shape
    usual = {"tie_word_embeddings": True, "dtype": "bfloat16"}
    return AutoConfig.for_model(**{**usual, **family, **dict(zip(_SIZES, sizes, strict=True))})


def load_config(model_name_or_path: str, revision: str = "main") -> tuple[Any | None, str]:
    """A model's config from its folder, the hub's cache or this package, or why there is none; its code is not run."""
    offline = {"local_files_only": True, "trust_remote_code": False}
    try:
        return AutoConfig.from_pretrained(model_name_or_path, revision=revision, **offline), ""
    except Exception as error:  # a config is an untrusted file: malformed ones have raised a dozen kinds
        reason = f"No config of {model_name_or_path!r} could be read: {type(error).__name__}: {one_line(error, 300)}"
    return shipped_config(model_name_or_path), reason


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
    refusal: str | None = None
    missing: tuple[str, ...] = ()  # targets that match nothing, which PEFT silently drops if others match


def on_meta(config: Any, architecture: Any = AutoModelForCausalLM) -> Any:
    """Build the model without memory for a single weight."""
    unset_hf_deepspeed_config()  # ZeRO-3 would divide the parameters among ranks that are not there
    build = getattr(architecture, "from_config", None) or architecture._from_config
    try:
        with torch.device("meta"):
            return build(config, attn_implementation="eager")  # other kernels may not be installed here
    except Exception as error:  # as above
        raise ConfigurationError(f"transformers builds no model from config.json: {one_line(error, 300)}") from error


def without_weights(cls: Any, name: Any, config: Any, settings: dict[str, Any]) -> Any:
    """What `cls.from_pretrained(name, ...)` would load, on torch's meta device."""
    if not isinstance(config, PretrainedConfig):
        config = cls.config_class.from_pretrained(name, revision=settings.get("revision") or "main")
    dtype = settings.get("dtype", settings.get("torch_dtype"))
    if dtype in (None, "auto"):
        dtype = getattr(config, "dtype", None) or torch.float32
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    model = on_meta(config, cls).to(dtype)
    if (quantisation := settings.get("quantization_config")) is not None:
        model.config.quantization_config = quantisation
        for bits in (4, 8):
            if getattr(quantisation, f"load_in_{bits}bit", False):
                setattr(model, f"is_loaded_in_{bits}bit", True)
    return model


def sizes_of(model: Any) -> Sizes:
    text = model.config.get_text_config()
    head = model.get_output_embeddings()
    modules = [module for module in model.modules() if module is not head]
    heads = int(text.num_attention_heads)
    head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    return Sizes(
        parameters=sum(p.numel() for p in model.parameters()),
        layers=int(text.num_hidden_layers),
        hidden=int(text.hidden_size),
        intermediate=int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size),
        kv_width=2 * int(getattr(text, "num_key_value_heads", None) or heads) * head_dim,
        vocabulary=int(text.vocab_size),
        context=int(getattr(text, "max_position_embeddings", 0) or 0),
        linear=sum(m.weight.numel() for m in modules if isinstance(m, torch.nn.Linear | Conv1D)),
    )


def adapters_of(model: Any, peft_config: Any) -> Adapters:
    """Let PEFT adapt, in place, a model that `on_meta` built."""
    try:
        with warnings.catch_warnings(action="ignore"):
            adapted: Any = peft.get_peft_model(model, peft_config)
    except (ValueError, TypeError, LookupError, RuntimeError, re.error) as error:
        return Adapters(0, one_line(error, 400))
    targets = getattr(peft_config, "target_modules", None) or ()
    asked = () if isinstance(targets, str) else sorted(targets)
    found = [f".{name}" for name in getattr(adapted, "targeted_module_names", [])]
    missing = [one for one in asked if not any(name.endswith(f".{one}") for name in found)]
    return Adapters(trainable_of(adapted), None, tuple(missing))


def trainable_of(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
