"""A plugin that fails on one rank stops all ranks with the same error; none hangs.

Otherwise a rank that fails leaves the others waiting in their next collective until it times out. So plugins run inside
`Agreement.section`, and whenever a rank there needs the others it first says why:

    GATHER   the plugin called `rollout.gather`, and this is the tensor's shape
    DONE     the section is finished
    FAILED   it raised, and the message has this many bytes

Only if all say GATHER, with shapes that fit, does the gather take place. If any says FAILED, its message goes to all.
If some gather and others are done, that is an error too. One exchange costs one gather of six integers.

Reward functions run inside TRL's own method, which ends in one gather of their scores. A rank that fails there first
takes part in that gather, with a stand-in (`Agreement.stand_in`), and raises in the section that follows. The ways in
which one rank could wait there for another, and what makes each of them a failure like any other:

    a reward changes or empties its arguments   `reward_watch` refuses it; the stand-in's size is taken before the call
    it raises, or returns a wrong count         `reward_watch` names it before TRL sees the result
    a reward model raises                       in TRL's method, like any other error there
    `sys.exit`, Ctrl-C                          not `Exception`s, so caught as `BaseException`; async code wraps them
    `os._exit`                                  raises inside `exits_refused`
    it never returns                            `RewardWatch.time_limit`
    it logs what cannot be sent or summed       `reward_watch` refuses it, for TRL gathers that after the rewards
    an interrupt arrives inside TRL's gather    the traceback shows it, and there is no stand-in
    another rank was killed                     the collective fails on all others, and the launcher names the rank
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from .. import errors
from ..errors import PluginOutputError, PluginRunError, TRLGRPOExtError

_GATHER, _DONE, _FAILED = range(3)
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_LONGEST_MESSAGE = 4000


class Agreement:
    """Keeps the ranks of a run in step while plugins run.

    `gather` concatenates equally shaped tensors on `device` over all ranks along the first axis, in rank order.
    """

    def __init__(
        self, rank: int, processes: int, gather: Callable[[torch.Tensor], torch.Tensor], device: torch.device
    ) -> None:
        self._rank = rank
        self._processes = processes
        self._gather = gather
        self._device = device
        self._stopped_by: BaseException | None = None

    @contextmanager
    def section(self) -> Iterator[None]:
        """Run plugins inside; every rank must enter its sections in the same order.

        The first failing rank's error is raised on all, with its number, and chained on the rank where it happened.
        """
        self._stopped_by = None
        try:
            with exits_refused():
                yield
        except BaseException as error:  # SystemExit and Ctrl-C too: they would leave the other ranks waiting
            if isinstance(error, KeyboardInterrupt) and self._processes == 1:
                raise
            if self._stopped_by is None:
                self._fail(error)
        else:
            if self._stopped_by is None and self._processes > 1:
                self._meet(_DONE)
        if self._stopped_by is not None:  # also where a plugin caught it
            raise self._stopped_by

    def stand_in(self, error: BaseException, gather: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> None:
        """Take part, after an error, in the one gather in which the other ranks wait, unless it came out of that."""
        if any(frame.f_code is gather.__code__ for frame, _ in traceback.walk_tb(error.__traceback__)):
            return
        try:
            gather(tensor)
        except Exception as gone:  # another rank has ended: what this one raises is its own error
            error.add_note(f"The ranks could not agree on it: {gone}")

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate `(B,)` or `(B, T)` over all ranks; `T` is padded with zeros to the longest of any rank."""
        if self._stopped_by is not None:  # a plugin caught it and goes on, while the others have left
            raise self._stopped_by
        if not isinstance(tensor, torch.Tensor):
            raise PluginOutputError(f"rollout.gather takes a tensor (B,) or (B, T), got {type(tensor).__name__}.")
        if tensor.dim() not in (1, 2) or tensor.dtype not in _DTYPES:
            got = f"{tuple(tensor.shape)}, {tensor.dtype}"
            raise PluginOutputError(f"rollout.gather takes a tensor (B,) or (B, T) of numbers, got shape {got}.")
        if self._processes == 1:
            return tensor
        rows = self._meet(_GATHER, tensor.dim(), tensor.size(0), tensor.size(-1), _DTYPES.index(tensor.dtype))
        kinds = {(dimensions, count, dtype) for _, dimensions, count, _, dtype, _ in rows}
        if len(kinds) > 1:
            shapes = ", ".join(_shape(*row[1:5]) for row in rows)
            self._stop(PluginOutputError(f"rollout.gather got tensors that don't fit together, by rank: {shapes}."))
        if tensor.dim() == 2:
            tensor = torch.nn.functional.pad(tensor, (0, max(row[3] for row in rows) - tensor.size(1)))
        return self._gather(tensor.contiguous())

    def _meet(self, *words: int) -> list[list[int]]:
        """Exchange where each rank is, and raise unless all are at the same place."""
        rows = self._exchange(*words)
        places = [row[0] for row in rows]
        if _FAILED in places:
            self._stop(self._shared_failure([row[5] for row in rows], b""))
        if len(set(places)) > 1:
            at = {place: [rank for rank, other in enumerate(places) if other == place] for place in set(places)}
            self._stop(
                PluginOutputError(
                    f"rollout.gather was called on {_ranks(at[_GATHER])} but not on {_ranks(at[_DONE])}. A plugin must "
                    "call it equally often on every rank, so never under a condition on its own rows."
                )
            )
        return rows

    def _exchange(self, *words: int) -> list[list[int]]:
        mine = torch.tensor([[*words, *([0] * (6 - len(words)))]], device=self._device)
        rows: list[list[int]] = self._gather(mine).tolist()
        return rows

    def _fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed, and keep the error that all raise."""
        kind, message = type(error), str(error)
        if isinstance(error, KeyboardInterrupt):
            message = "interrupted"
        elif not isinstance(error, TRLGRPOExtError):
            kind, message = PluginRunError, f"{type(error).__name__}: {error}"
        breaks = getattr(error, "breaks", None) or ""
        try:
            if self._processes == 1:
                self._stopped_by = _with_rank(kind.__name__, breaks, message, [0])
            else:
                text = f"{kind.__name__}\n{breaks}\n{message}".encode(errors="replace")[:_LONGEST_MESSAGE]
                sizes = [row[5] for row in self._exchange(_FAILED, 0, 0, 0, 0, len(text))]
                self._stopped_by = self._shared_failure(sizes, text)
        except Exception as gone:  # another rank has ended
            self._stopped_by = _with_rank(kind.__name__, breaks, message, [self._rank])
            self._stopped_by.add_note(f"The ranks could not agree on it: {gone}")
        self._stopped_by.__cause__ = error.__cause__ if kind is type(error) else error

    def _shared_failure(self, sizes: Sequence[int], mine: bytes) -> BaseException:
        """Exchange the messages and make the one error that every rank raises."""
        padded = torch.zeros(1, max(sizes), dtype=torch.uint8, device=self._device)
        padded[0, : len(mine)] = torch.tensor(list(mine), dtype=torch.uint8)
        texts = self._gather(padded).tolist()
        failed = [rank for rank, size in enumerate(sizes) if size > 0]
        text = bytes(texts[failed[0]][: sizes[failed[0]]]).decode(errors="replace")
        name, breaks, message = text.split("\n", 2)
        return _with_rank(name, breaks, message, failed)

    def _stop(self, error: BaseException) -> NoReturn:
        self._stopped_by = error
        raise error


@contextmanager
def exits_refused() -> Iterator[None]:
    """Inside, `os._exit` raises `SystemExit`: a rank that left with status 0 would end the run as if it had succeeded.

    Processes that are forked inside may still use it.
    """
    leave, owner = os._exit, os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != owner:
            leave(status)
        raise SystemExit(f"os._exit({status}) was called")

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = leave


def _with_rank(name: str, breaks: str, message: str, ranks: Sequence[int]) -> BaseException:
    also = f" ({_ranks(ranks[1:])} failed too.)" if len(ranks) > 1 else ""
    text = f"On rank {ranks[0]}: {message}{also}"
    if name == KeyboardInterrupt.__name__:
        return KeyboardInterrupt(text)
    kind = getattr(errors, name, None)
    error = (kind if isinstance(kind, type) and issubclass(kind, TRLGRPOExtError) else PluginRunError)(text)
    if breaks:
        error.breaks = breaks  # type: ignore[attr-defined]
    return error


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _shape(dimensions: int, rows: int, width: int, dtype: int) -> str:
    return f"{(rows,) if dimensions == 1 else (rows, width)} {_DTYPES[dtype]}"
