"""Watch reward functions while they score a generation batch: check results, keep time, name failing completions."""

import asyncio
import faulthandler
import logging
import math
import os
import pickle
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import PluginOutputError, PluginRunError, RewardError, TRLGRPOExtError
from ..types import Part, Parts
from . import leftovers
from .agreement import exits_refused
from .calls import call, check_scores, is_async, is_model, select_rows, start_scoring
from .messages import completion_text, joined_text
from .outcomes import OUTCOME_SUFFIX, exception_text, shown, source_line
from .unchanged import Fingerprints

logger = logging.getLogger(__name__)

_SEARCH_SECONDS = 10.0
_FIRST_LINE_SECONDS = 60.0  # after which a reward is said to be still running, and again after twice as long
_TICK_SECONDS = 1.0
_GRACE_SECONDS = 30.0
# Nobody else's: `SIGALRM` is what rewards themselves use (Math-Verify does).
_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None


class _Overrun(BaseException):
    """The limit has passed. Not an `Exception`, so that a function's own `except Exception` does not swallow it."""


@dataclass(eq=False)
class _Call:
    """A call of a reward function that has not returned."""

    name: str
    began: float
    tell_after: float  # seconds after which it is said to be running


class _Watched:
    """A reward function in the hands of a user's class: its attributes are the function's own."""

    def __init__(self, function: Any, watched: Callable[..., Any]) -> None:
        vars(self).update(_function=function, _watched=watched)

    def __call__(self, **columns: Any) -> Any:
        return self._watched(**columns)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._function, name, value)


class _WatchedAsync(_Watched):
    async def __call__(self, **columns: Any) -> Any:
        return await self._watched(**columns)


class RewardWatch:
    """Watches the functions of one scoring, at most `limit` seconds, and keeps parts, outcomes and NaNs."""

    def __init__(self, limit: float | None = None) -> None:
        self.parts: dict[str, list[Sequence[Part]]] = {}
        self.outcomes: dict[str, list[Any]] = {}
        self.nans: dict[str, int] = {}
        self._limit = limit
        self._started = time.monotonic()
        self._running: list[_Call] = []

    def start_scoring(
        self, functions: Sequence[Any], names: Sequence[str], inputs: Sequence[Mapping[str, Any]], **given: Any
    ) -> None:
        """Let the functions that can begin early do so; `given` is what TRL passes beside the columns of the rows."""
        own = ("prompt", "completion", "completion_ids")
        columns = {name: [row[name] for row in inputs] for name in inputs[0] if name not in own}
        for function, name in zip(functions, names, strict=True):
            try:
                with self._run(name):
                    start_scoring(function, {**given, **columns})
            except TRLGRPOExtError:
                raise
            except (Exception, SystemExit) as error:
                raise PluginRunError(f"{_raised(name, error)} (in start_scoring)") from error

    def wrap(self, function: Any, name: str) -> Any:
        """The same function, watched. Reward models pass through; async functions stay async, as TRL needs."""
        if is_model(function) or not callable(function):
            return function

        async def watched_async(**columns: Any) -> Any:
            with self._run(name):
                columns, check = self._listen(columns, name)
                try:
                    return check(await self._awaited(function(**columns), name))
                except TRLGRPOExtError:
                    raise
                except Exception as error:  # the search runs the function in this loop, so it needs a thread
                    raise await asyncio.to_thread(_explained, error, function, columns, name) from error

        def watched(**columns: Any) -> Any:
            with self._run(name):
                columns, check = self._listen(columns, name)
                try:
                    return check(function(**columns))
                except TRLGRPOExtError:
                    raise
                except (Exception, SystemExit) as error:
                    raise _explained(error, function, columns, name) from error

        return _WatchedAsync(function, watched_async) if is_async(function) else _Watched(function, watched)

    @contextmanager
    def time_limit(self) -> Iterator[None]:
        """Interrupt what runs inside at the limit, and name it; no function ends the process.

        What cannot be interrupted (compiled code that holds the interpreter lock, a training in another thread) ends
        the process after half a minute more, or the limit again, if that is longer, with a traceback of where it hangs.
        """
        is_main = threading.current_thread() is threading.main_thread()
        number = _SIGNAL if self._limit is not None and is_main else None
        over = threading.Event()
        clock = threading.Thread(target=self._keep_time, args=(over, number), daemon=True)
        with exits_refused():
            before = None if number is None else signal.signal(number, self._interrupt)
            clock.start()
            try:
                yield
            except _Overrun as overrun:
                raise RewardError(str(overrun)) from overrun
            finally:
                over.set()
                self._running.clear()  # the signal may be under way
                faulthandler.cancel_dump_traceback_later()  # an async function that blocks its loop may run on
                clock.join()
                if number is not None:
                    signal.signal(number, before)
                leftovers.prepare()

    def _keep_time(self, over: threading.Event, number: int | None) -> None:
        """Say what has been running for long, in ever longer intervals; interrupt the main thread at the limit."""
        rank = f" on rank {os.environ['RANK']}" if "RANK" in os.environ else ""
        end = "is off" if self._limit is None else f"stops the run after {self._limit:g} s"
        while not over.wait(min(_TICK_SECONDS, self._left() or _TICK_SECONDS)):
            if number is not None and self._left() == 0.0:
                signal.pthread_kill(threading.main_thread().ident or 0, number)
                number = None
            for running in [*self._running]:
                seconds = time.monotonic() - running.began
                if seconds >= running.tell_after:
                    running.tell_after *= 2
                    said = "The reward %r has been running for %.0f s%s; reward_timeout %s."
                    logger.warning(said, running.name, seconds, rank, end)

    @staticmethod
    def check_finite(rewards_N_K: torch.Tensor, names: Sequence[str]) -> None:
        """Refuse infinities, which reward models can return: TRL calls those itself."""
        infinite_N_K = torch.isinf(rewards_N_K)
        if infinite_N_K.any():
            row, column = infinite_N_K.nonzero()[0].tolist()
            value = rewards_N_K[row, column].item()
            raise PluginOutputError(f"The reward {names[column]!r} returned {value} at row {row}; it must be finite.")

    def counts(self, rewards_N_K: torch.Tensor, names: Sequence[str], gather: Callable[..., Any]) -> dict[str, float]:
        """Shares of all ranks' completions without a value, by metric; functions that gave every value are left out."""
        missing_K = torch.isnan(rewards_N_K).float().mean(dim=0)
        if not missing_K.any():  # on all ranks or on none, as the scores are those of all
            return {}
        nans_K = torch.tensor([[float(self.nans.get(name, 0)) for name in names]], device=rewards_N_K.device)
        nans_K = gather(nans_K).sum(dim=0) / rewards_N_K.size(0)
        shares: dict[str, float] = {}
        for name, missing, nans in zip(names, missing_K.tolist(), nans_K.tolist(), strict=True):
            if missing:
                shares |= {f"rewards/{name}/none": max(missing - nans, 0.0), f"rewards/{name}/nan": nans}
        return shares

    @contextmanager
    def _run(self, name: str) -> Iterator[None]:
        running = _Call(name, time.monotonic(), _FIRST_LINE_SECONDS)
        self._running.append(running)
        if self._limit is not None and sys.__stderr__ is not None:
            seconds = (self._left() or 0.0) + max(self._limit, _GRACE_SECONDS)
            with suppress(ValueError, OSError):  # stderr is no file: then without this last resort
                faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
        try:
            with leftovers.noted(name):
                yield
        finally:
            if running in self._running:
                self._running.remove(running)
            if self._limit is not None and not self._running:  # from now on this rank only waits for the others
                faulthandler.cancel_dump_traceback_later()

    async def _awaited(self, coroutine: Any, name: str) -> Any:
        async def without_exit() -> Any:
            try:
                return await coroutine
            except (SystemExit, KeyboardInterrupt) as error:  # would end the loop, and whoever waits for it would hang
                raise PluginRunError(_raised(name, error)) from error

        task = asyncio.ensure_future(without_exit())
        done, _ = await asyncio.wait([task], timeout=self._left())
        if not done:
            task.cancel()
            raise RewardError(self._overrun([name]))
        return task.result()

    def _left(self) -> float | None:
        return None if self._limit is None else max(0.0, self._started + self._limit - time.monotonic())

    def _interrupt(self, number: int, frame: types.FrameType | None) -> None:
        if self._running:  # else this rank is done, and waits for the others
            raise _Overrun(self._overrun([running.name for running in self._running]))

    def _overrun(self, names: Sequence[str]) -> str:
        which = f"reward{'s' * (len({*names}) > 1)} {', '.join(sorted({*names}))}"
        advice = "Raise reward_timeout, or set a limit per completion: {name: ..., guard: {timeout: 5}}."
        return f"The {which} did not finish within {self._limit:g} s. {advice}"

    def _listen(self, columns: dict[str, Any], reward: str) -> tuple[dict[str, Any], Callable[[Any], Any]]:
        """A call's columns, with loggers that refuse what TRL could not sum or send; and the check of its result."""
        count = len(columns["completions"])
        wrapped = dict(columns)

        def extra(column: str, values: Iterable[Any]) -> None:
            values = list(values)
            pickle.dumps((column, values))  # what cannot be sent to the other ranks is this reward's error, here
            if column.endswith(OUTCOME_SUFFIX) and len(values) == count:
                self.outcomes[column.removesuffix(OUTCOME_SUFFIX)] = values
            columns["log_extra"](column, values)

        if columns.get("log_extra") is not None:
            wrapped["log_extra"] = extra
        if columns.get("log_metric") is not None:
            wrapped["log_metric"] = lambda name, value: columns["log_metric"](name, float(value))
        prints = Fingerprints(wrapped)
        return wrapped, lambda returned: self._seen(returned, count, prints, reward)

    def _seen(self, returned: Any, count: int, prints: Fingerprints, name: str) -> list[float | None]:
        if (changed := prints.changed()) is not None:
            raise PluginOutputError(f"The reward {name!r} changed {changed!r}, which others read: copy it first.")
        scores = check_scores(returned, count, name)
        self.nans[name] = sum(score is not None and math.isnan(score) for score in scores)
        if any(isinstance(score, Parts) for score in scores):
            self.parts[name] = [score.parts if isinstance(score, Parts) else () for score in scores]
        return scores


def _raised(name: str, error: BaseException) -> str:
    return f"The reward {name!r} raised {type(error).__name__}: {exception_text(error)}{source_line(error)}"


def _explained(error: Exception | SystemExit, function: Any, columns: Mapping[str, Any], name: str) -> PluginRunError:
    """The same error with the reward's name and the completion at fault."""
    return PluginRunError(_raised(name, error) + _find_completion(error, function, columns))


def _find_completion(error: Exception | SystemExit, function: Any, columns: Mapping[str, Any]) -> str:
    """Call the function on one completion at a time until it raises that exception again, and describe where."""
    completions = columns["completions"]
    count = len(completions)
    if isinstance(error, SystemExit) or not count:  # the function has emptied them
        return ""
    until = time.monotonic() + _SEARCH_SECONDS
    failing = None
    passed = False
    for row in range(count):
        if time.monotonic() > until or (failing is not None and passed):
            break
        try:
            call(function, select_rows(columns, count, [row]))
            passed = True
        except TRLGRPOExtError:
            break  # the limit: no time is left to search
        except Exception as again:
            if failing is None and type(again) is type(error):
                failing = row
    if failing is not None and not passed and (form := _wrong_form(function, select_rows(columns, count, [failing]))):
        return form
    if failing is None or (not passed and count > 1):
        return f" (no single one of the {count} completions is at fault)"
    return f" (at row {failing} of {count}, whose completion is {shown(completions[failing])})"


def _wrong_form(function: Any, columns: dict[str, Any]) -> str:
    """What to say if the function fails on texts and works on messages, or the other way round; else nothing."""
    [completion], prompts = columns["completions"], columns.get("prompts", ())
    here, other = ("texts", "messages") if isinstance(completion, str) else ("messages", "texts")
    if other == "messages":
        completion = [{"role": "assistant", "content": completion}]
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    else:
        completion = completion_text(completion)
        prompts = [joined_text(prompt) for prompt in prompts]
    try:
        call(function, {**columns, "completions": [completion], "prompts": prompts})
    except Exception:  # it fails on both
        return ""
    return f" (completions are {here} here, because the prompts are; the reward works on {other})"


def reward_limit(reward_timeout: float | None, ddp_timeout: float, processes: int) -> float | None:
    """Seconds for the reward functions of a run; in several processes short enough to report to the others in time."""
    if reward_timeout is None or processes == 1:
        return reward_timeout
    return min(reward_timeout, 0.8 * ddp_timeout)
