"""A plugin that fails on one rank stops all ranks with the same error; none hangs.

Plugins run inside `Agreement.section`. Whenever a rank there needs the others it first says where it is: that it
gathers a tensor of some shape, that its section is finished, or that it failed, and why. The gather takes place only
if all gather shapes that fit; else all raise the same error.

Reward functions run inside TRL's own method, which ends in one gather of their scores. A rank that fails there takes
part in it with a stand-in, and raises in the section that follows. Where another rank was killed, `_lost` names it.
"""

import functools
import os
import platform
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from .. import errors
from ..errors import EngineError, PluginOutputError, PluginRunError, TRLGRPOExtError

_DEATH_SECONDS = 2.0
_PEER = re.compile("peer|connection|socket|remote process", re.IGNORECASE)  # what backends say of a dead process


def _gather_objects(one: Any) -> list[Any]:
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, one)
    return found


class Agreement:
    """Keeps the ranks of a run in step; `gather` and `exchange` return all ranks' values, in rank order."""

    def __init__(
        self,
        rank: int,
        processes: int,
        gather: Callable[[torch.Tensor], torch.Tensor],
        exchange: Callable[[Any], list[Any]] = _gather_objects,
    ) -> None:
        self._rank = rank
        self._processes = processes
        self._gather = gather
        self._send_and_hear = exchange
        self._stopped_by: BaseException | None = None
        self._places: list[tuple[str, int]] = []  # each rank's machine and process, once it has said something

    @contextmanager
    def section(self) -> Iterator[None]:
        """Run plugins inside, in the same order on every rank; the first failing rank's error is raised on all."""
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
                self._meet(None)
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
        if not isinstance(tensor, torch.Tensor) or tensor.dim() not in (1, 2):
            got = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise PluginOutputError(f"rollout.gather takes a tensor (B,) or (B, T), got {got}.")
        if self._processes == 1:
            return tensor
        seen = self._meet((tuple(tensor.shape), str(tensor.dtype)))
        if len({(len(shape), shape[0], dtype) for shape, dtype in seen}) > 1:
            shapes = ", ".join(f"{shape} {dtype}" for shape, dtype in seen)
            self._stop(PluginOutputError(f"rollout.gather got tensors that don't fit together, by rank: {shapes}."))
        if tensor.dim() == 2:
            tensor = torch.nn.functional.pad(tensor, (0, max(shape[1] for shape, _ in seen) - tensor.size(1)))
        gathered: torch.Tensor = self._collect(self._gather, tensor.contiguous())
        return gathered

    def _meet(self, place: Any) -> list[Any]:
        """Tell the others the shape that is gathered, or None at the end; raise unless all are at the same place."""
        heard = self._exchange(place)
        if any(isinstance(one, BaseException) for one in heard):
            self._stop(_shared_error(heard))
        gathers = [rank for rank, one in enumerate(heard) if one is not None]
        others = [rank for rank, one in enumerate(heard) if one is None]
        if gathers and others:
            where = f"was called on {_ranks(gathers)} but not on {_ranks(others)}"
            self._stop(PluginOutputError(f"rollout.gather {where}. Call it equally often on every rank."))
        return heard

    def _exchange(self, said: Any) -> list[Any]:
        heard = self._collect(self._send_and_hear, (said, (_machine(), os.getpid())))
        self._places = [place for _, place in heard]
        return [one for one, _ in heard]

    def _collect(self, collective: Callable[[Any], Any], given: Any) -> Any:
        try:
            return collective(given)
        except RuntimeError as error:
            if (lost := self._lost(error)) is not None:
                self._stop(lost)
            raise

    def _lost(self, error: BaseException) -> EngineError | None:
        """What to raise for an error that a collective raised because a rank has ended; None for other errors."""
        failed = _failure_of_collective(error)
        if failed is None:
            return None
        until = time.monotonic() + _DEATH_SECONDS  # a connection closes a moment before its process has ended
        here = [(rank, process) for rank, (machine, process) in enumerate(self._places) if machine == _machine()]
        while not (gone := [one for one in here if _has_ended(one[1])]) and time.monotonic() < until:
            time.sleep(0.05)
        if not gone and not _PEER.search(str(failed)):
            return None
        who = " and ".join(f"rank {rank} (process {process})" for rank, process in gone) or "another rank"
        lost = EngineError(
            f"{who[0].upper()}{who[1:]} has ended, and rank {self._rank} cannot go on without it. Its own output may "
            f"say why, unless it was killed, for want of memory say. A collective met: {failed}"
        )
        lost.__cause__ = failed
        return lost

    def _fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed, and keep the error that all raise."""
        if self._processes > 1 and (lost := self._lost(error)) is not None:
            self._stopped_by = lost
            return
        if isinstance(error, KeyboardInterrupt):
            common: BaseException = KeyboardInterrupt("interrupted")
        elif isinstance(error, TRLGRPOExtError):  # what others derive from it may not travel
            common = vars(errors).get(type(error).__name__, PluginRunError)(str(error))
        else:
            common = PluginRunError(f"{type(error).__name__}: {error}")
        try:
            self._stopped_by = _shared_error(self._exchange(common) if self._processes > 1 else [common])
        except Exception as gone:  # another rank has ended
            self._stopped_by = _shared_error([None] * self._rank + [common])
            self._stopped_by.add_note(f"The ranks could not agree on it: {gone}")
        self._stopped_by.__cause__ = error.__cause__ if type(common) is type(error) else error

    def _stop(self, error: BaseException) -> NoReturn:
        self._stopped_by = error
        raise error


def _failure_of_collective(error: BaseException | None) -> RuntimeError | None:
    """The error that a collective raised, which this one is or was caused by."""
    while error is not None:
        modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        if isinstance(error, RuntimeError) and any(name.startswith("torch.distributed") for name in modules):
            return error
        error = error.__cause__
    return None


@functools.cache
def _machine() -> str:
    """A name for this machine or container, in which numbers of processes mean the same."""
    name = platform.node()
    with suppress(OSError):  # which only Linux has
        name += str(Path("/proc/self/ns/pid").readlink())
    return name


def _has_ended(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return Path("/proc/self/stat").exists()  # else this is no Linux, and nothing is known
    return state in "ZX"  # ended, but its parent has not looked yet


@contextmanager
def exits_refused() -> Iterator[None]:
    """Inside, `os._exit` raises `SystemExit`, but in forks: a rank that left so would end the run as if it was done."""
    leave = os._exit
    owner = os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != owner:
            leave(status)
        raise SystemExit(f"os._exit({status}) was called")

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = leave


def _shared_error(heard: Sequence[Any]) -> BaseException:
    """The one error that every rank raises: the first failing rank's, with its number."""
    failed = [rank for rank, one in enumerate(heard) if isinstance(one, BaseException)]
    first = heard[failed[0]]
    also = f" ({_ranks(failed[1:])} failed too.)" if len(failed) > 1 else ""
    error: BaseException = type(first)(f"On rank {failed[0]}: {first}{also}")
    return error


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
