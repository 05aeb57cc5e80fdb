"""The parts that rewards consist of: their names agreed over all ranks, and their places as tokens.

Scores and names are read at once, places when somebody asks for them: that needs a text that matches its tokens.
"""

import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..completions import WHOLE, Part, PartTable, Place, WrittenTokens
from ..errors import AlignmentError, PluginOutputError
from ..guard.messages import content_text
from ..types import Rollout
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


def part_metrics(
    rows: Mapping[str, Rows],
    names: Mapping[str, Sequence[str]],
    gather: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """`parts/<reward>/<part>/mean` and `/present`, of those to whom it applies; after 32 parts, `others`."""
    sums: dict[str, list[float]] = {}
    for reward, of_reward in names.items():
        name_of = {
            part: f"parts/{reward}/{label(part) if column < MOST_IN_METRICS else 'others'}"
            for column, part in enumerate(of_reward)
        }
        sums |= {name: [0.0, 0.0, 0.0] for name in name_of.values()}
        for name, score, _, places in itertools.chain.from_iterable(rows.get(reward, ())):
            if score is not None:
                counts = sums[name_of[name]]
                counts[0] += 1.0
                counts[1] += score
                counts[2] += bool(places)
    if not sums:
        return {}
    mine = torch.tensor([*sums.values()], dtype=torch.float64, device=device)
    metrics: dict[str, float] = {}
    totals = gather(mine.view(1, -1)).sum(dim=0).view(-1, 3).tolist()
    for name, (count, total, there) in zip(sums, totals, strict=True):
        if count:
            metrics |= {f"{name}/mean": total / count, f"{name}/present": there / count}
    return metrics


def label(name: str) -> str:
    """A part's name as metrics and messages have it: printable and short, since a model may have written it."""
    return "".join(letter if letter.isprintable() else "?" for letter in name[:60])


def with_parts(
    rollout: Rollout, rows: Mapping[str, Sequence[Any]], names: Mapping[str, Sequence[str]] | None = None
) -> Rollout:
    """The rollout with its completions' `Parts`, by reward; `names` are those of all ranks, if they differ."""
    parts = {
        reward: [score if isinstance(score, tuple) else getattr(score, "parts", ()) for score in of_reward]
        for reward, of_reward in rows.items()
    }
    known = {reward: names_of(of_reward) for reward, of_reward in parts.items()} if names is None else names
    nothing: Rows = [()] * len(rollout.texts)
    tables = {reward: _part_table(reward, known[reward], parts.get(reward, nothing), rollout) for reward in known}
    return replace(rollout, parts=tables)


def _part_table(reward: str, names: Sequence[str], rows: Rows, rollout: Rollout) -> PartTable:
    """The parts of one reward function, in the dtype and on the device of the mask."""
    shape = (len(rows), len(names))
    scores = np.full(shape, np.nan)
    weights = np.zeros(shape)
    present = np.zeros(shape, dtype=bool)
    whole = np.zeros(shape, dtype=bool)
    turns = np.full(shape, -1)
    places: list[tuple[int, int, Place]] = []
    column_of = {name: column for column, name in enumerate(names)}
    for row, parts in enumerate(rows):
        for part in parts:
            if part.score is None:
                continue
            cell = row, column_of[part.name]
            scores[cell] = part.score
            weights[cell] = part.weight
            present[cell] = bool(part.places)
            whole[cell] = WHOLE in part.places
            for place in part.places:
                if place != WHOLE:
                    places.append((*cell, place))
                if place.turn is not None:
                    turns[cell] = place.turn
    like = rollout.mask_B_T
    return PartTable(
        names=tuple(names),
        scores_B_M=torch.from_numpy(scores).to(like),
        weights_B_M=torch.from_numpy(weights).to(like),
        present_B_M=torch.from_numpy(present).to(like.device),
        whole_B_M=torch.from_numpy(whole).to(like.device),
        turns_B_M=torch.from_numpy(turns).to(like.device),
        width=like.size(1),
        read_ranges=functools.partial(_ranges, reward, places, rollout),
    )


def _ranges(reward: str, places: Sequence[tuple[int, int, Place]], rollout: Rollout) -> torch.Tensor:
    """The tokens of places, `(R, 4)`: row, part, first token, end."""
    lengths = rollout.completion_mask_B_T.sum(dim=1).long().tolist()
    turns_B_T = rollout.turns_B_T.cpu().numpy()
    written = functools.cache(lambda row: WrittenTokens(rollout.offsets(row)))
    found: list[tuple[int, int, int, int]] = []
    for row, part, place in places:
        tokens: Sequence[int]
        if place.end is not None:
            begin, size = _seen_text(rollout, reward, place.turn, row)
            if place.end > size:
                raise PluginOutputError(
                    f"the reward {reward!r} has a part at the characters {place.start} to {place.end} of row {row}, "
                    f"which has {size} there. Give places in the text that `completion_text` returns."
                )
            tokens = written(row).of(begin + (place.start or 0), begin + place.end)
        elif place.turn is not None:
            tokens = np.flatnonzero(turns_B_T[row] == place.turn).tolist()
            if not tokens:
                count = int(turns_B_T[row].max(initial=-1)) + 1
                raise no_such_turn(f"The reward {reward!r}", place.turn, row, count)
        else:  # the last token
            tokens = range(lengths[row])[-1:]
        if tokens:
            found.append((row, part, tokens[0], tokens[-1] + 1))
    return torch.tensor(found, dtype=torch.int64, device=rollout.mask_B_T.device).view(-1, 4)


def _seen_text(rollout: Rollout, reward: str, turn: int | None, row: int) -> tuple[int, int]:
    """Where the text that a reward function saw begins in the completion's text, and its length."""
    text = rollout.texts[row]
    pairs = exchanges(rollout.completions[row])
    contents = [content_text(message.get("content")) for message, _ in pairs]
    if turn is None and (isinstance(rollout.completions[row], str) or contents == [text]):
        return 0, len(text)
    known = rollout.turns(row)
    said = [number for number, content in enumerate(contents) if content.strip()]
    if turn is None and (not said or len(known) != len(pairs)):  # a rollout function's one message
        place = only_place(contents[-1] if said else "", text, 0)
    else:
        number = said[-1] if turn is None else turn
        if number >= len(known):
            raise no_such_turn(f"The reward {reward!r}", number, row, len(known))
        place = known[number].content
    if place is None:
        which = "the last assistant message" if turn is None else f"assistant message {turn}"
        raise AlignmentError(
            f"The parts of {reward!r} at row {row} cannot be placed: the text of {which} is not in the completion's "
            "decoded tokens, or is there twice. Return a plain reward, or places that are whole turns."
        )
    return place[0], place[1] - place[0]


def no_such_turn(who: str, turn: int, row: int, count: int) -> AlignmentError:
    """The error for a turn that a completion does not have."""
    return AlignmentError(f"{who} has a part in turn {turn} of the completion at row {row}, which has {count} turns.")
