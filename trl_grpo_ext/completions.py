"""What a completion consists of: the parts that a reward judges with their places, and its turns with their calls.

Plugin authors import these names from `trl_grpo_ext.types`.
"""

from __future__ import annotations

import functools
import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import PluginOutputError

if TYPE_CHECKING:
    import torch

Span = tuple[int, int, float]
"""`(start, end, value)`: the value of the characters `text[start:end]` of a completion, for hooks that return spans."""


class Place(NamedTuple):
    """Where a completion says something; the tokens that wrote it get the credit.

    | place | what it is |
    | --- | --- |
    | `Place(start, end)` | characters of the completion's text (of messages: of the last one with content) |
    | `Place(start, end, turn)` | characters of the content of the `turn`-th assistant message, counted from 0 |
    | `Place(turn=k)` | a whole turn, with its tool calls and special tokens |
    | `END` | the last token: the one that ends the sequence, or the last before the limit |
    | `WHOLE` | all of the completion |
    """

    start: int | None = 0
    end: int | None = None
    turn: int | None = None


WHOLE = Place()
END = Place(None)


class Part(NamedTuple):
    """One thing that a completion is judged by."""

    name: str  # the same for the same thing in all completions: parts of one name are compared
    score: float | None  # its score; None if it does not apply here
    weight: float = 1.0  # its weight among the parts, not negative
    # Where it stands: a `Place` or a pair `(start, end)` of characters, or several of them. Empty or None if it
    # stands nowhere, that is, the completion lacks it. In `Parts` it is a tuple of `Place`s.
    places: Any = WHOLE


class Parts(float):
    """A completion's reward, and the parts that it consists of. Plain TRL sees an ordinary float.

        found = {name: re.search(pattern, text) for name, pattern in patterns.items()}
        return Parts({name: (float(bool(match)), match and match.span()) for name, match in found.items()})

    Args:
        parts: `Part`s; or by name a score, for what has no place of its own, or a pair `(score, places)`. A second part
            of the same name gets `_2` after its name, and so on.
        value: The reward; by default the weighted mean of the parts that have a score, NaN (which TRL reads as None)
            if none has.

    Raises:
        PluginOutputError: A score, weight or place is not one.
    """

    parts: tuple[Part, ...]

    def __new__(cls, parts: Sequence[Part] | Mapping[str, Any] = (), value: float | None = None) -> Parts:
        """Check the parts and make the number."""
        if isinstance(parts, Mapping):
            pairs = [(name, of if type(of) is tuple and len(of) == 2 else (of, WHOLE)) for name, of in parts.items()]
            made = [_checked_part(name, score, 1.0, places) for name, (score, places) in pairs]
        else:
            found = [part if isinstance(part, tuple) and len(part) > 1 else (None, part) for part in parts]
            made = [_checked_part(*part) for part in found]
            if len({part.name for part in made}) < len(made):
                made = _renamed(made)
        if value is None:
            scored = [(part.score, part.weight) for part in made if part.score is not None]
            weight = math.fsum(weight for _, weight in scored)
            value = math.fsum(score * weight for score, weight in scored) / weight if weight else math.nan
        score = super().__new__(cls, value)
        score.parts = tuple(made)
        return score

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the parts."""
        return Parts, (self.parts, float(self))


def _checked_part(name: Any, score: Any, weight: Any = 1.0, places: Any = WHOLE) -> Part:
    try:
        number = None if score is None or score != score else float(score)
        factor = float(weight)
        where = _checked_places(places)
        if type(name) is str and name and 0 <= factor < math.inf and (number is None or abs(number) < math.inf):
            return Part(name, number, factor, where)
    except (TypeError, ValueError, OverflowError):
        pass
    what = "a name, a finite score or None, a weight of at least 0, and as places pairs (start, end) or `Place`s"
    raise PluginOutputError(f"A part must have {what}, got {(name, score, weight, places)!r:.200}.")


def _checked_places(given: Any) -> tuple[Place, ...]:
    """The places as a tuple of `Place`s; a ValueError or TypeError if one of them is none."""
    if given is None or isinstance(given, Place):
        given = () if given is None else (given,)
    elif len(given) == 2 and not isinstance(given[0], Sequence):
        given = (given,)
    places = []
    for place in given:
        start, end, turn = place if isinstance(place, Place) else (*map(operator.index, place), None)
        in_order = start is not None and (start == 0 if end is None else 0 <= start <= end)
        is_end = start is None and end is None and turn is None
        if not (in_order or is_end) or (turn is not None and turn < 0):
            raise ValueError(place)
        places.append(Place(start, end, turn))
    return tuple(places)


def _renamed(parts: Sequence[Part]) -> list[Part]:
    """The parts under names that are all different."""
    taken = {part.name for part in parts}
    numbers = dict[str, int]()
    new = list[Part]()
    for part in parts:
        name = part.name
        while name in taken and part.name in numbers:
            numbers[part.name] += 1
            name = f"{part.name}_{numbers[part.name]}"
        numbers.setdefault(part.name, 1)
        taken.add(name)
        new.append(part._replace(name=name))
    return new


@dataclass(frozen=True, kw_only=True)
class PartTable:
    """The parts of one reward function in the completions of this rank; `M` names, the same on all ranks."""

    names: tuple[str, ...]  # the `M` names, in the order in which they were first seen
    scores_B_M: torch.Tensor  # their scores; NaN where a part does not apply
    weights_B_M: torch.Tensor  # their weights; 0 where a part does not apply
    present_B_M: torch.Tensor  # which have a place
    whole_B_M: torch.Tensor  # which have the whole completion as their place
    turns_B_M: torch.Tensor  # the turn that a part's place was given by (the last of several); -1 for others. Integer.
    width: int  # `T`
    # Finds the tokens of all places that are not the whole completion, `(R, 4)`, integer: row, part, first token,
    # end. Raises if a text cannot be matched with its tokens, so it is called only by who needs it.
    read_ranges: Callable[[], torch.Tensor]

    @functools.cached_property
    def ranges_R_4(self) -> torch.Tensor:
        """Where the parts stand in the completions: row, part, first token, end."""
        return self.read_ranges()

    def tokens(self, part: int) -> torch.Tensor:
        """The tokens that wrote a part, `(B, T)`, bool; none where it has no place, or the whole completion."""
        row, _, first, end = self.ranges_R_4[self.ranges_R_4[:, 1] == part].unbind(dim=1)
        edges_B_T = self.ranges_R_4.new_zeros(len(self.scores_B_M), self.width + 1)
        one = edges_B_T.new_ones(())
        edges_B_T.index_put_((row, first), one, accumulate=True)
        edges_B_T.index_put_((row, end), -one, accumulate=True)
        return edges_B_T.cumsum(dim=1)[:, : self.width] > 0

    def rows(self, rows: slice) -> PartTable:
        """The table of some of the completions."""
        first, last, _ = rows.indices(len(self.scores_B_M))

        def ranges() -> torch.Tensor:
            row_R = self.ranges_R_4[:, 0]
            found = self.ranges_R_4[(row_R >= first) & (row_R < last)].clone()
            found[:, 0] -= first
            return found

        names = ("scores_B_M", "weights_B_M", "present_B_M", "whole_B_M", "turns_B_M")
        return replace(self, read_ranges=ranges, **{name: getattr(self, name)[rows] for name in names})


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One tool call of a turn."""

    name: str  # the tool's name; empty if it cannot be read
    arguments: Any = None  # the parsed arguments; None if they cannot be parsed
    # "returned", "raised" (or no tool has that name), "unanswered" (no more calls were allowed, or TRL took its result
    # back, which did not fit), or "unknown" (some of several calls of one asynchronous tool raised)
    outcome: str = "returned"
    result: str | None = None  # the tool's answer as text; None if there is none or it is not known

    @property
    def failed(self) -> bool:
        """Whether the tool raised."""
        return self.outcome == "raised"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What the model wrote between two answers of a tool, an environment or the user."""

    number: int  # the turn's number, from 0, as in `Rollout.turns_B_T`
    tokens: tuple[int, int]  # `(first, end)` in the completion; `end` is not part of the turn
    text: str  # their text, without special tokens
    characters: tuple[int, int]  # `(start, end)` of that text in the completion's text
    # `(start, end)` of the message's content in the completion's text; None if it cannot be located there
    content: tuple[int, int] | None = None
    calls: Sequence[ToolCall] = ()  # the turn's tool calls
    observation: str = ""  # the text between this turn and the next, without special tokens; empty if there is none

    @property
    def failed(self) -> bool:
        """Whether any of its calls failed."""
        return any(call.failed for call in self.calls)


class WrittenTokens:
    """The tokens of a completion that wrote something, in order, to be found by what they wrote."""

    def __init__(self, offsets: Sequence[tuple[int, int]]) -> None:
        self._tokens = [token for token, (start, end) in enumerate(offsets) if end > start]
        self._starts = [offsets[token][0] for token in self._tokens]
        self._ends = [offsets[token][1] for token in self._tokens]

    def of(self, start: int, end: int) -> Sequence[int]:
        """The tokens that wrote some of the characters `start` to `end`."""
        return self._tokens[bisect_right(self._ends, start) : bisect_left(self._starts, end)] if end > start else ()


def turn_numbers(by_model_B_T: torch.Tensor) -> torch.Tensor:
    """Number each row's runs of tokens that the model wrote from 0; -1 elsewhere, integer."""
    begins_B_T = by_model_B_T.clone()
    begins_B_T[:, 1:] &= ~by_model_B_T[:, :-1]
    return (begins_B_T.cumsum(dim=1) - 1).masked_fill(~by_model_B_T, -1)
