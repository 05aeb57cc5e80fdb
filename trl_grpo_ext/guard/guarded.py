"""Any reward with a deadline, retries, a policy for its failures and a cache: `guarded(reward, timeout=5.0)`.

A batch is cut into calls (`_Calls`); completions with cached results are in none. A call runs in a worker process, in
this process, in a thread or on the event loop, and gives a `_Result`. The results give each completion its judgement,
and the policy turns that into a score.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ConfigurationError, PluginOutputError, RewardError
from ..types import SpanScore
from .cache import Recent, digest
from .calls import (
    PASSED_BY_TRL,
    StillRunningError,
    call_in_thread,
    check_scores,
    is_async,
    is_model,
    reward_name,
    select_rows,
)
from .outcomes import RAISE, Consequence, Judgement, Outcome, OutcomePolicy, exception_text, shown
from .parameters import checked_number, checked_whole
from .workers import Done, WorkerPool

_OUTCOMES = (Outcome.SCORED, Outcome.NONE, Outcome.TIMEOUT, Outcome.DIED, Outcome.ERROR)
_NO_LIMIT = 1e9
# They belong to this process, and neither travel to another nor say anything about a completion.
_STAY_HERE = frozenset({"trainer_state", "log_extra", "log_metric", "environments"})
_NOT_IN_KEY = PASSED_BY_TRL - {"prompts", "completions"}


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
    tokenizer: Any = None,
    name: str | None = None,
) -> Guarded:
    """Guard a reward: add a deadline, retries, a policy for failures and a cache.

    Where the reward runs:

    - A function or callable object with `timeout` or `workers`: in worker processes, where it may hang, crash or eat
      memory. Cloudpickle sends it there once. `trainer_state`, `log_extra`, `log_metric` and `environments` are left
      out, since they belong to this process. If a worker dies, its completion is tried once more.
    - A function or callable object with neither, or with `workers=0`: in this process; with a timeout, in a thread. A
      thread cannot be killed: past its deadline it is abandoned, and while it still runs the next call raises.
    - An async function or callable object: on the caller's event loop, all calls at once, or `workers` at a time. A
      call is cancelled at its deadline; code that blocks the loop ignores that.
    - A reward model (`torch.nn.Module`): in this process, scored as in TRL, by `model(**inputs).logits[:, 0]` on prompt
      plus completion, but without TRL's `chat_template_kwargs`.

    Args:
        reward: Any reward function that TRL takes, but not a model's name.
        timeout: Seconds that one call may take, for `batch_size` completions. In worker processes this counts CPU time,
            or sleep while the reward waits for something, so a busy machine costs no score. Elsewhere it is wall-clock
            time, because in a thread or on the event loop the reward's own time cannot be measured.
        retries: How often to repeat a call that raised. Timeouts and deaths are not retried.
        on_error: The result for a completion whose call raised: a number, None, or "raise", which stops the run and
            names the row.
        outcomes: The same for any outcome by name ("timeout", "died", "error"). By default a timeout or a death is 0.0
            if the completion ran alone in a worker, and so is at fault, else None.
        cache: The number of results to keep (least recently used go first). A completion with the same prompt and
            columns is not scored again, in this batch or later. Only for rewards that depend on nothing else. Data that
            is not plain JSON (an image, say) is never cached.
        workers: How many calls run at once. None means `WorkerPool`'s default for worker processes, no limit for async.
        batch_size: Completions per call; None means the whole batch, for rewards that compare completions. "auto" means
            1, or the whole batch for models. The reward gets `log_extra` and `log_metric` only if one call in this
            process has the whole batch.
        memory_mb: Address space that a worker process may add to what it started with, in MiB.
        tokenizer: The tokenizer of a reward model.
        name: The name in metrics and messages; None means the name that TRL gives the reward.

    Returns:
        A reward function; async if `reward` is (`AsyncGuarded`).

    Raises:
        ConfigurationError: A parameter is invalid, alone or in combination.
    """
    model, is_awaited = is_model(reward), is_async(reward)
    label = reward_name(reward) if name is None else name
    if not callable(reward):
        raise ConfigurationError(f"guarded: the reward must be callable, got {reward!r:.80}")
    if timeout is not None:
        checked_number(f"{label}: timeout", timeout, "a positive number of seconds", lambda x: x > 0)
    for parameter, number, least in (
        ("retries", retries, 0),
        ("cache", cache, 0),
        ("workers", 0 if workers is None else workers, 0),
        ("batch_size", 1 if batch_size in (None, "auto") else batch_size, 1),
        ("memory_mb", 1 if memory_mb is None else memory_mb, 1),
    ):
        checked_whole(f"{label}: {parameter}", number, least)
    if model != (tokenizer is not None):
        need = "is a model: give guarded its tokenizer" if model else "is not a model, so it takes no tokenizer"
        raise ConfigurationError(f"{label} {need}")
    if isinstance(outcomes, Mapping) and on_error != RAISE:
        if "error" in outcomes:
            raise ConfigurationError(f"{label}: on_error is {on_error!r} and outcomes has 'error' too; give one")
        outcomes = {**outcomes, "error": on_error}
    elif outcomes is None:
        outcomes = {"error": on_error}
    in_workers = not model and not is_awaited and workers != 0 and (timeout, workers) != (None, None)
    if memory_mb is not None and not in_workers:
        raise ConfigurationError(
            f"{label}: memory_mb is for worker processes, and this reward runs in none: async rewards, models and "
            "workers=0 run in this process, and so does a reward with neither timeout nor workers."
        )
    if batch_size == "auto":
        batch_size = None if model else 1
    own_fault: Consequence = 0.0 if in_workers and batch_size == 1 else None
    defaults: dict[Outcome, Consequence] = {Outcome.TIMEOUT: own_fault, Outcome.DIED: own_fault, Outcome.ERROR: RAISE}
    pool = None
    if in_workers:
        pool = WorkerPool(_Task(reward, label), workers=workers or None, memory_mb=memory_mb, name=label)
    return (AsyncGuarded if is_awaited and not model else Guarded)(
        reward,
        name=label,
        function=_Model(reward, tokenizer) if model else reward,
        policy=OutcomePolicy(label, _OUTCOMES, outcomes, defaults),
        pool=pool,
        timeout=timeout,
        retries=retries,
        workers=workers,
        batch_size=batch_size,
        cache=cache,
    )


class Guarded:
    """A guarded reward; `guarded` makes it and describes the parameters.

    Calling it returns scores; `judge(...)` returns the outcomes before the policy.
    """

    def __init__(
        self,
        reward: Any,
        *,
        name: str,
        function: Callable[..., Any],
        policy: OutcomePolicy,
        pool: WorkerPool | None,
        timeout: float | None,
        retries: int,
        workers: int | None,
        batch_size: int | None,
        cache: int,
    ) -> None:
        self.reward, self.__name__ = reward, name
        self.policy, self.timeout, self.retries, self.workers = policy, timeout, retries, workers
        self.batch_size, self._function, self._pool = batch_size, function, pool
        self._cache: Recent[Judgement] = Recent(cache)
        self._abandoned: threading.Thread | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_abandoned": None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.__name__})"

    def start_workers(self) -> None:
        """Start the worker processes' imports in the background, if any, as `load_rewards` does."""
        if self._pool is not None:
            self._pool.start()

    def close(self) -> None:
        """End the worker processes, if any; the next call starts new ones."""
        if self._pool is not None:
            self._pool.close()

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Score `B` completions.

        Args:
            completions: `B` completions, strings or lists of messages.
            **columns: The dataset's columns and whatever else TRL passes to reward functions.

        Returns:
            `B` scores or Nones. A `SpanScore` keeps its spans.

        Raises:
            RewardError: The policy of an outcome is "raise", or an earlier call still runs in its thread.
            PluginOutputError: The reward's result breaks the contract of rewards.
        """
        return self._scores(self._made(completions, columns))

    def judge(self, completions: Sequence[Any], **columns: Any) -> list[Judgement]:
        """Each completion's outcome; parameters and errors as in a call, except the policy's."""
        return self._made(completions, columns).judgements()

    def _calls(self, completions: Sequence[Any], columns: Mapping[str, Any]) -> _Calls:
        return _Calls(self.__name__, completions, columns, self.batch_size, self._cache)

    def _scores(self, calls: _Calls) -> list[float | None]:
        judgements = calls.judgements()
        self.policy.log(judgements, calls.columns.get("log_metric"), calls.columns.get("log_extra"))
        try:
            return self.policy.scores(judgements)
        except RewardError as error:
            without_value = (row for row, judged in enumerate(judgements) if self.policy.raises(judged))
            raise error from calls.causes.get(next(without_value))

    def _made(self, completions: Sequence[Any], columns: Mapping[str, Any]) -> _Calls:
        """A batch's calls, made, and repeated where they raised."""
        calls = self._calls(completions, columns)
        due = [*range(len(calls.rows))]
        for _ in range(self.retries + 1):
            if self._pool is not None:
                results = self._in_workers(self._pool, calls, due)
            else:
                results = [self._in_this_process(calls, call) for call in due]
            calls.results.update(zip(due, results, strict=True))
            due = [call for call in due if calls.results[call].outcome is Outcome.ERROR]
            if not due:
                break
        return calls

    def _in_workers(self, pool: WorkerPool, calls: _Calls, due: Sequence[int]) -> list[_Result]:
        limit = _NO_LIMIT if self.timeout is None else float(self.timeout)
        # What waits for a network or a disk uses no CPU time, so the limit holds for its sleep too.
        jobs = [calls.columns_of(call, leave_out=_STAY_HERE) for call in due]
        dones = pool.run(jobs, allowance=limit, patience=limit)
        return [_from_worker(done, len(calls.rows[call]), self.__name__) for call, done in zip(due, dones, strict=True)]

    def _in_this_process(self, calls: _Calls, call: int) -> _Result:
        if self._abandoned is not None and self._abandoned.is_alive():
            raise RewardError(
                f"{self.__name__}: an earlier call overran its timeout and still runs in its thread, which cannot be "
                "killed. Give it more time, or run it in worker processes (no `workers=0`), which a model cannot."
            )
        columns = calls.columns_of(call)
        try:
            if self.timeout is None:
                returned = self._function(**columns)
            else:
                returned = call_in_thread(self._function, columns, self.timeout, f"guarded-{self.__name__}")
        except StillRunningError as late:
            self._abandoned = late.thread
            return _timed_out(self.timeout)
        except Exception as error:  # foreign code; a failure is an outcome, and what that becomes is the user's choice
            return _failed(error)
        return _checked(returned, len(calls.rows[call]), self.__name__)


class AsyncGuarded(Guarded):
    """A guarded async reward, which TRL runs together with the other async ones."""

    async def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:  # type: ignore[override]
        """As `Guarded.__call__`."""
        return self._scores(await self._awaited(completions, columns))

    async def judge(self, completions: Sequence[Any], **columns: Any) -> list[Judgement]:  # type: ignore[override]
        """As `Guarded.judge`."""
        return (await self._awaited(completions, columns)).judgements()

    async def _awaited(self, completions: Sequence[Any], columns: Mapping[str, Any]) -> _Calls:
        calls = self._calls(completions, columns)
        at_once = asyncio.Semaphore(self.workers or max(1, len(calls.rows)))

        async def work(call: int) -> None:
            async with at_once:
                for _ in range(self.retries + 1):
                    calls.results[call] = await self._one(calls, call)
                    if calls.results[call].outcome is not Outcome.ERROR:
                        return

        await asyncio.gather(*(work(call) for call in range(len(calls.rows))))
        return calls

    async def _one(self, calls: _Calls, call: int) -> _Result:
        try:
            async with asyncio.timeout(self.timeout) as limit:
                returned = await self.reward(**calls.columns_of(call))
        except Exception as error:  # as above
            # Only the time that ran out here is a timeout; one that the reward itself met is its error.
            ran_out = isinstance(error, TimeoutError) and limit.expired()
            return _timed_out(self.timeout) if ran_out else _failed(error)
        return _checked(returned, len(calls.rows[call]), self.__name__)


class _Calls:
    """The calls that one batch is cut into, with each call's rows and result."""

    def __init__(
        self,
        reward: str,
        completions: Sequence[Any],
        columns: Mapping[str, Any],
        batch_size: int | None,
        cache: Recent[Judgement],
    ) -> None:
        self._reward, self._cache, self._count = reward, cache, len(completions)
        self.columns = {**columns, "completions": completions}
        self._keys = [digest(self._of_row(row)) if cache.size else None for row in range(self._count)]
        self._known: dict[int, Judgement] = {}
        self._same_as: dict[int, int] = {}
        first: dict[bytes, int] = {}
        for row, key in enumerate(self._keys):
            if (kept := cache.get(key)) is not None:
                self._known[row] = kept
            elif key is not None and first.setdefault(key, row) != row:
                self._same_as[row] = first[key]
        rows = [row for row in range(self._count) if row not in self._known and row not in self._same_as]
        size = batch_size or max(1, len(rows))
        self.rows = [rows[start : start + size] for start in range(0, len(rows), size)]
        self.results: dict[int, _Result] = {}
        self.causes: dict[int, BaseException | None] = {}

    def _of_row(self, row: int) -> dict[str, Any]:
        cut = select_rows(self.columns, self._count, [row])
        return {name: cut[name] for name in cut if name not in _NOT_IN_KEY and cut[name] is not self.columns[name]}

    def columns_of(self, call: int, *, leave_out: frozenset[str] = frozenset()) -> dict[str, Any]:
        """What the reward is called with."""
        rows = self.rows[call]
        columns = self.columns if len(rows) == self._count else select_rows(self.columns, self._count, rows)
        return {name: value for name, value in columns.items() if name not in leave_out}

    def judgements(self) -> list[Judgement]:
        """Each completion's outcome, once all calls have results."""
        judged = dict(self._known)
        for call, rows in enumerate(self.rows):
            result = self.results[call]
            if result.broken is not None:
                if len(rows) == self._count:
                    raise result.broken
                which = f"row {rows[0]}" if len(rows) == 1 else f"{len(rows)} rows, {rows[0]} to {rows[-1]},"
                text = f"{result.broken} That call had {which} of the batch's {self._count}."
                raise PluginOutputError(text, result.broken.breaks) from result.broken
            for position, row in enumerate(rows):
                judged[row] = result.judgement(position)
                self.causes[row] = result.cause
                if result.scores is not None:
                    self._cache.put(self._keys[row], judged[row])
        for row, other in self._same_as.items():
            judged[row], self.causes[row] = judged[other], self.causes[other]
        return [judged[row] for row in range(self._count)]


@dataclass
class _Result:
    """The result of one call: its scores, or why there are none."""

    scores: list[float | None] | None = None
    outcome: Outcome = Outcome.SCORED
    detail: str = ""
    cause: BaseException | None = None
    broken: PluginOutputError | None = None

    def judgement(self, position: int) -> Judgement:
        """The outcome of the call's completion at this position."""
        if self.scores is None:
            return Judgement(self.outcome, self.detail)
        score = self.scores[position]
        if score is None or math.isnan(score):
            return Judgement(Outcome.NONE)
        return Judgement(Outcome.SCORED, score=score)


def _checked(returned: Any, count: int, reward: str) -> _Result:
    """Check what a reward returned against its contract."""
    try:
        return _Result(check_scores(returned, count, reward))
    except PluginOutputError as error:
        return _Result(broken=error)


def _timed_out(timeout: float | None) -> _Result:
    return _Result(outcome=Outcome.TIMEOUT, detail=f"no result within {timeout:g} s")


def _failed(error: Exception) -> _Result:
    return _Result(outcome=Outcome.ERROR, detail=f"{type(error).__name__}: {exception_text(error)}", cause=error)


class _Task:
    """What a worker runs: the reward on one call's columns. The scores travel as JSON."""

    def __init__(self, reward: Callable[..., Any], name: str) -> None:
        self._reward, self._name = reward, name

    def __call__(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Score one call's completions."""
        count = len(columns["completions"])
        try:
            scores = check_scores(self._reward(**columns), count, self._name)
        except PluginOutputError as error:
            return {"broken": [str(error), error.breaks]}
        return {"scores": [[score, score.spans] if isinstance(score, SpanScore) else score for score in scores]}


def _from_worker(done: Done, count: int, reward: str) -> _Result:
    """Read the result of a call in a worker process."""
    if done.status == "done":
        try:
            if "broken" in done.value:
                message, breaks = done.value["broken"]
                return _Result(broken=PluginOutputError(str(message), breaks))
            scores = [SpanScore(*score) if isinstance(score, list) else score for score in done.value["scores"]]
        except (TypeError, KeyError, ValueError, OverflowError) as error:  # not written by `_Task`
            return _Result(broken=PluginOutputError(f"The worker of {reward!r} sent no scores: {error}"))
        return _checked(scores, count, reward)
    if done.status == "error":
        kind, _, message = done.detail.partition(": ")
        cause = RewardError(f"In the worker process:\n{done.traceback}")
        return _Result(outcome=Outcome.ERROR, detail=f"{kind}: {shown(message)}", cause=cause)
    return _Result(outcome=Outcome(done.status), detail=done.detail)


class _Model:
    """A reward model as a reward function: `model(**inputs).logits[:, 0]`, as TRL scores it."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        """Score prompt and completion together."""
        import torch

        pairs = list(zip(prompts, completions, strict=True))
        if isinstance(prompts[0], str):
            texts = [prompt + completion for prompt, completion in pairs]
        else:
            texts = [self._tokenizer.apply_chat_template([*p, *c], tokenize=False) for p, c in pairs]
        inputs = self._tokenizer(
            text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        device = next(self._model.parameters()).device
        # Which GPU is the current one is a thread's own setting.
        current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        with torch.inference_mode(), current:
            logits = self._model(**{name: value.to(device) for name, value in inputs.items()}).logits
            scores: list[float] = logits[:, 0].float().tolist()
        return scores
