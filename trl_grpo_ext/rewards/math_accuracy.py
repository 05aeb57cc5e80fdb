"""Is the answer mathematically equal to the reference? math-verify's verdict, without hanging."""

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import ConfigurationError
from ..guard.messages import completion_text
from ..guard.outcomes import Judgement, Outcome, shown
from ..guard.parameters import column, seconds, whole
from ..guard.workers import Done, WorkerPool
from ..types import RewardDeclaration
from ._judged import ABOUT_A_REFERENCE, IN_A_WORKER, Judged
from ._math import plain_answers

_ADVICE = "Rename the column that holds the reference answers to 'solution'."
_MOST_REFERENCES = 10_000
_CHECK = f"{__package__}._math.verification:check"

Pair = tuple[str, str | None]  # a reference, and where the answer is looked for; None asks for the reference alone


class _Reading(NamedTuple):
    judgement: Judgement
    gold: str = ""  # as it was read
    found: str = ""


class _Question(NamedTuple):
    pair: Pair  # that the workers are asked about
    refused: str = ""  # unless the reference proves to be unreadable


class _MathVerify:
    """The workers' task: unpickles to `verification.check`, so that only they import sympy."""

    def __call__(self, job: Mapping[str, Any]) -> Any:
        return pkgutil.resolve_name(_CHECK)(job)

    def __reduce__(self) -> tuple[Any, ...]:
        return pkgutil.resolve_name, (_CHECK,)


class MathAccuracy(Judged):
    r"""Score 1.0 where the completion's answer equals the reference in the column `solution`, 0.0 where it does not.

    The verdict is math-verify's, with the settings of TRL's `accuracy_reward`: the reference is LaTeX or a number, and
    all of it is read; the completion's answer must be LaTeX, in `\boxed{}` or an environment after the word "answer".
    Math-Verify's timeouts are signals, so `\boxed{9^{9^{9^9}}}` costs five seconds or hangs a training. Here it runs in
    worker processes, and only for what is not decided by plain numbers, equal texts, or the work that it asks for.

    The outcomes and their default values: `right` 1.0; `wrong`, `no_answer` 0.0; `unparseable_reference` None (the
    reference parses to nothing, asks for too much, or cannot be compared even with a plain number in time); `timeout`,
    `died` (twice, or out of memory) and `refused` (the answer asks for too much) 0.0; `error` raises. If a pair has no
    verdict, the reference is tried alone, once, to find which of the two is at fault.

    Args:
        timeout: CPU seconds for one completion, whatever the rest of the batch and the machine do. An ordinary pair
            takes 1 to 20 milliseconds, an integral about a second.
        workers: Number of processes; None means the number of cores divided among this machine's ranks, at most 8.
        memory_mb: Memory that a worker may add to what it starts with, in MiB; None means no limit.
        max_characters: Longer completions are `refused`, longer references unparseable.
        outcomes: Values of outcomes, by name: a number, None, or "raise".
        cache: Number of verdicts kept over batches; timeouts and deaths are not kept.
        reasoning_delimiters: What ends the reasoning, such as `["</think>"]`; None means that all of the completion
            counts. As in TRL's `reasoning_accuracy_reward`, only the text after the last occurrence of the first of
            them that occurs is read, and a completion without any has no answer, whatever its reference.

    Departures from TRL's `accuracy_reward`:

    - Of several messages the last assistant message with text counts, and completions may also be strings.
    - Math-Verify has 5 seconds on the wall clock for each of parsing the reference, parsing the answer and comparing,
      so it may say 1.0 after `timeout`; and a reference that never finishes is 0.0 to TRL, None here.
    - Different exact fractions are not equal. To math-verify they are if the difference vanishes in floating point.
    - A reference is read as a whole, and unparseable if that cannot be. Math-Verify takes the last number of what it
      cannot parse: 0 for `3x-y+13=0`. What its grammar does not know is right as the same text.
    - The references `3,5` and `3,5 cm` are lists, so write decimals with a point. To Math-Verify they are 3.5, as
      `3,5%` and `3,50 euros` are here.
    - Notation that it misreads is rewritten: `1\,000`, `1e3`, `1 1/2`, `\frac12`, `0.\overline{3}`,
      `\frac{1 \pm \sqrt{5}}{2}`, `\langle 1,2\rangle`, `30^\circ 15'`, `y''`. The `t` of `5t` and the text of
      `k \text{ is even}` are no units, `1010_2` is not `1010_3`, 5 is no answer to `x + y = 5`, and `i^2` is -1.
    - "gold_parsed" and "answer_parsed" are the LaTeX that was read, not sympy's spelling of it.

    Math-Verify's rules for decimals and percent are kept: numbers are rounded to 6 places if one is a decimal
    (`\boxed{0.0000001}` is right for `0.0`), unless that leaves nothing of the reference (9.1e-31 is wrong for
    `1.6e-19`), and a percent sign is ignored if both are integers.
    """

    __name__ = "math_accuracy"
    can = (*ABOUT_A_REFERENCE, *IN_A_WORKER)
    declares = RewardDeclaration(reference_column="solution")
    timeout: float = seconds(4.0)
    workers: int | None = None
    memory_mb: int | None = 512
    max_characters: int = whole(200_000, lowest=1)
    cache: int = whole(10_000, lowest=0)
    reasoning_delimiters: Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.reasoning_delimiters
        texts = isinstance(given, list | tuple) and all(isinstance(each, str) and each for each in given)
        if given is not None and not (given and texts):
            raise ConfigurationError(f"math_accuracy: reasoning_delimiters must be a list of texts, got {given!r}.")
        self._pool = WorkerPool(_MathVerify(), workers=self.workers, memory_mb=self.memory_mb, name=self.__name__)
        self._verdicts: dict[Pair, _Reading] = {}
        self._references: dict[str, Judgement] = {}

    def __call__(
        self,
        completions: Sequence[Any],
        solution: Sequence[Any] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """`B` scores; logs outcomes and their shares, and the columns "solution", "gold_parsed" and "answer_parsed"."""
        readings = self._read(completions, solution, columns)
        if log_extra is not None and solution is not None:
            log_extra("solution", [_printable(reference) for reference in solution])
            log_extra("gold_parsed", [_printable(reading.gold) for reading in readings])
            log_extra("answer_parsed", [_printable(reading.found) for reading in readings])
        logs = {"log_metric": log_metric, "log_extra": log_extra}
        return self._scored([reading.judgement for reading in readings], logs)

    def judge(self, completions: Sequence[Any], solution: Any = None, **columns: Any) -> list[Judgement]:
        return [reading.judgement for reading in self._read(completions, solution, columns)]

    def read_references(self, references: Sequence[Any]) -> list[tuple[str, str]]:
        """What each reference is read as ("" where it cannot be), and what of its text that leaves over."""
        texts = [reference for reference in dict.fromkeys(references) if isinstance(reference, str)]
        plain = {text: plain_answers.plain_reference(text) for text in texts}
        read = {text: (number.text, "") for text, number in plain.items() if number is not None}
        rest = [text for text in texts if text not in read]
        asked = [text for text in rest if plain_answers.excess_of_reference(text, self.max_characters) is None]
        for text, done in zip(asked, self._run([(text, None) for text in asked]), strict=True):
            found = done.value if done.status == "done" else {}
            read[text] = (found.get("gold", ""), found.get("left", ""))
        return [read.get(reference, ("", str(reference))) for reference in references]

    def start_workers(self) -> None:
        self._pool.start()

    def close(self) -> None:
        """End the worker processes. The next call starts new ones."""
        self._pool.close()

    def _read(self, completions: Sequence[Any], solution: Any, columns: Mapping[str, Any]) -> list[_Reading]:
        references = column(self.__name__, "solution", {**columns, "solution": solution}, len(completions), _ADVICE)
        pairs = zip(completions, references, strict=True)
        rows = [self._decided(completion_text(completion), reference) for completion, reference in pairs]
        asked = dict.fromkeys(row.pair for row in rows if isinstance(row, _Question))
        answers = self._readings(list(asked))
        readings = []
        for row, reference in zip(rows, references, strict=True):
            reading = row if isinstance(row, _Reading) else answers[row.pair]
            judged = reading.judgement
            if isinstance(row, _Question) and row.refused and judged.outcome is Outcome.SCORED:
                reading = _Reading(Judgement(Outcome.REFUSED, row.refused), reading.gold)
            elif judged.outcome is Outcome.UNPARSEABLE and isinstance(reference, str):
                why = f": {judged.detail}" if judged.detail else ""
                reading = _Reading(Judgement(Outcome.UNPARSEABLE, f"{shown(reference)}{why}"), reading.gold)
            readings.append(reading)
        return readings

    def _decided(self, text: str, reference: Any) -> _Reading | _Question:
        ends = [delimiter for delimiter in self.reasoning_delimiters or () if delimiter in text]
        if self.reasoning_delimiters and not ends:
            return _Reading(Judgement(Outcome.NO_ANSWER, "the reasoning does not end"))
        answer = text.rpartition(ends[0])[2] if ends else text
        if not isinstance(reference, str):
            return _Reading(Judgement(Outcome.UNPARSEABLE, f"a {type(reference).__name__}, not a string"))
        gold = plain_answers.plain_reference(reference)
        if gold is not None and len(answer) <= self.max_characters:
            found = plain_answers.plain_answer(answer)
            outcome = plain_answers.verdict(gold, found) if found is not None else None
            if found is not None and outcome is not None:
                return _Reading(Judgement(outcome), gold.text, found.text)
            if plain_answers.has_no_answer(answer):
                return _Reading(Judgement(Outcome.NO_ANSWER), gold.text)
        excess = None if gold is not None else plain_answers.excess_of_reference(reference, self.max_characters)
        if excess is not None:
            return _Reading(Judgement(Outcome.UNPARSEABLE, excess))
        excess = plain_answers.excess_of_completion(answer, self.max_characters)
        if excess is None:
            return _Question((reference, plain_answers.answer_alone(answer)))
        if gold is None:
            return _Question((reference, None), refused=excess)
        return _Reading(Judgement(Outcome.REFUSED, excess), gold.text)

    def _readings(self, pairs: Sequence[Pair]) -> dict[Pair, _Reading]:
        readings = {pair: self._verdicts.pop(pair) for pair in pairs if pair in self._verdicts}
        for pair, known in readings.items():
            _keep(self._verdicts, pair, known, self.cache)  # as the latest
        jobs = [pair for pair in pairs if pair not in readings]
        failed = {}
        for pair, done in zip(jobs, self._run(jobs), strict=True):
            if done.status == "done":
                readings[pair] = _reading(done)
                _keep(self._verdicts, pair, readings[pair], self.cache)
            else:
                failed[pair] = Judgement(Outcome(done.status), done.detail)
        alone = self._references_alone([reference for reference, _ in failed])
        for pair, judgement in failed.items():
            of_reference = alone.get(pair[0], judgement)
            readings[pair] = _Reading(judgement if of_reference.outcome is Outcome.SCORED else of_reference)
        return readings

    def _references_alone(self, references: Sequence[str]) -> dict[str, Judgement]:
        """The judgements of references by themselves; plain numbers and bugs are left out."""
        wanted = [one for one in dict.fromkeys(references) if plain_answers.plain_reference(one) is None]
        unknown: list[Pair] = [(reference, None) for reference in wanted if reference not in self._references]
        for (reference, _), done in zip(unknown, self._run(unknown), strict=True):
            if done.status != "error":  # a bug, and no property of the reference
                judgement = Judgement(Outcome.UNPARSEABLE, f"the reference alone: {done.detail}")
                judgement = _reading(done).judgement if done.status == "done" else judgement
                _keep(self._references, reference, judgement, _MOST_REFERENCES)
        return {reference: self._references[reference] for reference in wanted if reference in self._references}

    def _run(self, pairs: Sequence[Pair]) -> list[Done]:
        jobs = [{"reference": r} if answer is None else {"reference": r, "answer": answer} for r, answer in pairs]
        return self._pool.run(jobs, allowance=self.timeout) if jobs else []


def _keep(cache: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    cache[key] = value
    while len(cache) > most:
        cache.pop(next(iter(cache)), None)


def _reading(done: Done) -> _Reading:
    value = done.value
    judgement = Judgement(Outcome(value["outcome"]), value.get("detail", ""))
    return _Reading(judgement, value.get("gold", ""), value.get("found", ""))


math_accuracy = MathAccuracy()
"""`MathAccuracy` with its defaults, for `--reward_funcs` and other places that take a function by its path."""


def _printable(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text[:500].encode(errors="backslashreplace").decode()
