"""Everything that this package relies on inside TRL: versions, private names, and how TRL reduces its loss.

The adapter's collaborators get facts read here, never the trainer itself. `tests/upstream` runs this contract against
the oldest and the newest supported TRL. If a release changes something below, the error names it.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from accelerate.utils import is_peft_model
from packaging.version import Version
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from trl import GRPOTrainer
from trl.models import prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import pad, use_adapter

from ..credit.flow import TRL_REDUCTIONS
from ..credit.turns import Parsing
from ..errors import ConfigurationError, UpstreamError
from .facts import LossSettings, Progress, RunFacts

try:
    from trl.trainer.utils import add_fused_lm_head as add_fused_lm_head  # again, for the mixin
except ImportError:  # before TRL 1.16
    add_fused_lm_head = None
try:
    from trl.kernels import chunked_logprob
except ImportError:  # before TRL 1.16
    chunked_logprob = None

HEAD_TOKENS = 240
OLDEST_TESTED = "1.14"
NEWEST_TESTED = "1.16"

METHODS: dict[str, tuple[str, ...]] = {
    "_generate": ("self", "prompts"),
    "_generate_and_score_completions": ("self", "inputs"),
    "_tokenize_prompts": ("self", "prompts"),
    "_prepare_inputs": ("self", "generation_batch"),
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    # Called with positional arguments by some releases and passed through untouched, so only `self, model` matter.
    "_get_per_token_logps_and_entropies": ("self", "model"),
    "_compute_loss": ("self", "model", "inputs"),
    "compute_loss": ("self", "model", "inputs"),
    "evaluation_loop": ("self", "dataloader"),
    "log": ("self", "logs"),
    "_get_train_sampler": ("self", "dataset"),
    "_remove_unused_columns": ("self", "dataset", "description"),
    "_save": ("self", "output_dir"),
    "save_model": ("self", "output_dir"),
    "train": ("self", "resume_from_checkpoint"),
    "training_step": ("self", "model", "inputs"),
}
"""Methods of `GRPOTrainer` that we wrap, or call to draw and tokenise prompts, with their leading parameters."""

CALLED = frozenset({"_get_train_sampler", "_remove_unused_columns", "_tokenize_prompts"})
"""Those that are called and not wrapped."""

LOSS_METHODS = frozenset({"_compute_loss", "compute_loss"})
"""Methods that make the loss; a class that overrides one has its own loss."""

ENTROPY_ARGUMENT = 4
"""Place of `compute_entropy` after `model` among the arguments of `_get_per_token_logps_and_entropies`."""

SAVING: dict[str, tuple[str, ...]] = {
    "_get_output_dir": ("self", "trial"),
    "_load_from_checkpoint": ("self", "resume_from_checkpoint"),
    "_push_from_checkpoint": ("self", "checkpoint_folder"),
    "_save_checkpoint": ("self", "model", "trial"),
    "train": ("self", "resume_from_checkpoint"),
}
"""Methods of transformers' `Trainer` that `SafeCheckpoints` wraps."""

WHERE_THERE: dict[str, tuple[str, ...]] = {"_run_epoch": ("self",)}
"""Methods that are wrapped if this release of transformers has them."""

ATTRIBUTES: tuple[str, ...] = (
    *("_buffered_inputs", "_entropy_bonus_enabled", "_entropy_window_stats", "_last_world_entropy", "_logs"),
    *("_metrics", "_step", "_tokenizer", "aux_loss_enabled", "beta", "data_collator", "entropy_coef", "epsilon_high"),
    *("importance_sampling_level", "loss_type", "mask_truncated_completions", "max_completion_length"),
    *("multi_objective_aggregation", "num_generations", "num_generations_eval", "num_iterations"),
    *("pad_to_multiple_of", "reward_func_names", "reward_funcs", "reward_weights", "rollout_func", "scale_rewards"),
    *("temperature", "tools", "top_entropy_quantile", "train_dataset", "use_vllm"),
)
"""Attributes that a constructed `GRPOTrainer` has and that we read (or set aside for a trial and restore)."""

ARGUMENTS: tuple[str, ...] = (
    *("num_iterations", "sapo_temperature_pos", "steps_per_generation", "use_bias_correction_kl"),
)
"""Fields of `GRPOConfig` that we read."""

BATCH_KEYS: tuple[str, ...] = (
    *("advantages", "completion_ids", "completion_mask", "num_items_in_batch", "prompt_ids", "prompt_mask"),
)
"""What `_generate_and_score_completions` always returns and we read. Where they apply also `tool_mask`,
`old_per_token_logps`, `ref_per_token_logps`, `sampling_per_token_logps` and `importance_sampling_ratio`."""

MULTIMODAL_KEYS = frozenset(
    {
        *("image_grid_thw", "image_position_ids", "image_sizes", "mm_token_type_ids", "num_images", "num_tiles"),
        *("pixel_attention_mask", "pixel_values", "spatial_shapes", "token_type_ids"),
    }
)
"""Entries of a batch that belong to images, which compact updates leave alone."""

LOSS_TYPES = frozenset(TRL_REDUCTIONS)
GLOBAL_TOKEN_MEAN = frozenset(name for name in LOSS_TYPES if TRL_REDUCTIONS[name] == "token_mean")
LOCAL_TOKEN_MEAN = frozenset(name for name in LOSS_TYPES if TRL_REDUCTIONS[name] == "token_mean_local")
ROW_MEAN = LOSS_TYPES - GLOBAL_TOKEN_MEAN - LOCAL_TOKEN_MEAN
"""Their reduction divides by the rows of a micro-batch, masked ones included."""

LOSSES_PER_COMPLETION: dict[str, str] = {
    "trl.experimental.gmpo.gmpo_trainer.GMPOTrainer": (
        "it takes the geometric mean of a completion's importance ratios, which is no sum over its tokens"
    )
}
"""TRL's own trainers below `GRPOTrainer` whose loss has no per-token terms, and why."""


def check_version(installed: str | None = None) -> None:
    """Refuse a TRL that cannot work and warn about an untested one."""
    installed = version("trl") if installed is None else installed
    release = Version(installed)
    if release < Version(OLDEST_TESTED) or release.major > Version(NEWEST_TESTED).major:
        raise UpstreamError(
            f"trl {installed} is installed; trl-grpo-ext works with {OLDEST_TESTED} to {NEWEST_TESTED}.x. "
            f"Run: pip install 'trl>={OLDEST_TESTED},<{Version(NEWEST_TESTED).major + 1}'"
        )
    if release.release[:2] > Version(NEWEST_TESTED).release[:2]:
        warnings.warn(
            f"trl {installed} is newer than {NEWEST_TESTED}.x, the newest release trl-grpo-ext was tested with. "
            "The private names it relies on are checked now, and the loss at the first training step.",
            stacklevel=3,
        )


def check_class(trainer_class: type, methods: dict[str, tuple[str, ...]] = METHODS) -> None:
    """Check that a trainer class has the methods that we wrap, with the parameters that we pass on."""
    problems = []
    for name, expected in methods.items():
        method = getattr(trainer_class, name, None)
        if method is None:
            problems.append(f"method {name} is gone")
            continue
        parameters = tuple(inspect.signature(method).parameters)
        if parameters[: len(expected)] != expected:
            problems.append(f"method {name} takes {parameters}, expected it to begin with {expected}")
    _raise(problems, trainer_class)


def check_instance(trainer: Any) -> None:
    """Check that a constructed trainer has the attributes and arguments that we read."""
    problems = [f"attribute {name} is gone" for name in ATTRIBUTES if not hasattr(trainer, name)]
    problems += [f"argument {name} is gone" for name in ARGUMENTS if not hasattr(trainer.args, name)]
    _raise(problems, type(trainer))


def check_loss_type(loss_type: str | None) -> None:
    """Check that we know a loss type's reduction; None passes."""
    if loss_type is not None and loss_type not in LOSS_TYPES:
        raise ConfigurationError(
            f"loss_type {loss_type!r} cannot take a loss aggregation: trl-grpo-ext knows "
            f"{', '.join(sorted(LOSS_TYPES))}. Change loss_type, or remove loss_aggregation."
        )


def reason_per_completion(owner: type) -> str | None:
    """Why the loss of a known trainer below `GRPOTrainer` has no per-token terms; None for any other class."""
    return LOSSES_PER_COMPLETION.get(f"{owner.__module__}.{owner.__qualname__}")


def classes_between(trainer_class: type, mixin: type) -> Sequence[type]:
    """A user's classes between our mixin and TRL's trainer, nearest first."""
    order = trainer_class.__mro__
    if GRPOTrainer not in order:
        raise ConfigurationError(
            f"{trainer_class.__qualname__} is not a subclass of TRL's GRPOTrainer, which advantage hooks, aggregations "
            f"and compact updates need. Rewards work in any trainer: reward_funcs=load_rewards([...])."
        )
    return order[order.index(mixin) + 1 : order.index(GRPOTrainer)]


def check_batch(batch: dict[str, Any]) -> None:
    """Check that a scored generation batch has the entries that we read."""
    _raise([f"batch entry {key!r} is gone" for key in BATCH_KEYS if key not in batch], dict)


def facts_of(trainer: Any) -> RunFacts:
    """What stays the same for the run of a constructed trainer."""
    args, accelerator, tokenizer = trainer.args, trainer.accelerator, trainer._tokenizer
    # TRL 1.14 knows one end-of-sequence token only.
    ends = getattr(trainer, "eos_token_ids", [tokenizer.eos_token_id])
    return RunFacts(
        trainer=type(trainer).__qualname__,
        tokenizer=tokenizer,
        end_ids=frozenset({*ends, tokenizer.pad_token_id}),
        pad_id=tokenizer.pad_token_id,
        pad_to_multiple_of=trainer.pad_to_multiple_of,
        masks_truncated=bool(trainer.mask_truncated_completions),
        reward_names=tuple(trainer.reward_func_names),
        num_generations=trainer.num_generations,
        num_generations_eval=trainer.num_generations_eval,
        max_completion_length=trainer.max_completion_length,
        accumulation=int(args.gradient_accumulation_steps),
        steps_per_generation=int(args.steps_per_generation),
        rows_per_pass=int(args.per_device_train_batch_size),
        rows_per_pass_eval=int(args.per_device_eval_batch_size),
        rank=accelerator.process_index,
        ranks=accelerator.num_processes,
        gather=accelerator.gather,
        sum_over_ranks=partial(accelerator.reduce, reduction="sum"),
        device=accelerator.device,
        async_tools=frozenset(
            getattr(tool, "__name__", "") for tool in trainer.tools or () if inspect.iscoroutinefunction(tool)
        ),
    )


def parsing_of(tokenizer: Any) -> Parsing | None:
    """By what TRL parses the messages of a conversation; None without a template, or before Transformers 5.13."""
    template = getattr(tokenizer, "response_template", None)
    if template is None:
        return None
    try:
        from transformers.utils.chat_parsing.content_parsers import process_field
        from transformers.utils.chat_parsing.response_templates import load_response_template
    except ImportError:
        return None
    return Parsing(load_response_template(template), process_field)


def progress_of(trainer: Any) -> Progress:
    """Where in its run a trainer is."""
    training = bool(trainer.model.training)
    return Progress(
        training=training,
        step=trainer.state.global_step,
        accumulation=int(trainer.current_gradient_accumulation_steps) if training else 1,
        steps_per_generation=int(trainer.args.steps_per_generation) if training else 1,
        precision=torch.promote_types(torch.float32, trainer.model.dtype),
    )


def refuse_stream(dataset: Any) -> None:
    """Refuse data that has no rows to draw."""
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigurationError(
            f"resample draws further prompts from train_dataset, but {type(dataset).__name__} has no rows to choose "
            "from (a stream). Load it as a Dataset, or remove resample."
        )


def training_data_of(trainer: Any) -> tuple[Any, Callable[[], Any]]:
    """The rows of a trainer's data loader, without unused columns, and a function that makes a sampler of them."""
    args, rows = trainer.args, trainer._remove_unused_columns(trainer.train_dataset, "training")
    sampler = partial(trainer._get_train_sampler, rows)
    if len(sampler()) < args.generation_batch_size * args.num_iterations * args.steps_per_generation:
        prompts = int(args.generation_batch_size) // int(args.num_generations)
        raise ConfigurationError(f"A generation batch has {prompts} prompts, but train_dataset has fewer. Add some.")
    return rows, sampler


@contextmanager
def small_head_tiles(device: torch.device) -> Iterator[None]:
    """Inside, TRL's head makes the logits of few tokens at a time on a CPU, which takes less than half as long.

    It cuts the vocabulary into pieces of 32,768, and what it computes of 240 tokens and a piece takes less than 32 MiB:
    more than that glibc maps and unmaps at every operation, page by page.
    """
    if device.type != "cpu" or not hasattr(chunked_logprob, "TOKEN_CHUNK_SIZE"):
        yield
        return
    before, chunked_logprob.TOKEN_CHUNK_SIZE = chunked_logprob.TOKEN_CHUNK_SIZE, HEAD_TOKENS
    try:
        yield
    finally:
        chunked_logprob.TOKEN_CHUNK_SIZE = before


def batches_done(trainer: Any, step: int) -> int:
    """Generation batches that a run without `resample` has drawn by an optimizer step."""
    block = int(trainer.args.num_iterations) * int(trainer.args.steps_per_generation)
    return -(-step * int(trainer.args.gradient_accumulation_steps) // block)


def batch_statistics_of(trainer: Any) -> str | None:
    """The setting that makes TRL's own advantages depend on the whole batch; None if they depend on the group."""
    if trainer.multi_objective_aggregation == "normalize_then_sum":
        return "multi_objective_aggregation: normalize_then_sum"
    return "scale_rewards: batch" if trainer.scale_rewards == "batch" else None


def saves_inside_batches(trainer: Any) -> str | None:
    """The setting by which checkpoints fall inside generation batches, and what to set; None if none does."""
    args = trainer.args
    every, block = args.save_steps, int(args.steps_per_generation) * int(trainer.num_iterations)
    if args.save_strategy != "steps" or every < 1 or every * args.gradient_accumulation_steps % block == 0:
        return None
    steps = math.lcm(block, int(args.gradient_accumulation_steps)) // int(args.gradient_accumulation_steps)
    return f"save_steps={every} has to be a multiple of {steps} here"


def between_batches(trainer: Any) -> bool:
    """Whether TRL generates at the next micro-step."""
    return bool(trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations) == 0)


def problems_of(dataloader: Any, ranks: int) -> int | None:
    """The rows of a data loader's data; None if unknown. accelerate fills up the last batches with the first rows."""
    try:
        return len(dataloader.dataset)
    except (TypeError, NotImplementedError):
        if ranks > 1:
            warnings.warn(
                "The evaluation data has no length, so the problems with which accelerate fills up the last batch of "
                f"{ranks} processes count twice in pass@k. Use a data set that is not streamed.",
                stacklevel=2,
            )
        return None


def loss_settings_of(trainer: Any) -> LossSettings:
    """The settings that determine a trainer's loss."""
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


def keep_adapter_as_reference(model: Any, args: Any, peft_config: Any) -> None:
    """Keep a frozen copy, named `ref`, of an adapter that will be trained further.

    TRL makes one if `beta` is above 0, and uses it as the reference. With `beta` 0 it makes none, and a hook would get
    the bare model instead of the policy at the start of training. For a new adapter (`peft_config`) the two are equal.
    """
    beta = getattr(args, "beta", 0.0)
    if isinstance(model, str) or peft_config is not None or beta != 0.0 or not is_peft_model(model):
        return
    if "ref" in model.peft_config:
        return
    trained = model.active_adapter
    model.add_adapter("ref", model.peft_config[trained])
    set_peft_model_state_dict(model, get_peft_model_state_dict(model, adapter_name=trained), adapter_name="ref")


def served_instead(trainer: Any) -> str | None:
    """The name of the model that a vLLM server has, on the rank that talks to it, if it is not the trained one's."""
    served = getattr(getattr(getattr(trainer, "vllm_generation", None), "vllm_client", None), "model", None)
    named = [str(name).rstrip("/").rpartition("/")[2].lower() for name in (served, trainer.model.config._name_or_path)]
    return None if served is None or named[0] == named[1] else str(served)


def reference_of(trainer: Any) -> Callable[[], AbstractContextManager[Any]] | None:
    """A context in which the policy's pass is the reference's: adapter off, or TRL's `ref` on; None without one."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not is_peft_model(model):
        return nullcontext if trainer.beta != 0.0 else None
    return lambda: use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None)


def prepare_like_policy(trainer: Any, model: Any) -> Any:
    """Put another model on the policy's device, sharded like it, with the head that TRL gives the policy."""
    if add_fused_lm_head is not None:
        add_fused_lm_head(model, temperature=trainer.temperature)
    if trainer.is_deepspeed_enabled:
        return prepare_deepspeed(model, trainer.accelerator)
    if trainer.is_fsdp_enabled:
        return prepare_fsdp(model, trainer.accelerator)
    return trainer.accelerator.prepare_model(model, evaluation_mode=True)


def pad_rows(facts: RunFacts, rows: Sequence[Any], value: float, side: str = "right") -> torch.Tensor:
    """Rows of different lengths as one tensor, by TRL's own function."""
    tensors = [torch.as_tensor(row) for row in rows]
    padded: torch.Tensor = pad(tensors, value, padding_side=side, pad_to_multiple_of=facts.pad_to_multiple_of)
    return padded.to(facts.device)


@contextmanager
def reward_columns(trainer: Any) -> Iterator[Callable[[Sequence[str]], None]]:
    """A context in which TRL's reward functions, names and weights match the columns of rewards."""
    names, functions, weights = trainer.reward_func_names, trainer.reward_funcs, trainer.reward_weights

    def more(added: Sequence[str]) -> None:
        trainer.reward_func_names = [*names, *added]
        trainer.reward_funcs = [*functions, *[None] * len(added)]
        trainer.reward_weights = torch.cat([weights, weights.new_ones(len(added))])

    try:
        yield more
    finally:
        trainer.reward_func_names, trainer.reward_funcs, trainer.reward_weights = names, functions, weights


def slope_at_ratio_one(trainer: Any) -> float:
    """|∂l/∂A| of one token of TRL's loss at importance ratio 1, advantage 1 and log-probability -1."""
    if trainer.loss_type == "sapo":
        return 2.0 / float(trainer.args.sapo_temperature_pos)  # σ(0)·4/τ
    if trainer.loss_type == "cispo":
        return min(1.0, float(trainer.epsilon_high))
    return 1.0


@contextmanager
def restore_after_trial(trainer: Any) -> Iterator[None]:
    """Restore metrics and entropy controller after trials of TRL's loss, without entropy bonus and auxiliary loss."""
    metrics = {mode: {name: list(values) for name, values in kept.items()} for mode, kept in trainer._metrics.items()}
    names = ("entropy_coef", "_last_world_entropy", "_entropy_window_stats", "_entropy_bonus_enabled")
    before = {name: getattr(trainer, name) for name in (*names, "aux_loss_enabled")}
    trainer._entropy_bonus_enabled = trainer.aux_loss_enabled = False
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(trainer, name, value)
        for mode, kept in trainer._metrics.items():
            kept.clear()
            kept.update(metrics[mode])


def backward_may_be_left_out(trainer: Any) -> bool:
    """Whether no one misses this micro-step's pass: it is not the last of its step, and no engine acts at each pass."""
    accelerator = trainer.accelerator
    engine = accelerator.distributed_type.value
    return not accelerator.sync_gradients and (engine == "NO" or engine.startswith("MULTI_"))


def drop_undefined_metrics(trainer: Any) -> None:
    """Remove metrics without a value from what TRL is about to log, since its loggers would print None."""
    for kept in trainer._metrics.values():
        for name in [name for name, values in kept.items() if values and all(map(math.isnan, values))]:
            del kept[name]


def _raise(problems: list[str], where: type) -> None:
    if problems:
        raise UpstreamError(
            f"trl {version('trl')} is not the TRL that trl-grpo-ext knows ({where.__module__}.{where.__qualname__}): "
            + "; ".join(problems)
            + f". Install a TRL between {OLDEST_TESTED} and {NEWEST_TESTED}.x, or report it to trl-grpo-ext."
        )


def reduction_weights(
    loss_type: str, mask_B_T: torch.Tensor, num_items_in_batch: torch.Tensor, facts: RunFacts, progress: Progress
) -> torch.Tensor:
    """The weight that TRL's reduction gives each token of a micro-batch, `(B, T)`, measured by the self-check."""
    check_loss_type(loss_type)
    accumulation = progress.accumulation
    rows = mask_B_T.size(0) * accumulation
    tokens_of_step = num_items_in_batch.clamp(min=1.0) / facts.ranks * accumulation / progress.steps_per_generation
    divisors: dict[str, Any] = {
        "token_mean": tokens_of_step,
        "token_mean_local": mask_B_T.sum().clamp(min=1.0) * accumulation,
        "seq_mean_token_mean": mask_B_T.sum(-1, keepdim=True).clamp(min=1.0) * rows,
        "seq_mean_token_sum": rows,
        "constant_length": rows * facts.max_completion_length,
    }
    weights_B_T: torch.Tensor = mask_B_T / divisors[TRL_REDUCTIONS[loss_type]]
    return weights_B_T
