"""Run math-verify in worker processes, with time limits, and decide who is at fault if there is no verdict."""

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...guard.outcomes import Judgement, Outcome
from ...guard.workers import Done, WorkerPool
from .plain_answers import plain_reference

_MOST_REFERENCES = 10_000

Pair = tuple[str, str | None]
"""A reference, and the text in which the answer is looked for; None asks for the reference alone."""


@dataclass(frozen=True)
class Reading:
    """One completion's judgement, the answers read from reference and completion, and what else the reference says."""

    judgement: Judgement
    gold: str = ""
    found: str = ""
    left: str = ""


class Verifier:
    """Judges pairs of a reference and a text with math-verify, in workers that are killed if they take too long."""

    def __init__(self, name: str, *, timeout: float, workers: int | None, memory_mb: int | None, cache: int) -> None:
        self._timeout = timeout
        self.pool = WorkerPool(_MathVerify(), workers=workers, memory_mb=memory_mb, name=name)
        self._most_verdicts = cache
        self._verdicts: dict[Pair, Reading] = {}
        self._references: dict[str, Judgement] = {}

    def readings(self, pairs: Sequence[Pair]) -> dict[Pair, Reading]:
        """Judge distinct pairs: cached verdicts first, workers for the others."""
        readings = {pair: self._verdicts.pop(pair) for pair in pairs if pair in self._verdicts}
        for pair, known in readings.items():
            _keep(self._verdicts, pair, known, self._most_verdicts)  # as the latest
        jobs = [pair for pair in pairs if pair not in readings]
        failed: dict[Pair, Judgement] = {}
        for pair, done in zip(jobs, self._run(jobs), strict=True):
            if done.status == "done":
                readings[pair] = _reading(done)
                _keep(self._verdicts, pair, readings[pair], self._most_verdicts)
            else:
                failed[pair] = Judgement(Outcome(done.status), done.detail)
        alone = self._references_alone([reference for reference, _ in failed])
        for pair, judgement in failed.items():
            of_reference = alone.get(pair[0], judgement)
            readings[pair] = Reading(judgement if of_reference.outcome is Outcome.SCORED else of_reference)
        return readings

    def read(self, references: Sequence[str]) -> list[Reading]:
        lost = Reading(Judgement(Outcome.UNPARSEABLE))
        done = self._run([(reference, None) for reference in references])
        return [_reading(one) if one.status == "done" else lost for one in done]

    def _references_alone(self, references: Sequence[str]) -> dict[str, Judgement]:
        """The judgements of references by themselves; plain numbers and bugs are left out."""
        alone: dict[str, Judgement] = {}
        unknown: list[Pair] = []
        for reference in dict.fromkeys(references):
            if (known := self._references.get(reference)) is not None:
                alone[reference] = known
            elif plain_reference(reference) is None:
                unknown.append((reference, None))
        for (reference, _), done in zip(unknown, self._run(unknown), strict=True):
            if done.status == "error":
                continue  # a bug, and no property of the reference
            judgement = Judgement(Outcome.UNPARSEABLE, f"the reference alone: {done.detail}")
            alone[reference] = _reading(done).judgement if done.status == "done" else judgement
            _keep(self._references, reference, alone[reference], _MOST_REFERENCES)
        return alone

    def _run(self, pairs: Sequence[Pair]) -> list[Done]:
        jobs = [{"reference": r} if answer is None else {"reference": r, "answer": answer} for r, answer in pairs]
        return self.pool.run(jobs, allowance=self._timeout) if jobs else []


def _keep(cache: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    cache[key] = value
    while len(cache) > most:
        cache.pop(next(iter(cache)), None)


class _MathVerify:
    """The workers' task: unpickles to `verification.check`, so that only they import sympy."""

    CHECK = f"{__package__}.verification:check"

    def __call__(self, job: Mapping[str, Any]) -> Any:
        return pkgutil.resolve_name(self.CHECK)(job)

    def __reduce__(self) -> tuple[Any, ...]:
        return pkgutil.resolve_name, (self.CHECK,)


def _reading(done: Done) -> Reading:
    value = done.value
    judgement = Judgement(Outcome(value["outcome"]), value.get("detail", ""))
    return Reading(judgement, value.get("gold", ""), value.get("found", ""), value.get("left", ""))
