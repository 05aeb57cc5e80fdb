"""Token means of good and bad completions, apart (Balanced Aggregation)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from ..types import Rollout


class SignBalanced:
    """A token mean within each sign of the advantage, weighted by how many completions have it.

    `w_i = 1/Q · (G_s / G) / Σ_{j in s} |o_j|`, where `s` are the completions of the group whose advantage has the sign
    of completion i's, and `G_s` is their number. In a plain token mean the longer side wins: where wrong answers are
    long, pushing them down outweighs pulling the right ones up. Here the sides' weights don't depend on their lengths,
    while within a side every token counts the same.

    Source: Balanced Aggregation (2605.04077).

    Departures: completions with advantage zero form a third part; they have no policy gradient but may carry a KL
    penalty. A completion's sign is that of the sum of its tokens' advantages, after the rollout stage of the hooks.
    `G_s` and `G` count the completions with a live token; a group with none counts in Q.

    Args:
        over: Where the parts are made: "group" as in the paper, or "batch", which takes the generation batch of all
            ranks as one group. In a batch, rounding may give the completions of a group with equal rewards either sign;
            `skip_zero_variance` leaves such groups out.

    Raises:
        ConfigurationError: `over` is neither; or, from `weights`, the rollout holds no advantages.
    """

    __name__ = "sign_balanced"

    def __init__(self, *, over: str = "group") -> None:
        if over not in ("group", "batch"):
            raise ConfigurationError(f'sign_balanced: over must be "group" or "batch", got {over!r}.')
        self.over = over

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """Return weights `(B, T)`, the same for all tokens of a completion."""
        if rollout.advantages_B_T is None:
            raise ConfigurationError(
                "sign_balanced: rollout.advantages_B_T is None, and without advantages there are no signs to balance. "
                "The trainer sets it; a rollout made by hand must, too."
            )
        signs_B = (rollout.advantages_B_T * rollout.mask_B_T).sum(dim=1).sign()
        signs_N = rollout.gather(signs_B)
        lengths_N = rollout.gather(rollout.lengths_B)
        groups_N = rollout.gather(rollout.group_ids_B)
        together_B_N = (lengths_N > 0).expand(len(signs_B), -1)
        if self.over == "group":
            together_B_N = together_B_N & (rollout.group_ids_B.unsqueeze(1) == groups_N)
        part_B_N = together_B_N & (signs_B.unsqueeze(1) == signs_N)
        share_B = part_B_N.sum(dim=1) / together_B_N.sum(dim=1).clamp(min=1).to(lengths_N.dtype)
        tokens_B = (part_B_N * lengths_N).sum(dim=1).clamp(min=1.0)
        parts = max(rollout.totals.prompts, 1) if self.over == "group" else 1
        return rollout.mask_B_T * (share_B / tokens_B / parts).unsqueeze(1)
