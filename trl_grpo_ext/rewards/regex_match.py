"""Does the completion match a regular expression?"""

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Any

from ..errors import ConfigurationError
from ..guard.messages import completion_text
from ..guard.outcomes import Judgement, Outcome
from ..guard.parameters import number, seconds, text, whole
from ..guard.workers import Done, WorkerPool
from ..types import Parts, RewardDeclaration
from ._judged import IN_A_WORKER, Judged, too_long


class RegexMatch(Judged, kw_only=False):
    r"""Score `value` where the completion matches, `otherwise` where it does not.

    The pattern is Python's (`re`) and may match anywhere. One such as `(a+)+b` can take longer than the training on a
    text that a model may well write, so matches run in worker processes, which are killed after `timeout` CPU seconds.

    Each named group, `(?P<name>...)`, is a part; without any, the whole match is the one part `match`. The places are
    those of the matches that count; a group that took no part in a match has no share in it.

    Args:
        pattern: The regular expression; `(?s)` lets a dot match line breaks, `\A...\Z` asks for the whole completion.
        value: The score of a match.
        otherwise: The score without a match.
        count: How many matches earn the whole `value`; with fewer, the score lies between `otherwise` and `value`.
        max_characters: Longer completions are refused.
        timeout: CPU seconds that the match of one completion may take.
        outcomes: Values of the outcomes `refused`, `timeout`, `died` (0.0) and `error`, which raises.
    """

    __name__ = "regex_match"
    declares = RewardDeclaration(conformance={"parameters": {"pattern": r"<answer>.*?</answer>"}})

    can = (Outcome.SCORED, *IN_A_WORKER)
    pattern: str = text()
    _: KW_ONLY
    value: float = number(1.0, "a finite number")
    otherwise: float = number(0.0, "a finite number")
    count: int = whole(1, lowest=1)
    max_characters: int = whole(100_000, lowest=1)
    timeout: float = seconds(0.25)

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self.parts = list(re.compile(self.pattern).groupindex) or ["match"]
        except (re.error, ValueError, OverflowError, RecursionError) as error:
            raise ConfigurationError(f"regex_match: pattern {self.pattern!r}: {error}.") from error
        self._pool = WorkerPool(functools.partial(find_matches, self.pattern, self.count), name="regex_match")

    def judge(self, completions: Sequence[Any], **columns: Any) -> list[Judgement]:
        texts = [completion_text(completion) for completion in completions]
        short = [text for text in dict.fromkeys(texts) if len(text) <= self.max_characters]
        judged = dict(zip(short, map(self._judged, self._pool.run(short, allowance=self.timeout)), strict=True))
        most = self.max_characters
        return [judged.get(text) or Judgement(Outcome.REFUSED, too_long(len(text), most)) for text in texts]

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


def find_matches(pattern: str, count: int, text: str) -> list[dict[str, tuple[int, int]]]:
    """Beginnings and ends of the named groups of the first `count` matches; without any, "match". Runs in a worker."""
    compiled = re.compile(pattern)
    found = []
    for match in itertools.islice(compiled.finditer(text), count):
        groups = {name: match.span(name) for name in compiled.groupindex if match.start(name) >= 0}
        found.append(groups if compiled.groupindex else {"match": match.span()})
    return found
