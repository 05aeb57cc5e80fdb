"""Any reward with a deadline, retries and a policy for its failures: `guarded(reward, timeout=5.0)`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigurationError, PluginOutputError, RewardError
from ..types import Part, Parts, Place
from .calls import check_scores, is_async, is_model, reward_name, select_rows, start_scoring
from .outcomes import RAISE, Consequence, Judgement, Outcome, OutcomePolicy, exception_text, shown
from .parameters import checked_number, checked_whole
from .workers import Done, WorkerPool

_OUTCOMES = (Outcome.SCORED, Outcome.NONE, Outcome.TIMEOUT, Outcome.DIED, Outcome.ERROR)
_NO_LIMIT = 1e9
# They belong to this process, and neither travel to another nor say anything about a completion.
_STAY_HERE = frozenset({"trainer_state", "log_extra", "log_metric", "environments"})


def guarded(
    reward: Any,
    *,
    timeout: float | None = None,
    retries: int = 0,
    on_error: Consequence = RAISE,
    outcomes: Mapping[str, Consequence] | None = None,
    workers: int | None = None,
    batch_size: int | None = 1,
    memory_mb: int | None = None,
    name: str | None = None,
) -> Guarded:
    """Guard a reward: add a deadline, retries and a policy for failures.

    A function or callable object with `timeout` or `workers` runs in worker processes, where it may hang, crash or eat
    memory. Cloudpickle sends it there once; `trainer_state`, `log_extra`, `log_metric` and `environments` stay here. If
    a worker dies, its completion is tried once more. An async function or object runs on the caller's event loop and is
    cancelled at its deadline; code that blocks the loop ignores that. All others run in this process.

    Args:
        reward: A reward function as TRL takes it, but no reward model (`torch.nn.Module`), which TRL calls itself.
        timeout: Seconds that one call may take, for `batch_size` completions. In worker processes this counts CPU time,
            or sleep while the reward waits for something, so a busy machine costs no score; on the event loop
            wall-clock time.
        retries: How often to repeat a call that raised. Timeouts and deaths are not retried.
        on_error: The result for a completion whose call raised: a number, None, or "raise", which stops the run and
            names the row.
        outcomes: The same for any outcome by name ("timeout", "died", "error"). By default a timeout or a death is 0.0
            if the completion ran alone in a worker, and so is at fault, else None.
        workers: How many calls run at once. None means `WorkerPool`'s default for worker processes, no limit for async.
        batch_size: Completions per call; None means the whole batch, for rewards that compare completions. The reward
            gets `log_extra` and `log_metric` only if one call in this process has the whole batch.
        memory_mb: Address space that a worker process may add to what it started with, in MiB.
        name: The name in metrics and messages; None means the name that TRL gives the reward.

    Returns:
        A reward function; async if `reward` is (`AsyncGuarded`).

    Raises:
        ConfigurationError: A parameter is invalid, alone or in combination.
    """
    if not callable(reward) or is_model(reward):
        raise ConfigurationError(f"guarded: the reward must be a function or callable object, got {reward!r:.80}")
    label = reward_name(reward) if name is None else name
    if timeout is not None:
        checked_number(f"{label}: timeout", timeout, "a positive number of seconds", lambda x: x > 0)
    checked_whole(f"{label}: retries", retries, 0)
    for parameter, number in (("workers", workers), ("batch_size", batch_size), ("memory_mb", memory_mb)):
        if number is not None:
            checked_whole(f"{label}: {parameter}", number, 1)
    if isinstance(outcomes, Mapping) and "error" in outcomes and on_error != RAISE:
        raise ConfigurationError(f"{label}: on_error is {on_error!r} and outcomes has 'error' too; give one")
    if outcomes is None or (isinstance(outcomes, Mapping) and on_error != RAISE):
        outcomes = {**(outcomes or {}), "error": on_error}
    in_workers = not is_async(reward) and (timeout, workers) != (None, None)
    if memory_mb is not None and not in_workers:
        raise ConfigurationError(
            f"{label}: memory_mb is for worker processes, and this reward runs in none: it is async, or has neither "
            "timeout nor workers."
        )
    own_fault: Consequence = 0.0 if in_workers and batch_size == 1 else None
    defaults: dict[Outcome, Consequence] = {Outcome.TIMEOUT: own_fault, Outcome.DIED: own_fault, Outcome.ERROR: RAISE}
    pool = None
    if in_workers:
        pool = WorkerPool(_Task(reward, label), workers=workers, memory_mb=memory_mb, name=label)
    policy = OutcomePolicy(label, _OUTCOMES, outcomes, defaults)
    kind = AsyncGuarded if is_async(reward) else Guarded
    return kind(reward, policy, pool, timeout=timeout, retries=retries, workers=workers, batch_size=batch_size)


@dataclass
class _Result:
    """The judgements of one call's completions; for a call that raised, its exception."""

    judgements: list[Judgement]
    cause: BaseException | None = None


_Call = tuple[range, Mapping[str, Any]]
"""The rows of a batch that one call scores, and what the reward is called with."""


class Guarded:
    """A guarded reward, made by `guarded`; calling it returns scores, `judge(...)` the outcomes before the policy."""

    def __init__(
        self,
        reward: Any,
        policy: OutcomePolicy,
        pool: WorkerPool | None,
        *,
        timeout: float | None,
        retries: int,
        workers: int | None,
        batch_size: int | None,
    ) -> None:
        self.reward, self.__name__, self.policy, self._pool = reward, policy.reward, policy, pool
        self.timeout, self.retries, self.workers, self.batch_size = timeout, retries, workers, batch_size

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.__name__})"

    def start_workers(self) -> None:
        """Start the worker processes' imports in the background, if any, as `load_rewards` does."""
        if self._pool is not None:
            self._pool.start()

    def start_scoring(self, completions: Sequence[Any], **columns: Any) -> None:
        """Let the reward begin early, unless it runs in worker processes."""
        if self._pool is None:
            start_scoring(self.reward, {**columns, "completions": completions})

    def close(self) -> None:
        """End the worker processes, if any; the next call starts new ones."""
        if self._pool is not None:
            self._pool.close()

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """`B` scores or Nones, by TRL's contract; `Parts` keep their parts."""
        return self._scores(self._results(completions, columns), columns)

    def judge(self, completions: Sequence[Any], **columns: Any) -> list[Judgement]:
        """Each completion's outcome; parameters and errors as in a call, except the policy's."""
        return [judged for result in self._results(completions, columns) for judged in result.judgements]

    def _calls(self, completions: Sequence[Any], columns: Mapping[str, Any]) -> list[_Call]:
        count, batch = len(completions), {**columns, "completions": completions}
        size = self.batch_size or max(1, count)
        parts = [range(start, min(start + size, count)) for start in range(0, count, size)]
        return [(rows, batch if len(rows) == count else select_rows(batch, count, rows)) for rows in parts]

    def _scores(self, results: Sequence[_Result], columns: Mapping[str, Any]) -> list[float | None]:
        judgements = [judged for result in results for judged in result.judgements]
        self.policy.log(judgements, columns.get("log_metric"), columns.get("log_extra"))
        try:
            return self.policy.scores(judgements)
        except RewardError as error:
            stops = (result.cause for result in results for judged in result.judgements if self.policy.raises(judged))
            raise error from next(stops)

    def _results(self, completions: Sequence[Any], columns: Mapping[str, Any]) -> list[_Result]:
        """Make a batch's calls, and repeat those that raised."""
        calls = self._calls(completions, columns)
        results = self._made(calls, len(completions))
        for _ in range(self.retries):
            again = [number for number, result in enumerate(results) if result.cause]
            if not again:
                break
            made = self._made([calls[number] for number in again], len(completions))
            for number, result in zip(again, made, strict=True):
                results[number] = result
        return results

    def _made(self, calls: Sequence[_Call], count: int) -> list[_Result]:
        if self._pool is not None:
            limit = _NO_LIMIT if self.timeout is None else float(self.timeout)
            jobs = [{name: part[name] for name in part.keys() - _STAY_HERE} for _, part in calls]
            # What waits for a network or a disk uses no CPU time, so the limit holds for its sleep too.
            dones = self._pool.run(jobs, allowance=limit, patience=limit)
            return [self._from_worker(done, call[0], count) for call, done in zip(calls, dones, strict=True)]
        results = []
        for rows, part in calls:
            try:
                returned = self.reward(**part)
            except (
                Exception
            ) as error:  # foreign code; a failure is an outcome, and what that becomes is the user's choice
                results.append(_failed(error, rows))
            else:
                results.append(self._checked(returned, rows, count))
        return results

    def _checked(self, returned: Any, rows: range, count: int) -> _Result:
        """Check what a reward returned against its contract, which no outcome hides."""
        try:
            return _Result([_judged(score) for score in check_scores(returned, len(rows), self.__name__)])
        except PluginOutputError as error:
            raise _broken(str(error), error.breaks, rows, count) from error

    def _from_worker(self, done: Done, rows: range, count: int) -> _Result:
        """Read the result of a call in a worker process."""
        if done.status == "done":
            scores = [_parts_of(score) if isinstance(score, list) else score for score in done.value]
            return self._checked(scores, rows, count)
        if done.status == "error":
            kind, _, message = done.detail.partition(": ")
            if kind == PluginOutputError.__name__:
                raise _broken(message, None, rows, count)
            cause = RewardError(f"In the worker process:\n{done.traceback}")
            return _Result([Judgement(Outcome.ERROR, f"{kind}: {shown(message)}")] * len(rows), cause)
        return _Result([Judgement(Outcome(done.status), done.detail)] * len(rows))


class AsyncGuarded(Guarded):
    """A guarded async reward, which TRL runs together with the other async ones."""

    async def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:  # type: ignore[override]
        """As `Guarded.__call__`."""
        return self._scores(await self._awaited(completions, columns), columns)

    async def judge(self, completions: Sequence[Any], **columns: Any) -> list[Judgement]:  # type: ignore[override]
        """As `Guarded.judge`."""
        return [judged for result in await self._awaited(completions, columns) for judged in result.judgements]

    async def _awaited(self, completions: Sequence[Any], columns: Mapping[str, Any]) -> list[_Result]:
        calls = self._calls(completions, columns)
        at_once = asyncio.Semaphore(self.workers or max(1, len(calls)))

        async def work(rows: range, part: Mapping[str, Any]) -> _Result:
            async with at_once:
                result = await self._one(rows, part, len(completions))
                for _ in range(self.retries):
                    if result.cause is None:
                        break
                    result = await self._one(rows, part, len(completions))
                return result

        return await asyncio.gather(*(work(*call) for call in calls))

    async def _one(self, rows: range, part: Mapping[str, Any], count: int) -> _Result:
        try:
            async with asyncio.timeout(self.timeout) as limit:
                returned = await self.reward(**part)
        except Exception as error:  # as above
            # Only the time that ran out here is a timeout; one that the reward itself met is its error.
            if isinstance(error, TimeoutError) and limit.expired():
                return _Result([Judgement(Outcome.TIMEOUT, f"no result within {self.timeout:g} s")] * len(rows))
            return _failed(error, rows)
        return self._checked(returned, rows, count)


class _Task:
    """What a worker runs: the reward on one call's columns. The scores travel as JSON."""

    def __init__(self, reward: Callable[..., Any], name: str) -> None:
        self._reward, self._name = reward, name

    def __call__(self, columns: Mapping[str, Any]) -> list[Any]:
        """Score one call's completions."""
        scores = check_scores(self._reward(**columns), len(columns["completions"]), self._name)
        return [[score, score.parts] if isinstance(score, Parts) else score for score in scores]


def _parts_of(sent: Sequence[Any]) -> Parts:
    """`Parts` as a worker sends them."""
    value, parts = sent
    found = [(name, score, weight, [Place(*place) for place in places]) for name, score, weight, places in parts]
    return Parts([Part(*one) for one in found], value)


def _judged(score: float | None) -> Judgement:
    if score is None or math.isnan(score):
        return Judgement(Outcome.NONE)
    return Judgement(Outcome.SCORED, score=score)


def _failed(error: Exception, rows: range) -> _Result:
    detail = f"{type(error).__name__}: {exception_text(error)}"
    return _Result([Judgement(Outcome.ERROR, detail)] * len(rows), error)


def _broken(message: str, breaks: str | None, rows: range, count: int) -> PluginOutputError:
    if len(rows) < count:
        which = f"row {rows[0]}" if len(rows) == 1 else f"{len(rows)} rows, {rows[0]} to {rows[-1]},"
        message += f" That call had {which} of the batch's {count}."
    return PluginOutputError(message, breaks)
