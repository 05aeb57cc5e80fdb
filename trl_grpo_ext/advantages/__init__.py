"""Built-in advantage hooks, and the mathematics of the estimators as functions of arrays."""

from .estimators import (
    batch_whitening,
    centred,
    decoupled_normalisation,
    leave_one_out,
    max_only,
    mean_relative,
    normalised,
    optimal_baseline,
    pass_at_k,
    raw_reward,
)
from .returns import group_mean_gae

__all__ = [
    "batch_whitening",
    "centred",
    "decoupled_normalisation",
    "group_mean_gae",
    "leave_one_out",
    "max_only",
    "mean_relative",
    "normalised",
    "optimal_baseline",
    "pass_at_k",
    "raw_reward",
]
