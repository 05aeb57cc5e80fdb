"""What can be chosen in the lecture, as plugins and settings of TRL."""

from collections.abc import Sequence
from typing import Any

from common.errors import RecipeError

from trl_grpo_ext import GRPOExtConfig

REWARDS = ("sort_inclusion", "sort_distance")
VARIANTS = {"raw": "raw_reward", "centred": "centred", "normalised": "normalised", "max_only": "max_only"}
"""The lecture's "deltas", and the advantage hooks that they are."""
OBJECTIVES = ("clipped", "unclipped", "naive")
EXACT = "sorting.task:exactly_sorted"
NAIVE = "sorting.naive:Naive"

NEVER_CLIPS = 1e30
"""An epsilon between whose bounds, 1 - 1e30 and 1 + 1e30, every importance ratio of float32 below infinity matters."""
RATIO_LOSSES = ("dapo", "grpo", "bnpo", "dr_grpo", "luspo")
"""TRL's loss types with the per-token loss `-min(ρ·A, clip(ρ)·A)`; they differ in how they sum."""


def check_numbers(recipe: Any) -> None:
    """Make sure that the numbers of the recipe's arguments can work; what a YAML file says is not checked elsewhere."""
    lowest = {"numbers": 2, "largest": 1, "train_prompts": 1, "eval_prompts": 1, "hidden_size": 8, "layers": 1}
    for name, least in lowest.items():
        value = getattr(recipe, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise RecipeError(f"--{name} must be a whole number from {least} up, got {value!r}.")
    if recipe.numbers > 100 or recipe.largest > 10_000:
        raise RecipeError(
            f"--numbers {recipe.numbers} and --largest {recipe.largest} are too much for this task: at most 100 "
            "numbers from 0 to 10000."
        )
    if recipe.hidden_size % 8:
        raise RecipeError(
            f"--hidden_size must be a multiple of 8 (four heads of even width), got {recipe.hidden_size}."
        )


def choose_plugins(args: GRPOExtConfig, reward: str, variant: str) -> None:
    """Select one reward to train on, and measure the other one and the share of right answers beside it.

    The variant stands in front of other advantage hooks, because it replaces what comes in.
    """
    _one_of("reward", reward, REWARDS)
    _one_of("variant", variant, tuple(VARIANTS))
    if args.rewards is not None or args.reward_weights is not None:
        raise RecipeError("Here --reward chooses the reward: leave --rewards and --reward_weights away.")
    weights = {name: 1.0 if name == reward else 0.0 for name in (reward, *REWARDS)}
    rewards: list[Any] = [
        {"name": f"sorting.rewards:{name}", "normalise": True, "weight": weight} for name, weight in weights.items()
    ]
    rewards.append({"name": EXACT, "weight": 0.0})
    args.rewards = rewards
    args.advantage_hooks = [VARIANTS[variant], *(args.advantage_hooks or [])]


def choose_objective(args: GRPOExtConfig, objective: str, given: Sequence[str]) -> None:
    """Make TRL's clipped loss the objective that was asked for.

    - clipped: as TRL has it, `-min(ρ·A, clip(ρ, 1 - ε, 1 + ε)·A)`.
    - unclipped: with an ε that never clips, where both arguments of the minimum are the same, `-ρ·A`.
    - naive: unclipped, with the ratio taken out of the gradient again by `Naive`: `-A·∇log π`.
    """
    _one_of("objective", objective, OBJECTIVES)
    if args.loss_type not in RATIO_LOSSES:
        raise RecipeError(f"--loss_type {args.loss_type} is another objective itself: use {', '.join(RATIO_LOSSES)}.")
    if objective == "clipped":
        return
    given = [*given, *(["delta"] if args.delta is not None else [])]
    if given:
        raise RecipeError(f"--objective {objective} does not clip: leave {' and '.join(f'--{n}' for n in given)} away.")
    if args.importance_sampling_level != "token":
        raise RecipeError(
            f"--objective {objective} is per token: leave --importance_sampling_level "
            f"{args.importance_sampling_level} away."
        )
    args.epsilon = NEVER_CLIPS
    args.epsilon_high = None
    if objective == "naive":
        args.advantage_hooks = [*(args.advantage_hooks or []), NAIVE]


def _one_of(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise RecipeError(f"--{name} must be one of {', '.join(choices)}, got {value!r}.")
