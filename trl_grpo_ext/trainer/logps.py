"""Log-probabilities and entropies that hooks declare (`needs`, `teachers`) and TRL does not compute."""

import inspect
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ..credit.alignment import check_alignment
from ..credit.flow import plugin_label
from ..errors import ConfigurationError
from ..types import (
    POLICY,
    REFERENCE,
    AggregationDeclaration,
    Declaration,
    FilterDeclaration,
    HookDeclaration,
    TokenLossDeclaration,
    implements,
    split_teacher,
)
from .batch import whole_rows
from .compact.sampling import copies_exactly, read_once, runs_alone
from .sampled_batch import HookLogps
from .upstream import acting, reading


class LogpsForHooks:
    """Computes the log-probabilities and entropies that the selected hooks need, with the models of a trainer."""

    def __init__(self, hooks: Sequence[Any], trainer: Any, tokenizer: Any, share_prompts: bool = False) -> None:
        self._trainer = trainer
        self._shares = share_prompts and runs_alone(trainer)
        self.needs = {need for hook in hooks for need in Declaration.of(hook).needs}
        for hook in hooks:
            _check(hook, trainer, tokenizer)
        self._pad = tokenizer.pad_token_id
        self._loaded: dict[str, Any] = {}
        self._teachers: dict[str, str] = {}  # by name, a hook that asks for it
        for hook in hooks:
            for name in _teachers(hook):
                model, _ = split_teacher(name)
                if model not in (POLICY, REFERENCE) and model not in self._loaded:
                    remote_code = bool(trainer.args.trust_remote_code)
                    teacher = _load_teacher(model, plugin_label(hook), tokenizer, remote_code)
                    self._loaded[model] = acting.prepare_like_policy(trainer, teacher).eval()
                self._teachers.setdefault(name, plugin_label(hook))

    def missing(self, batch: Collection[str]) -> list[str]:
        """What `compute` would compute for a batch with these entries: names from `needs`, and names of teachers."""
        keys = {"old_logps": "old_per_token_logps", "old_entropies": None, "ref_logps": "ref_per_token_logps"}
        return [need for need, key in keys.items() if need in self.needs and key not in batch] + [*self._teachers]

    def with_prompts(self, batch: dict[str, Any], inputs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """The batch after the prompts of each column that a teacher sees, by column; it may raise on one rank alone."""
        if self._loaded and batch.get("pixel_values") is not None:
            raise ConfigurationError(f"The teacher {next(iter(self._loaded))!r} sees no images. Remove its hook.")
        columns = {column: hook for name, hook in self._teachers.items() if (column := split_teacher(name)[1])}
        return {column: self._after_prompts(batch, inputs, column, hook) for column, hook in columns.items()}

    def compute(self, batch: dict[str, Any], prompted: Mapping[str, dict[str, Any]], rows_at_once: int) -> HookLogps:
        """Compute them for one generation batch. All ranks call it, since sharded models need all of them."""
        missing = self.missing(batch)
        found = dict[str, torch.Tensor]()
        with_entropies = "old_entropies" in missing
        if with_entropies or "old_logps" in missing:
            found["old_logps"], entropies_B_T = acting.policy_pass(self._trainer, batch, rows_at_once, with_entropies)
            if entropies_B_T is not None:
                found["old_entropies"] = entropies_B_T
        if "ref_logps" in missing:
            found["ref_logps"] = self._teacher_logps(REFERENCE, batch, prompted, rows_at_once)
        return found | {name: self._teacher_logps(name, batch, prompted, rows_at_once) for name in self._teachers}

    def _teacher_logps(
        self, name: str, batch: dict[str, Any], prompted: Mapping[str, dict[str, Any]], rows_at_once: int
    ) -> torch.Tensor:
        teacher, column = split_teacher(name)
        batch = prompted.get(column, batch)
        if teacher in (POLICY, REFERENCE):
            found = nullcontext(None) if teacher == POLICY else reading.reference_of(self._trainer)
            assert found is not None  # checked at construction
            with found as model:
                return acting.policy_pass(self._trainer, batch, rows_at_once, False, model)[0]
        ids, mask = whole_rows(batch)
        parts = []
        model = self._loaded[teacher]
        shares = self._shares and copies_exactly(model)
        for first in range(0, ids.size(0), rows_at_once):
            rows = slice(first, first + rows_at_once)
            with torch.no_grad(), self._trainer.accelerator.autocast():
                parts.append(tiled_logps(model, ids[rows], mask[rows], batch["completion_ids"].size(1), shares))
        return torch.cat(parts)

    def _after_prompts(
        self, batch: dict[str, Any], inputs: Sequence[Mapping[str, Any]], column: str, hook: str
    ) -> dict[str, Any]:
        prompts: list[Any] = [row.get(column) for row in inputs]
        if not all(prompts):
            row = [*map(bool, prompts)].index(False)
            what = f"shows its teacher the column {column!r}, which row {row} lacks"
            raise ConfigurationError(f"The advantage hook {hook!r} {what}; the columns are {sorted(inputs[0])}.")
        if batch.get("pixel_values") is not None:
            raise ConfigurationError(f"The advantage hook {hook!r} shows its teacher other prompts: not with images.")
        tokens = [batch["prompt_ids"].new_tensor(row) for row in acting.prompt_tokens(self._trainer, prompts)]
        left: dict[str, Any] = {"batch_first": True, "padding_side": "left"}
        completions = {key: batch[key] for key in ("completion_ids", "completion_mask")}
        return completions | {
            "prompt_ids": pad_sequence(tokens, padding_value=self._pad, **left),
            "prompt_mask": pad_sequence([torch.ones_like(row) for row in tokens], **left),
        }


def tiled_logps(
    model: Any, ids: torch.Tensor, attention_mask: torch.Tensor, length: int, shares: bool = False
) -> torch.Tensor:
    """Log-probabilities `(B, T)` of the last `length` tokens by TRL's head, which never makes all logits."""
    labels = ids.masked_fill(attention_mask == 0, -100)  # TRL scores the token that follows each labelled place
    labels[:, :-length] = -100
    prompt = ids.size(1) - length
    cache = read_once(model, ids[:, :prompt], attention_mask[:, :prompt]) if shares else None
    new = slice(0 if cache is None else prompt - 1, None)
    given: dict[str, Any] = {"input_ids": ids[:, new], "attention_mask": attention_mask, "labels": labels[:, new]}
    given |= {"fused_lm_head": True, "past_key_values": cache}
    if "position_ids" in inspect.signature(getattr(model, "module", model).forward).parameters:
        given["position_ids"] = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, new]
    logps_B_T: torch.Tensor = model(**given).log_probs[:, -length:]
    return logps_B_T


def _teachers(plugin: Any) -> tuple[str, ...]:
    declared = Declaration.of(plugin)
    return declared.teachers if isinstance(declared, HookDeclaration | FilterDeclaration) else ()


def needs_reference(plugin: Any) -> bool:
    of_teachers = any(split_teacher(name)[0] == REFERENCE for name in _teachers(plugin))
    return of_teachers or "ref_logps" in Declaration.of(plugin).needs


def _check(hook: Any, trainer: Any, tokenizer: Any) -> None:
    declared = Declaration.of(hook)
    needs = declared.needs
    kinds: dict[type, str] = {FilterDeclaration: "group filter", AggregationDeclaration: "loss aggregation"}
    kinds[TokenLossDeclaration] = "token loss"
    label = f"The {kinds.get(type(declared), 'advantage hook')} {plugin_label(hook)!r}"
    if "entropies" in needs and not implements(hook, "on_forward"):
        raise ConfigurationError(f"{label} needs entropies, which on_forward alone sees. List old_entropies.")
    if "several_updates" in needs and (one_update := reading.one_update_of(trainer)) is not None:
        what = f"acts on how far the policy has moved, but each batch feeds one optimizer step ({one_update})"
        raise ConfigurationError(f"{label} {what}. Raise num_iterations or steps_per_generation.")
    if "sampling_logps" in needs and not trainer.use_vllm and trainer.rollout_func is None:
        what = "needs the sampler's log-probabilities, which only vLLM and a rollout_func provide"
        raise ConfigurationError(f"{label} {what}. Set use_vllm: true, or use one that takes old_logps.")
    if needs_reference(hook) and reading.reference_of(trainer) is None:
        what = "needs a reference policy, but beta is 0.0 and the model has no adapter"
        raise ConfigurationError(f"{label} {what}. Set one of them, or name a model where it takes one (`teacher`).")
    if "offsets" in needs:
        check_alignment(tokenizer)


def _load_teacher(name: str, hook: str, tokenizer: Any, trust_remote_code: bool) -> Any:
    """Check a teacher's vocabulary and load it without gradients."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    label = f"The teacher {name!r} of the advantage hook {hook!r}"

    def loaded(auto: Any, **options: Any) -> Any:
        try:
            return auto.from_pretrained(name, trust_remote_code=trust_remote_code, **options)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{label} cannot be loaded: {error}") from error

    teachers = loaded(AutoTokenizer).get_vocab()
    own = tokenizer.get_vocab()
    different = sorted(token for token, number in own.items() if teachers.get(token) != number)
    if different:
        example = different[0]
        what = f"{len(different)} of the policy's {len(own)} tokens differ, such as {example!r}"
        numbers = f"with the number {own[example]} here and {teachers.get(example, 'none')} there"
        raise ConfigurationError(f"{label} has a different vocabulary: {what} {numbers}.")
    return loaded(AutoModelForCausalLM, dtype="auto").requires_grad_(False)
