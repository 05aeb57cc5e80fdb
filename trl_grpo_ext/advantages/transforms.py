"""Transforms: they change the advantages that come in, by their sign or by what the completion's tokens are."""

from __future__ import annotations

import torch

from ..errors import ConfigurationError
from ..guard.parameters import checked_choice, checked_number, checked_whole
from ..types import Rollout


class SignScaling:
    """Multiply positive advantages by one factor and negative ones by another: `A' = λ⁺·max(A, 0) + λ⁻·min(A, 0)`.

    Pushing away from what failed keeps the rest of the distribution in place, where pulling towards what succeeded
    narrows it. A small λ⁺ therefore keeps entropy and pass@k for large k. λ⁺ = 0 learns from failures alone, λ⁻ = 0
    from successes alone. It acts on the advantages that come in, token by token, so it stands behind the hook, or TRL's
    own advantages, that it scales.

    Source: The Surprising Effectiveness of Negative Reinforcement in LLM Reasoning (2506.01347), Weighted-REINFORCE,
    whose λ is 0.1.

    Departures: the paper scales rewards of 1 and -1, with no baseline: that is `raw_reward` in front of this hook, with
    such rewards. Here any advantages are scaled.

    Args:
        positive: λ⁺, not negative.
        negative: λ⁻, not negative; not 0 if `positive` is.

    Raises:
        ConfigurationError: A parameter is out of its range.
    """

    __name__ = "sign_scaling"
    role = "transform"

    def __init__(self, *, positive: float = 0.1, negative: float = 1.0) -> None:
        wanted = "a finite number that is not negative"
        self.positive = checked_number("sign_scaling: positive", positive, wanted, lambda x: x >= 0)
        self.negative = checked_number("sign_scaling: negative", negative, wanted, lambda x: x >= 0)
        if positive == negative == 0:
            raise ConfigurationError(
                f"sign_scaling: negative must be greater than 0 where positive is 0, got {negative!r}; "
                "otherwise nothing would be learnt."
            )

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Return the new advantages `(B, T)`."""
        return self.positive * advantages_B_T.clamp(min=0) + self.negative * advantages_B_T.clamp(max=0)


class TruncationMasking:
    """Set the advantages of truncated completions to 0: `A'_t = 0` where the completion ended at the limit.

    A completion that the length limit cut off was graded before it was done, so its reward says little about it. With
    `keep="negative"` only credit is taken away, `A'_t = min(A_t, 0)`: running into the limit may still be punished.

    TRL's `mask_truncated_completions` takes the tokens out of the loss mask, and with it out of every count, of the KL
    penalty and of the entropy bonus. Here they stay: their policy gradient is 0, yet they count in the denominators of
    the loss, and a KL penalty (`beta`) acts on them. Where TRL's option is on, this hook has nothing left to do. It is
    a mask: it acts after the other transforms, and forward hooks give such tokens no advantage again.

    Source: the overlong filtering of DAPO (2503.14476), which masks the loss of truncated samples.

    Departures: the denominators, as said; `keep="negative"` is not in the paper.

    Args:
        keep: "nothing" or "negative".

    Raises:
        ConfigurationError: `keep` is something else.
    """

    __name__ = "truncation_masking"
    role = "transform"
    last = True

    def __init__(self, *, keep: str = "nothing") -> None:
        self.keep = checked_choice("truncation_masking: keep", keep, ("nothing", "negative"))

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Return the new advantages `(B, T)`."""
        kept_B_T = advantages_B_T.clamp(max=0.0) if self.keep == "negative" else torch.zeros_like(advantages_B_T)
        return torch.where(rollout.truncated_B.unsqueeze(1), kept_B_T, advantages_B_T)


class RepetitionPenalty:
    """Take a constant off every token that repeats: `A'_t = A_t - p` where `t` lies in an n-gram seen before.

    Seen before means that the same n tokens begin at an earlier place of the same completion; the two may overlap. The
    first occurrence is not punished, and a token in several repeated n-grams is punished once. N-grams are of all
    completion tokens, a tool's too, while the penalty is for live tokens only. Every completion is penalised, whether a
    reward function scored it or not.

    The penalty is in units of the advantage. It lands where the repetition is and leaves the rest of the completion
    alone, which a reward for the whole completion cannot.

    Source: the N-gram repetition penalty of Demystifying Long Chain-of-Thought Reasoning in LLMs (2502.03373), appendix
    C.2.

    Departures: there the penalty is a reward at the token, discounted into the returns of the tokens before it; here it
    is in the advantage of the token itself and nowhere else.

    Args:
        ngram: n, at least 1.
        penalty: p, positive.

    Raises:
        ConfigurationError: A parameter is out of its range.
    """

    __name__ = "repetition_penalty"
    role = "transform"

    def __init__(self, *, ngram: int = 40, penalty: float = 0.05) -> None:
        self.ngram = checked_whole("repetition_penalty: ngram", ngram, 1)
        self.penalty = checked_number("repetition_penalty: penalty", penalty, "a positive number", lambda x: x > 0)

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Return the new advantages `(B, T)`."""
        repeated_B_T = repeated_tokens(rollout.completion_ids_B_T, rollout.completion_mask_B_T > 0, self.ngram)
        return advantages_B_T - self.penalty * repeated_B_T.to(advantages_B_T.dtype)


def repeated_tokens(ids_B_T: torch.Tensor, written_B_T: torch.Tensor, ngram: int) -> torch.Tensor:
    """Which tokens lie in an n-gram that began at an earlier place of the same completion too, `(B, T)`, bool.

    Exact, and O(T log T log n): n-grams are numbered, those of twice the length by the pair of numbers of their halves.

    Args:
        ids_B_T: Token ids.
        written_B_T: Where there is a completion token; what lies elsewhere is in no n-gram.
        ngram: n.
    """
    rows, width = ids_B_T.shape
    places = width - ngram + 1
    if places < 1 or rows == 0:
        return torch.zeros_like(written_B_T)
    # A row's number goes into those of its tokens, so that no n-gram equals one of another row.
    row_B_1 = torch.arange(rows, device=ids_B_T.device).unsqueeze(1)
    numbers_B_S = _numbered(row_B_1.expand_as(ids_B_T), ids_B_T)
    size = 1
    while size < ngram:
        step = min(size, ngram - size)  # the second half may overlap the first
        numbers_B_S = _numbered(numbers_B_S[:, :-step], numbers_B_S[:, step:])
        size += step
    # All n tokens are written where the last one is, for padding is on the right; what runs into it comes after these.
    whole_B_S = written_B_T[:, ngram - 1 :]
    place_S = torch.arange(places, device=ids_B_T.device)
    first_place = torch.full((int(numbers_B_S.max()) + 1,), places, device=ids_B_T.device)
    first_place = first_place.scatter_reduce(0, numbers_B_S.flatten(), place_S.repeat(rows), "amin")
    again_B_S = whole_B_S & (first_place[numbers_B_S] < place_S)
    # Token t lies in a repeated n-gram if one begins at t-n+1 … t.
    begun_B_T = torch.nn.functional.pad(again_B_S, (0, ngram - 1)).cumsum(dim=1)
    over_B_T = torch.nn.functional.pad(begun_B_T[:, : width - ngram], (ngram, 0))
    return (begun_B_T > over_B_T) & written_B_T


def _numbered(first_B_S: torch.Tensor, second_B_S: torch.Tensor) -> torch.Tensor:
    """A number for each pair, from 0; equal for equal pairs and different for different ones."""
    lowest = second_B_S.min()
    pairs_B_S = first_B_S * (second_B_S.max() - lowest + 1) + (second_B_S - lowest)
    numbers_B_S: torch.Tensor = torch.unique(pairs_B_S, return_inverse=True)[1]
    return numbers_B_S
