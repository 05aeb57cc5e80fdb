"""On-policy distillation: a teacher's log-ratio as the advantage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..guard.parameters import checked_choice, checked_number
from .other_policies import checked_model, logps_of, needed, needs_of
from .returns import wide

if TYPE_CHECKING:
    from ..types import Rollout


class TeacherLogRatio:
    """Credit each token by how much likelier the teacher finds it: `A_t = c·(log π_teacher - log π_old)`.

    In expectation over the policy's own tokens this is the gradient of the reverse KL divergence from the policy to the
    teacher, token by token: distillation on what the student itself writes. It needs no reward and no group. In mode
    "replace" it stands first in a chain; in mode "add" it is added to the advantages that come in. Every completion
    gets it, whether a reward function scored it or not.

    Source: MiniLLM (2306.08543) minimises the reverse KL on the student's own samples by policy gradient.

    Departures: each token is credited with its own log-ratio alone, where MiniLLM sums the ratios of the tokens that
    follow (`kl_in_reward` does, with the teacher as the reference); there is no length normalisation and no mixing of
    the teacher into the sampling.

    Args:
        teacher: Id or path of a causal language model with the policy's tokenizer, or "reference" for the policy that
            TRL keeps as the reference.
        coefficient: c, positive.
        mode: "replace" or "add".

    Raises:
        ConfigurationError: A parameter is out of its range.
    """

    __name__ = "teacher_log_ratio"

    def __init__(self, *, teacher: str = "reference", coefficient: float = 1.0, mode: str = "replace") -> None:
        self.teacher = checked_model("teacher_log_ratio: teacher", teacher)
        self.needs, self.teachers = needs_of(teacher)
        self.coefficient = checked_number(
            "teacher_log_ratio: coefficient", coefficient, "a positive number", lambda x: x > 0
        )
        self.mode = checked_choice("teacher_log_ratio: mode", mode, ("replace", "add"))

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Return the new advantages `(B, T)`."""
        teacher_B_T = logps_of("teacher_log_ratio", self.teacher, rollout)
        logps_B_T = needed("teacher_log_ratio", "old_logps_B_T", rollout.old_logps_B_T)
        dtype = wide(advantages_B_T.dtype)
        new_B_T = self.coefficient * (teacher_B_T.to(dtype) - logps_B_T.to(dtype))
        if self.mode == "add":
            new_B_T = advantages_B_T + new_B_T
        return new_B_T.to(advantages_B_T.dtype)
