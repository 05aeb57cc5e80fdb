"""Run math-verify in worker processes, with time limits, and decide who is at fault if there is no verdict."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...guard.cache import Recent, digest
from ...guard.outcomes import Judgement, Outcome
from ...guard.workers import Done, WorkerPool
from .plain_answers import plain_reference

_SHORTEST_TURN, _LONGEST_TURN = 0.05, 0.25  # CPU seconds; an ordinary pair takes 1 to 20 ms
_BATCH = 64  # completions that `budget` is for; larger batches have more
_MOST_REFERENCES = 10_000
# Where short expressions have their large values from.
_COSTLY = re.compile(r"\^|!|\\(?:sum|prod|int|lim|binom)|[0-9]{7}")
_COST_OF_OPERATOR = 50


@dataclass(frozen=True)
class Reading:
    """One completion's judgement, and the answers read from the reference and the completion."""

    judgement: Judgement
    gold: str = ""
    found: str = ""


@dataclass(frozen=True)
class _Alone:
    """The judgement of a reference by itself, and the CPU seconds that it takes."""

    judgement: Judgement
    seconds: float


Pair = tuple[str, str | None]
"""A reference, and the text in which the answer is looked for; None asks for the reference alone."""


class Verifier:
    """Judges pairs of a reference and a text with math-verify, in workers that are suspended if they take long.

    Args:
        name: For messages.
        timeout: CPU seconds for one pair.
        budget: CPU seconds that pairs without a verdict may use together, for 64 pairs, of all workers.
        workers: Number of processes; None is as many as there are cores, at most 8.
        memory_mb: Memory that a worker may add to what it starts with, in MiB; None means no limit.
        cache: Number of verdicts that are kept.
    """

    def __init__(
        self, name: str, *, timeout: float, budget: float, workers: int | None, memory_mb: int | None, cache: int
    ) -> None:
        self._timeout, self._budget = timeout, budget
        self.pool = WorkerPool(_MathVerify(), workers=workers, memory_mb=memory_mb, name=name)
        self._verdicts: Recent[Reading] = Recent(cache)
        self._references: Recent[_Alone] = Recent(_MOST_REFERENCES)

    def readings(self, pairs: Sequence[Pair]) -> dict[Pair, Reading]:
        """Judge distinct pairs: cached verdicts first, workers for the others."""
        readings: dict[Pair, Reading] = {}
        jobs: list[Pair] = []
        for pair in pairs:
            known = self._verdicts.get(digest(pair))
            if known is None:
                jobs.append(pair)
            else:
                readings[pair] = known
        if not jobs:
            return readings
        jobs.sort(key=_expected_cost)
        failed: dict[Pair, Done] = {}
        for pair, done in zip(jobs, self._run(jobs, self._budget * max(1.0, len(jobs) / _BATCH)), strict=True):
            if done.status == "done":
                readings[pair] = _reading(done.value)
                self._verdicts.put(digest(pair), readings[pair])
            else:
                failed[pair] = done
        alone = self._references_alone([reference for reference, _ in failed])
        for pair, done in failed.items():
            readings[pair] = Reading(_verdict_on_failure(done, alone.get(pair[0])))
        return readings

    def _references_alone(self, references: Sequence[str]) -> dict[str, _Alone]:
        """The judgements of references by themselves, each with its full time; plain numbers and bugs are left out."""
        alone: dict[str, _Alone] = {}
        unknown: list[Pair] = []
        for reference in dict.fromkeys(references):
            known = self._references.get(digest(reference))
            if known is not None:
                alone[reference] = known
            elif plain_reference(reference) is None:
                unknown.append((reference, None))
        for (reference, _), done in zip(unknown, self._run(unknown, None), strict=True):
            if done.status == "error":
                continue  # a bug, and no property of the reference
            judgement = Judgement(Outcome.UNPARSEABLE, f"the reference alone: {done.detail}")
            if done.status == "done":
                judgement = _reading(done.value).judgement
            alone[reference] = _Alone(judgement, done.seconds)
            self._references.put(digest(reference), alone[reference])
        return alone

    def _run(self, pairs: Sequence[Pair], budget: float | None) -> list[Done]:
        if not pairs:
            return []
        jobs = [{"reference": r} if answer is None else {"reference": r, "answer": answer} for r, answer in pairs]
        # So short that each job has had its first turn within half of the budget, even if all of them are hostile.
        turn = _LONGEST_TURN if budget is None else budget / 2 / len(jobs)
        turn = min(max(turn, _SHORTEST_TURN), _LONGEST_TURN)
        return self.pool.run(jobs, allowance=self._timeout, budget=budget, turn=turn)


def _verdict_on_failure(done: Done, alone: _Alone | None) -> Judgement:
    """Decide who is at fault if a pair has no verdict."""
    if alone is not None and alone.judgement.outcome is not Outcome.SCORED:
        return alone.judgement
    if alone is not None and not done.whole and done.seconds <= alone.seconds:
        detail = f"the batch's budget was spent while the reference was read, which takes {alone.seconds:.1f} s"
        return Judgement(Outcome.UNPARSEABLE, detail)
    return Judgement(Outcome(done.status), done.detail)


class _MathVerify:
    """The workers' task: unpickles to `verification.check`, so that only they import sympy."""

    def __call__(self, job: Mapping[str, Any]) -> Any:
        return _math_verify()(job)

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _math_verify, ()


def _math_verify() -> Callable[[Mapping[str, Any]], dict[str, str]]:
    from .verification import check

    return check


def _expected_cost(pair: Pair) -> int:
    """The sort key of jobs: short and simple ones first, so that they never wait for slow ones."""
    texts = (pair[0], pair[1] or "")
    return sum(len(text) + _COST_OF_OPERATOR * len(_COSTLY.findall(text)) for text in texts)


def _reading(value: Mapping[str, str]) -> Reading:
    outcome = Outcome(value["outcome"])
    return Reading(Judgement(outcome), value.get("gold", ""), value.get("found", ""))
