"""The rules of rewards, each as a check on small batches in TRL's form."""

from __future__ import annotations

import ast
import contextlib
import copy
import ctypes
import doctest
import hashlib
import inspect
import locale
import math
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from ..errors import PluginOutputError
from ..guard.calls import call, check_scores, reward_name
from ..guard.outcomes import shown
from .collectives import collectives_of_ranks, describe_difference, mentions_collectives
from .rules import Broken, Checks, NotChecked, cause_of, describe_exception, pickle_round_trip

SECONDS_PER_COMPLETION = 1.0
"""More than this, and `reward.time` is broken, unless the reward declares another limit."""

RELATIVE, ABSOLUTE = 1e-4, 1e-5
"""How far scores may be apart that ought to be the same: a model's last digits change with the padding."""

_SLOW, _FEW = 0.02, 4
"""Seconds per completion from which on fewer completions are tried, and how many."""
_CALLS, _ROUNDS = 3, 10
_ROWS_SHOWN = 3
_QUICK = 0.05
"""Seconds; what takes longer is not called by two threads over and over."""

Scores = list[float | None]
Form = Literal["text", "messages"]


class RewardChecks(Checks):
    """The checks of one reward. A method without a leading `_` checks its rule.

    Args:
        reward: The reward function.
        batch: An ordinary batch.
        again: Builds another one.
        deterministic: Whether it declares that it is.
        per_completion: Whether it scores each completion on its own.
        formats: The forms of completions that it takes.
        required: Columns that are never None.
        unreadable: References, besides None, that it cannot read.
        seconds_per_completion: Its time limit.
    """

    def __init__(
        self,
        reward: Any,
        batch: Batch,
        *,
        again: Callable[[], Any] | None = None,
        deterministic: bool = True,
        per_completion: bool = True,
        formats: Sequence[Form] = ("text", "messages"),
        required: Sequence[str] = (),
        unreadable: Sequence[Any] = (),
        seconds_per_completion: float = SECONDS_PER_COMPLETION,
    ) -> None:
        super().__init__()
        self.reward, self.batch = reward, batch
        self._again = again or (lambda: reward)
        self.deterministic, self.per_completion = deterministic, per_completion
        self._forms, self.required, self.unreadable = tuple(formats), tuple(required), tuple(unreadable)
        self.limit = seconds_per_completion
        self.name = reward_name(reward)
        self.state_before: dict[str, Any] = {}
        self.state_after: dict[str, Any] = {}
        self.seconds: list[float] = []
        self.first_call = 0.0
        self.slow = False
        self._first: Any = None
        self._given: set[float | None] = set()

    def _raw(self, batch: Batch, reward: Any = None) -> Any:
        """What the reward returns; a generator is read once."""
        returned = call(self.reward if reward is None else reward, batch.arguments())
        return returned if hasattr(returned, "__len__") or not hasattr(returned, "__iter__") else list(returned)

    def _scores(self, batch: Batch, reward: Any = None) -> Scores:
        """The same, checked against the contract. NaN becomes None, as in TRL."""
        return self._read(self._raw(batch, reward), batch)

    def _read(self, returned: Any, batch: Batch) -> Scores:
        values = check_scores(returned, len(batch.items), self.name)
        scores = [None if value is None or math.isnan(value) else float(value) for value in values]
        self._given.update(scores)
        return scores

    def _checked(self, returned: Any, batch: Batch, part: str) -> Scores:
        """The result as a run reads it; breaking the contract is `Broken`."""
        try:
            return check_scores(returned, len(batch.items), self.name)
        except PluginOutputError as error:
            if error.breaks != part:
                return []
            raise Broken(str(error), str(batch)) from error

    def _timed(self, batch: Batch) -> Any:
        """`raw`, timed; the first call is watched for what it changes in the process."""
        first = not self.seconds
        if first:
            self.state_before = global_state()
        began = time.perf_counter()
        returned = self._raw(batch)
        took = time.perf_counter() - began
        self.seconds.append(took / max(len(batch.items), 1))
        if first:
            self.first_call = took
            self.state_after = global_state()
        return returned

    def _spare(self) -> None:
        """Use fewer completions if each takes long."""
        self.slow = min(self.seconds) > _SLOW
        if self.slow:
            self.batch = self.batch.with_items(self.batch.items[:_FEW])

    def _over(
        self, batches: Iterable[Batch], judge: Callable[[Batch], None], where: str = "", smaller: bool = True
    ) -> None:
        """Judge batches; the reward's exceptions are `Broken` too."""

        def guarded(batch: Batch) -> None:
            try:
                judge(batch)
            except (Broken, NotChecked, KeyboardInterrupt):
                raise
            except BaseException as error:  # the reward's own, whatever it is; SystemExit too
                message = f"{describe_exception(error)}{f' ({where})' if where else ''}{_advice(error, batch)}"
                raise Broken(message, str(batch), cause_of(error)) from error

        self.over(batches, guarded, Batch.smaller if smaller else lambda batch: ())

    def _agree(self, ours: Scores, theirs: Scores, what: str, batch: Batch) -> None:
        """Compare scores that should be equal.

        Raises:
            Broken: They differ; `what` names the two.
        """
        for row, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if not _scores_agree(one, other):
                raise Broken(f"{what}: {_said(one)} and {_said(other)} at row {row}", str(batch))

    def _deterministic_only(self) -> None:
        """Leave a rule out for a reward that declares its randomness."""
        if not self.deterministic:
            raise NotChecked("it declares deterministic = False")

    def measured(self) -> dict[str, float | str]:
        """Its time."""
        if not self.seconds:
            return {}
        return {"seconds_per_completion": min(self.seconds), "seconds_of_first_call": self.first_call}

    def unshown(self) -> str:
        """All texts got one score."""
        if len(self._given) > 1 or not self._given or not self.seconds:
            return ""
        (score,) = self._given
        return f"it gave every text of the kit {_said(score)}; give it completions and columns whose scores differ"

    # ------------------------------------------------------------------------------------------ what it returns

    def call(self) -> None:
        """The signature accepts TRL's call."""
        if not callable(self.reward):
            raise Broken(f"it is {type(self.reward).__name__}, which is not callable")
        try:
            signature = inspect.signature(self.reward)
        except (TypeError, ValueError):  # some compiled function, of which nobody knows
            return
        try:
            signature.bind(**self.batch.arguments())
        except TypeError as error:
            advice = "TRL passes every column and more by keyword: end the signature with **columns"
            if "missing" in str(error):
                advice = f"the batch has the columns {', '.join(self.batch.items[0].columns)}; give others in `columns`"
            raise Broken(f"its signature is {signature}: {error}; {advice}") from error

    def run(self) -> None:
        """The very first call, whose scores are kept for comparison."""

        def judge(batch: Batch) -> None:
            first = self._timed(batch)
            if self._first is None:
                self._first = first

        self._over([self.batch], judge)
        self._spare()

    def length(self) -> None:
        """One value each."""

        def judge(batch: Batch) -> None:
            self._checked(self._timed(batch), batch, "length")

        self._over([self.batch.with_items(self.batch.items[:1]), self.batch], judge)

    def types(self) -> None:
        """Numbers and None."""

        def judge(batch: Batch) -> None:
            returned = self._raw(batch)
            values = self._checked(returned, batch, "types")
            for row, value in enumerate(returned if isinstance(returned, list | tuple) else values):
                _check_value(value, row, batch)

        self._over([self.batch], judge)

    def none(self) -> None:
        """None in one row of one column."""
        batch = self.batch.with_items(self.batch.items[:3])
        names = [name for name in batch.items[0].columns if name not in self.required]
        if not names:
            raise NotChecked("no column may be None")
        self._deterministic_only()
        for name in names:

            def judge(tried: Batch, name: str = name) -> None:
                with_none = tried.with_column(0, name, None)
                scores = self._scores(with_none)
                if self.per_completion and len(scores) > 1:
                    what = f"with {name!r} as it is and with None in row 0"
                    self._agree(self._scores(tried)[1:], scores[1:], what, with_none)

            self._over([batch.with_items(batch.items[:1]), batch], judge, f"{name!r} is None in row 0")

    def hostile_text(self) -> None:
        """Texts that a model can write."""
        self._contract(HOSTILE, "hostile text")

    def empty(self) -> None:
        """Completions with nothing in them."""
        for what, completion in EMPTY:
            text = isinstance(completion, str)
            if ("text" if text else "messages") in self._forms:
                self._contract([completion], what)

    def formats(self) -> None:
        """Strings and messages."""
        if len(self._forms) < 2:
            raise NotChecked(f"it declares formats = {list(self._forms)}")

        def judge(batch: Batch) -> None:
            texts, messages = replace(batch, form="text"), replace(batch, form="messages")
            in_texts, in_messages = self._scores(texts), self._scores(messages)
            if self.deterministic:
                self._agree(in_texts, in_messages, "as a string and as a message", messages)

        strings = [item for item in self.batch.items if isinstance(item.completion, str)]
        if not strings:
            raise NotChecked("the completions that were given are messages")
        self._over([self.batch.with_items(strings)], judge)

    def determinism(self) -> None:
        """The same to the bit: as in the first call, again, from a fresh build, and after other texts."""
        self._deterministic_only()

        def same(batch: Batch, once: Scores, again: Scores, what: str) -> None:
            for row, (one, other) in enumerate(zip(once, again, strict=True)):
                if one != other:
                    raise Broken(f"{what}: {one!r} and {other!r} at row {row}", str(self._read_alone(batch, row)))

        def judge(batch: Batch) -> None:
            once, again = self._scores(batch), self._scores(batch)
            same(batch, once, again, "once and again")
            if min(self.seconds, default=1.0) < _SLOW / _ROUNDS:
                for _ in range(_ROUNDS):
                    same(batch, once, self._scores(batch), "once and after some more calls")

        def first(batch: Batch) -> None:
            if self._first is not None and len(batch.items) == len(self._first):
                same(batch, self._read(self._first, batch), self._scores(batch), "in its first call and later")

        def unseen(batch: Batch) -> None:
            once, again = self._scores(batch), self._scores(batch)
            same(batch, once, again, "with texts that it had not seen, once and again")

        def rebuilt(batch: Batch) -> None:
            one, other, half = self._again(), self._again(), len(batch.items) // 2
            front, back = batch.with_items(batch.items[:half]), batch.with_items(batch.items[half:])
            in_order = [self._scores(front, one), self._scores(back, one)]
            turned = [self._scores(back, other), self._scores(front, other)][::-1]
            for part, first_come, last_come in zip((front, back), in_order, turned, strict=True):
                same(part, first_come, last_come, "of two fresh builds that got two batches in either order")

        marked = [_with_mark(item, f"{time.time_ns():x}{row}") for row, item in enumerate(self.batch.items)]
        self._over([self.batch], first, smaller=False)
        self._over([self.batch], judge)
        self._over([self.batch.with_items(marked)], unseen, smaller=False)
        if len(self.batch.items) > 1:
            self._over([self.batch], rebuilt, smaller=False)

    def _read_alone(self, batch: Batch, row: int) -> Batch:
        """One row of a batch with the columns that the signature names, for an example that is not made smaller."""
        if len(batch.items) <= 1:
            return batch
        try:
            named = set(inspect.signature(self.reward).parameters)
        except (TypeError, ValueError):  # compiled
            named = set()
        item = batch.items[row]
        kept = {name: value for name, value in item.columns.items() if name in named}
        return batch.with_items([replace(item, columns=kept)])

    def rows(self) -> None:
        """One text with each row's columns, in two orders."""
        self._deterministic_only()
        items = self.batch.items
        if len(items) < 2:
            raise NotChecked("there is one completion alone")

        def judge(batch: Batch) -> None:
            alike = batch.with_items([replace(batch.items[0])] * len(batch.items))
            if len({*self._scores(alike)}) > 1:  # it goes by the place, which is another rule's matter
                return
            places = range(len(batch.items))
            for order in ([*places[1:], 0], [*places][::-1]):
                turned = batch.with_items(batch.items[place] for place in order)
                ours = self._scores(batch)
                what = "with the rows in one order and in another, each with its own columns"
                self._agree([ours[place] for place in order], self._scores(turned), what, turned)

        batches = []
        for item in items[:1] if self.slow else items:
            if isinstance(item.completion, str):
                same_text = [replace(other, prompt=item.prompt, completion=item.completion) for other in items]
                batches.append(self.batch.with_items(same_text))
        if not batches:
            raise NotChecked("the completions that were given are messages")
        self._over(batches, judge)

    def order(self) -> None:
        """In reverse order."""
        self._independent()

        def judge(batch: Batch) -> None:
            turned = batch.with_items(batch.items[::-1])
            what = "in order and the other way round"
            self._agree(self._scores(batch), self._scores(turned)[::-1], what, batch)

        self._over([self.batch], judge)

    def neighbours(self) -> None:
        """Row 0 with others, and alone."""
        self._independent()

        def judge(batch: Batch) -> None:
            alone = batch.with_items(batch.items[:1])
            what = f"row 0 alone and beside {len(batch.items) - 1} others"
            self._agree(self._scores(alone), self._scores(batch)[:1], what, batch)

        items = self.batch.items
        first_rows = range(0, len(items), len(items) if self.slow else 3)
        turns = [self.batch.with_items(items[row:] + items[:row]) for row in first_rows]
        self._over(turns, judge)

    def outcomes(self) -> None:
        """Unreadable references."""
        column = getattr(self.reward, "reference_column", None)
        if not isinstance(column, str):
            raise NotChecked("it has no reference_column, so it compares with nothing")
        self._deterministic_only()
        if column not in self.batch.items[0].columns:
            raise NotChecked(f"there is no column {column!r}; give one in columns")
        scored = [(score, item) for score, item in zip(self._scores(self.batch), self.batch.items, strict=True)]
        right, item = max(
            ((score, item) for score, item in scored if score is not None),
            default=(0.0, None),
            key=lambda pair: pair[0],
        )
        wrong = min((score for score, _ in scored if score is not None), default=0.0)
        if item is None or _scores_agree(right, wrong):
            raise NotChecked("none of the completions scores better than the others; give a right one in completions")
        batch = self.batch.with_items([item])
        for reference in (None, *self.unreadable):

            def judge(tried: Batch, reference: Any = reference) -> None:
                (score,) = self._scores(tried)
                if score is not None and _scores_agree(score, wrong):
                    message = (
                        f"with the reference {shown(reference)} a right answer gets {_said(score)}, as a wrong one"
                    )
                    raise Broken(f"{message}; give None", str(tried))

            # Made no smaller: of a completion that is right, half is not.
            self._over(
                [batch.with_column(0, column, reference)], judge, f"{column!r} is {shown(reference)}", smaller=False
            )

    def _contract(self, completions: Sequence[Any], where: str) -> None:
        """No exception, and values that keep the contract, in all forms that it takes."""
        items = self.batch.items

        def judge(batch: Batch) -> None:
            returned = self._raw(batch)
            self._read(returned, batch)
            for row, value in enumerate(check_scores(returned, len(batch.items), self.name)):
                _check_value(value, row, batch)

        rows = [replace(items[row % len(items)], completion=text) for row, text in enumerate(completions)]
        texts = any(isinstance(text, str) for text in completions)
        forms: tuple[Form, ...] = self._forms if texts and not self.slow else self._forms[:1]
        together = [rows] if self.slow else [*([row] for row in rows), rows]
        batches = [replace(self.batch.with_items(some), form=form) for form in forms for some in together]
        self._over(batches, judge, where)

    def _independent(self) -> None:
        self._deterministic_only()
        if not self.per_completion:
            raise NotChecked("it declares per_completion = False")

    # ------------------------------------------------------------------------------------------ what else it does

    def inputs(self) -> None:
        """The lists are as they were."""

        def judge(batch: Batch) -> None:
            arguments, untouched = batch.arguments(), batch.arguments()
            call(self.reward, arguments)
            for name, value in untouched.items():
                if name != "trainer_state" and arguments[name] != value:
                    raise Broken(f"it changed {name!r}", str(batch))

        spaced = replace(self.batch.items[0], completion="  18 \n")
        self._over([Batch((*self.batch.items, spaced), form) for form in self._forms], judge)

    def pickle(self) -> None:
        """There and back."""
        again = pickle_round_trip(self.reward)

        def judge(batch: Batch) -> None:
            theirs = self._scores(batch, again)
            if self.deterministic:
                self._agree(self._scores(batch), theirs, "before and after pickling", batch)

        self._over([self.batch], judge)

    def threads(self) -> None:
        """Off the main thread, and two at once."""
        batch = self.batch
        turned = batch.with_items(batch.items[::-1])
        expected = (self._scores(batch), self._scores(turned))
        with ThreadPoolExecutor(1) as pool:
            try:
                alone = pool.submit(self._scores, batch).result()
            except BaseException as error:  # the reward's own, whatever it is
                raise Broken(
                    f"called off the main thread {describe_exception(error)}", str(batch), cause_of(error)
                ) from error
        if self.deterministic:
            self._agree(expected[0], alone, "on the main thread and off it", batch)

        rounds = _ROUNDS if min(self.seconds, default=0.0) * len(batch.items) < _QUICK else 1

        def repeatedly(which: Batch) -> list[Scores]:
            return [self._scores(which) for _ in range(rounds)]

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)  # threads take turns often, so that what they share is met half done
        try:
            with ThreadPoolExecutor(2) as pool:
                futures = [pool.submit(repeatedly, which) for which in (batch, turned)]
                both = [future.result() for future in futures]
        except BaseException as error:  # the reward's own, whatever it is
            raise Broken(
                f"called by two threads at once {describe_exception(error)}", str(batch), cause_of(error)
            ) from error
        finally:
            sys.setswitchinterval(interval)
        if self.deterministic:
            for which, wanted, found in zip((batch, turned), expected, both, strict=True):
                for scores in found:
                    self._agree(wanted, scores, "called by one thread and by two at once", which)

    def leftovers(self) -> None:
        """Nothing piles up."""
        self._raw(self.batch)  # what is made once and kept is there from now on
        before = wait_for_helpers(helpers(), 0.0)
        counts = [before]
        for _ in range(_CALLS):
            self._raw(self.batch)
            counts.append(wait_for_helpers(counts[-1]))
        for place, what in ((0, "threads"), (1, "child processes")):
            numbers = [count[place] for count in counts]
            if all(later > earlier for earlier, later in pairwise(numbers)):
                listed = ", ".join(map(str, numbers))
                raise Broken(f"each call leaves {what} running: {listed} after one call each", str(self.batch))

    def collectives(self) -> None:
        """The same on two ranks with half the batch each."""
        if not mentions_collectives(self.reward):
            raise NotChecked("it does not use torch.distributed")

        def judge(batch: Batch) -> None:
            half = len(batch.items) // 2
            halves = batch.with_items(batch.items[:half]), batch.with_items(batch.items[half:])
            if difference := describe_difference(collectives_of_ranks(lambda rank: self._raw(halves[rank]))):
                raise Broken(difference, str(batch))

        rows = self.batch.items
        self._over(
            [self.batch.with_items(rows[step:] + rows[:step]) for step in range(len(rows))], judge, smaller=False
        )

    def global_state(self) -> None:
        """The process is as it was."""
        changed = differences(self.state_before, self.state_after) if self.state_before else []
        if not changed:

            def judge(batch: Batch) -> None:
                before = global_state()
                self._raw(batch)
                names = differences(before, global_state())
                if names:
                    raise Broken(f"a call changed {', '.join(names)}", str(batch))

            self._over([self.batch], judge)
            return
        raise Broken(f"the first call changed {', '.join(changed)}", str(self.batch))

    def time(self) -> None:
        """Fast enough."""
        if not self.seconds:
            self._timed(self.batch)
            self._timed(self.batch)
        best = min(self.seconds)
        if best > self.limit:
            raise Broken(f"{best:.3g} s per completion, more than {self.limit:g} s", str(self.batch))


def _scores_agree(one: float | None, other: float | None) -> bool:
    """Whether two scores are the same, up to the last digits."""
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def _said(score: float | None) -> str:
    """A score for a message."""
    return "None" if score is None else f"{score:.6g}"


def _check_value(value: Any, row: int, batch: Batch) -> None:
    """Whether `torch.tensor(value, dtype=torch.float32)` takes it, and finds it finite; without torch."""
    if value is None:
        return
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, int | float):
        kind = type(value).__name__
        raise Broken(f"the value {value!r:.80} at row {row} ({kind}) is not accepted by torch.tensor", str(batch))
    try:
        as_trl = ctypes.c_float(number).value
    except OverflowError:
        as_trl = math.inf
    if math.isnan(as_trl):
        message = f"the value at row {row} is NaN; return None where the reward does not apply"
        raise Broken(message, str(batch), "NaN")
    if math.isinf(as_trl):
        raise Broken(f"the value {value!r:.80} at row {row} is not finite in float32", str(batch))


def _advice(error: BaseException, batch: Batch) -> str:
    """Advice about a missing column."""
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str) and batch.items:
        has = batch.items[0].columns
        if error.args[0] not in has:
            return f". The batch has the columns {', '.join(has)}; give others in `columns`"
    return ""


def _with_mark(item: Item, mark: str) -> Item:
    """The text with a unique mark."""
    text = item.completion
    return replace(item, completion=f"{text} {mark}") if isinstance(text, str) else item


# ---------------------------------------------------------------------------------------------- batches

COMPLETIONS = (
    r"The answer is \boxed{18}.",
    "<think>20 - 2 = 18</think>\n<answer>\\boxed{18}</answer>",
    "nothing at all is to be seen here",
    "She sells 16 - 3 - 4 = 9 eggs a day, and so she has 9 * 2 = $18. #### 18",
    "```python\ndef add(a, b):\n    return a + b\n```",
    '```json\n{"answer": 18, "unit": "eggs"}\n```',
    "1 3 18",
    "<think>x</think><answer>3</answer>",
)
"""Completions of several kinds, so that most rewards give different scores."""

PROMPTS = ("Janet has 20 eggs and breaks 2. How many are left?", "Add two numbers.", "Sort: 3 18 1")

COLUMNS: Mapping[str, Sequence[Any]] = {
    "answer": ["#### 18", "#### 18", "#### 9", "#### 3"],
    "solution": ["18", "18", "9", "3"],
    "numbers": [[3, 18, 1], [18, 3, 1], [2, 1]],
    "tests": [["assert add(1, 2) == 3"], ["assert add(1, 2) == 4"]],
    "task": ["math"],
}
"""Columns that many data sets have: a list of values, repeated as often as there are completions."""

HOSTILE = (
    "\x00\x01\x1b[31m\x7f",
    "\ud800 a lone surrogate",
    "\u202eright to left\u2066\u200b\ufeff",
    "١٨ ５ ² ½ Ⅷ 十八",
    "e\u0301\u0301\u0301" * 20,
    "👩‍👩‍👧‍👦🏳️‍🌈",
    "9" * 5000,
    "1e999 -1e999 nan inf 1/0 0x1F 1_000",
    "(" * 2000 + "[" * 2000 + "{" * 2000,
    "<think>" * 500,
    "</answer></think><answer><think>",
    r"\boxed{" * 300,
    r"\boxed{\frac{1}{0}}",
    '```json\n{"a": NaN, "a": [[[[{}]]]]}\n```',
    "```python\nraise SystemExit(1)\n```",
    "%s %d {0} {x} ${y} \\1 \\",
    "a" * 20_000,
    "\n" * 3000,
    " ",
    "\r\n\t\v\f\x85\u2028",
    "'; DROP TABLE rewards; --",
    "None",
)
"""What a policy writes sooner or later."""

EMPTY: Sequence[tuple[str, Any]] = (
    ("the empty string", ""),
    ("a conversation without messages", []),
    ("a message with empty text", [{"role": "assistant", "content": ""}]),
    (
        "a message that only calls a tool",
        [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}],
            }
        ],
    ),
)


@dataclass(frozen=True)
class Item:
    """One completion with its row of the data set."""

    prompt: Any
    completion: Any
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class Batch:
    """One call of a reward. `form` is the form in which string completions are passed."""

    items: tuple[Item, ...]
    form: Form = "text"

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments, fresh lists throughout, as TRL passes them."""
        names = dict.fromkeys(name for item in self.items for name in item.columns)
        return {
            "prompts": [self._as_message(item.prompt, "user") for item in self.items],
            "completions": [self._as_message(item.completion, "assistant") for item in self.items],
            "completion_ids": [_ids(item.completion) for item in self.items],
            **{name: [copy.deepcopy(item.columns.get(name)) for item in self.items] for name in names},
            "trainer_state": TrainerState(),
            "log_extra": _log_extra,
            "log_metric": _take_metric,
        }

    def __str__(self) -> str:
        first, more = self.items[:_ROWS_SHOWN], max(len(self.items) - _ROWS_SHOWN, 0)
        rest = f", and {more} more" if more else ""
        completions = ", ".join(shown(item.completion) for item in first) + rest
        parts = [f"completions=[{completions}]" + (" as messages" if self.form == "messages" else "")]
        for name in dict.fromkeys(name for item in self.items for name in item.columns):
            parts.append(f"{name}=[{', '.join(shown(item.columns.get(name)) for item in first)}{rest}]")
        return ", ".join(parts)

    def with_items(self, items: Iterable[Item]) -> Batch:
        """The same with other rows."""
        return replace(self, items=tuple(items))

    def with_column(self, row: int, name: str, value: Any) -> Batch:
        """The same with another value in one row of a column."""
        item = self.items[row]
        changed = replace(item, columns={**item.columns, name: value})
        return self.with_items((*self.items[:row], changed, *self.items[row + 1 :]))

    def smaller(self) -> Iterator[Batch]:
        """Smaller batches, the greatest steps first: fewer rows, then half the text, then fewer characters."""
        count = len(self.items)
        if count > 2:
            yield self.with_items(self.items[: count // 2])
            yield self.with_items(self.items[count // 2 :])
        for row in range(count) if count > 1 else ():
            yield self.with_items(self.items[:row] + self.items[row + 1 :])
        for name in self.items[0].columns if self.items else ():
            yield self.with_items(
                replace(item, columns={key: value for key, value in item.columns.items() if key != name})
                for item in self.items
            )
        for row, item in enumerate(self.items):
            for shorter in _shorter(item.completion):
                changed = replace(item, completion=shorter)
                yield self.with_items((*self.items[:row], changed, *self.items[row + 1 :]))

    def _as_message(self, text: Any, role: str) -> Any:
        if isinstance(text, str) and self.form == "messages":
            return [{"role": role, "content": text}]
        return copy.deepcopy(text)


class TrainerState:
    """The fields of transformers' `TrainerState` that a reward can sensibly read, early in a run."""

    def __init__(self) -> None:
        self.global_step, self.max_steps, self.epoch, self.num_train_epochs = 3, 100, 0.1, 1
        self.is_world_process_zero, self.is_local_process_zero = True, True
        self.log_history: list[dict[str, float]] = []


def ordinary_batch(
    reward: Any,
    completions: Sequence[Any] | None,
    prompts: Sequence[Any] | None,
    columns: Mapping[str, Sequence[Any]],
    form: Form,
) -> Batch:
    """An ordinary batch of completions.

    Args:
        reward: Whose docstring's examples are taken too, where no completions are given, and texts that say what
            stands in the column that it compares with.
        completions: The completions; `COMPLETIONS` by default.
        prompts: The prompts, repeated.
        columns: By name a list of values, repeated; more than `COLUMNS`, or instead.
        form: How strings are passed.
    """
    texts = completions or COMPLETIONS
    asked = prompts or PROMPTS
    every = {**COLUMNS, **columns}
    items = [
        Item(asked[row % len(asked)], text, {name: values[row % len(values)] for name, values in every.items()})
        for row, text in enumerate(texts)
    ]
    if completions is None:
        items += [
            replace(item, columns={**item.columns, **own})
            for text, own in examples_of(reward)
            for item in [replace(items[0], completion=text)]
        ]
        items += _saying(getattr(reward, "reference_column", None), columns, items)
    return Batch(tuple(items[:_MOST_ITEMS]), form)


_MOST_ITEMS = 16


def _saying(column: Any, given: Mapping[str, Sequence[Any]], items: Sequence[Item]) -> list[Item]:
    """Completions that say what the data's reference says, in several ways."""
    if column not in given:
        return []
    item = items[0]
    value = str(item.columns[column])
    return [
        replace(item, completion=text)
        for text in (value, rf"\boxed{{{value}}}", f"<answer>{value}</answer>", f"#### {value}")
    ]


def examples_of(reward: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Completions and columns from the literal calls in a reward's docstring examples."""
    found: list[tuple[Any, dict[str, Any]]] = []
    for holder in dict.fromkeys((reward, type(reward), vars(type(reward)).get("__call__"))):
        text = getattr(holder, "__doc__", None)
        for example in _EXAMPLES.get_examples(text) if isinstance(text, str) and ">>>" in text else ():
            with contextlib.suppress(SyntaxError):
                for node in ast.walk(ast.parse(example.source)):
                    found += _rows_of_call(node) if isinstance(node, ast.Call) else []
    return found


_EXAMPLES = doctest.DocTestParser()


def _rows_of_call(node: ast.Call) -> list[tuple[Any, dict[str, Any]]]:
    given: dict[str, Any] = {}
    for keyword in node.keywords:
        with contextlib.suppress(ValueError):
            given[str(keyword.arg)] = ast.literal_eval(keyword.value)
    if "completions" not in given and node.args:
        with contextlib.suppress(ValueError):
            given["completions"] = ast.literal_eval(node.args[-1])
    texts = given.pop("completions", None)
    if not isinstance(texts, list) or not all(isinstance(text, str | list) for text in texts):
        return []
    columns = {name: value for name, value in given.items() if isinstance(value, list) and len(value) == len(texts)}
    columns.pop("prompts", None)
    return [(text, {name: value[row] for name, value in columns.items()}) for row, text in enumerate(texts)]


def _shorter(text: Any) -> Iterator[str]:
    if not isinstance(text, str) or not text:
        return
    piece = len(text) // 2
    while piece:
        yield text[:-piece]
        yield text[piece:]
        piece //= 2
    for place in range(len(text)) if len(text) <= 40 else ():
        yield text[:place] + text[place + 1 :]


def _ids(completion: Any) -> list[int]:
    """One token per four characters; rewards only read their number."""
    text = completion if isinstance(completion, str) else "".join(str(message.get("content")) for message in completion)
    return [1 + ord(character) % 500 for character in text[::4]]


def _log_extra(column: str, values: list[Any]) -> None:
    """Accept what TRL would put into its table of completions."""


def _take_metric(name: str, value: float) -> None:
    """Accept what TRL would log."""


# ---------------------------------------------------------------------------------------------- the process


def global_state() -> dict[str, Any]:
    """The global state of the process that others rely on, by name."""
    state: dict[str, Any] = {
        "the state of `random`": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
        "the working directory": _working_directory(),
        "the locale": locale.setlocale(locale.LC_ALL),
        "the recursion limit": sys.getrecursionlimit(),
        "the limit on digits of int": sys.get_int_max_str_digits(),
        "standard output": id(sys.stdout),
        "standard error": id(sys.stderr),
    }
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "random"):
        state |= {
            "torch's random generator": hashlib.sha256(bytes(torch.random.get_rng_state().tolist())).hexdigest(),
            "torch's default dtype": torch.get_default_dtype(),
            "torch's grad mode": torch.is_grad_enabled(),
            "torch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "torch's number of threads": torch.get_num_threads(),
        }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy's random generator"] = hashlib.sha256(repr(numpy.random.get_state()[1:]).encode()).hexdigest()
        state["numpy's error settings"] = tuple(sorted(numpy.geterr().items()))
    state |= {f"the environment variable {name}": value for name, value in os.environ.items()}
    for number in signal.valid_signals():
        state[f"the handler of {_signal_name(number)}"] = signal.getsignal(number)
    return state


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The changes, in words."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    # A library that was imported meanwhile has not changed its generator, and torch names its compiler's cache.
    imports = ("numpy", "torch", "the environment variable TORCHINDUCTOR_")
    return [name for name in names if not (name.startswith(imports) and name not in before)]


def helpers() -> tuple[int, int]:
    """The numbers of threads and child processes of this process."""
    return threading.active_count(), len(_children())


def wait_for_helpers(wanted: tuple[int, int], seconds: float = 1.0) -> tuple[int, int]:
    """The same, after waiting a little for those that are just ending."""
    until = time.monotonic() + seconds
    now = helpers()
    while (now[0] > wanted[0] or now[1] > wanted[1]) and time.monotonic() < until:
        time.sleep(0.01)
        now = helpers()
    return now


def _children() -> set[int]:
    children = {child.pid for child in multiprocessing.active_children() if child.pid is not None}
    for file in Path("/proc/self/task").glob("*/children"):  # Linux; those that were forked past multiprocessing
        try:
            children |= {int(number) for number in file.read_text().split()}
        except OSError:  # the thread is gone
            continue
    return children


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was deleted
        return "gone"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
