"""The recipes' trainer, and a training between two evaluations that works on every engine."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, GenerationConfig, StaticCache

from trl_grpo_ext import GRPOExtTrainer
from trl_grpo_ext.launch.checkpoints import SafeCheckpoints, exit_status
from trl_grpo_ext.launch.engine import EngineCheck, ExpectedRun

from .processes import leave
from .quantised import keep_4_bit_trainable, keep_adapters_in_float32
from .results import first_evaluation


class RecipeTrainer(SafeCheckpoints, GRPOExtTrainer):
    """`GRPOExtTrainer` with complete checkpoints or none, which saves and stops on SIGTERM.

    With `share_prompts` one process samples as it trains: each prompt is computed once for its completions.
    """

    eval_temperature: float | None = None
    adapters_in_float32 = True  # see `train_and_score`; `doctor` asks

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        # Several processes may hold parts of the weights, and then all must run the model equally often.
        if (
            self.args.share_prompts
            and self.accelerator.num_processes == 1
            and not (self.use_vllm or self.is_fsdp_enabled)
        ):
            share_prefill(self)

    def evaluate(self, *arguments: Any, **keywords: Any) -> Any:
        """Evaluate as usual, at the temperature of evaluations."""
        with _sampling_at(self, self.eval_temperature):
            return super().evaluate(*arguments, **keywords)


@contextmanager
def _sampling_at(trainer: Any, temperature: float | None) -> Iterator[None]:
    """A context in which generation has another temperature; `None` for no change."""
    if temperature is None:
        yield
        return
    holder = trainer.vllm_generation if trainer.use_vllm else trainer.generation_config
    before = holder.temperature
    try:
        _set_temperature(trainer, holder, temperature)
        yield
    finally:
        _set_temperature(trainer, holder, before)


def _set_temperature(trainer: Any, holder: Any, temperature: float) -> None:
    holder.temperature = temperature
    if not trainer.use_vllm:
        trainer.generation_kwargs["temperature"] = temperature  # TRL lays them over the model's own


def share_prefill(trainer: Any) -> None:
    """Compute each prompt once for all its completions when sampling with transformers.

    TRL gives `generate` each prompt as often as it is to be answered; on a CPU, reading prompts is much of the work.
    With `cache_implementation: static` the cache has its full size at once, else it is copied for every token.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    generate = model.generate

    def generate_from_shared(
        *, input_ids: torch.Tensor, attention_mask: torch.Tensor, generation_config: GenerationConfig, **settings: Any
    ) -> Any:
        numbers: dict[tuple[int, ...], int] = {}
        rows = torch.cat([input_ids, attention_mask], dim=1).tolist()
        which = [numbers.setdefault(tuple(row), len(numbers)) for row in rows]
        if len(numbers) < len(rows):
            firsts = [which.index(number) for number in range(len(numbers))]
            ids, mask = input_ids[firsts, :-1], attention_mask[firsts, :-1]  # `generate` reads the last token itself
            places = (mask.cumsum(dim=1) - 1).clamp(min=0)
            cache: Cache = DynamicCache(config=model.config)
            if generation_config.cache_implementation == "static":
                most = input_ids.size(1) + generation_config.max_new_tokens
                cache = StaticCache(config=model.config, max_cache_len=most)
                generation_config = copy(generation_config)
                generation_config.cache_implementation = None  # `generate` takes either a cache or its name
            settings["past_key_values"] = cache
            with torch.no_grad():
                model.get_decoder()(
                    input_ids=ids, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True
                )
            cache.reorder_cache(torch.tensor(which, device=input_ids.device))
        return generate(
            input_ids=input_ids, attention_mask=attention_mask, generation_config=generation_config, **settings
        )

    model.generate = generate_from_shared


@dataclass(frozen=True)
class Scored:
    """A finished training."""

    before: dict[str, Any]
    after: dict[str, Any]
    seconds: float
    facts: dict[str, Any]


def train_and_score(trainer: RecipeTrainer, asked: ExpectedRun, *lines: str) -> Scored:
    """Train between two evaluations, check what was asked for, and save the model and the trainer's state."""
    keep_4_bit_trainable(trainer.model)
    if asked.bits:
        keep_adapters_in_float32(trainer.model)
    engine = EngineCheck(trainer, asked)
    for line in lines:
        trainer.accelerator.print(line, flush=True)
    resumed = trainer.args.resume_from_checkpoint
    # The first evaluation runs inside: before that, ZeRO and FSDP have no model that can generate.
    started = time.perf_counter()
    trainer.train(resume_from_checkpoint=resumed)
    seconds = time.perf_counter() - started
    exit_if_stopped(trainer)
    before = first_evaluation(trainer.state.log_history)
    if resumed is None:
        seconds -= before.get("eval_runtime", 0.0)
    after = trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    return Scored(before, after, seconds, engine.facts)


def exit_if_stopped(trainer: RecipeTrainer) -> None:
    """Exit if a signal ended the training; the checkpoint is saved, and nothing else is worth the time."""
    stopped_by = trainer.stopped_by_signal
    if stopped_by is None:
        return
    step, folder = trainer.state.global_step, trainer.args.output_dir
    trainer.accelerator.print(
        f"{stopped_by.name}: saved checkpoint-{step} in {folder}; continue with --resume_from_checkpoint true",
        flush=True,
    )
    leave(trainer)
    sys.exit(exit_status(stopped_by))
