"""Credit for the characters of each equation, for TRL's `GRPOTrainer` and trl-grpo-ext."""

from .equation_accuracy import equation_accuracy
from .equation_credit import EquationCredit
from .equations import Equation, find_equations

__all__ = ["Equation", "EquationCredit", "equation_accuracy", "find_equations"]
