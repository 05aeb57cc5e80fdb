"""GSPO's sequence ratio with advantages per token, for TRL's `GRPOTrainer` and trl-grpo-ext."""

from .gspo_token import GSPOToken

__all__ = ["GSPOToken"]
