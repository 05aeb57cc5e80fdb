"""Each reward pays the tokens that earned it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import ConfigurationError
from ..guard.parameters import checked_choice
from .group_statistics import group_means, group_stds

if TYPE_CHECKING:
    from ..types import Rollout, Span

_EPSILON = 1e-4  # beside the standard deviation, as in TRL


class SpanCredit:
    """Pay each reward function's advantage only to the tokens in that function's spans.

    With `a_{i,k} = r_{i,k} - mean of r_k over the group of i` (over those that function `k` scored), and `w_k` its
    weight:

        A_{i,t} = Σ_k w_k · a_{i,k} · [t wrote a character of a span of function k, or k points at nothing]

    A function points by returning `SpanScore`s, or by a regular expression in `patterns`. So the format reward teaches
    the tags, the answer's reward the answer, and neither blames the reasoning in between. A function that returns plain
    numbers pays all tokens; where none points, this is the sum of all functions' centred rewards. It replaces the
    advantages that come in, so it stands first in a chain. Only the places of the spans are used, not their values.

    Source: none of its own; one advantage per reward function and the normalisation by its own deviation are those of
    GDPO (2601.05242), and giving a reward to the part of the completion that it judges is common practice.

    Departures: GDPO whitens the sum over the batch once more; this does not. A completion that a function did not score
    gets nothing from it and is not in its mean.

    Args:
        normalise: Divide each function's centred rewards by their standard deviation in the group (n - 1) plus 1e-4.
        without_spans: What a function that points at something in other completions does with one in which it points at
            nothing: "all" pays all of its tokens, "none" pays nothing.
        patterns: For the name of a reward function, a regular expression (Python's `re`, searched through the text
            from left to right) whose matches are its spans, instead of those that it returned. A pattern that
            backtracks without end stops the run on a hostile text.

    Raises:
        ConfigurationError: A parameter is of the wrong kind, a pattern does not compile, or, at run time, is for a
            reward function that the run does not have.
    """

    __name__ = "span_credit"
    needs = ("offsets",)

    def __init__(
        self, *, normalise: bool = False, without_spans: str = "all", patterns: Mapping[str, str] | None = None
    ) -> None:
        if not isinstance(normalise, bool):
            raise ConfigurationError(f"span_credit: normalise must be true or false, got {normalise!r}.")
        if patterns is not None and not isinstance(patterns, Mapping):
            raise ConfigurationError(f"span_credit: patterns must be a mapping, got {patterns!r}.")
        self.normalise = normalise
        self.without_spans = checked_choice("span_credit: without_spans", without_spans, ("all", "none"))
        self.patterns = {name: _compiled(name, pattern) for name, pattern in (patterns or {}).items()}

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Return the new advantages `(B, T)`."""
        names = list(rollout.reward_names)
        if unknown := sorted(set(self.patterns) - set(names)):
            raise ConfigurationError(
                f"span_credit: patterns has {', '.join(map(repr, unknown))}, but the reward functions of this run are "
                f"{', '.join(map(repr, names))}."
            )
        precise = torch.promote_types(rollout.rewards_B_K.dtype, torch.float32)
        rewards_B_K = rollout.rewards_B_K.to(precise)
        # Whether a function points at all must not depend on which completions this rank happens to have.
        points = [float(name in self.patterns or name in rollout.reward_spans) for name in names]
        points_K = (rollout.gather(rewards_B_K.new_tensor(points).expand_as(rewards_B_K)) > 0).any(dim=0).tolist()
        credit_B_K = weighted_credit(rollout.gather(rewards_B_K), rollout.gather(rollout.group_ids_B), self.normalise)[
            rollout.local_rows
        ] * rollout.reward_weights_K.to(precise)
        new_B_T = torch.zeros(advantages_B_T.shape, dtype=precise, device=advantages_B_T.device)
        for k, name in enumerate(names):
            credit_B_1 = credit_B_K[:, k].unsqueeze(1)
            if not points_K[k]:
                new_B_T += credit_B_1
                continue
            spans = [[(start, end, 1.0) for start, end, _ in row or ()] for row in self._spans(name, rollout)]
            inside_B_T = rollout.span_values(spans) > 0
            if self.without_spans == "all":
                inside_B_T = inside_B_T | ~inside_B_T.any(dim=1, keepdim=True)
            new_B_T += torch.where(inside_B_T, credit_B_1, 0.0)
        return new_B_T.to(advantages_B_T.dtype)

    def _spans(self, name: str, rollout: Rollout) -> Sequence[Sequence[Span] | None]:
        pattern = self.patterns.get(name)
        if pattern is None:
            return rollout.reward_spans.get(name, [None] * len(rollout.texts))
        return [
            [(*match.span(), 1.0) for match in pattern.finditer(text) if match.end() > match.start()]
            for text in rollout.texts
        ]


def weighted_credit(rewards_N_K: torch.Tensor, group_ids_N: torch.Tensor, normalise: bool) -> torch.Tensor:
    """Each function's rewards against their own mean in the group, `(N, K)`; 0 where a reward is NaN."""
    groups_N = torch.unique(group_ids_N, return_inverse=True)[1]
    columns = []
    for rewards_N in rewards_N_K.unbind(dim=1):
        scored_N = ~torch.isnan(rewards_N)
        values_N, ones_N = torch.where(scored_N, rewards_N, 0.0), scored_N.to(rewards_N.dtype)
        centred_N = ones_N * (values_N - group_means(values_N, ones_N, groups_N))
        if normalise:
            centred_N = centred_N / (group_stds(values_N, ones_N, groups_N) + _EPSILON)
        columns.append(centred_N)
    return torch.stack(columns, dim=1)


def _compiled(name: object, pattern: object) -> re.Pattern[str]:
    if not isinstance(name, str) or not isinstance(pattern, str):
        raise ConfigurationError(
            f"span_credit: patterns must have a regular expression for the name of a reward, got {name!r}: {pattern!r}."
        )
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigurationError(
            f"span_credit: patterns must be regular expressions, got {pattern!r} for {name!r}: {error}."
        ) from error
