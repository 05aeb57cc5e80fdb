"""The rules of rewards, each as a check on small calls in TRL's form."""

from __future__ import annotations

import inspect
import json
import math
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ..errors import PluginOutputError
from ..guard.calls import PASSED_BY_TRL, call, check_scores, reward_name
from ..guard.messages import completion_text, content_text
from ..guard.outcomes import shown
from ..types import Parts, RewardDeclaration
from .reward_calls import EMPTY, HOSTILE, Form, RewardCall
from .rules import (
    Broken,
    Checks,
    Finding,
    NotChecked,
    Rule,
    describe_exception,
    only_if,
    pickle_round_trip,
    plugin_code,
)

RELATIVE = 1e-4
ABSOLUTE = 1e-5
"""How far scores may be apart that ought to be the same: a model's last digits change with the padding."""

_SLOW = 0.02
_FEW = 4
"""Seconds per completion from which on fewer completions are tried, and how many."""
_ROUNDS = 10
_QUICK = 0.05
"""Seconds; what takes longer is not called by two threads over and over."""

Scores = list[float | None]
T = TypeVar("T")


class RewardChecks(Checks):
    """The checks of one reward. Each public method checks the rule of its name."""

    def __init__(self, reward: Any, ordinary: RewardCall, forms: Sequence[Form], options: Mapping[str, Any]) -> None:
        self.reward = reward
        self.ordinary = ordinary
        self.per_completion = options.get("per_completion", True)
        self.required = options.get("required", ())
        self.unreadable = options.get("unreadable", ())
        self.seconds = 0.0  # the least that a completion took
        self.slow = False
        self._forms = tuple(forms)
        self._given_columns = frozenset(options.get("columns") or ())
        self._tried = False
        self._first: Any = None  # what the first call returned
        self._changed_first: list[str] = []
        self._refused = ""  # what it says to the first form
        self._of_texts_alone = ""  # what it says to messages
        self._untried = ""  # why nothing can be tried: it reads columns that nobody gave
        self._given: set[float | None] = set()

    def check(self, rule: Rule) -> Finding:
        """Check one rule, after a first call, whose scores are kept for comparison."""
        if rule.short == "call":
            self._ask_for_columns(self._missing())
        elif not self._tried and not self._untried:
            self._tried = True
            try:
                self._call_first()
            except Broken as took_too_long:
                return took_too_long.with_traceback(None)
        return NotChecked(self._untried) if self._untried else super().check(rule)

    def _call_first(self) -> None:
        """Call it with strings or, if it takes both forms by its declaration but refuses these, with messages."""
        read: list[str] = []
        for form in dict.fromkeys((self._forms[0], "messages")) if "messages" in self._forms else self._forms:
            ordinary = replace(self.ordinary, form=form)
            before = process_state()
            began = time.perf_counter()
            self.example = str(ordinary)
            try:
                self._first = self._raw(ordinary)
            except (Broken, KeyboardInterrupt):
                raise
            except BaseException as error:  # the reward's own, whatever it is; the rule `run` reports it
                self._refused = self._refused or describe_exception(error)
                read = read or self._columns_read(error)
                continue
            self.seconds = (time.perf_counter() - began) / len(ordinary.items)
            self.slow = self.seconds > _SLOW
            self._changed_first = _differences(before, process_state())
            self._forms = (form,) if self._refused else self._forms
            self.ordinary = ordinary.with_items(ordinary.items[:_FEW]) if self.slow else ordinary
            if form == "text" and "messages" in self._forms:
                self._try_messages()
            return
        self._ask_for_columns(read)

    def _try_messages(self) -> None:
        """A reward that raises for messages is one for texts: it stops a run of conversations, and harms no other."""
        try:
            self._raw(replace(self.ordinary, form="messages"))
        except (Broken, KeyboardInterrupt):
            raise
        except BaseException as error:  # the reward's own, whatever it is
            self._of_texts_alone = describe_exception(error)
            self._forms = ("text",)

    def _ask_for_columns(self, names: Sequence[str]) -> None:
        """Without these columns nothing can be tried."""
        if names:
            example = json.dumps({names[0]: ["first row's value", "second row's"]})
            listed = ", ".join(map(repr, names))
            why = f" ({self._refused})" if self._refused else ""
            self._untried = f"it reads {listed}, of which no values were given{why}: --columns '{example}'"

    def _missing(self) -> list[str]:
        """The parameters that no column of the call fills, if that is all that is wrong with the signature."""
        try:
            signature = inspect.signature(self.reward)
            arguments = self.ordinary.arguments()
            kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            needed = [
                one.name for one in signature.parameters.values() if one.kind in kinds and one.default is one.empty
            ]
            missing = [name for name in needed if name not in arguments]
            signature.bind(**arguments, **dict.fromkeys(missing))
        except (TypeError, ValueError):  # it does not take what TRL passes, whatever the columns
            return []
        return missing

    def _columns_read(self, error: BaseException) -> list[str]:
        """The columns that it reads and nobody gave; they may be why it failed, and then nothing can be said."""
        source = ""
        with suppress(OSError, TypeError):
            source = inspect.getsource(self.reward if inspect.isroutine(self.reward) else type(self.reward))
        try:
            parameters = inspect.signature(self.reward).parameters.values()
        except (TypeError, ValueError):
            return []
        named = [one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        for rest in (one.name for one in parameters if one.kind is one.VAR_KEYWORD):
            named += re.findall(rf"\b{rest}(?:\.get\(|\.pop\(|\[)\s*['\"](\w+)['\"]", source)
            named += [str(error.args[0])] if isinstance(error, KeyError) and error.args else []
        passed = {*PASSED_BY_TRL, "trainer_state", "log_extra", "log_metric", "self", *self._given_columns}
        return [name for name in dict.fromkeys(named) if name not in passed]

    def _raw(self, batch: RewardCall, reward: Any = None) -> Any:
        """What the reward returns; a generator is read once."""
        returned = call(self.reward if reward is None else reward, batch.arguments())
        return returned if hasattr(returned, "__len__") or not hasattr(returned, "__iter__") else list(returned)

    def _scores(self, batch: RewardCall, reward: Any = None) -> Scores:
        """The same, checked against the contract. NaN becomes None, as in TRL."""
        return self._read(self._raw(batch, reward), batch)

    def _read(self, returned: Any, batch: RewardCall) -> Scores:
        values = check_scores(returned, len(batch.items), reward_name(self.reward))
        scores = [None if value is None or math.isnan(value) else float(value) for value in values]
        self._given.update(scores)
        return scores

    def _reported_by(self, error: BaseException, tried: Any, breaks: str) -> str | None:
        """A result that breaks another part of the contract is that part's rule's to report."""
        return "" if breaks and isinstance(error, PluginOutputError) and error.breaks != breaks else None

    def _agree(self, ours: Scores, theirs: Scores, what: str, batch: RewardCall) -> None:
        """Compare scores that should be equal; `what` names the two."""
        for row, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if not _same(one, other):
                raise Broken(f"{what}: {_said(one)} and {_said(other)} at row {row}", batch)

    def no_effect(self) -> str:
        if self._untried:
            return "none of its rules could be tried"
        if len(self._given) != 1:
            return ""
        (score,) = self._given
        return f"it gave every text of the kit {_said(score)}; give it completions and columns whose scores differ"

    def call(self) -> None:
        if not callable(self.reward):
            raise Broken(f"it is {type(self.reward).__name__}, which is not callable")
        self._contract("reward", self.reward)
        try:
            signature = inspect.signature(self.reward)
        except (TypeError, ValueError):  # some compiled function, of which nobody knows
            return
        try:
            signature.bind(**self.ordinary.arguments())
        except TypeError as error:
            parameters = signature.parameters.values()
            names = {one.name for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD}
            advice = "TRL passes every column and more by keyword: end the signature with **columns"
            if len(names) == len(parameters) and names.isdisjoint(PASSED_BY_TRL):
                advice = "it takes nothing that TRL passes; if it makes a reward, call it, and pass what it returns"
            raise Broken(f"its signature is {signature}: {error}; {advice}") from error

    def run(self) -> None:
        if self._first is None:
            self._over([self.ordinary], self._raw)

    def length(self) -> None:
        self._over([self.ordinary.with_items(self.ordinary.items[:1]), self.ordinary], self._scores, breaks="length")

    def types(self) -> None:
        def judge(batch: RewardCall) -> None:
            returned = self._raw(batch)
            values = check_scores(returned, len(batch.items), reward_name(self.reward))
            for row, value in enumerate(returned if isinstance(returned, list | tuple) else values):
                _check_value(value, row, batch)

        self._over([self.ordinary], judge, breaks="types")

    def none(self) -> None:
        batch = self.ordinary.with_items(self.ordinary.items[:3])
        declares = hasattr(self.reward, "declares")
        names = [name for name in batch.columns if name not in self.required]
        if not declares:  # somebody's function: as the columns that came with it are
            empty = [name for name in names if any(item.columns.get(name) is None for item in self.ordinary.items)]
            names = [name for name in empty if name in self._given_columns]
        only_if(names, "no column may be None" if declares else "no column with a None in it was given")
        self._deterministic_only()
        for name in names:

            def judge(tried: RewardCall, name: str = name) -> None:
                with_none = tried.with_value(0, name, None)
                scores = self._scores(with_none)
                if self.per_completion:
                    what = f"with {name!r} as it is and with None in row 0"
                    self._agree(self._scores(tried)[1:], scores[1:], what, with_none)

            self._over([batch.with_items(batch.items[:1]), batch], judge, f"{name!r} is None in row 0")

    def hostile_text(self) -> None:
        self._keeps_contract(HOSTILE, "hostile text")
        for what, completion in EMPTY:
            if ("text" if isinstance(completion, str) else "messages") in self._forms:
                self._keeps_contract([completion], what)

    def _keeps_contract(self, completions: Sequence[Any], where: str) -> None:
        """No exception, and values that keep the contract, in all forms that it takes."""
        items = self.ordinary.items

        def judge(batch: RewardCall) -> None:
            for row, value in enumerate(check_scores(self._raw(batch), len(batch.items), reward_name(self.reward))):
                _check_value(value, row, batch)

        rows = [replace(items[row % len(items)], completion=text) for row, text in enumerate(completions)]
        texts = any(isinstance(text, str) for text in completions)
        forms = self._forms if texts and not self.slow else self._forms[:1]
        together = [rows] if self.slow else [*([row] for row in rows), rows]
        self._over([RewardCall(tuple(some), form) for form in forms for some in together], judge, where)

    def formats(self) -> None:
        if self._refused and self._first is not None:
            raise NotChecked(f"it takes messages alone: with strings {self._refused}")
        if self._of_texts_alone:
            raise NotChecked(f"it takes texts alone, so prompts must be no conversations: {self._of_texts_alone}")
        if len(self._forms) < 2:
            raise NotChecked(f"it declares formats = {list(self._forms)}")

        def judge(batch: RewardCall) -> None:
            messages = replace(batch, form="messages")
            in_texts = self._scores(replace(batch, form="text"))
            in_messages = self._scores(messages)
            if self.deterministic:
                self._agree(in_texts, in_messages, "as a string and as a message", messages)

        strings = [item for item in self.ordinary.items if isinstance(item.completion, str)]
        only_if(strings, "the completions that were given are messages")
        self._over([self.ordinary.with_items(strings)], judge)

    def determinism(self) -> None:
        """To the bit: as in the first call, and again and again."""
        self._deterministic_only()
        rounds = _ROUNDS if self.seconds < _SLOW / _ROUNDS else 2

        def judge(batch: RewardCall) -> None:
            runs = [self._scores(batch) for _ in range(rounds)]
            if self._first is not None and len(self._first) == len(batch.items):
                runs.insert(0, self._read(self._first, batch))
            for other in runs[1:]:
                for row, (one, two) in enumerate(zip(runs[0], other, strict=True)):
                    if one != two:
                        here = batch.with_items([batch.items[row]])
                        raise Broken(f"once and again: {one!r} and {two!r} at row {row}", here)

        self._over([self.ordinary], judge)

    def neighbours(self) -> None:
        self._deterministic_only()
        only_if(self.per_completion, "it declares per_completion=False")
        items = self.ordinary.items

        def alone(batch: RewardCall) -> None:
            one = self._scores(batch.with_items(batch.items[:1]))
            self._agree(one, self._scores(batch)[:1], f"row 0 alone and beside {len(items) - 1} others", batch)

        def backwards(batch: RewardCall) -> None:
            scores = self._scores(batch.with_items(items[::-1]))
            self._agree(self._scores(batch), scores[::-1], "in order and the other way round", batch)

        first_rows = range(0, len(items), len(items) if self.slow else 3)
        self._over([self.ordinary.with_items(items[row:] + items[:row]) for row in first_rows], alone)
        self._over([self.ordinary], backwards)

    def outcomes(self) -> None:
        column = RewardDeclaration.of(self.reward).reference_column
        if column is None:
            raise NotChecked("it has no reference_column, so it compares with nothing")
        self._deterministic_only()
        only_if(column in self.ordinary.columns, f"there is no column {column!r}; give one in columns")
        items = self.ordinary.items
        scored = [(s, item) for s, item in zip(self._scores(self.ordinary), items, strict=True) if s is not None]
        wrong = min((score for score, _ in scored), default=0.0)
        right = max((score for score, _ in scored), default=0.0)
        if _same(right, wrong):
            raise NotChecked("none of the completions scores better than the others; give a right one in completions")
        batch = self.ordinary.with_items([next(item for score, item in scored if score == right)])
        for reference in (None, *self.unreadable):

            def judge(tried: RewardCall, reference: Any = reference) -> None:
                (score,) = self._scores(tried)
                if score is not None and _same(score, wrong):
                    what = f"with the reference {shown(reference)} a right answer gets {_said(score)}, as a wrong one"
                    raise Broken(f"{what}; give None", tried)

            tried = batch.with_value(0, column, reference)
            self._over([tried], judge, f"{column!r} is {shown(reference)}")

    def parts(self) -> None:
        names: Counter[str] = Counter()
        with_parts = 0

        def judge(batch: RewardCall) -> None:
            nonlocal with_parts
            for row, score in enumerate(check_scores(self._raw(batch), len(batch.items), reward_name(self.reward))):
                if isinstance(score, Parts):
                    with_parts += 1
                    names.update(part.name for part in score.parts)
                    _check_places(score, batch.items[row].completion, row, batch)

        items = self.ordinary.items
        self._over([self.ordinary], judge)
        only_if(with_parts, "it returns no Parts")
        if with_parts > 1 and names and max(names.values()) == 1:
            listed = ", ".join(map(shown, list(names)[:3]))
            raise Broken(f"each of its parts has a name of its own ({listed}, ...)", self.ordinary)
        hostile = [replace(items[row % len(items)], completion=text) for row, text in enumerate(HOSTILE)]
        self._over([self.ordinary.with_items(hostile)], judge, "hostile text")

    def inputs(self) -> None:
        def judge(batch: RewardCall) -> None:
            arguments = batch.arguments()
            call(self.reward, arguments)
            for name, value in batch.arguments().items():
                if isinstance(value, list) and arguments[name] != value:
                    raise Broken(f"it changed {name!r}", batch)

        spaced = replace(self.ordinary.items[0], completion="  18 \n")
        self._over([RewardCall((*self.ordinary.items, spaced), form) for form in self._forms], judge)

    def pickle(self) -> None:
        if inspect.isfunction(self.reward) and "<locals>" in self.reward.__qualname__:
            raise NotChecked("a function made by a function cannot be pickled, so it cannot run under reward_timeout")
        again = pickle_round_trip(self.reward)

        def judge(batch: RewardCall) -> None:
            theirs = self._scores(batch, again)
            if self.deterministic:
                self._agree(self._scores(batch), theirs, "before and after pickling", batch)

        self._over([self.ordinary], judge)

    def threads(self) -> None:
        batch = self.ordinary
        backwards = batch.with_items(batch.items[::-1])
        expected = (self._scores(batch), self._scores(backwards))
        rounds = _ROUNDS if self.seconds * len(batch.items) < _QUICK else 1
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)  # threads take turns often, so that what they share is met half done
        try:
            with plugin_code(batch, before="called by two other threads at once "):
                found = run_together(
                    lambda: [self._scores(batch) for _ in range(rounds)],
                    lambda: [self._scores(backwards) for _ in range(rounds)],
                )
        finally:
            sys.setswitchinterval(interval)
        if not self.deterministic:
            return
        for which, wanted, theirs in zip((batch, backwards), expected, found, strict=True):
            for scores in theirs:
                self._agree(wanted, scores, "called by the main thread and by two others at once", which)

    def global_state(self) -> None:
        if self._changed_first:
            raise Broken(f"the first call changed {', '.join(self._changed_first)}", self.ordinary)

        def judge(batch: RewardCall) -> None:
            before = process_state()
            self._raw(batch)
            if names := _differences(before, process_state()):
                raise Broken(f"a call changed {', '.join(names)}", batch)

        self._over([self.ordinary], judge)


def run_together(*works: Callable[[], T]) -> list[T]:
    """Run each in a thread of its own, which nobody waits for if this one is interrupted."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(place: int) -> None:
        try:
            results[place] = works[place]()
        except BaseException as error:  # raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[place] for place in range(len(works))]


def _same(one: float | None, other: float | None) -> bool:
    """Whether two scores are the same, up to the last digits."""
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def _said(score: float | None) -> str:
    return "None" if score is None else f"{score:.6g}"


def _check_value(value: Any, row: int, batch: RewardCall) -> None:
    """Whether torch makes a number of a value that `check_scores` lets pass, and not NaN."""
    number = value.item() if hasattr(value, "item") else value
    if number is not None and not isinstance(number, int | float):
        kind = type(value).__name__
        raise Broken(f"the value {value!r:.80} at row {row} ({kind}) is not accepted by torch.tensor", batch)
    if number is not None and math.isnan(number):
        raise Broken(f"the value at row {row} is NaN; return None where the reward does not apply", batch)


def _check_places(score: Parts, completion: Any, row: int, batch: RewardCall) -> None:
    """Places of characters must be in the text that counts, or in that of the turn that they name."""
    said = [completion]
    if not isinstance(completion, str):
        theirs = [message for message in completion if message.get("role", "assistant") == "assistant"]
        said = [content_text(message.get("content")) for message in theirs]
    for part in score.parts:
        for _, end, turn, _ in part.places or ():
            if turn is not None and turn >= len(said):
                raise Broken(f"the part {shown(part.name)} at row {row} is in turn {turn} of {len(said)}", batch)
            text = completion_text(completion) if turn is None else said[turn]
            if end is not None and end > len(text):
                where = f"the characters up to {end} of a text of {len(text)}"
                raise Broken(f"the part {shown(part.name)} at row {row} has {where}", batch)


def process_state() -> dict[str, Any]:
    """The global state of the process that others rely on, by name."""
    state: dict[str, Any] = {
        "the state of `random`": random.getstate(),
        "the working directory": Path.cwd(),
        "the limit on digits of int": sys.get_int_max_str_digits(),
        "the handler of SIGALRM": signal.getsignal(signal.SIGALRM),
    }
    torch = sys.modules.get("torch")
    numpy = sys.modules.get("numpy")
    if torch is not None and hasattr(torch, "random"):
        state["torch's random generator"] = torch.random.get_rng_state().tolist()
        state["torch's default dtype"] = torch.get_default_dtype()
        state["torch's number of threads"] = torch.get_num_threads()
    if numpy is not None:
        state["numpy's random generator"] = repr(numpy.random.get_state())
    return state | {f"the environment variable {name}": value for name, value in os.environ.items()}


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The changes, in words."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    # A library that was imported meanwhile has not changed its generator, and torch names its compiler's cache.
    imports = ("numpy", "torch", "the environment variable TORCHINDUCTOR_")
    return [name for name in names if not (name.startswith(imports) and name not in before)]
