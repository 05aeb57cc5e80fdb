"""The rules of rewards that are about what is returned for what is given; the rest is in `reward_manners`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import PluginOutputError
from ..guard.calls import call, checked_scores
from ..guard.outcomes import shown
from .process_state import global_state
from .reward_batches import EMPTY, HOSTILE, Batch, Form
from .running import Broken, NotChecked, over, raised

GATES = ("reward.call", "reward.length", "reward.types")
SECONDS_PER_COMPLETION = 1.0
"""More than this, and `reward.time` is broken, unless the reward declares another limit."""

RELATIVE, ABSOLUTE = 1e-4, 1e-5
"""How far scores may be apart that ought to be the same: a model's last digits change with the padding."""

_SLOW = 0.02
"""Seconds per completion from which on fewer completions are tried."""
_FEW = 4

Scores = list[float | None]


class RewardCase:
    """One reward, and what it was said to be.

    Args:
        reward: The reward function.
        batch: An ordinary batch.
        deterministic: Whether it says that it is.
        per_completion: Whether it looks at each completion by itself.
        formats: The forms of completions that it takes.
        required: Columns that are never None.
        unreadable: References, beside None, that it cannot read.
        seconds_per_completion: Its limit of time.
    """

    def __init__(
        self,
        reward: Any,
        batch: Batch,
        *,
        deterministic: bool = True,
        per_completion: bool = True,
        formats: Sequence[Form] = ("text", "messages"),
        required: Sequence[str] = (),
        unreadable: Sequence[Any] = (),
        seconds_per_completion: float = SECONDS_PER_COMPLETION,
    ) -> None:
        self.reward, self.batch = reward, batch
        self.deterministic, self.per_completion = deterministic, per_completion
        self.formats, self.required, self.unreadable = tuple(formats), tuple(required), tuple(unreadable)
        self.limit = seconds_per_completion
        self.name = str(getattr(reward, "__name__", type(reward).__name__))
        self.state_before: dict[str, Any] = {}
        self.state_after: dict[str, Any] = {}
        self.seconds: list[float] = []
        self.first_call = 0.0
        self.slow = False

    def raw(self, batch: Batch, reward: Any = None) -> Any:
        """What the reward returns, read once where it is a generator."""
        returned = call(self.reward if reward is None else reward, batch.arguments())
        return returned if hasattr(returned, "__len__") or not hasattr(returned, "__iter__") else list(returned)

    def scores(self, batch: Batch, reward: Any = None) -> Scores:
        """The same, held to the contract. NaN is None, as it is to TRL."""
        values = checked_scores(self.raw(batch, reward), len(batch.items), self.name)
        return [None if value is None or math.isnan(value) else float(value) for value in values]

    def timed(self, batch: Batch) -> Any:
        """`raw`, timed; the first call is watched for what it changes in the process."""
        first = not self.seconds
        if first:
            self.state_before = global_state()
        began = time.perf_counter()
        returned = self.raw(batch)
        took = time.perf_counter() - began
        self.seconds.append(took / max(len(batch.items), 1))
        if first:
            self.first_call = took
            self.state_after = global_state()
        return returned

    def spare(self) -> None:
        """Go on with fewer completions where each takes long."""
        self.slow = min(self.seconds) > _SLOW
        if self.slow:
            self.batch = self.batch.with_items(self.batch.items[:_FEW])

    def over(
        self, batches: Iterable[Batch], judge: Callable[[Batch], None], where: str = "", smaller: bool = True
    ) -> None:
        """Judge batches; what the reward raises is `Broken` too."""

        def guarded(batch: Batch) -> None:
            try:
                judge(batch)
            except (Broken, NotChecked):
                raise
            except Exception as error:  # the reward's own, whatever it is
                raise Broken(f"it {raised(error)}{f' ({where})' if where else ''}", str(batch)) from error

        over(batches, guarded, Batch.smaller if smaller else lambda batch: ())

    def agree(self, ours: Scores, theirs: Scores, what: str, batch: Batch) -> None:
        """Compare scores that ought to be the same.

        Raises:
            Broken: They differ; `what` says which two they are.
        """
        for row, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if not alike(one, other):
                raise Broken(f"{what}: {said(one)} and {said(other)} at row {row}", str(batch))

    def deterministic_only(self) -> None:
        """Leave a rule out for a reward that declares its randomness."""
        if not self.deterministic:
            raise NotChecked("it declares deterministic = False")


class ContractChecks:
    """The checks of what a reward returns for what it is given."""

    def __init__(self, case: RewardCase) -> None:
        self.case = case

    def call(self) -> None:
        """TRL's call."""
        if not callable(self.case.reward):
            raise Broken(f"it is {type(self.case.reward).__name__}, which is not callable")

        def judge(batch: Batch) -> None:
            try:
                self.case.timed(batch)
            except Exception as error:  # the reward's own, whatever it is
                raise Broken(f"it {raised(error)}{_advice(error, batch)}", str(batch)) from error

        over([self.case.batch], judge, Batch.smaller)
        self.case.spare()

    def length(self) -> None:
        """One value each."""
        batch = self.case.batch
        sizes = [batch.with_items(batch.items[:1]), batch]

        def judge(batch: Batch) -> None:
            returned = self.case.timed(batch)
            count = _count(returned)
            if count is None:
                hint = ": did the function forget its return?" if returned is None else ""
                raise Broken(f"it returned {_what(returned)}, not a list{hint}", str(batch))
            if count != len(batch.items):
                raise Broken(f"it returned {count} values for {len(batch.items)} completions", str(batch))

        self.case.over(sizes, judge)

    def types(self) -> None:
        """Numbers and None."""

        def judge(batch: Batch) -> None:
            returned = self.case.raw(batch)
            try:
                values = checked_scores(returned, len(batch.items), self.case.name)
            except PluginOutputError as error:
                raise Broken(str(error), str(batch)) from error
            for row, value in enumerate(returned if isinstance(returned, list | tuple) else values):
                _check_value(value, row, batch)

        self.case.over([self.case.batch], judge)

    def none(self) -> None:
        """None in one row of one column."""
        case = self.case
        batch = case.batch.with_items(case.batch.items[:3])
        names = [name for name in batch.items[0].columns if name not in case.required]
        if not names:
            raise NotChecked("no column may be None")
        case.deterministic_only()
        for name in names:

            def judge(tried: Batch, name: str = name) -> None:
                with_none = tried.with_column(0, name, None)
                scores = case.scores(with_none)
                if case.per_completion and len(scores) > 1:
                    what = f"with {name!r} as it is and with None in row 0"
                    case.agree(case.scores(tried)[1:], scores[1:], what, with_none)

            case.over([batch.with_items(batch.items[:1]), batch], judge, f"{name!r} is None in row 0")

    def hostile_text(self) -> None:
        """Texts that a model can write."""
        self._contract(HOSTILE, "hostile text")

    def empty(self) -> None:
        """Completions with nothing in them."""
        for what, completion in EMPTY:
            text = isinstance(completion, str)
            if ("text" if text else "messages") in self.case.formats:
                self._contract([completion], what)

    def formats(self) -> None:
        """Strings and messages."""
        case = self.case
        if len(case.formats) < 2:
            raise NotChecked(f"it declares formats = {list(case.formats)}")

        def judge(batch: Batch) -> None:
            texts, messages = replace(batch, form="text"), replace(batch, form="messages")
            in_texts, in_messages = case.scores(texts), case.scores(messages)
            if case.deterministic:
                case.agree(in_texts, in_messages, "as a string and as a message", messages)

        strings = [item for item in case.batch.items if isinstance(item.completion, str)]
        if not strings:
            raise NotChecked("the completions that were given are messages")
        case.over([case.batch.with_items(strings)], judge)

    def determinism(self) -> None:
        """Twice the same, to the bit."""
        case = self.case
        case.deterministic_only()

        def judge(batch: Batch) -> None:
            once, again = case.scores(batch), case.scores(batch)
            for row, (one, other) in enumerate(zip(once, again, strict=True)):
                if one != other:
                    raise Broken(f"once and again: {one!r} and {other!r} at row {row}", str(batch))

        case.over([case.batch], judge)

    def order(self) -> None:
        """The other way round."""
        case = self.case
        self._independent()

        def judge(batch: Batch) -> None:
            turned = batch.with_items(batch.items[::-1])
            what = "in order and the other way round"
            case.agree(case.scores(batch), case.scores(turned)[::-1], what, batch)

        case.over([case.batch], judge)

    def neighbours(self) -> None:
        """Row 0 beside others, and alone."""
        case = self.case
        self._independent()

        def judge(batch: Batch) -> None:
            alone = batch.with_items(batch.items[:1])
            what = f"row 0 alone and beside {len(batch.items) - 1} others"
            case.agree(case.scores(alone), case.scores(batch)[:1], what, batch)

        items = case.batch.items
        first_rows = range(0, len(items), len(items) if case.slow else 3)
        turns = [case.batch.with_items(items[row:] + items[:row]) for row in first_rows]
        case.over(turns, judge)

    def outcomes(self) -> None:
        """Unreadable references."""
        case = self.case
        column = getattr(case.reward, "reference_column", None)
        if not isinstance(column, str):
            raise NotChecked("it has no reference_column, so it compares with nothing")
        case.deterministic_only()
        if column not in case.batch.items[0].columns:
            raise NotChecked(f"there is no column {column!r}; give one in columns")
        scored = [(score, item) for score, item in zip(case.scores(case.batch), case.batch.items, strict=True)]
        right, item = max(
            ((score, item) for score, item in scored if score is not None), default=(0.0, None), key=_first
        )
        wrong = min((score for score, _ in scored if score is not None), default=0.0)
        if item is None or alike(right, wrong):
            raise NotChecked("none of the completions scores better than the others; give a right one in completions")
        batch = case.batch.with_items([item])
        for reference in (None, *case.unreadable):

            def judge(tried: Batch, reference: Any = reference) -> None:
                (score,) = case.scores(tried)
                if score is not None and alike(score, wrong):
                    message = f"with the reference {shown(reference)} a right answer gets {said(score)}, as a wrong one"
                    raise Broken(f"{message}; give None", str(tried))

            # Made no smaller: of a completion that is right, half is not.
            case.over(
                [batch.with_column(0, column, reference)], judge, f"{column!r} is {shown(reference)}", smaller=False
            )

    def _contract(self, completions: Sequence[Any], where: str) -> None:
        """No exception, and values that keep the contract, in all forms that it takes."""
        case = self.case
        items = case.batch.items

        def judge(batch: Batch) -> None:
            for row, value in enumerate(checked_scores(case.raw(batch), len(batch.items), case.name)):
                _check_value(value, row, batch)

        rows = [replace(items[row % len(items)], completion=text) for row, text in enumerate(completions)]
        texts = any(isinstance(text, str) for text in completions)
        forms: tuple[Form, ...] = case.formats if texts and not case.slow else case.formats[:1]
        case.over([replace(case.batch.with_items(rows), form=form) for form in forms], judge, where)

    def _independent(self) -> None:
        self.case.deterministic_only()
        if not self.case.per_completion:
            raise NotChecked("it declares per_completion = False")


def _first(pair: tuple[float, Any]) -> float:
    return pair[0]


def alike(one: float | None, other: float | None) -> bool:
    """Whether two scores are the same, up to the last digits."""
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def said(score: float | None) -> str:
    """A score for a message."""
    return "None" if score is None else f"{score:.6g}"


def _check_value(value: Any, row: int, batch: Batch) -> None:
    if value is None:
        return
    try:
        as_trl = float(torch.tensor(value, dtype=torch.float32))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        message = (
            f"the value {value!r:.80} at row {row} ({type(value).__name__}) is none that torch.tensor takes: {error}"
        )
        raise Broken(message, str(batch)) from error
    if math.isnan(as_trl):
        raise Broken(f"the value at row {row} is NaN; say None where the reward has nothing to say", str(batch))
    if math.isinf(as_trl):
        raise Broken(f"the value {value!r:.80} at row {row} is not finite in float32", str(batch))


def _count(returned: Any) -> int | None:
    if isinstance(returned, str | bytes | Mapping | set | frozenset) or not hasattr(returned, "__len__"):
        return None
    try:
        return len(returned)
    except TypeError:  # a tensor without axes
        return None


def _what(returned: Any) -> str:
    return "None" if returned is None else f"{type(returned).__name__}, {shown(returned)}"


def _advice(error: Exception, batch: Batch) -> str:
    if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
        return ". TRL passes every column and more by keyword: take the rest as **columns"
    if isinstance(error, KeyError | TypeError | ValueError):
        has = ", ".join(batch.items[0].columns)
        return f". The batch has the columns {has}; give others in `columns`"
    return ""
