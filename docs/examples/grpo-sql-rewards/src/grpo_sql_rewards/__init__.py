"""Rewards for models that write SQL, for TRL's `GRPOTrainer` and trl-grpo-ext."""

from .sql_execution import SQLExecution
from .sql_match import SQLMatch

__all__ = ["SQLExecution", "SQLMatch"]
