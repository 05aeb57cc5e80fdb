"""Where in a run a call happens, and what decides about TRL's loss then."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Progress:
    """Where in the run a call happens."""

    training: bool  # False in evaluation, which neither accumulates nor cuts generation batches
    step: int  # optimizer steps done
    accumulation: int = 1  # micro-batches of the optimizer step at hand
    steps_per_generation: int = 1  # micro-batches of the generation batch at hand
    precision: torch.dtype = torch.float32  # of the loss: float32, unless the policy has more


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
