"""Credit by position in a completion's text."""

from __future__ import annotations

import torch

from ..credit.groups import gather_groups, group_apart
from ..guard.parameters import checked_choice, checked_flag
from ..types import HookDeclaration, Rollout

_EPSILON = 1e-4  # beside the standard deviation, as in TRL


class SpanCredit:
    """Pay each reward function's advantage only to the tokens in that function's spans.

    With `a_{i,k} = r_{i,k} - mean of r_k over the group of i` (over those that function `k` scored), and `w_k` its
    weight:

        A_{i,t} = Σ_k w_k · a_{i,k} · [t wrote a character of a span of function k, or k points at nothing]

    A function points by returning `SpanScore`s, as `regex_match` does. So the format reward teaches the tags, the
    answer's reward the answer, and neither blames the reasoning in between. A function that returns plain numbers pays
    all tokens. The spans' positions count, not their values.

    Source: none of its own; one advantage per reward function and the normalisation by its own deviation are those of
    GDPO (2601.05242).

    Departures: GDPO whitens the sum over the batch once more; this does not. A completion that a function did not score
    gets nothing from it and is not in its mean.

    Args:
        normalise: Divide each function's centred rewards by their standard deviation in the group (n - 1) plus 1e-4.
        without_spans: For a completion in which a function points at nothing, though it does in others: "all" pays all
            of its tokens, "none" pays nothing.
    """

    __name__ = "span_credit"
    declares = HookDeclaration(role="estimator", needs=("offsets",))

    def __init__(self, *, normalise: bool = False, without_spans: str = "all") -> None:
        self.normalise = checked_flag("span_credit: normalise", normalise)
        self.without_spans = checked_choice("span_credit: without_spans", without_spans, ("all", "none"))

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Return the new advantages `(B, T)`."""
        names = list(rollout.reward_names)
        precise = torch.promote_types(rollout.rewards_B_K.dtype, torch.float32)
        rewards_B_K = rollout.rewards_B_K.to(precise)
        # Whether a function points at all must not depend on which completions this rank happens to have.
        points = [float(name in rollout.reward_spans) for name in names]
        points_K = (rollout.gather(rewards_B_K.new_tensor(points).expand_as(rewards_B_K)) > 0).any(dim=0).tolist()
        rewards_N_K, groups_N = rollout.gather(rewards_B_K), gather_groups(rollout)
        epsilon = _EPSILON if self.normalise else None
        credit_N_K = torch.stack([group_apart(of_one_N, groups_N, epsilon) for of_one_N in rewards_N_K.T], dim=1)
        credit_B_K = credit_N_K[rollout.local_rows] * rollout.reward_weights_K.to(precise)
        new_B_T = torch.zeros(advantages_B_T.shape, dtype=precise, device=advantages_B_T.device)
        for k, name in enumerate(names):
            credit_B_1 = credit_B_K[:, k].unsqueeze(1)
            if not points_K[k]:
                new_B_T += credit_B_1
                continue
            found = rollout.reward_spans.get(name, [None] * len(rollout.texts))
            spans = [[(start, end, 1.0) for start, end, _ in row or ()] for row in found]
            inside_B_T = rollout.span_values(spans) > 0
            if self.without_spans == "all":
                inside_B_T = inside_B_T | ~inside_B_T.any(dim=1, keepdim=True)
            new_B_T += torch.where(inside_B_T, credit_B_1, 0.0)
        return new_B_T.to(advantages_B_T.dtype)
