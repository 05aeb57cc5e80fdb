"""What the collaborators know of a run: `RunFacts` (constant), `Progress` and `LossSettings` (now).

`upstream.reading` reads all three off TRL's trainer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..guard.agreement import Agreement


@dataclass(frozen=True)
class RunFacts:
    """What stays the same from the trainer's construction to its end; `gather` is in rank order."""

    trainer: str  # qualified name of the trainer's class, for messages
    tokenizer: Any
    end_ids: frozenset[int]  # tokens that end a completion, padding among them
    pad_id: int
    pad_to_multiple_of: int | None  # the width of TRL's tensors is a multiple of it; None for any width
    masks_truncated: bool  # whether truncated completions have an empty mask
    reward_names: tuple[str, ...]
    num_generations: int
    num_generations_eval: int
    max_completion_length: int
    accumulation: int  # micro-batches of an optimizer step
    steps_per_generation: int  # micro-batches of a generation batch
    rows_per_pass: int
    rows_per_pass_eval: int
    rank: int
    ranks: int
    agreement: Agreement
    gather: Callable[[torch.Tensor], torch.Tensor]
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]
    device: torch.device
    async_tools: frozenset[str] = frozenset()  # names of the asynchronous tools

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
