"""Any reward with a deadline, retries, a policy for its failures and a cache: `guarded(reward, timeout=5.0)`."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..errors import ConfigurationError, RewardError
from .calls import is_async, reward_name
from .guarded_batch import Batch, Cache, Jobs
from .guarded_calls import (
    Model,
    Result,
    StillRunningError,
    Task,
    ThisProcess,
    checked,
    from_worker,
    is_model,
    late,
    raised,
)
from .outcomes import RAISE, Consequence, Judgement, Outcome, OutcomePolicy
from .progress import scored
from .workers import WorkerPool

_OUTCOMES = (Outcome.SCORED, Outcome.NONE, Outcome.TIMEOUT, Outcome.DIED, Outcome.ERROR)
_NO_DEADLINE = 1e9


def guarded(
    reward: Any,
    *,
    timeout: float | None = None,
    retries: int = 0,
    on_error: Consequence = RAISE,
    outcomes: Mapping[str, Consequence] | None = None,
    cache: int = 0,
    workers: int | None = None,
    batch_size: int | Literal["auto"] | None = "auto",
    memory_mb: int | None = None,
    budget: float | None = None,
    tokenizer: Any = None,
    name: str | None = None,
) -> Guarded:
    """Guard a reward: what it does in time and without an error is what it returns, and the rest is an outcome.

    Where the reward runs:

    - A function or callable object, with `timeout` or `workers`: in worker processes, where it may hang, crash or eat
      memory. It is sent there by cloudpickle, once. `trainer_state`, `log_extra`, `log_metric` and `environments`
      belong to this process and are left out there. A completion whose worker died is tried once more.
    - The same with neither, or with `workers=0`: in this process. With a timeout, a thread runs it. A thread cannot be
      killed: at its deadline it is left alone, and while it still runs the next call raises.
    - An async function or callable object: on the caller's event loop, all calls at once, or `workers` at a time. At
      its deadline a call is cancelled, which code that blocks the loop ignores.
    - A reward model (`torch.nn.Module`): in this process, scored as TRL does, `model(**inputs).logits[:, 0]` of prompt
      and completion together, without TRL's `chat_template_kwargs`.

    Args:
        reward: What TRL takes as a reward function, other than a model's name.
        timeout: Seconds that one call may take; a call is for `batch_size` completions.
        retries: How often a call that raised is made again. A timeout and a death are not retried.
        on_error: What a completion gets whose call raised: "raise" stops the run and names the row; a number; None.
        outcomes: The same for any outcome by its name ("timeout", "died", "error"). Timeouts and deaths are 0.0 where
            a single completion ran by itself in a worker, and so is at fault; elsewhere None.
        cache: How many results to keep, those used last. A completion that comes again with the same prompt and the
            same columns is not scored again, in one batch or later. Only for rewards that depend on these alone.
            What is no plain JSON data (an image, say) is never taken from the cache.
        workers: How many calls run at once. None is `WorkerPool`'s default for worker processes, no limit for async.
        batch_size: How many completions one call gets; None is the whole batch, for rewards that compare completions.
            "auto" is 1, and the whole batch for models. `log_extra` and `log_metric` reach the reward only where one
            call in this process gets the whole batch.
        memory_mb: Address space that a worker process may add to what it started with, in MiB.
        budget: Seconds for a whole batch in worker processes. Once they are spent, each call has one short try.
        tokenizer: The tokenizer of a reward model.
        name: The name for metrics and messages; None is the name that TRL gives the reward.

    Returns:
        A reward function; async if `reward` is (`AsyncGuarded`).

    Raises:
        ConfigurationError: A parameter cannot work, alone or with the others.
    """
    kind = AsyncGuarded if is_async(reward) and not is_model(reward) else Guarded
    return kind(
        reward,
        timeout=timeout,
        retries=retries,
        on_error=on_error,
        outcomes=outcomes,
        cache=cache,
        workers=workers,
        batch_size=batch_size,
        memory_mb=memory_mb,
        budget=budget,
        tokenizer=tokenizer,
        name=name,
    )


class Guarded:
    """A guarded reward; `guarded` makes it and describes the parameters.

    `judge(...)` returns each completion's outcome, and calling it what the policy makes of them.
    """

    def __init__(
        self,
        reward: Any,
        *,
        timeout: float | None,
        retries: int,
        on_error: Consequence,
        outcomes: Mapping[str, Consequence] | None,
        cache: int,
        workers: int | None,
        batch_size: int | Literal["auto"] | None,
        memory_mb: int | None,
        budget: float | None,
        tokenizer: Any,
        name: str | None,
    ) -> None:
        self.reward = reward
        self.__name__ = label = _name(reward) if name is None else name
        model = is_model(reward)
        if not callable(reward):
            raise ConfigurationError(f"guarded: the reward must be callable, got {reward!r:.80}")
        for parameter, seconds in (("timeout", timeout), ("budget", budget)):
            if seconds is not None and not _is_positive(seconds):
                raise ConfigurationError(f"{label}: {parameter} must be a positive number of seconds, got {seconds!r}")
        for parameter, number, least in (
            ("retries", retries, 0),
            ("cache", cache, 0),
            ("workers", 0 if workers is None else workers, 0),
            ("batch_size", 1 if batch_size in (None, "auto") else batch_size, 1),
            ("memory_mb", 1 if memory_mb is None else memory_mb, 1),
        ):
            if not isinstance(number, int) or isinstance(number, bool) or number < least:
                raise ConfigurationError(f"{label}: {parameter} must be an integer from {least}, got {number!r}")
        if model and tokenizer is None:
            raise ConfigurationError(f"{label} is a model: give guarded its tokenizer, tokenizer=...")
        if tokenizer is not None and not model:
            raise ConfigurationError(f"{label} is no model, so there is nothing to do with a tokenizer")
        if isinstance(outcomes, Mapping) and on_error != RAISE:
            if "error" in outcomes:
                raise ConfigurationError(f"{label}: on_error is {on_error!r} and outcomes has 'error' too; give one")
            outcomes = {**outcomes, "error": on_error}
        elif outcomes is None:
            outcomes = {"error": on_error}
        in_workers = not model and not is_async(reward) and workers != 0 and (timeout, workers) != (None, None)
        for parameter, value in (("memory_mb", memory_mb), ("budget", budget)):
            if value is not None and not in_workers:
                raise ConfigurationError(
                    f"{label}: {parameter} is for worker processes, and this reward runs in none: async rewards, "
                    "models and workers=0 run in this process, and so does a reward with neither timeout nor workers."
                )
        self.batch_size = (None if model else 1) if batch_size == "auto" else batch_size
        self.timeout, self.retries, self.workers, self.budget = timeout, retries, workers, budget
        own_fault: Consequence = 0.0 if in_workers and self.batch_size == 1 else None
        self.policy = OutcomePolicy(
            label, _OUTCOMES, outcomes, {Outcome.TIMEOUT: own_fault, Outcome.DIED: own_fault, Outcome.ERROR: RAISE}
        )
        self._pool = (
            WorkerPool(Task(reward, label), workers=workers or None, memory_mb=memory_mb, name=label)
            if in_workers
            else None
        )
        self._function = Model(reward, tokenizer) if model else reward
        self._cache = Cache(cache)
        self._here = ThisProcess(label)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.__name__})"

    def close(self) -> None:
        """End the worker processes, where there are any; the next call starts new ones."""
        if self._pool is not None:
            self._pool.close()

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Score `B` completions.

        Args:
            completions: `B` completions, strings or lists of messages.
            **columns: The dataset's columns, and what else TRL hands to reward functions.

        Returns:
            `B` scores or Nones. A `SpanScore` keeps its spans.

        Raises:
            RewardError: An outcome raises, as the policy says; or an earlier call in a thread still runs.
            PluginOutputError: The reward returned something that breaks the contract of rewards.
        """
        batch = Batch(completions, columns, self.batch_size, self._cache)
        self._work(batch)
        return self._scores(batch)

    def judge(self, completions: Sequence[Any], **columns: Any) -> list[Judgement]:
        """What became of each completion; parameters and errors as in a call, without the policy's."""
        batch = Batch(completions, columns, self.batch_size, self._cache)
        self._work(batch)
        return batch.judgements(self.__name__)

    def _scores(self, batch: Batch) -> list[float | None]:
        judgements = batch.judgements(self.__name__)
        self.policy.log(judgements, batch.columns.get("log_metric"), batch.columns.get("log_extra"))
        try:
            return self.policy.scores(judgements)
        except RewardError as error:
            raising = (row for row, judged in enumerate(judgements) if self._raises(judged))
            raise error from batch.causes.get(next(raising))

    def _raises(self, judged: Judgement) -> bool:
        return judged.outcome not in (Outcome.SCORED, Outcome.NONE) and self.policy[judged.outcome] == RAISE

    def _work(self, batch: Batch) -> None:
        """Make the batch's calls, and those again that raised."""
        end = None if self.budget is None else time.monotonic() + self.budget
        calls = [*range(len(batch.calls))]
        for _ in range(self.retries + 1):
            if self._pool is not None:
                left = None if end is None else max(end - time.monotonic(), 0.001)
                results = self._in_workers(self._pool, batch, calls, left)
            else:
                results = []
                for call in calls:
                    results.append(self._in_this_process(batch, call))
                    scored(len(results), len(calls))
            for call, result in zip(calls, results, strict=True):
                batch.results[call] = result
            calls = [call for call in calls if batch.results[call].outcome is Outcome.ERROR]
            if not calls:
                return

    def _in_workers(self, pool: WorkerPool, batch: Batch, calls: Sequence[int], budget: float | None) -> list[Result]:
        jobs = Jobs(batch, calls)
        deadline = _NO_DEADLINE if self.timeout is None else float(self.timeout)
        # Short first tries would run a slow function several times over; only a budget is worth that.
        done = pool.run(jobs, deadline=deadline, budget=budget, slice=deadline if budget is None else None)
        counts = [len(batch.calls[call]) for call in calls]
        return [from_worker(one, count, self.__name__) for one, count in zip(done, counts, strict=True)]

    def _in_this_process(self, batch: Batch, call: int) -> Result:
        columns = batch.columns_of(call)
        self._here.check_is_free()
        try:
            returned = self._here.run(self._function, columns, self.timeout)
        except StillRunningError:
            return late(self.timeout)
        except Exception as error:  # foreign code; a failure is an outcome, and what that becomes is the user's choice
            return raised(error)
        return checked(returned, len(batch.calls[call]), self.__name__)


class AsyncGuarded(Guarded):
    """A guarded async reward, which TRL runs together with the other async ones."""

    async def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:  # type: ignore[override]
        """As `Guarded.__call__`."""
        batch = Batch(completions, columns, self.batch_size, self._cache)
        await self._work_async(batch)
        return self._scores(batch)

    async def judge(self, completions: Sequence[Any], **columns: Any) -> list[Judgement]:  # type: ignore[override]
        """As `Guarded.judge`."""
        batch = Batch(completions, columns, self.batch_size, self._cache)
        await self._work_async(batch)
        return batch.judgements(self.__name__)

    async def _work_async(self, batch: Batch) -> None:
        at_once = asyncio.Semaphore(self.workers or max(1, len(batch.calls)))

        async def work(call: int) -> None:
            async with at_once:
                for _ in range(self.retries + 1):
                    batch.results[call] = await self._awaited(batch, call)
                    if batch.results[call].outcome is not Outcome.ERROR:
                        return

        await asyncio.gather(*(work(call) for call in range(len(batch.calls))))

    async def _awaited(self, batch: Batch, call: int) -> Result:
        try:
            async with asyncio.timeout(self.timeout) as limit:
                returned = await self.reward(**batch.columns_of(call))
        except Exception as error:  # as above
            # Only the time that ran out here is a timeout; one that the reward itself met is its error.
            return late(self.timeout) if isinstance(error, TimeoutError) and limit.expired() else raised(error)
        return checked(returned, len(batch.calls[call]), self.__name__)


def _name(reward: Any) -> str:
    """The name that TRL gives the reward: a model's is the last part of where it came from."""
    path = getattr(getattr(reward, "config", None), "_name_or_path", "") if is_model(reward) else ""
    return str(path).split("/")[-1] or reward_name(reward)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
