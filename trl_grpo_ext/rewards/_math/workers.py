"""math-verify in worker processes: what is asked, for how long, and whose fault it is when no answer comes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...guard.cache import Recent, digest
from ...guard.outcomes import Judgement, Outcome
from ...guard.progress import listening
from ...guard.workers import Done, WorkerPool
from .plain_answers import plain_reference

_LOADING_LIMIT = 120.0  # seconds; importing sympy from a slow network file system takes its time
_SHORTEST_SLICE, _LONGEST_SLICE = 0.1, 0.25  # an ordinary pair takes 1 to 20 ms, on a busy machine five times that
_BATCH = 64  # completions that `budget` is for; larger batches have more
_SHARE_OF_REFERENCES = 0.25  # of the budget: kept to find out which references are at fault
_MOST_REFERENCES = 10_000
# Where short expressions have their large values from.
_COSTLY = re.compile(r"\^|!|\\(?:sum|prod|int|lim|binom)|[0-9]{7}")
_COST_OF_OPERATOR = 50


@dataclass(frozen=True)
class Reading:
    """One completion's judgement, and what was read in the reference and in the completion."""

    judgement: Judgement
    gold: str = ""
    found: str = ""


Pair = tuple[str, str | None]
"""A reference, and the text in which the answer is looked for; None asks for the reference alone."""


class Verifier:
    """Judges pairs of a reference and a text with math-verify, in workers that are killed when they take too long.

    Args:
        name: For messages.
        timeout: Seconds for one pair.
        budget: Seconds for 64 pairs.
        workers: Number of processes; None is as many as there are cores, at most 8.
        memory_mb: What a worker may use beside what it starts with, in MiB; None is no limit.
        cache: Number of verdicts that are kept.
    """

    def __init__(
        self, name: str, *, timeout: float, budget: float, workers: int | None, memory_mb: int | None, cache: int
    ) -> None:
        self._timeout, self._budget = timeout, budget
        self.pool = WorkerPool(_MathVerify(), workers=workers, memory_mb=memory_mb, name=name)
        self._loaded_in = 0
        self._verdicts: Recent[Reading] = Recent(cache)
        self._references: Recent[Reading] = Recent(_MOST_REFERENCES)

    def readings(self, pairs: Sequence[Pair]) -> dict[Pair, Reading]:
        """Have distinct pairs judged: known verdicts first, workers for the others."""
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
        self._load()
        jobs.sort(key=_expected_cost)
        begun, budget = time.monotonic(), self._budget * max(1.0, len(jobs) / _BATCH)
        suspects = sum(plain_reference(reference) is None for reference, _ in jobs)
        share = 1 - _SHARE_OF_REFERENCES if suspects else 1.0
        failed: dict[Pair, Done] = {}
        for pair, done in zip(jobs, self._run(jobs, budget * share), strict=True):
            if done.status == "done":
                readings[pair] = _reading(done.value)
                self._verdicts.put(digest(pair), readings[pair])
            else:
                failed[pair] = done
        left = budget - (time.monotonic() - begun)
        at_fault = self._references_at_fault(failed, max(left, budget * _SHARE_OF_REFERENCES))
        for pair, done in failed.items():
            readings[pair] = Reading(at_fault.get(pair[0]) or Judgement(Outcome(done.status), done.detail))
        return readings

    def _references_at_fault(self, failed: Mapping[Pair, Done], budget: float) -> dict[str, Judgement]:
        """Of the pairs that came to no verdict: the references that come to none alone either."""
        suspects = [r for r in dict.fromkeys(reference for reference, _ in failed) if plain_reference(r) is None]
        judged: dict[str, Judgement] = {}
        unknown: list[Pair] = []
        for reference in suspects:
            known = self._references.get(digest(reference))
            if known is None:
                unknown.append((reference, None))
            elif known.judgement.outcome is not Outcome.SCORED:
                judged[reference] = known.judgement
        if not unknown:
            return judged
        for pair, done in zip(unknown, self._run(unknown, budget, _SHORTEST_SLICE / 2), strict=True):
            if done.status == "error":
                continue  # a bug, and no property of the reference
            if done.status == "done":
                reading = _reading(done.value)
            else:
                reading = Reading(Judgement(Outcome.UNPARSEABLE, f"the reference alone: {done.detail}"))
            if done.status == "done" or done.seconds >= self._timeout:
                self._references.put(
                    digest(pair[0]), reading
                )  # what a spent budget cut short may be in order next time
            if reading.judgement.outcome is not Outcome.SCORED:
                judged[pair[0]] = reading.judgement
        return judged

    def _run(self, pairs: Sequence[Pair], budget: float, shortest: float = _SHORTEST_SLICE) -> list[Done]:
        jobs = [{"reference": r} if answer is None else {"reference": r, "answer": answer} for r, answer in pairs]
        # So short that each job has had its first try within the budget, even if all of them are hostile.
        slice = budget * self.pool.workers / len(jobs)
        slice = min(max(slice, shortest), _LONGEST_SLICE, self._timeout)
        return self.pool.run(jobs, deadline=self._timeout, budget=budget, slice=slice)

    def _load(self) -> None:
        """Wait for the workers' imports, so that they don't count against a batch's budget."""
        if self._loaded_in != os.getpid():
            with listening(None):  # these are no completions
                self.pool.run([{"reference": "7"}] * self.pool.workers, deadline=_LOADING_LIMIT, slice=_LOADING_LIMIT)
            self._loaded_in = os.getpid()


class _MathVerify:
    """The workers' task: turns into `verification.check` where it is unpickled, so that only they import sympy."""

    def __call__(self, job: Mapping[str, Any]) -> Any:
        return _math_verify()(job)

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _math_verify, ()


def _math_verify() -> Callable[[Mapping[str, Any]], dict[str, str]]:
    from .verification import check

    return check


def _expected_cost(pair: Pair) -> int:
    """The order of the jobs: the short and simple first, so that they never wait for what burns its time."""
    texts = (pair[0], pair[1] or "")
    return sum(len(text) + _COST_OF_OPERATOR * len(_COSTLY.findall(text)) for text in texts)


def _reading(value: Mapping[str, str]) -> Reading:
    outcome = Outcome(value["outcome"])
    return Reading(Judgement(outcome), value.get("gold", ""), value.get("found", ""))
