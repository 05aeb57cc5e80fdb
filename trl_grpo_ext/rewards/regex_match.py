"""Does the completion match a regular expression?"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigurationError
from ..guard.messages import completion_text
from ..guard.outcomes import Judgement, Outcome, OutcomePolicy
from ..guard.parameters import checked_flag, checked_number, checked_whole
from ..guard.workers import Done, WorkerPool
from ..types import Parts, RewardDeclaration
from ._judged import Judged

_FLAGS = {"a": re.ASCII, "i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE}
_OUTCOMES = (Outcome.SCORED, Outcome.REFUSED, Outcome.TIMEOUT, Outcome.DIED, Outcome.ERROR)


class RegexMatch(Judged):
    r"""Score `value` where the completion matches, `otherwise` where it does not.

    The pattern is Python's (`re`) and may match anywhere. A pattern such as `(a+)+b` can take longer than the training
    on a text that a model may well write, and `re` cannot be interrupted. So matches run in worker processes, which are
    killed after `timeout` seconds of CPU time.

    Each named group, `(?P<name>...)`, is a part; without any, the whole match is the one part `match`. The places are
    those of the matches that count; a group that took no part in a match has no share in it.

    Args:
        pattern: The regular expression.
        full: Whether the whole completion must match, from its first character to its last.
        flags: Letters from "aimsx", as in `(?i)`. Without "s" a dot does not match a line break.
        value: The score of a match.
        otherwise: The score without a match.
        count: How many non-overlapping matches earn the whole `value`. With fewer, the score lies between `otherwise`
            and `value` in proportion.
        max_characters: Longer completions are refused. Cutting them would make `$` and `full` wrong.
        timeout: CPU seconds that the match of one completion may take.
        outcomes: Values of the outcomes `refused`, `timeout`, `died` and `error`: 0.0 each, except that the last
            raises.
    """

    __name__ = "regex_match"
    declares = RewardDeclaration(conformance={"parameters": {"pattern": r"<answer>.*?</answer>"}})

    def __init__(
        self,
        pattern: str,
        *,
        full: bool = False,
        flags: str = "",
        value: float = 1.0,
        otherwise: float = 0.0,
        count: int = 1,
        max_characters: int = 100_000,
        timeout: float = 0.25,
        outcomes: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(pattern, str):
            raise ConfigurationError(f"regex_match: pattern must be a string, got {pattern!r}.")
        if not isinstance(flags, str) or not set(flags) <= _FLAGS.keys():
            raise ConfigurationError(f"regex_match: flags must be letters out of 'aimsx', got {flags!r}.")
        self.pattern = pattern
        self.flags = flags
        bits = functools.reduce(lambda bits, letter: bits | _FLAGS[letter], flags, 0)
        try:
            self.parts = list(re.compile(pattern, bits).groupindex) or ["match"]
        except (re.error, ValueError, OverflowError, RecursionError) as error:
            raise ConfigurationError(
                f"regex_match: pattern must be a regular expression, got {pattern!r}: {error}."
            ) from error
        self.full = checked_flag("regex_match: full", full)
        self.value = checked_number("regex_match: value", value, "a finite number")
        self.otherwise = checked_number("regex_match: otherwise", otherwise, "a finite number")
        self.count = checked_whole("regex_match: count", count, 1)
        if full and count > 1:
            raise ConfigurationError(f"regex_match: count must be 1 with full, got {count!r}.")
        self.max_characters = checked_whole("regex_match: max_characters", max_characters, 1)
        self.timeout = checked_number("regex_match: timeout", timeout, "a positive number", lambda x: x > 0)
        self.policy = OutcomePolicy("regex_match", _OUTCOMES, outcomes)
        self._pool = WorkerPool(functools.partial(find_matches, pattern, bits, full, self.count), name="regex_match")

    def judge(self, completions: Sequence[Any], **columns: Any) -> list[Judgement]:
        """The outcomes of `B` completions."""
        texts = [completion_text(completion) for completion in completions]
        short = [text for text in dict.fromkeys(texts) if len(text) <= self.max_characters]
        judged = dict(zip(short, map(self._judged, self._pool.run(short, allowance=self.timeout)), strict=True))
        limit = f"more than max_characters, {self.max_characters}"
        return [judged.get(text) or Judgement(Outcome.REFUSED, f"{len(text)} characters, {limit}") for text in texts]

    def _judged(self, done: Done) -> Judgement:
        if done.status != "done":
            return Judgement(Outcome(done.status), done.detail)
        parts = {}
        for name in self.parts:
            places = [one[name] for one in done.value if name in one]
            parts[name] = (self._worth(len(places)), places)
        return Judgement(Outcome.SCORED, score=Parts(parts, self._worth(len(done.value))))

    def _worth(self, matches: int) -> float:
        share = matches / self.count
        return share * self.value + (1 - share) * self.otherwise


def find_matches(pattern: str, flags: int, full: bool, count: int, text: str) -> list[dict[str, tuple[int, int]]]:
    """Beginnings and ends of the named groups of the first `count` matches; without any, "match". Runs in a worker."""
    compiled = re.compile(pattern, flags)
    matches = [compiled.fullmatch(text)] if full else itertools.islice(compiled.finditer(text), count)
    found = []
    for match in filter(None, matches):
        groups = {name: match.span(name) for name in compiled.groupindex if match.start(name) >= 0}
        found.append(groups if compiled.groupindex else {"match": match.span()})
    return found
