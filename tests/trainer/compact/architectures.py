"""Every causal language model of the installed transformers, small, in updates of compact rows against plain TRL's."""

import inspect
import logging
import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from tests.support import relative_gap
from trl_grpo_ext.trainer.compact.packed import packing_of
from trl_grpo_ext.trainer.compact.updates import CompactUpdates, Freedom
from trl_grpo_ext.trainer.upstream.reading import LossSettings

NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LIMIT = 24
"""Every length that a small config names: of windows, chunks, and positions before they are stretched."""

BATCHES = {"below": (3, 6, 2, 10), "across": (3, 9, 2, 25), "above": (27, 31, 6, 12), "again below": (3, 6, 2, 10)}
"""Tokens of the shortest and the longest prompt and completion, in the order in which one run meets them."""

SIZES: list[tuple[tuple[str, ...], int]] = [
    (("window", "chunk", "position", "context_length", "max_seq", "n_ctx", "block_size", "max_length"), LIMIT),
    (("lora_rank",), 8),
    (("per_tok", "top_k", "topk", "moe_k", "n_group"), 1),
    (("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    (("experts", "expert_num"), 4),
    (("group",), 1),
    (("head_dim", "headdim", "d_head", "d_kv", "state", "rank", "rotary"), 8),
    (("heads", "n_head"), 4),
    (("layers", "n_layer"), 2),
    (("intermediate", "ffn", "d_ff", "inner", "mlp"), 64),
    (("hidden_size", "d_model", "n_embd", "embedding_size", "embed_dim", "lru_width", "dim"), 32),
    (("vocab_size",), 64),
]
"""Parts of a setting's name, and what it becomes; the first that fits."""

SPECIAL: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "gemma3n": {"num_kv_shared_layers": 0},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gemma4_unified_assistant": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "mimo_v2_flash": {"num_key_value_heads": 2, "swa_num_key_value_heads": 2, "mlp_layer_types": ["dense", "sparse"]},
    "reformer": {"is_decoder": True, "axial_pos_shape": (4, 16), "axial_pos_embds_dim": (16, 16)},
}
"""What cannot be guessed."""

LARGEST = 20_000_000
"""Parameters of a model that is small."""


@dataclass
class Outcome:
    """Of one architecture."""

    name: str
    gaps: dict[str, float] = field(default_factory=dict)
    packed: dict[str, bool] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    failed: str = ""  # why it could not be tried, at all or at one width

    @property
    def kind(self) -> str:
        if not self.gaps or any(map(math.isnan, self.gaps.values())):  # TRL's own gradient is none
            return "not tried"
        if max(self.gaps.values()) > EQUAL:
            return "different"
        return "packed and equal" if all(self.packed.values()) else "not packed, equal"


EQUAL = 1e-3
"""The largest relative gap between gradients in float32 that are the same."""


def small_config(name: str) -> Any:
    """A model's config with all sizes small."""
    whole = AutoConfig.for_model(name)
    text = whole.get_text_config()
    config = text if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING else whole
    changed: dict[str, Any] = {"head_dim": 8} if config.to_dict().get("head_dim", 0) is None else {}
    for key, value in config.to_dict().items():
        if isinstance(value, bool) or key.endswith("_token_id"):
            continue
        if isinstance(value, float) and ("drop" in key or "jitter" in key):
            changed[key] = 0.0
        elif isinstance(value, float) and key in {"initializer_range", "init_std", "initializer_factor"}:
            changed[key] = 0.2
        elif isinstance(value, int) and value > 1:
            size = next((size for parts, size in SIZES if any(part in key for part in parts)), None)
            if size is not None:
                changed[key] = min(value, size)
    count = 2
    if types := config.to_dict().get("layer_types"):
        kinds = [*dict.fromkeys(types)]
        count = max(2, len(kinds))
        changed["layer_types"] = [*kinds, *kinds][:count]
        for key in ("num_hidden_layers", "n_layer", "num_layers"):
            if key in changed:
                changed[key] = count
    rope = config.to_dict().get("rope_parameters")
    if isinstance(rope, dict) and "original_max_position_embeddings" in rope:
        changed["rope_parameters"] = {**rope, "original_max_position_embeddings": LIMIT}
    changed |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, **SPECIAL.get(name.removesuffix("_text"), {})}
    return type(config)(**changed)


def batch_of(shape: tuple[int, int, int, int], seed: int) -> list[dict[str, Any]]:
    """Two micro-batches of four rows, two of each prompt."""
    generator = torch.Generator().manual_seed(seed)
    low, high, short, long = shape
    prompts = torch.linspace(low, high, 4).round().long().repeat_interleave(2).tolist()
    completions = torch.linspace(short, long, 8).round().long()[torch.randperm(8, generator=generator)].tolist()
    ids = torch.randint(3, 60, (8, high + long), generator=generator)
    ids[1::2, :high] = ids[::2, :high]
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        mask[row, high - prompt : high + completion] = 1
    ids = ids * mask
    whole = {
        "prompt_ids": ids[:, :high],
        "prompt_mask": mask[:, :high],
        "completion_ids": ids[:, high:],
        "completion_mask": mask[:, high:],
        "advantages": torch.randn(8, long, generator=generator),
    }
    return [{key: value[first : first + 4] for key, value in whole.items()} for first in (0, 4)]


TRL = SimpleNamespace(accelerator=SimpleNamespace(autocast=nullcontext))
"""What TRL's method reads of its trainer."""


def trls_logps(model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, **kwargs: Any) -> Any:
    """TRL's own log-probabilities of a batch."""
    method = inspect.unwrap(GRPOTrainer._get_per_token_logps_and_entropies)
    return method(TRL, model, input_ids, attention_mask, logits_to_keep, **kwargs)


def gradient_of(model: Any, micro_batches: list[dict[str, Any]], logps: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for batch in micro_batches:
        if not batch["completion_mask"].any():
            continue
        ids, mask = (torch.cat([batch[f"{part}_{end}"] for part in ("prompt", "completion")], 1) for end in ENDS)
        values = logps(model, ids, mask, batch["completion_ids"].size(1))[0]
        (values * batch["advantages"] * batch["completion_mask"]).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


ENDS = ("ids", "mask")


class Heard(logging.Handler):
    """The sentences of compact updates."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage().partition(": ")[2])


def updates_of(model: Any, logged: dict[str, float]) -> CompactUpdates:
    """The compact updates of a run in which everything may move."""
    sizes = {"ranks": 1, "rank": 0, "accumulation": 2, "rows_per_pass": 4, "pad_id": 0}
    facts: Any = SimpleNamespace(**sizes, device=torch.device("cpu"), gather=lambda table: table)
    packing = packing_of(model, LossSettings("dapo"), share=True, compiled=False, overridden=False)
    freedom = Freedom(sort=True, drop=True, any_count=True)
    return CompactUpdates(lambda: freedom, facts, None, packing, lambda: (trls_logps, model), logged.update)


def tried(name: str) -> Outcome:
    """One architecture at all widths of a batch."""
    outcome, heard = Outcome(name), Heard()
    room = logging.getLogger("trl_grpo_ext.trainer.compact")
    try:
        torch.manual_seed(0)
        config = small_config(name)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
        if size > LARGEST:
            raise ValueError(f"{size:,} parameters")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    except Exception as error:  # whatever forbids to build it is the outcome
        outcome.failed = f"cannot be built small: {type(error).__name__}: {error}"
        return outcome
    room.addHandler(heard)
    level = room.level
    room.setLevel(logging.INFO)
    try:
        logged: dict[str, float] = {}
        compact = updates_of(model, logged)
        for seed, (width, shape) in enumerate(BATCHES.items()):
            try:
                expected = gradient_of(model, batch_of(shape, seed), trls_logps)
            except Exception as error:  # plain TRL does not run it at this width
                outcome.failed = f"plain TRL fails {width}: {type(error).__name__}: {error}"
                continue
            planned = compact.plan(batch_of(shape, seed), torch.float32)
            found = gradient_of(model, planned, lambda *given: compact.logps(trls_logps, *given))
            outcome.gaps[width] = relative_gap(found, expected)
            outcome.packed[width] = logged["compact/computed_tokens"] < logged["compact/live_tokens"]
    finally:
        room.removeHandler(heard)
        room.setLevel(level)
    outcome.said = heard.said
    return outcome
