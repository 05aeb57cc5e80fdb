"""Facts read off TRL's trainer, so that nobody else needs it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from trl import GRPOTrainer
from trl.trainer.utils import use_adapter

from ...credit.flow import TRL_REDUCTIONS
from ...errors import ConfigurationError
from ...guard.agreement import Agreement
from . import contract


class RankFacts:
    """Which rank this is, and how it reaches the others."""

    def __init__(self, accelerator: Any) -> None:
        self.rank: int = accelerator.process_index
        self.ranks: int = accelerator.num_processes
        self.agreement = Agreement(self.rank, self.ranks, accelerator.gather)
        self.gather: Callable[[torch.Tensor], torch.Tensor] = accelerator.gather  # in rank order
        self.sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] = partial(accelerator.reduce, reduction="sum")
        self.device: torch.device = accelerator.device


class UnevenRanks(RankFacts):
    """Ranks of which each may have another number of rows."""

    def __init__(self, accelerator: Any) -> None:
        super().__init__(accelerator)
        self.gather = self._gather_uneven

    def _gather_uneven(self, values: torch.Tensor) -> torch.Tensor:
        counts = self.agreement.gather(torch.tensor([len(values)], device=values.device)).tolist()
        missing = values.new_zeros(max(counts) - len(values), *values.shape[1:])
        both = torch.split(self.agreement.gather(torch.cat([values, missing])), max(counts))
        return torch.cat([rows[:count] for rows, count in zip(both, counts, strict=True)])


class RunFacts(RankFacts):
    """What stays the same from a trainer's construction to its end."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer.accelerator)
        args = trainer.args
        self.trainer_name = type(trainer).__qualname__  # for messages
        self.tokenizer = trainer._tokenizer
        self.pad_id = self.tokenizer.pad_token_id
        self.end_ids = frozenset({*trainer.eos_token_ids, self.pad_id})  # tokens that end a completion
        self.pad_to_multiple_of: int | None = trainer.pad_to_multiple_of  # the width of TRL's tensors is one
        self.masks_truncated = bool(trainer.mask_truncated_completions)
        self.reward_names = tuple(trainer.reward_func_names)
        self.num_generations: int = trainer.num_generations
        self.num_generations_eval: int = trainer.num_generations_eval
        self.accumulation = int(args.gradient_accumulation_steps)  # micro-batches of an optimizer step
        self.steps_per_generation = int(args.steps_per_generation)  # micro-batches of a generation batch
        self.rows_per_pass = int(args.per_device_train_batch_size)
        self.rows_per_pass_eval = int(args.per_device_eval_batch_size)
        tools = [tool for tool in trainer.tools or () if inspect.iscoroutinefunction(tool)]
        self.async_tools = frozenset(getattr(tool, "__name__", "") for tool in tools)

    def group_size(self, training: bool) -> int:
        return self.num_generations if training else self.num_generations_eval

    def rows_at_once(self, training: bool) -> int:
        return self.rows_per_pass if training else self.rows_per_pass_eval


@dataclass(frozen=True)
class Progress:
    """Where in the run a call happens."""

    training: bool  # False in evaluation, which neither accumulates nor cuts generation batches
    step: int  # optimizer steps done
    accumulation: int = 1  # micro-batches of the optimizer step at hand
    steps_per_generation: int = 1  # micro-batches of the generation batch at hand
    max_completion_length: int = 0  # in tokens; a callback may raise it as the run goes on
    precision: torch.dtype = torch.float32  # of the loss: float32, unless the policy has more


def progress_of(trainer: Any) -> Progress:
    training = bool(trainer.model.training)
    return Progress(
        training=training,
        step=trainer.state.global_step,
        accumulation=int(trainer.current_gradient_accumulation_steps) if training else 1,
        steps_per_generation=int(trainer.args.steps_per_generation) if training else 1,
        max_completion_length=trainer.max_completion_length,
        precision=torch.promote_types(torch.float32, trainer.model.dtype),
    )


def training_data_of(trainer: Any) -> tuple[Any, Callable[[], Any]]:
    """The rows of a trainer's data loader, without unused columns, and a function that makes a sampler of them."""
    args = trainer.args
    rows = trainer._remove_unused_columns(trainer.train_dataset, "training")
    sampler = partial(trainer._get_train_sampler, rows)
    if len(sampler()) < args.generation_batch_size * args.num_iterations * args.steps_per_generation:
        prompts = int(args.generation_batch_size) // int(args.num_generations)
        raise ConfigurationError(f"A generation batch has {prompts} prompts, but train_dataset has fewer. Add some.")
    if getattr(trainer.get_train_dataloader, "__func__", None) is not GRPOTrainer.get_train_dataloader:
        what = (
            f"Prompts are drawn from train_dataset, and get_train_dataloader of {type(trainer).__name__} is not asked"
        )
        warnings.warn(f"{what}. If it deals other rows, put them into train_dataset.", stacklevel=2)
    return rows, sampler


def inside_a_batch(trainer: Any) -> bool:
    """Whether TRL generates nothing at the next micro-step, so that no run could resume from a checkpoint here."""
    return bool(trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations))


@dataclass(frozen=True)
class LossSettings:
    """What decides about TRL's loss, read at each loss because callbacks may change it."""

    loss_type: str
    beta: float = 0.0
    importance_sampling_level: str = "token"
    bias_correction_kl: bool = False
    entropy_bonus: bool = False
    auxiliary_loss: bool = False
    top_entropy_quantile: float = 1.0


def loss_settings_of(trainer: Any) -> LossSettings:
    return LossSettings(
        loss_type=trainer.loss_type,
        beta=trainer.beta,
        importance_sampling_level=trainer.importance_sampling_level,
        bias_correction_kl=trainer.args.use_bias_correction_kl,
        entropy_bonus=trainer._entropy_bonus_enabled,
        auxiliary_loss=trainer.aux_loss_enabled,
        top_entropy_quantile=trainer.top_entropy_quantile,
    )


def one_update_of(trainer: Any) -> str | None:
    """The settings by which each generation batch feeds one optimizer step; None if the policy moves in between."""
    names = ("num_iterations", "steps_per_generation", "gradient_accumulation_steps")
    iterations, steps, accumulation = values = [int(getattr(trainer.args, name)) for name in names]
    if accumulation % (iterations * steps):  # TRL's own condition for keeping the old policy's log-probabilities
        return None
    return ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))


def reference_of(trainer: Any) -> AbstractContextManager[Any] | None:
    """A context with the reference: TRL's model, or the policy with its adapter off or `ref` on."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not is_peft_model(model):
        return None if trainer.ref_model is None else nullcontext(trainer.ref_model)
    return _on_adapter(trainer.model, model)


@contextmanager
def _on_adapter(policy: Any, model: Any) -> Iterator[Any]:
    with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
        yield policy


def slope_at_ratio_one(trainer: Any) -> float:
    """|∂l/∂A| of one token of TRL's loss at importance ratio 1, advantage 1 and log-probability -1."""
    if trainer.loss_type == "sapo":
        return 2.0 / float(trainer.args.sapo_temperature_pos)  # σ(0)·4/τ
    if trainer.loss_type == "cispo":
        return min(1.0, float(trainer.epsilon_high))
    return 1.0


def backward_may_be_left_out(trainer: Any) -> bool:
    """Whether no one misses this micro-step's pass: it is not the last of its step, and no engine acts at each pass."""
    accelerator = trainer.accelerator
    engine = accelerator.distributed_type.value
    return not accelerator.sync_gradients and (engine == "NO" or engine.startswith("MULTI_"))


def reduction_weights(
    loss_type: str, mask_B_T: torch.Tensor, num_items_in_batch: torch.Tensor, facts: RunFacts, progress: Progress
) -> torch.Tensor:
    """The weight that TRL's reduction gives each token of a micro-batch, `(B, T)`, measured by the self-check."""
    accumulation = progress.accumulation
    rows = mask_B_T.size(0) * accumulation
    tokens_of_step = num_items_in_batch.clamp(min=1.0) / facts.ranks * accumulation / progress.steps_per_generation
    divisors: dict[str, Any] = {
        "token_mean": tokens_of_step,
        "token_mean_local": mask_B_T.sum().clamp(min=1.0) * accumulation,
        "seq_mean_token_mean": mask_B_T.sum(-1, keepdim=True).clamp(min=1.0) * rows,
        "seq_mean_token_sum": rows,
        "constant_length": rows * progress.max_completion_length,
    }
    weights_B_T: torch.Tensor = mask_B_T / divisors[TRL_REDUCTIONS[loss_type]]
    return weights_B_T


@dataclass(frozen=True)
class Generated:
    """What TRL's `_generate` returns, by name."""

    prompt_ids: Sequence[Sequence[int]] = ()
    completion_ids: Sequence[Sequence[int]] = ()
    tool_masks: Sequence[Sequence[int]] | None = None  # which tokens the model wrote, by completion; None without tools
    sampling_logps: Sequence[Sequence[float | None]] | None = None
    images: Any = None

    @classmethod
    def of(cls, returned: Sequence[Any]) -> Generated:
        prompt_ids, completion_ids, tool_masks, _, sampling_logps, _, images, *_ = returned
        return cls(prompt_ids, completion_ids, tool_masks, sampling_logps, images)


def closes_step(trainer: Any) -> bool:
    """Whether the micro-step just done was the last of its optimizer step, where TRL logs its own `step_time`."""
    return bool(trainer._step % trainer.current_gradient_accumulation_steps == 0)


def images_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {key: batch[key] for key in contract.MULTIMODAL_KEYS if batch.get(key) is not None}


def adapter_in_use(model: Any) -> Any:
    """What stands for the adapters that a model runs with; None without any."""
    if not is_peft_model(model):
        return None
    layer = next((module for module in model.modules() if isinstance(module, BaseTunerLayer)), None)
    return None if layer is None else (layer.disable_adapters, [*layer.active_adapters])
