"""Credit by position in a completion's text: by a reward's spans, or by the parts around two markers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ..credit.groups import gather_groups, group_mean, group_std
from ..errors import ConfigurationError
from ..guard.parameters import checked_choice, checked_flag, checked_number, checked_text
from ..types import Rollout

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
    role = "estimator"
    needs = ("offsets",)

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
        credit_N_K = centred_rewards(rollout.gather(rewards_B_K), gather_groups(rollout), self.normalise)
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


def centred_rewards(rewards_N_K: torch.Tensor, groups_N: torch.Tensor, normalise: bool) -> torch.Tensor:
    """Each function's rewards against their own mean in the group, `(N, K)`; 0 where a reward is NaN."""
    columns = []
    for rewards_N in rewards_N_K.unbind(dim=1):
        centred_N = rewards_N - group_mean(rewards_N, groups_N)
        if normalise:
            centred_N = centred_N / (group_std(rewards_N, groups_N) + _EPSILON)
        columns.append(torch.where(torch.isnan(rewards_N), 0.0, centred_N))
    return torch.stack(columns, dim=1)


class SegmentWeights:
    """Weigh the parts of a completion: `A'_t = w(part of t) · A_t`.

    The parts are the thoughts between two markers, the answer after them, the markers themselves, and the text before
    the first. A closing marker without an opening one closes thoughts that began with the completion, as when the chat
    template writes `<think>`; thoughts that are never closed reach to the end; a completion without markers is all
    answer. Only the first pair counts: later markers are part of the answer.

    A token across a boundary has the weight of the part in which it begins. A token that wrote nothing (end of
    sequence) has the weight of its surrounding part.

    Source: none of its own; thoughts and answers are weighed apart in many recipes, without a common formula.

    Departures: none.

    Args:
        think: Weight of the thoughts.
        answer: Weight of the answer.
        tags: Weight of the two markers.
        other: Weight of the text before the opening marker.
        open: The opening marker, found as it is (no regular expression).
        close: The closing marker.
    """

    __name__ = "segment_weights"
    role = "transform"
    per_group = True
    needs = ("offsets",)

    conformance: ClassVar[Mapping[str, Any]] = {"parameters": {"think": 0.5}}

    def __init__(
        self,
        *,
        think: float = 1.0,
        answer: float = 1.0,
        tags: float = 1.0,
        other: float = 1.0,
        open: str = "<think>",
        close: str = "</think>",
    ) -> None:
        weights = {"think": think, "answer": answer, "tags": tags, "other": other}
        self.weights = {
            kind: checked_number(f"segment_weights: {kind}", weight, "at least 0", lambda x: x >= 0)
            for kind, weight in weights.items()
        }
        self.open = checked_text("segment_weights: open", open)
        self.close = checked_text("segment_weights: close", close)
        if open == close:
            raise ConfigurationError(f"segment_weights: close must not be the same as open, got {close!r}.")

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Return the new advantages `(B, T)`."""
        width = advantages_B_T.size(1)
        rows = []
        for row, counts in enumerate((rollout.lengths_B > 0).tolist()):
            weights: list[float] = []
            if counts:
                parts = split_at_markers(rollout.texts[row], self.open, self.close)
                weights = token_weights(rollout.offsets(row), parts, self.weights)
            rows.append([*weights, *[1.0] * (width - len(weights))])
        return advantages_B_T * advantages_B_T.new_tensor(rows).view_as(advantages_B_T)


def split_at_markers(text: str, opening: str, closing: str) -> list[tuple[int, int, str]]:
    """Cut a text at its first pair of markers into `(start, end, kind)`, without gaps, the last one possibly empty.

    Kinds: "other" (before the opening), "tags" (the markers), "think" (between them) and "answer" (after the closing).
    """
    closes = text.find(closing)
    opens = text.find(opening, 0, len(text) if closes < 0 else closes)
    if opens < 0 and closes < 0:
        return [(0, len(text), "answer")]
    parts = []
    thoughts = 0
    if opens >= 0:
        thoughts = opens + len(opening)
        parts += [(0, opens, "other"), (opens, thoughts, "tags")]
        closes = text.find(closing, thoughts)
    if closes < 0:
        return [*parts, (thoughts, len(text), "think")]
    answer = closes + len(closing)
    return [*parts, (thoughts, closes, "think"), (closes, answer, "tags"), (answer, len(text), "answer")]


def token_weights(
    offsets: Sequence[tuple[int, int]], parts: Sequence[tuple[int, int, str]], weights: Mapping[str, float]
) -> list[float]:
    """Each token's weight: that of the part in which it begins."""
    starts = [start for start, *_ in parts]
    return [weights[parts[bisect_right(starts, start) - 1][2]] for start, _ in offsets]
