"""What of TRL is relied on: versions, methods, attributes, entries of batches and loss types, and their checks."""

import inspect
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from packaging.version import Version
from trl import GRPOTrainer

from ...credit.flow import TRL_REDUCTIONS
from ...errors import ConfigurationError, UpstreamError

OLDEST_TESTED = "1.16"
NEWEST_TESTED = "1.16"

LOGPS_ARGUMENTS = ("input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy")
"""The arguments after `model` of `_get_per_token_logps_and_entropies`."""

METHODS: dict[str, tuple[str, ...]] = {
    "_generate": ("self", "prompts"),
    "_generate_and_score_completions": ("self", "inputs"),
    "_tokenize_prompts": ("self", "prompts"),
    "_prepare_inputs": ("self", "generation_batch"),
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "_get_per_token_logps_and_entropies": ("self", "model", *LOGPS_ARGUMENTS),
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

SAVING: dict[str, tuple[str, ...]] = {
    "_get_output_dir": ("self", "trial"),
    "_load_from_checkpoint": ("self", "resume_from_checkpoint"),
    "_push_from_checkpoint": ("self", "checkpoint_folder"),
    "_save_checkpoint": ("self", "model", "trial"),
    "train": ("self", "resume_from_checkpoint"),
}
"""Methods of transformers' `Trainer` that `SafeCheckpoints` wraps."""

_STATE = ("_buffered_inputs", "_entropy_window_stats", "_last_world_entropy", "_logs", "_metrics", "_step", "ref_model")
_ROLLOUTS = ("num_generations", "num_generations_eval", "num_iterations", "max_completion_length", "temperature")
_SAMPLING = ("tools", "rollout_func", "use_transformers_continuous_batching", "use_vllm", "mask_truncated_completions")
_DATA = ("_tokenizer", "data_collator", "eos_token_ids", "pad_to_multiple_of", "train_dataset")
_REWARDS = ("multi_objective_aggregation", "reward_func_names", "reward_funcs", "reward_weights", "scale_rewards")
_LOSS = ("beta", "epsilon_high", "importance_sampling_level", "loss_type", "top_entropy_quantile")
_BONUS = ("_entropy_bonus_enabled", "aux_loss_enabled", "entropy_coef")
ATTRIBUTES: tuple[str, ...] = (*_STATE, *_ROLLOUTS, *_SAMPLING, *_DATA, *_REWARDS, *_LOSS, *_BONUS)
"""Attributes that a constructed `GRPOTrainer` has and that we read (or set aside for a trial and restore)."""

ARGUMENTS: tuple[str, ...] = (
    "delta",
    "off_policy_mask_threshold",
    "vllm_importance_sampling_correction",
    "num_iterations",
    "sapo_temperature_pos",
    "steps_per_generation",
    "use_bias_correction_kl",
)
"""Fields of `GRPOConfig` that we read."""

BATCH_KEYS: tuple[str, ...] = (
    "advantages",
    "completion_ids",
    "completion_mask",
    "num_items_in_batch",
    "prompt_ids",
    "prompt_mask",
)
"""What a batch always has and we read; others, such as `tool_mask` and log-probabilities, where they apply."""

_SIZES = ("image_grid_thw", "image_sizes", "num_images", "num_tiles", "spatial_shapes")
_PIXELS = ("image_position_ids", "mm_token_type_ids", "pixel_attention_mask", "pixel_values", "token_type_ids")
MULTIMODAL_KEYS = frozenset((*_SIZES, *_PIXELS))
"""Entries of a batch that belong to images."""

POLICY_METRICS = ("policy_loss", "clip_ratio/", "cispo_clip_ratio", "vespo/")
"""Beginnings of the metrics in which TRL's `_compute_loss` describes its policy loss."""

LOSS_TYPES = frozenset(TRL_REDUCTIONS)


def check_version(installed: str | None = None) -> None:
    """Refuse a TRL that cannot work and warn about an untested one."""
    installed = version("trl") if installed is None else installed
    release = Version(installed)
    if release < Version(OLDEST_TESTED) or release.major > Version(NEWEST_TESTED).major:
        works = f"trl-grpo-ext works with {OLDEST_TESTED} to {NEWEST_TESTED}.x"
        pip = f"pip install 'trl>={OLDEST_TESTED},<{Version(NEWEST_TESTED).major + 1}'"
        raise UpstreamError(f"trl {installed} is installed; {works}. Run: {pip}")
    if release.release[:2] > Version(NEWEST_TESTED).release[:2]:
        what = f"newer than {NEWEST_TESTED}.x, the newest that trl-grpo-ext was tested with"
        warnings.warn(
            f"trl {installed} is {what}. Its names are checked now, and its loss at the first step if plugins or "
            "compact_updates take part in it.",
            stacklevel=3,
        )


def check_class(trainer_class: type, methods: dict[str, tuple[str, ...]] = METHODS) -> None:
    problems = []
    for name, expected in methods.items():
        method = getattr(trainer_class, name, None)
        if method is None:
            problems.append(f"method {name} is gone")
            continue
        parameters = tuple(inspect.signature(method).parameters)
        if parameters[: len(expected)] != expected:
            problems.append(f"method {name} takes {parameters}, expected it to begin with {expected}")
    require(problems, trainer_class)


def check_instance(trainer: Any, attributes: Sequence[str] = ATTRIBUTES, arguments: Sequence[str] = ARGUMENTS) -> None:
    problems = [f"attribute {name} is gone" for name in attributes if not hasattr(trainer, name)]
    problems += [f"argument {name} is gone" for name in arguments if not hasattr(trainer.args, name)]
    require(problems, type(trainer))


def check_loss_type(loss_type: str) -> None:
    """Check that we know a loss type's reduction."""
    if loss_type not in LOSS_TYPES:
        what = f"loss_type {loss_type!r} takes no aggregation, token loss or compact_updates: trl-grpo-ext knows"
        raise ConfigurationError(f"{what} {', '.join(sorted(LOSS_TYPES))}.")


def classes_between(trainer_class: type, mixin: type) -> Sequence[type]:
    """A user's classes between our mixin and TRL's trainer, nearest first."""
    order = trainer_class.__mro__
    if GRPOTrainer not in order:
        what = f"{trainer_class.__qualname__} is not a subclass of TRL's GRPOTrainer"
        raise ConfigurationError(f"{what}. Rewards alone work in any: reward_funcs=load_rewards([...]).")
    return order[order.index(mixin) + 1 : order.index(GRPOTrainer)]


def check_batch(batch: dict[str, Any]) -> None:
    require([f"batch entry {key!r} is gone" for key in BATCH_KEYS if key not in batch], dict)


def require(problems: list[str], where: type) -> None:
    if problems:
        what = f"is not known ({where.__module__}.{where.__qualname__}): {'; '.join(problems)}"
        raise UpstreamError(f"trl {version('trl')} {what}. Install {OLDEST_TESTED} to {NEWEST_TESTED}.x, or report it.")
