"""The parts that rewards consist of: their names agreed over all ranks, and their places as tokens.

Scores and names are read at once. Places are looked up when somebody reads them, since that needs a text that can be
matched with its tokens.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..errors import AlignmentError, PluginOutputError
from ..guard.messages import content_text
from ..types import WHOLE, Part, Parts, PartTable, Place, Rollout
from .turns import exchanges, only_place

MOST_IN_METRICS = 32
"""Names of a reward's parts that have metrics of their own."""

Rows = Sequence[Sequence[Part]]
"""The parts of each completion of this rank; none where the function returned a plain number or None."""


def names_of(rows: Rows) -> tuple[str, ...]:
    """The parts' names, in the order in which they are first seen."""
    return tuple(dict.fromkeys(part.name for row in rows for part in row))


def agreed_names(
    rows: Mapping[str, Rows], gather: Callable[[torch.Tensor], torch.Tensor], device: torch.device | str = "cpu"
) -> dict[str, tuple[str, ...]]:
    """By reward function the names of the parts on all ranks, the same on each; gathers once."""
    mine = json.dumps({reward: names_of(of_reward) for reward, of_reward in rows.items()}).encode()
    sent_1_L = torch.frombuffer(bytearray(mine), dtype=torch.uint8).unsqueeze(0).to(device)
    said = [json.loads(bytes(row).rstrip(b"\0")) for row in gather(sent_1_L).tolist()]  # padded with zeros
    rewards = dict.fromkeys(reward for names in said for reward in names)
    return {
        reward: tuple(dict.fromkeys(name for names in said for name in names.get(reward, ()))) for reward in rewards
    }


@dataclass(frozen=True)
class PartArrays:
    """What a reward says of its parts, `(B, M)` each, without their places in the text."""

    scores: Any
    weights: Any
    whole: Any
    placed: Any  # how many places it gives
    turns: Any
    places: Sequence[tuple[int, int, Place]]  # row, part, place

    @classmethod
    def of(cls, rows: Rows, names: Sequence[str]) -> PartArrays:
        """Read the parts of some completions."""
        column_of = {name: column for column, name in enumerate(names)}
        width = len(names)
        said: list[tuple[int, float, float, int]] = []  # cell, score, weight, number of places
        places: list[tuple[int, int, Place]] = []
        special: list[tuple[int, Place]] = []  # cells whose place is all of the completion, or in a turn
        for row, parts in enumerate(rows):
            for name, score, weight, found in parts:
                if score is None:
                    continue
                column = column_of[name]
                cell = row * width + column
                said.append((cell, score, weight, len(found)))
                for place in found:
                    if place[1] is None or place[2] is not None:
                        special.append((cell, place))
                        if place == WHOLE:
                            continue
                    places.append((row, column, place))
        cells, scores, weights, counts = zip(*said, strict=True) if said else ((), (), (), ())

        def table(start: Any, at: Any, values: Any, kind: Any) -> Any:
            made = np.full(len(rows) * width, start, dtype=kind)
            made[list(at)] = values
            return made.reshape(len(rows), width)

        whole = [cell for cell, place in special if place == WHOLE]
        turns = [(cell, place.turn) for cell, place in special if place.turn is not None]
        return cls(
            scores=table(np.nan, cells, scores, np.float64),
            weights=table(0.0, cells, weights, np.float64),
            whole=table(False, whole, True, bool),
            placed=table(0, cells, counts, np.int64),
            turns=table(-1, [cell for cell, _ in turns], [turn for _, turn in turns], np.int64),
            places=places,
        )


def part_metrics(
    rows: Mapping[str, Rows],
    names: Mapping[str, Sequence[str]],
    gather: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """`parts/<reward>/<part>/mean` of the scores and `/present`, the share of completions that have the part.

    Both are over the completions in which the part applies. The parts after the first 32 of a reward are one, `others`.
    Gathers once if there are parts on any rank.
    """
    shown: list[str] = []
    counts: list[Any] = []
    for reward, of_reward in names.items():
        arrays = PartArrays.of(rows.get(reward, ()), of_reward)
        scored = ~np.isnan(arrays.scores)
        each = np.stack([scored.sum(0), np.nan_to_num(arrays.scores).sum(0), (scored & (arrays.placed > 0)).sum(0)])
        if len(of_reward) > MOST_IN_METRICS:
            rest = each[:, MOST_IN_METRICS:].sum(1, keepdims=True)
            each = np.concatenate([each[:, :MOST_IN_METRICS], rest], axis=1)
        labels = [*map(label, of_reward[:MOST_IN_METRICS]), "others"][: each.shape[1]]
        shown += [f"parts/{reward}/{name}" for name in labels]
        counts.append(each)
    if not shown:
        return {}
    mine = torch.tensor(np.concatenate(counts, axis=1), dtype=torch.float64, device=device)
    applies, sums, present = gather(mine.view(1, -1)).sum(dim=0).view(3, -1).tolist()
    metrics: dict[str, float] = {}
    for name, count, total, there in zip(shown, applies, sums, present, strict=True):
        if count:
            metrics |= {f"{name}/mean": total / count, f"{name}/present": there / count}
    return metrics


def label(name: str) -> str:
    """A part's name as metrics and messages have it: printable and short, since a model may have written it."""
    return "".join(letter if letter.isprintable() else "?" for letter in name[:60])


class ByReward(Mapping[str, Any]):
    """Values by reward function, made when they are read: if that fails, only a run whose hooks need them stops."""

    def __init__(self, names: Iterable[str], read: Callable[[str], Any]) -> None:
        self._names, self._read = tuple(names), functools.cache(read)

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def with_parts(
    rollout: Rollout, rows: Mapping[str, Sequence[Any]], names: Mapping[str, Sequence[str]] | None = None
) -> Rollout:
    """The rollout with the parts of its completions, by reward function: `Parts`, their parts, a number or None.

    `names` are those of all ranks; without them this rank has all.
    """
    parts = {reward: [_parts_of(score) for score in of_reward] for reward, of_reward in rows.items()}
    known = {reward: names_of(of_reward) for reward, of_reward in parts.items()} if names is None else names

    def read(reward: str) -> PartTable:
        return _part_table(reward, known[reward], parts.get(reward, [()] * len(rollout.texts)), rollout)

    return replace(rollout, parts=ByReward(known, read))


def _parts_of(score: Any) -> Sequence[Part]:
    if isinstance(score, Parts):
        return score.parts
    return score if isinstance(score, tuple) else ()


def _part_table(reward: str, names: Sequence[str], rows: Rows, rollout: Rollout) -> PartTable:
    """The parts of one reward function, in the dtype and on the device of the mask."""
    arrays, like = PartArrays.of(rows, names), rollout.mask_B_T

    def numbers(values: Any) -> torch.Tensor:
        return torch.from_numpy(values).to(like.device)

    return PartTable(
        names=tuple(names),
        scores_B_M=numbers(arrays.scores).to(like.dtype),
        weights_B_M=numbers(arrays.weights).to(like.dtype),
        present_B_M=numbers(arrays.placed > 0),
        whole_B_M=numbers(arrays.whole),
        turns_B_M=numbers(arrays.turns),
        width=like.size(1),
        read_ranges=lambda: _ranges(reward, arrays.places, rollout).to(like.device),
    )


def _ranges(reward: str, places: Sequence[tuple[int, int, Place]], rollout: Rollout) -> torch.Tensor:
    """The tokens of places, `(R, 4)`: row, part, first token, end."""
    found: list[tuple[int, int, int, int]] = []
    characters: list[tuple[int, int, int, int]] = []
    lengths = rollout.completion_mask_B_T.sum(dim=1).long().tolist()
    turns_B_T = rollout.turns_B_T.cpu().numpy()
    plain = [_seen_whole(completion, text) for completion, text in zip(rollout.completions, rollout.texts, strict=True)]
    sizes = [len(text) for text in rollout.texts]
    for row, part, place in places:
        start, end, turn, call = place
        if end is not None:
            if turn is not None or start is None or not plain[row] or end > sizes[row]:
                start, end = _characters(rollout, reward, place, row)
            characters.append((row, part, start, end))
        elif start is None:
            found.append((row, part, max(lengths[row] - 1, 0), lengths[row]))
        elif call is None:
            found.append((row, part, *_turn(turns_B_T[row], reward, turn, row)))
        else:
            found.append((row, part, *_call(rollout, reward, place, row)))
    both = [torch.tensor(found, dtype=torch.int64).view(-1, 4), _tokens(characters, rollout)]
    ranges_R_4 = torch.cat(both)
    return ranges_R_4[ranges_R_4[:, 3] > ranges_R_4[:, 2]]


def _tokens(characters: Sequence[tuple[int, int, int, int]], rollout: Rollout) -> torch.Tensor:
    """The tokens that wrote characters of texts: for `(row, part, start, end)`, `(row, part, first token, end)`."""
    if not characters:
        return torch.zeros(0, 4, dtype=torch.int64)
    asked_R_4 = np.array(characters, dtype=np.int64)
    rows = sorted({row for row, *_ in characters})
    offsets = [rollout.offsets(row) for row in rows]
    pairs = itertools.chain.from_iterable(itertools.chain.from_iterable(offsets))
    written = np.fromiter(pairs, dtype=np.int64).reshape(-1, 2)
    counts = np.array([len(of_row) for of_row in offsets])
    # One axis for the characters of all texts: a text's begin where those of the text before end.
    sizes = np.array([len(rollout.texts[row]) + 1 for row in rows])
    bases, firsts = np.cumsum(sizes) - sizes, np.cumsum(counts) - counts
    shifted = written + np.repeat(bases, counts)[:, None]
    with_text = np.flatnonzero(written[:, 1] > written[:, 0])
    starts, ends = shifted[with_text, 0], shifted[with_text, 1]
    place = np.searchsorted(rows, asked_R_4[:, 0])
    start, end = asked_R_4[:, 2] + bases[place], asked_R_4[:, 3] + bases[place]
    first = np.searchsorted(ends, start, side="right")  # those that end after the start
    last = np.searchsorted(starts, end, side="left") - 1  # and begin before the end
    wrote = (asked_R_4[:, 3] > asked_R_4[:, 2]) & (last >= first)
    asked_R_4, first, last, place = asked_R_4[wrote], first[wrote], last[wrote], place[wrote]
    asked_R_4[:, 2] = with_text[first] - firsts[place]
    asked_R_4[:, 3] = with_text[last] - firsts[place] + 1
    return torch.from_numpy(asked_R_4)


def _characters(rollout: Rollout, reward: str, place: Place, row: int) -> tuple[int, int]:
    """The characters of the completion's text that a place of characters means, as a reward function saw them."""
    begins, size = _begins(rollout, reward, place.turn, row)
    assert place.start is not None
    assert place.end is not None
    if place.end > size:
        raise PluginOutputError(
            f"the reward {reward!r} has a part at the characters {place.start} to {place.end} of row {row}, which has "
            f"{size} there. Give places in the text that `completion_text` returns."
        )
    return begins + place.start, begins + place.end


def _seen_whole(completion: Any, text: str) -> bool:
    """Whether a reward function saw the text as it is: a string, or one message that has it as its content."""
    if isinstance(completion, str):
        return True
    pairs = exchanges(completion)
    return len(pairs) == 1 and pairs[0][0].get("content") == text


def _begins(rollout: Rollout, reward: str, turn: int | None, row: int) -> tuple[int, int]:
    """Where the text that a function saw begins in the completion's text, and its length."""
    completion, text = rollout.completions[row], rollout.texts[row]
    if turn is None and _seen_whole(completion, text):
        return 0, len(text)
    pairs = exchanges(completion)
    said = [number for number, (message, _) in enumerate(pairs) if content_text(message.get("content")).strip()]
    at: tuple[int, int] | None
    known = rollout.turns(row)
    if turn is None and (not said or len(known) != len(pairs)):  # a rollout function's one message
        at = only_place(content_text(pairs[-1][0].get("content")) if said else "", text, 0)
    else:
        number = said[-1] if turn is None else turn
        if not number < len(known):
            raise no_such_turn(f"The reward {reward!r}", number, row, len(known))
        at = known[number].content
    if at is None:
        which = "the last assistant message" if turn is None else f"assistant message {turn}"
        raise AlignmentError(
            f"The parts of {reward!r} at row {row} cannot be placed: the text of {which} does not occur verbatim in "
            "the completion's decoded tokens, or occurs twice. Return a plain reward, or places that are whole turns."
        )
    return at[0], at[1] - at[0]


def _turn(turns_T: Any, reward: str, turn: int | None, row: int) -> tuple[int, int]:
    assert turn is not None
    tokens = np.flatnonzero(turns_T == turn)
    if not len(tokens):
        raise no_such_turn(f"The reward {reward!r}", turn, row, int(turns_T.max(initial=-1)) + 1)
    return int(tokens[0]), int(tokens[-1]) + 1


def _call(rollout: Rollout, reward: str, place: Place, row: int) -> tuple[int, int]:
    turns = rollout.turns(row)
    assert place.turn is not None
    assert place.call is not None
    if place.turn >= len(turns):
        raise no_such_turn(f"The reward {reward!r}", place.turn, row, len(turns))
    calls = turns[place.turn].calls
    if place.call >= len(calls):
        raise AlignmentError(
            f"The reward {reward!r} has a part at the tool call {place.call} of turn {place.turn} at row {row}, which "
            f"makes {len(calls)} (counted from 0)."
        )
    return calls[place.call].tokens


def no_such_turn(who: str, turn: int, row: int, count: int) -> AlignmentError:
    """The error for a turn that a completion does not have."""
    return AlignmentError(
        f"{who} has a part in turn {turn} of the completion at row {row}, which has {count} (counted from 0). Name "
        "no more turns than there are assistant messages."
    )
