"""What a model is made of, counted exactly and without its weights: the real class is built on torch's meta device."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...errors import ConfigurationError
from .known_models import known_config

Targets = str | Sequence[str] | None
"""LoRA targets as PEFT takes them: `all-linear`, a regular expression (a string), names, or None for PEFT's default."""

MOST_LAYERS = 2_000
"""A config with more layers than this is taken for a mistake: building its modules would take minutes."""

_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ImportError)


@dataclass(frozen=True)
class ModuleShape:
    """A module that LoRA can adapt: its full name, kind, and matrix (`inputs` columns, `outputs` rows)."""

    name: str
    kind: Literal["linear", "embedding"]
    inputs: int
    outputs: int
    bias: bool = False

    @property
    def matrix(self) -> int:
        """Entries of the weight matrix, without the bias."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class LinearKind:
    """Linear layers of one last name and shape, such as `q_proj`, and how many there are."""

    name: str
    inputs: int
    outputs: int
    count: int


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal language model. Parameters are counted once where they are shared.

    Attributes:
        model_type: As transformers names it, such as "qwen2".
        parameters: All of them.
        embedding_parameters: The input embedding.
        head_parameters: The output head's own: 0 where it shares the embedding's matrix.
        tied: The head and the embedding are one matrix.
        hidden: Width of the residual stream.
        layers: Decoder layers.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of one head.
        intermediate: Width of the feed-forward part (of one expert where there are experts).
        vocabulary: Rows of the head.
        context: Longest sequence of positions that the config declares; 0 where it declares none.
        experts: Experts per layer; 0 for a dense model.
        experts_per_token: Of these, those that a token visits.
        expert_parameters: Held by experts as three-dimensional tensors, which are no linear layers.
        layer_parameters: Of the largest decoder layer.
        modules: What LoRA can adapt.
        other_names: Full names of all other modules.
        head_name: Full name of the output head, which `all-linear` leaves out.
        from_table: The published sizes in `known_models` were used, not a config file.
    """

    model_type: str
    parameters: int
    embedding_parameters: int
    head_parameters: int
    tied: bool
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    context: int
    experts: int
    experts_per_token: int
    expert_parameters: int
    layer_parameters: int
    modules: tuple[ModuleShape, ...]
    other_names: tuple[str, ...]
    head_name: str
    from_table: bool = False

    @property
    def linears(self) -> tuple[LinearKind, ...]:
        """Linear layers by last name and shape, in the order in which the model has them."""
        kinds = [(m.name.rpartition(".")[2], m.inputs, m.outputs) for m in self.modules if m.kind == "linear"]
        return tuple(LinearKind(*kind, count) for kind, count in Counter(kinds).items())

    @property
    def quantisable(self) -> tuple[ModuleShape, ...]:
        """Linear layers that bitsandbytes replaces: all but the head."""
        return tuple(m for m in self.modules if m.kind == "linear" and m.name != self.head_name)

    @property
    def quantisable_parameters(self) -> int:
        """Entries of these layers' matrices; biases stay as they are."""
        return sum(m.matrix for m in self.quantisable)


@dataclass(frozen=True)
class LoadedConfig:
    """A model's config and where it came from; `config` is None where there was none, and `reason` says why."""

    config: Any | None
    source: Literal["folder", "cache or hub", "table", "none"]
    reason: str


@dataclass(frozen=True)
class MissingTarget:
    """A LoRA target that adapts nothing: why, and names of the model that look like it."""

    target: str
    reason: str
    near: tuple[str, ...]


def load_config(model_name_or_path: str, *, revision: str = "main", network: bool = False) -> LoadedConfig:
    """Find a model's config: in its folder, in the hub's cache, on the hub (only with `network`), or in our table.

    No code of the model's own is run. A config that cannot be read is a reason, not an exception.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    here = Path(model_name_or_path).is_dir()
    try:
        config = AutoConfig.from_pretrained(
            model_name_or_path, revision=revision, local_files_only=not network, trust_remote_code=False
        )
    # A config is somebody else's file: each of these was seen to come out of a malformed one.
    except (*_MALFORMED, OSError, RecursionError, StrictDataclassError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    else:
        return LoadedConfig(config, "folder" if here else "cache or hub", "")
    known = None if here else known_config(model_name_or_path)
    if known is not None:
        return LoadedConfig(known, "table", "The config is not on this machine: the published sizes were used.")
    where = "the folder" if here else "the hub's cache"
    return LoadedConfig(None, "none", f"No config of {model_name_or_path!r} could be read from {where}: {reason}")


def shape_of(config: Any, *, from_table: bool = False) -> ModelShape:
    """Count what transformers would build from a `PretrainedConfig`, without memory for a single weight.

    Raises:
        ConfigurationError: No causal language model can be built from it.
    """
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoModelForCausalLM

    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", 0)
    if not isinstance(layers, int) or not 0 < layers <= MOST_LAYERS:
        raise ConfigurationError(
            f"The model's config has num_hidden_layers {layers!r}: a number from 1 to {MOST_LAYERS} was expected. "
            "Check its config.json."
        )
    try:
        with torch.device("meta"):
            # Eager: an attention kernel that is not installed here does not change the count.
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except (*_MALFORMED, RuntimeError, ZeroDivisionError, StrictDataclassError) as error:
        raise ConfigurationError(
            f"transformers builds no causal language model from the config of type {config.model_type!r}: "
            f"{' '.join(str(error).split())[:300]}. Check the model's config.json."
        ) from error
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    modules, others = _modules(model)
    heads = int(text.num_attention_heads)
    return ModelShape(
        model_type=str(text.model_type),
        parameters=sum(p.numel() for p in model.parameters()),
        embedding_parameters=embedding.weight.numel(),
        head_parameters=0 if tied or head is None else sum(p.numel() for p in head.parameters()),
        tied=tied,
        hidden=int(text.hidden_size),
        layers=layers,
        heads=heads,
        kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
        intermediate=int(_first(text, "moe_intermediate_size", "intermediate_size", "n_inner") or 4 * text.hidden_size),
        vocabulary=int(embedding.weight.shape[0] if head is None else head.weight.shape[0]),
        context=int(getattr(text, "max_position_embeddings", 0) or 0),
        experts=int(_first(text, "num_local_experts", "num_experts", "n_routed_experts") or 0),
        experts_per_token=int(_first(text, "num_experts_per_tok") or 0),
        expert_parameters=sum(p.numel() for p in model.parameters() if p.dim() == 3),
        layer_parameters=_largest_layer(model, layers),
        modules=modules,
        other_names=others,
        head_name=next((name for name, module in model.named_modules() if module is head and head is not None), ""),
        from_table=from_table,
    )


def adapted_modules(shape: ModelShape, targets: Targets) -> tuple[ModuleShape, ...]:
    """Return the modules that PEFT would adapt, by its own rules for `target_modules`.

    `all-linear` takes every linear layer but the head; another string is a regular expression that must match a whole
    name; names match a whole name or its end behind a dot; None takes PEFT's default for the model type.
    """
    if isinstance(targets, str) and targets.lower() == "all-linear":
        return shape.quantisable
    return tuple(m for m in shape.modules if _matches(_resolved(shape, targets), m.name))


def lora_parameters(shape: ModelShape, rank: int, targets: Targets) -> int:
    """Parameters of LoRA adapters: `rank * (inputs + outputs)` for each adapted module."""
    return sum(rank * (m.inputs + m.outputs) for m in adapted_modules(shape, targets))


def missing_targets(shape: ModelShape, targets: Targets) -> list[MissingTarget]:
    """Return the targets that adapt nothing, with near names.

    PEFT raises where no target matches. Of several names it drops those that match nothing without a word.
    """
    resolved = _resolved(shape, targets)
    if isinstance(targets, str) and targets.lower() == "all-linear":
        return [] if shape.quantisable else [MissingTarget(targets, "the model has no linear layer", ())]
    if resolved is None:
        reason = f"PEFT has no default targets for model type {shape.model_type!r}: name them"
        return [MissingTarget("None", reason, _last_names(shape)[:8])]
    if isinstance(resolved, str):
        return _missing_pattern(shape, resolved)
    return [missing for target in dict.fromkeys(resolved) if (missing := _missing_name(shape, target)) is not None]


def _missing_pattern(shape: ModelShape, pattern: str) -> list[MissingTarget]:
    near = _near(shape, pattern)
    try:
        found = [m for m in shape.modules if re.fullmatch(pattern, m.name)]
    except re.error as error:
        return [MissingTarget(pattern, f"it is not a regular expression ({error})", near)]
    if found:
        return []
    reason = "a string is a regular expression that must match a module's whole name, and this one matches none"
    return [MissingTarget(pattern, reason, near)]


def _missing_name(shape: ModelShape, target: str) -> MissingTarget | None:
    if any(_matches([target], m.name) for m in shape.modules):
        return None
    if any(_matches([target], name) for name in shape.other_names):
        return MissingTarget(target, "it names modules, but no linear layer or embedding", _near(shape, target))
    return MissingTarget(target, "the model has no module of this name", _near(shape, target))


def _resolved(shape: ModelShape, targets: Targets) -> str | list[str] | None:
    if targets is None:
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

        default = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(shape.model_type)
        return None if default is None else list(default)
    return targets if isinstance(targets, str) else list(targets)


def _matches(targets: str | Iterable[str] | None, name: str) -> bool:
    if targets is None:
        return False
    if isinstance(targets, str):
        try:
            return re.fullmatch(targets, name) is not None
        except re.error:
            return False
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _last_names(shape: ModelShape) -> tuple[str, ...]:
    return tuple(dict.fromkeys(m.name.rpartition(".")[2] for m in shape.modules))


def _near(shape: ModelShape, target: str) -> tuple[str, ...]:
    last = re.split(r"[.\\*+^$|()]+", target.strip("$^"))[-1] or target
    names = _last_names(shape)
    close = difflib.get_close_matches(last, names, n=3, cutoff=0.5)
    return tuple(close) or names[:8]


def _modules(model: Any) -> tuple[tuple[ModuleShape, ...], tuple[str, ...]]:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    modules, others = [], []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            bias = module.bias is not None
            modules.append(ModuleShape(name, "linear", module.in_features, module.out_features, bias))
        elif isinstance(module, Conv1D):
            modules.append(ModuleShape(name, "linear", module.nx, module.nf, True))
        elif isinstance(module, nn.Embedding):
            modules.append(ModuleShape(name, "embedding", module.num_embeddings, module.embedding_dim))
        elif name:
            others.append(name)
    return tuple(modules), tuple(others)


def _largest_layer(model: Any, layers: int) -> int:
    """Parameters of the largest member of the one list of modules that has a module for each layer."""
    from torch import nn

    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == layers]
    sizes = [sum(p.numel() for p in layer.parameters()) for members in lists for layer in members]
    return max(sizes, default=0)


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)
