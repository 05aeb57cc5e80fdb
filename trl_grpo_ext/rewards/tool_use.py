"""A reward by turn, for completions with tools: `tool_use`."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..credit.turns import Exchange, exchanges, is_tool_error, tool_calls
from ..errors import ConfigurationError
from ..guard.messages import completion_text
from ..guard.parameters import Checked, checked_text, number, whole
from ..types import Parts, Place, RewardDeclaration


class ToolUse(Checked):
    """Score each turn by its tool calls: made, returned, failed and unanswered.

        made · calls + returned · calls that returned + failed · calls that failed + unanswered · calls without answer

    A turn is an assistant message with the tool messages that answer it. A call fails if TRL answers with an `error`:
    the tool raised, does not exist or does not take the arguments. A message whose text contains `marker` but
    which has no calls is a call that could not be parsed, and failed. A call has no answer if it never ran, or if its
    result, which may be an error, did not fit into `max_completion_length`: TRL then takes it back. So it counts as
    failed by default; else a policy that calls near its budget would escape.

    The score is the sum over the turns, with a part for each. Only the first `at_most` calls of a completion earn
    anything, so that a policy does not call tools for the reward's sake; failures still cost after that.

    Args:
        returned: Score of each call that returned.
        failed: Score of each call that failed.
        made: Score of each call, whatever its result.
        unanswered: Score of each call without an answer; None means that of a failed one.
        at_most: How many calls of a completion earn anything; None means all.
        marker: The beginning of a call in text without special tokens; None ignores calls that cannot be parsed.
    """

    __name__ = "tool_use"
    declares = RewardDeclaration(conformance={"completions": ["<tool_call>{", "Wait. <tool_call>add(1, 2", "18", ""]})

    returned: float = number(0.1, "a number")
    failed: float = number(-0.1, "a number")
    made: float = number(0.0, "a number")
    unanswered: float | None = number(None, "a number")
    at_most: int | None = whole(None, lowest=0)
    marker: str | None = "<tool_call>"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.marker is not None:
            checked_text("tool_use: marker", self.marker)
        if not (self.returned or self.failed or self.made or self.unanswered):
            raise ConfigurationError("tool_use: returned, failed or made must not be 0.")

    def __call__(self, completions: Sequence[Any], log_metric: Any = None, **columns: Any) -> list[Parts]:
        """`B` scores; logs `tool_use/` `calls`, `returned`, `failed` and `unanswered`, each per completion."""
        counts = [[self._counts(exchange) for exchange in exchanges_of(completion)] for completion in completions]
        if log_metric is not None and completions:
            for place, what in enumerate(("calls", "returned", "failed", "unanswered")):
                log_metric(f"tool_use/{what}", sum(turn[place] for row in counts for turn in row) / len(completions))
        return [self._scored(row) for row in counts]

    def _counts(self, exchange: Exchange) -> tuple[int, int, int, int]:
        message, answers = exchange
        answers = [one for one in answers if one.get("role") not in ("user", "system", "developer")]
        calls = len(tool_calls(message))
        if not calls:
            unparsed = int(self.marker is not None and self.marker in completion_text(message))
            return unparsed, 0, unparsed, 0
        answered = min(len(answers), calls)
        errors = min(sum(is_tool_error(answer.get("content")) for answer in answers), calls)
        return calls, answered - errors, errors, calls - answered

    def _scored(self, turns: Sequence[tuple[int, int, int, int]]) -> Parts:
        left = float("inf") if self.at_most is None else self.at_most
        unanswered = self.failed if self.unanswered is None else self.unanswered
        worth = (self.made, self.returned, self.failed, unanswered)
        values = []
        for counts in turns:
            earning = min(counts[0], left)
            pairs = zip(worth, counts, strict=True)
            values.append(sum(each * (min(count, earning) if each > 0 else count) for each, count in pairs))
            left -= earning
        return Parts({f"turn {turn}": (value, Place(turn=turn)) for turn, value in enumerate(values)}, sum(values))


def exchanges_of(completion: Any) -> list[Exchange]:
    """The turns of a completion in any form; what is neither text nor messages has none."""
    if isinstance(completion, str):
        return [({"role": "assistant", "content": completion}, [])]
    messages = [completion] if isinstance(completion, Mapping) else completion
    messages = messages if isinstance(messages, list | tuple) else []
    return exchanges([one for one in messages if isinstance(one, Mapping)])
