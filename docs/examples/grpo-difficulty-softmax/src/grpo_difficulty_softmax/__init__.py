"""DGPO's question weights as a loss aggregation, for trl-grpo-ext."""

from .difficulty_softmax import DifficultySoftmax

__all__ = ["DifficultySoftmax"]
