"""Any reward with a deadline, retries and a policy for its failures: `guarded(reward, timeout=5.0)`."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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


class Guarded:
    """Guard a reward: add a deadline, retries and a policy for failures.

    With `timeout` or `workers` it runs in worker processes, where it may hang, crash or eat memory; `trainer_state`,
    `log_extra`, `log_metric` and `environments` stay here. If a worker dies, its completion is tried once more.

    Args:
        reward: A reward function as TRL takes it; neither async nor a model, both of which TRL calls itself.
        timeout: Seconds that one call may take: CPU time, or sleep, so a busy machine costs no score.
        retries: How often to repeat a call that raised. Timeouts and deaths are not retried.
        on_error: The result for a completion whose call raised: a number, None, or "raise", which stops the run.
        outcomes: The same for any outcome by name ("timeout", "died", "error"). By default a timeout or a death is 0.0
            if the completion ran alone in a worker, and so is at fault, else None.
        workers: How many calls run at once. None means `WorkerPool`'s default.
        batch_size: Completions per call; None means the whole batch, for rewards that compare completions. The reward
            gets `log_extra` and `log_metric` only if one call in this process has the whole batch.
        memory_mb: Address space that a worker process may add to what it started with, in MiB.
        name: The name in metrics and messages; None means the name that TRL gives the reward.

    Raises:
        ConfigurationError: A parameter is invalid, alone or in combination.
    """

    def __init__(
        self,
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
    ) -> None:
        if not callable(reward) or is_model(reward) or is_async(reward):
            raise ConfigurationError(f"guarded: the reward must be callable, and not async, got {reward!r:.80}")
        label = reward_name(reward) if name is None else name
        if timeout is not None:
            checked_number(f"{label}: timeout", timeout, "a positive number of seconds", lambda x: x > 0)
        if batch_size is not None:
            checked_whole(f"{label}: batch_size", batch_size, 1)
        if on_error != RAISE and "error" in (outcomes or {}):
            raise ConfigurationError(f"{label}: on_error is {on_error!r} and outcomes has 'error' too; give one")
        in_workers = timeout is not None or workers is not None
        if memory_mb is not None and not in_workers:
            raise ConfigurationError(f"{label}: memory_mb is for worker processes; set timeout or workers too.")
        own_fault: Consequence = 0.0 if in_workers and batch_size == 1 else None
        self.reward = reward
        self.__name__ = label
        self.timeout = timeout
        self.retries = checked_whole(f"{label}: retries", retries, 0)
        self.workers = workers
        self.batch_size = batch_size
        changed = {"error": on_error, **(outcomes or {})}
        self.policy = OutcomePolicy(label, _OUTCOMES, changed, {Outcome.TIMEOUT: own_fault, Outcome.DIED: own_fault})
        task = functools.partial(_score, reward, label)
        self._pool = WorkerPool(task, workers=workers, memory_mb=memory_mb, name=label) if in_workers else None

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
        judgements, causes = self._judged(completions, columns)
        self.policy.log(judgements, columns.get("log_metric"), columns.get("log_extra"))
        return self.policy.scores(judgements, causes)

    def judge(self, completions: Sequence[Any], **columns: Any) -> list[Judgement]:
        """Each completion's outcome; parameters and errors as in a call, except the policy's."""
        return self._judged(completions, columns)[0]

    def _judged(
        self, completions: Sequence[Any], columns: Mapping[str, Any]
    ) -> tuple[list[Judgement], dict[int, BaseException]]:
        """Each row's judgement, and by row the exception of a call that raised each time."""
        count = len(completions)
        batch = {**columns, "completions": completions}
        size = self.batch_size or max(1, count)
        waiting = [range(start, min(start + size, count)) for start in range(0, count, size)]
        judged: dict[int, Judgement] = {}
        causes: dict[int, BaseException] = {}
        for _ in range(self.retries + 1):
            calls = [batch if len(rows) == count else select_rows(batch, count, rows) for rows in waiting]
            made = list(zip(waiting, self._made(calls, waiting, count), strict=True))
            judged |= {row: one for rows, (found, _) in made for row, one in zip(rows, found, strict=True)}
            causes = {row: cause for rows, (_, cause) in made if cause is not None for row in rows}
            waiting = [rows for rows in waiting if rows[0] in causes]
        return [judged[row] for row in range(count)], causes

    def _made(
        self, calls: Sequence[Mapping[str, Any]], rows: Sequence[range], count: int
    ) -> Iterator[tuple[list[Judgement], BaseException | None]]:
        """Each call's judgements, and the exception if it raised one; a broken contract is no outcome, but raises."""
        if self._pool is not None:
            limit = _NO_LIMIT if self.timeout is None else float(self.timeout)
            jobs = [{name: call[name] for name in call.keys() - _STAY_HERE} for call in calls]
            # What waits for a network or a disk uses no CPU time, so the limit holds for its sleep too.
            dones = self._pool.run(jobs, allowance=limit, patience=limit)
            yield from (_from_worker(done, own, count) for done, own in zip(dones, rows, strict=True))
            return
        for call, own in zip(calls, rows, strict=True):
            try:
                returned = self.reward(**call)
            except Exception as error:  # foreign code; what a failure becomes is the user's choice
                detail = f"{type(error).__name__}: {exception_text(error)}"
                yield [Judgement(Outcome.ERROR, detail)] * len(own), error
                continue
            try:
                yield [_scored(score) for score in check_scores(returned, len(own), self.__name__)], None
            except PluginOutputError as error:
                raise _broken(str(error), own, count) from error


guarded = Guarded


def _score(reward: Callable[..., Any], name: str, columns: Mapping[str, Any]) -> list[Any]:
    """Score one call's completions, in a worker; parts travel beside their score."""
    scores = check_scores(reward(**columns), len(columns["completions"]), name)
    return [[score, score.parts] if isinstance(score, Parts) else score for score in scores]


def _from_worker(done: Done, rows: range, count: int) -> tuple[list[Judgement], BaseException | None]:
    if done.status == "done":
        return [_scored(_parts_of(*sent) if isinstance(sent, list) else sent) for sent in done.value], None
    if done.status != "error":
        return [Judgement(Outcome(done.status), done.detail)] * len(rows), None
    kind, _, message = done.detail.partition(": ")
    if kind == PluginOutputError.__name__:
        raise _broken(message, rows, count)
    cause = RewardError(f"In the worker process:\n{done.traceback}")
    return [Judgement(Outcome.ERROR, f"{kind}: {shown(message)}")] * len(rows), cause


def _parts_of(value: float, parts: Sequence[Any]) -> Parts:
    found = [Part(name, score, weight, [Place(*one) for one in places]) for name, score, weight, places in parts]
    return Parts(found, value)


def _scored(score: float | None) -> Judgement:
    if score is None or math.isnan(score):
        return Judgement(Outcome.NONE)
    return Judgement(Outcome.SCORED, score=score)


def _broken(message: str, rows: range, count: int) -> PluginOutputError:
    where = f" That call had rows {rows[0]} to {rows[-1]} of the batch's {count}." if len(rows) < count else ""
    return PluginOutputError(f"{message}{where}")
