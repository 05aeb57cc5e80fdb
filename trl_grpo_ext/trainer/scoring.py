"""Log-probabilities that hooks need and TRL does not compute: the old policy's, the reference's, a teacher's.

What a hook needs is known from its `needs` and `teachers`. What cannot be had is an error at construction, before any
weights are loaded for it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import is_peft_model

from ..credit.alignment import check_alignment
from ..credit.flow import plugin_label
from ..errors import ConfigurationError
from ..types import NEEDS, implements

if TYPE_CHECKING:
    from .mixin import GRPOExtMixin

MULTIMODAL_KEYS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)
"""Entries of TRL's batch that its own forward passes hand on to the model."""


@dataclass(frozen=True)
class Scores:
    """Log-probabilities `(B, T)` of one generation batch that TRL has not computed; None and empty without need."""

    old_B_T: torch.Tensor | None = None
    ref_B_T: torch.Tensor | None = None
    teachers: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Scorer:
    """Knows what the selected hooks need and computes it.

    Args:
        trainer: A constructed trainer.
        hooks: Its advantage hooks.

    Raises:
        ConfigurationError: A hook needs what this run does not have; the message names the hook and what to do.
    """

    def __init__(self, trainer: GRPOExtMixin, hooks: Sequence[Any]) -> None:
        self._trainer = trainer
        self.needs = {need for hook in hooks for need in _needs(hook)}
        for hook in hooks:
            _check(trainer, hook)
        self._teachers: dict[str, Any] = {}
        for hook in hooks:
            for name in _strings(hook, "teachers"):
                if name not in self._teachers:
                    self._teachers[name] = _load_teacher(trainer, name, plugin_label(hook))

    def scores(self, batch: dict[str, Any]) -> Scores:
        """Score one generation batch. All ranks call it, since sharded models need all of them."""
        old_B_T = ref_B_T = None
        if "old_logps" in self.needs and "old_per_token_logps" not in batch:
            old_B_T = self._policy_logps(batch)
        if "ref_logps" in self.needs and "ref_per_token_logps" not in batch:
            with _as_reference(self._trainer):
                ref_B_T = self._policy_logps(batch)
        teachers = {name: self._teacher_logps(model, batch) for name, model in self._teachers.items()}
        return Scores(old_B_T, ref_B_T, teachers)

    def _policy_logps(self, batch: dict[str, Any]) -> torch.Tensor:
        """By TRL's own method, so these are the numbers that TRL itself would have computed."""
        ids, mask = _whole(batch)
        extra = {key: batch[key] for key in MULTIMODAL_KEYS if batch.get(key) is not None}
        length = batch["completion_ids"].size(1)
        with torch.no_grad():
            scored = self._trainer._get_per_token_logps_and_entropies(
                self._trainer.model, ids, mask, length, batch_size=self._rows_at_once, **extra
            )
        logps_B_T: torch.Tensor = scored[0].detach()
        return logps_B_T

    @property
    def _rows_at_once(self) -> int:
        args = self._trainer.args
        training = self._trainer.model.training
        return int(args.per_device_train_batch_size if training else args.per_device_eval_batch_size)

    def _teacher_logps(self, model: Any, batch: dict[str, Any]) -> torch.Tensor:
        ids, mask = _whole(batch)
        length, temperature = batch["completion_ids"].size(1), float(self._trainer._trl.temperature)
        parts = []
        for first in range(0, ids.size(0), self._rows_at_once):
            rows = slice(first, first + self._rows_at_once)
            with torch.no_grad(), self._trainer.accelerator.autocast():
                parts.append(completion_logps(model, ids[rows], mask[rows], length, temperature))
        return torch.cat(parts)


def completion_logps(
    model: Any, ids: torch.Tensor, attention_mask: torch.Tensor, length: int, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probabilities of the last `length` tokens under a causal language model, in float32.

    Args:
        model: Takes `input_ids` and `attention_mask` and returns `logits`.
        ids: `(B, P + T)`, prompts padded on the left.
        attention_mask: Of the same shape.
        length: `T`.
        temperature: The logits are divided by it, as TRL does for the policy.

    Returns:
        `(B, T)`.
    """
    takes = inspect.signature(_unwrapped(model).forward).parameters
    extra: dict[str, Any] = {}
    if "position_ids" in takes:
        extra["position_ids"] = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
    if "logits_to_keep" in takes:
        extra["logits_to_keep"] = length + 1
    logits = model(input_ids=ids, attention_mask=attention_mask, use_cache=False, **extra).logits
    logits = logits[:, -length - 1 : -1]
    rows = []
    for row_logits, row_ids in zip(logits, ids[:, -length:], strict=True):  # one by one: float32 logits are large
        scaled_T_V = row_logits.float() / temperature
        chosen_T = scaled_T_V.gather(1, row_ids.unsqueeze(1)).squeeze(1)
        rows.append(chosen_T - scaled_T_V.logsumexp(dim=1))
    return torch.stack(rows)


def _whole(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompt and completion, and what of them is no padding."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    return ids, torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)


def _unwrapped(model: Any) -> Any:
    return getattr(model, "module", model)


@contextlib.contextmanager
def _as_reference(trainer: GRPOExtMixin) -> Any:
    """The policy without its adapter, or with the adapter that TRL keeps as the reference."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if "ref" not in model.peft_config:
        with model.disable_adapter():
            yield
        return
    active = model.active_adapter
    model.set_adapter("ref")
    try:
        yield
    finally:
        model.set_adapter(active)


# ------------------------------------------------------------------ at construction


def _strings(hook: Any, attribute: str) -> tuple[str, ...]:
    value = getattr(hook, attribute, ())
    if isinstance(value, str) or not all(isinstance(name, str) for name in value):
        raise ConfigurationError(
            f"{attribute} of the advantage hook {plugin_label(hook)!r} is {value!r}; it must be a sequence of strings."
        )
    return tuple(value)


def _needs(hook: Any) -> tuple[str, ...]:
    return _strings(hook, "needs")


def _check(trainer: GRPOExtMixin, hook: Any) -> None:
    needs, label, trl = _needs(hook), f"The advantage hook {plugin_label(hook)!r}", trainer._trl
    unknown = [need for need in needs if need not in NEEDS]
    if unknown:
        raise ConfigurationError(f"{label} needs {unknown[0]!r}, which there is not. There are: {', '.join(NEEDS)}.")
    if "entropies" in needs and not implements(hook, "on_forward"):
        raise ConfigurationError(
            f"{label} needs entropies, and has only on_rollout. They come with the policy's loss forward: give it "
            "on_forward(advantages_B_T, forward), where forward.entropies_B_T has them."
        )
    if "sampling_logps" in needs and not (trl.use_vllm or trl.rollout_func is not None):
        raise ConfigurationError(
            f"{label} needs the sampler's log-probabilities, which only vLLM and a rollout_func report. Set "
            "use_vllm: true, or use a hook that takes old_logps."
        )
    if "ref_logps" in needs and trl.beta == 0.0 and not is_peft_model(trainer.accelerator.unwrap_model(trainer.model)):
        raise ConfigurationError(
            f"{label} needs a reference policy, and there is none: beta is 0.0 and the model has no adapter that could "
            "be switched off. Set beta above 0, train an adapter (use_peft: true), or name a model where the hook "
            f"takes one (`reference`, `teacher`). The model trained is {trl.model.config._name_or_path!r}."
        )
    if "offsets" in needs:
        check_alignment(trl._tokenizer)


def _load_teacher(trainer: GRPOExtMixin, name: str, hook: str) -> Any:
    """Load a teacher, after a look at its vocabulary; eval mode, without gradients, where the policy is."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, trust = trainer._trl._tokenizer, bool(getattr(trainer.args, "trust_remote_code", False))
    try:
        teachers = AutoTokenizer.from_pretrained(name, trust_remote_code=trust).get_vocab()
    except Exception as error:  # the hub's, the file system's and the parsers' errors have no common root
        raise ConfigurationError(
            f"The teacher {name!r} of the advantage hook {hook!r} has no tokenizer that can be loaded: {error}. Its "
            "vocabulary must be known to be the policy's."
        ) from error
    own = tokenizer.get_vocab()
    different = sorted(token for token, number in own.items() if teachers.get(token) != number)
    if different:
        example = different[0]
        raise ConfigurationError(
            f"The teacher {name!r} of the advantage hook {hook!r} has another vocabulary: {len(different)} of the "
            f"policy's {len(own)} tokens are not the same there, such as {example!r} with the number {own[example]} "
            f"here and {teachers.get(example, 'none')} there. Its log-probabilities would be of other texts."
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", trust_remote_code=trust)
    except Exception as error:  # as above
        raise ConfigurationError(
            f"The teacher {name!r} of the advantage hook {hook!r} cannot be loaded: {error}"
        ) from error
    if model.get_input_embeddings().num_embeddings <= max(own.values()):
        raise ConfigurationError(
            f"The teacher {name!r} of the advantage hook {hook!r} has {model.get_input_embeddings().num_embeddings} "
            f"embeddings, fewer than the policy's vocabulary needs ({max(own.values()) + 1})."
        )
    model.requires_grad_(False)
    accelerator = trainer.accelerator
    if trainer._trl.is_deepspeed_enabled:
        from trl.models import prepare_deepspeed

        return prepare_deepspeed(model, accelerator).eval()
    if trainer._trl.is_fsdp_enabled:
        from trl.models import prepare_fsdp

        return prepare_fsdp(model, accelerator).eval()
    return accelerator.prepare_model(model, evaluation_mode=True).eval()
