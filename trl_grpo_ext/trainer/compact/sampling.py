"""Passes in which each prompt is read once: its keys and values are copied for every completion, as in sampling."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from copy import copy
from typing import Any

import torch
from transformers import Cache, DynamicCache, StaticCache

from .packed import backbone_of, reason_against_sharing, window_of


def sharing_of(trainer: Any) -> Callable[[], AbstractContextManager[None]]:
    """What the trainer's generation runs in, so that prompts are shared where one process samples and it is exact."""
    elsewhere = trainer.use_vllm or trainer.use_transformers_continuous_batching or trainer.rollout_func is not None
    model = trainer.accelerator.unwrap_model(trainer.model)
    if elsewhere or not runs_alone(trainer) or not copies_exactly(model):
        return contextlib.nullcontext
    draws = reason_against_sharing(model) is not None  # in training, where TRL samples with dropout
    return lambda: contextlib.nullcontext() if draws and model.training else shared_prompts(model)


def runs_alone(trainer: Any) -> bool:
    """Whether no other process takes part in a pass of a model, and would have to run as many."""
    return not (trainer.accelerator.num_processes > 1 or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled)


def copies_exactly(model: Any) -> bool:
    """Whether a prompt's keys and values are all that a completion needs, and do not depend on its length."""
    backbone = backbone_of(model)
    text = model.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    angles = {one.get("rope_type") for one in (rope, *rope.values()) if isinstance(one, dict)}
    takes = inspect.signature(type(backbone).forward).parameters
    return (
        {"position_ids", "past_key_values"} <= takes.keys()
        and not model.config.is_encoder_decoder
        and not getattr(backbone, "_is_stateful", False)
        and window_of(model.config) is None
        and not angles & {"dynamic", "longrope"}  # they change with the length of a pass
        and {"full_attention"}.issuperset(getattr(text, "layer_types", None) or ())
        and not any(
            adapter.is_prompt_learning or getattr(adapter, "alora_invocation_tokens", None)
            for adapter in getattr(model, "peft_config", {}).values()
        )
    )


@contextlib.contextmanager
def shared_prompts(model: Any) -> Iterator[None]:
    before = vars(model).get("generate")
    model.generate = functools.partial(_generate_once, model, model.generate)
    try:
        yield
    finally:
        del model.generate
        if before is not None:
            model.generate = before


def _generate_once(model: Any, generate: Callable[..., Any], **given: Any) -> Any:
    """`generate`'s result. Calls with images, with beams, or with no or another kind of cache are left alone."""
    tensors = {name for name, value in given.items() if isinstance(value, torch.Tensor)}
    config = given.get("generation_config")
    if tensors != {"input_ids", "attention_mask"} or "past_key_values" in given or config is None:
        return generate(**given)
    ids = given["input_ids"]
    mask = given["attention_mask"]
    plain = config.use_cache is not False and config.num_beams in (None, 1) and config.max_new_tokens is not None
    if not plain or config.cache_implementation not in (None, "static"):  # another cache is the user's choice
        return generate(**given)
    new_cache = functools.partial(DynamicCache, config=model.config)
    if config.cache_implementation == "static":
        new_cache = functools.partial(StaticCache, model.config, max_cache_len=ids.size(1) + config.max_new_tokens)
        config = copy(config)
        config.cache_implementation = None  # `generate` takes either a cache or its name
    with torch.no_grad():
        cache = read_once(model, ids, mask, new_cache)
    if cache is None:
        return generate(**given)
    return generate(**{**given, "generation_config": config, "past_key_values": cache})


def read_once(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, new_cache: Callable[[], Cache] | None = None
) -> Cache | None:
    """Keys and values of prompts without their last tokens, of equal ones read once; None where all differ."""
    numbers: dict[tuple[int, ...], int] = {}
    rows = torch.cat([ids, mask], dim=1).tolist()
    which = [numbers.setdefault(tuple(row), len(numbers)) for row in rows]
    if len(numbers) == len(rows) or ids.size(1) < 2 or not mask[:, :-1].any(dim=1).all():
        return None
    firsts = [which.index(number) for number in range(len(numbers))]
    seen = mask[firsts, :-1]
    cache = DynamicCache(config=model.config) if new_cache is None else new_cache()
    read = {"input_ids": ids[firsts, :-1], "attention_mask": seen, "past_key_values": cache, "use_cache": True}
    samples: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # what `generate` calls
    if "logits_to_keep" in inspect.signature(samples.forward).parameters:
        read["logits_to_keep"] = 1
    samples(position_ids=(seen.cumsum(dim=1) - 1).clamp(min=0), **read)  # whose `forward` may be wrapped in autocast
    cache.reorder_cache(torch.tensor(which, device=ids.device))
    return cache
