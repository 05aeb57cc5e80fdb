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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import PluginOutputError
from ..guard.calls import PASSED_BY_TRL, call, check_scores, reward_name
from ..guard.messages import completion_text, content_text
from ..guard.outcomes import shown
from ..types import Parts, RewardDeclaration
from .reward_calls import EMPTY, HOSTILE, Form, RewardCall
from .rules import Broken, Checks, Finding, NotChecked, Rule, describe_exception, pickle_round_trip, plugin_code

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


class RewardChecks(Checks):
    """The checks of one reward. Each public method checks the rule of its name."""

    def __init__(
        self, reward: Any, ordinary: RewardCall, forms: Sequence[Form], options: Mapping[str, Any], again: Any = None
    ) -> None:
        self.reward = reward
        self.ordinary = ordinary
        self._forms = tuple(forms)
        self._again = again
        self.deterministic = options.get("deterministic", True)
        self.per_completion = options.get("per_completion", True)
        self.required = options.get("required", ())
        self.unreadable = options.get("unreadable", ())
        self.name = reward_name(reward)
        self.seconds: list[float] = []
        self.slow = False
        self._first: Any = None
        self._changed_first: list[str] = []
        self._refused = ""
        self._of_texts_alone = ""  # what it says to messages
        self._untried = ""  # why nothing can be tried: it reads columns that nobody gave
        self._given_columns = frozenset(options.get("columns") or ())
        self._given: set[float | None] = set()

    # ------------------------------------------------------------------------------------------ calling it

    def check(self, rule: Rule) -> Finding:
        """Check one rule, after a first call, whose scores are kept for comparison."""
        if rule.short == "call":
            self._ask_for_columns(self._required())
        elif not self.seconds and not self._refused and not self._untried:
            self._call_first()
        if self._untried:
            return NotChecked(self._untried)
        return super().check(rule)

    def _call_first(self) -> None:
        """Call it with strings or, if it takes both forms by its declaration but refuses these, with messages."""
        made_up: list[str] = []
        for form in dict.fromkeys((self._forms[0], "messages")) if "messages" in self._forms else self._forms:
            ordinary = replace(self.ordinary, form=form)
            before = process_state()
            self.example = str(ordinary)
            try:
                self._first = self._timed(ordinary)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # the reward's own, whatever it is; the rule `run` reports it
                self._refused = self._refused or describe_exception(error)
                made_up = made_up or self._made_up(error)
                continue
            self._changed_first = _differences(before, process_state())
            self._forms = (form,) if self._refused else self._forms
            self.ordinary = ordinary
            if form == "text" and "messages" in self._forms:
                self._try_messages()
            self.slow = self.seconds[0] > _SLOW
            if self.slow:
                self.ordinary = ordinary.with_items(ordinary.items[:_FEW])
            return
        self._ask_for_columns(made_up)

    def _ask_for_columns(self, names: Sequence[str]) -> None:
        """Without these columns nothing can be tried."""
        if names:
            example = json.dumps({names[0]: ["first row's value", "second row's"]})
            listed = ", ".join(map(repr, names))
            why = f" ({self._refused})" if self._refused else ""
            self._untried = f"it reads {listed}, of which no values were given{why}: --columns '{example}'"

    def _required(self) -> list[str]:
        """The parameters that no column of the call fills, if that is all that is wrong with the signature."""
        try:
            signature = inspect.signature(self.reward)
            arguments = self.ordinary.arguments()
        except (TypeError, ValueError):
            return []
        missing = [
            name
            for name, one in signature.parameters.items()
            if one.default is one.empty
            and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
            and name not in arguments
        ]
        try:
            signature.bind(**arguments, **dict.fromkeys(missing))
        except TypeError:  # it does not take what TRL passes, whatever the columns
            return []
        return missing

    def _try_messages(self) -> None:
        """A reward that raises for messages is one for texts: it stops a run of conversations, and harms no other."""
        try:
            self._raw(replace(self.ordinary, form="messages"))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the reward's own, whatever it is
            self._of_texts_alone = describe_exception(error)
            self._forms = ("text",)

    def _made_up(self, error: BaseException) -> list[str]:
        """The columns that it reads and nobody gave; they may be why it failed, and then nothing can be said."""
        try:
            parameters = inspect.signature(self.reward).parameters.values()
            inspect.signature(self.reward).bind(**self.ordinary.arguments())
        except (TypeError, ValueError):
            return self._required()
        named = [one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        rest = [one.name for one in parameters if one.kind is one.VAR_KEYWORD]
        function = self.reward if inspect.isroutine(self.reward) else type(self.reward)
        try:
            source = inspect.getsource(function)
        except (OSError, TypeError):
            source = ""
        for name in rest:
            named += re.findall(rf"\b{name}(?:\.get\(|\.pop\(|\[)\s*['\"](\w+)['\"]", source)
        if isinstance(error, KeyError) and rest and error.args and isinstance(error.args[0], str):
            named.append(error.args[0])
        passed = {*PASSED_BY_TRL, "trainer_state", "log_extra", "log_metric", "self", *self._given_columns}
        return [name for name in dict.fromkeys(named) if name not in passed]

    def _timed(self, batch: RewardCall) -> Any:
        began = time.perf_counter()
        returned = self._raw(batch)
        self.seconds.append((time.perf_counter() - began) / max(len(batch.items), 1))
        return returned

    def _raw(self, batch: RewardCall, reward: Any = None) -> Any:
        """What the reward returns; a generator is read once."""
        returned = call(self.reward if reward is None else reward, batch.arguments())
        return returned if hasattr(returned, "__len__") or not hasattr(returned, "__iter__") else list(returned)

    def _scores(self, batch: RewardCall, reward: Any = None) -> Scores:
        """The same, checked against the contract. NaN becomes None, as in TRL."""
        return self._read(self._raw(batch, reward), batch)

    def _read(self, returned: Any, batch: RewardCall) -> Scores:
        values = check_scores(returned, len(batch.items), self.name)
        scores = [None if value is None or math.isnan(value) else float(value) for value in values]
        self._given.update(scores)
        return scores

    def _checked(self, returned: Any, batch: RewardCall, part: str) -> Scores:
        """The result as a run reads it; breaking this part of the contract is `Broken`."""
        try:
            return check_scores(returned, len(batch.items), self.name)
        except PluginOutputError as error:
            if error.breaks != part:
                return []
            raise Broken(str(error), batch) from error

    def _over(self, batches: Iterable[RewardCall], judge: Callable[[RewardCall], Any], where: str = "") -> None:
        """Judge calls; the reward's exceptions are `Broken` too."""

        def guarded(batch: RewardCall) -> None:
            try:
                judge(batch)
            except (Broken, NotChecked, KeyboardInterrupt):
                raise
            except BaseException as error:  # the reward's own, whatever it is; SystemExit too
                message = f"{describe_exception(error)}{f' ({where})' if where else ''}"
                if isinstance(error, KeyError) and batch.items and error.args and error.args[0] not in batch.columns:
                    message += f". The batch has the columns {', '.join(batch.columns)}; give others in `columns`"
                raise Broken(message, batch) from error

        self.over(batches, guarded)

    def _agree(self, ours: Scores, theirs: Scores, what: str, batch: RewardCall) -> None:
        """Compare scores that should be equal; `what` names the two."""
        for row, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if not _same(one, other):
                raise Broken(f"{what}: {_said(one)} and {_said(other)} at row {row}", batch)

    def _deterministic_only(self) -> None:
        if not self.deterministic:
            raise NotChecked("it declares deterministic=False")

    def no_effect(self) -> str:
        if self._untried:
            return "none of its rules could be tried"
        if len(self._given) != 1 or not self.seconds:
            return ""
        (score,) = self._given
        return f"it gave every text of the kit {_said(score)}; give it completions and columns whose scores differ"

    # ------------------------------------------------------------------------------------------ what it returns

    def call(self) -> None:
        if not callable(self.reward):
            raise Broken(f"it is {type(self.reward).__name__}, which is not callable")
        self._contract("reward", self.reward)
        try:
            signature = inspect.signature(self.reward)
        except (TypeError, ValueError):  # some compiled function, of which nobody knows
            return
        arguments = self.ordinary.arguments()
        try:
            signature.bind(**arguments)
        except TypeError as error:
            parameters = signature.parameters.values()
            names = {one.name for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD}
            if len(names) == len(parameters) and names.isdisjoint(PASSED_BY_TRL):
                advice = "it takes nothing that TRL passes; if it makes a reward, call it, and pass what it returns"
            elif "missing" in str(error):
                advice = f"the batch has the columns {', '.join(self.ordinary.columns)}; give others in `columns`"
            else:
                advice = "TRL passes every column and more by keyword: end the signature with **columns"
            raise Broken(f"its signature is {signature}: {error}; {advice}") from error

    def run(self) -> None:
        if self._first is None:
            self._over([self.ordinary], self._timed)

    def length(self) -> None:
        calls = [self.ordinary.with_items(self.ordinary.items[:1]), self.ordinary]
        self._over(calls, lambda batch: self._checked(self._timed(batch), batch, "length"))

    def types(self) -> None:
        def judge(batch: RewardCall) -> None:
            returned = self._raw(batch)
            values = self._checked(returned, batch, "types")
            for row, value in enumerate(returned if isinstance(returned, list | tuple) else values):
                _check_value(value, row, batch)

        self._over([self.ordinary], judge)

    def none(self) -> None:
        batch = self.ordinary.with_items(self.ordinary.items[:3])
        declares = hasattr(self.reward, "declares")
        names = [name for name in batch.columns if name not in self.required]
        if not declares:  # somebody's function: as the columns that came with it are
            names = [name for name in names if name in self._given_columns and self._has_none(name)]
        if not names:
            raise NotChecked("no column may be None" if declares else "no column with a None in it was given")
        self._deterministic_only()
        for name in names:

            def judge(tried: RewardCall, name: str = name) -> None:
                with_none = tried.with_value(0, name, None)
                scores = self._scores(with_none)
                if self.per_completion:
                    what = f"with {name!r} as it is and with None in row 0"
                    self._agree(self._scores(tried)[1:], scores[1:], what, with_none)

            self._over([batch.with_items(batch.items[:1]), batch], judge, f"{name!r} is None in row 0")

    def _has_none(self, name: str) -> bool:
        return any(item.columns.get(name) is None for item in self.ordinary.items)

    def hostile_text(self) -> None:
        self._keeps_contract(HOSTILE, "hostile text")
        for what, completion in EMPTY:
            if ("text" if isinstance(completion, str) else "messages") in self._forms:
                self._keeps_contract([completion], what)

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
        if not strings:
            raise NotChecked("the completions that were given are messages")
        self._over([self.ordinary.with_items(strings)], judge)

    def determinism(self) -> None:
        """To the bit: as in the first call, again, with texts that it has not seen, and of fresh builds."""
        self._deterministic_only()
        ordinary, items, first = self.ordinary, self.ordinary.items, self._first
        mark = f"{time.time_ns():x}"
        texts = [item for item in items if isinstance(item.completion, str)]
        unseen = ordinary.with_items(
            replace(item, completion=f"{item.completion} {mark}{row}") for row, item in enumerate(texts)
        )
        half = len(items) // 2
        halves = (ordinary.with_items(items[:half]), ordinary.with_items(items[half:]))

        def once() -> Scores:
            return self._scores(ordinary)

        def in_order(*order: int) -> Scores:
            if self._again is None:
                raise NotChecked("reward.pickle is broken: it cannot be copied, so fresh builds are not compared")
            fresh = self._again()
            scores = {place: self._scores(halves[place], fresh) for place in order}
            return scores[0] + scores[1]

        if first is not None and len(items) == len(first):
            self._identical(ordinary, "in its first call and later", lambda: self._read(first, ordinary), once)
        quick = min(self.seconds, default=1.0) < _SLOW / _ROUNDS
        self._identical(ordinary, "once and again", *[once] * (_ROUNDS if quick else 2))
        if texts:
            self._identical(unseen, "with texts new to it, once and again", *[lambda: self._scores(unseen)] * 2)
        if half:
            what = "of two fresh builds that got two batches in either order"
            self._identical(ordinary, what, lambda: in_order(0, 1), lambda: in_order(1, 0))

    def _identical(self, batch: RewardCall, what: str, *runs: Callable[[], Scores]) -> None:
        """Runs that score the same batch do so to the bit."""

        def judge(tried: RewardCall) -> None:
            first, *others = (run() for run in runs)
            for other in others:
                for row, (one, two) in enumerate(zip(first, other, strict=True)):
                    if one != two:
                        raise Broken(f"{what}: {one!r} and {two!r} at row {row}", tried.with_items([tried.items[row]]))

        self._over([batch], judge)

    def neighbours(self) -> None:
        self._deterministic_only()
        if not self.per_completion:
            raise NotChecked("it declares per_completion=False")

        def judge(batch: RewardCall) -> None:
            alone = batch.with_items(batch.items[:1])
            what = f"row 0 alone and beside {len(batch.items) - 1} others"
            self._agree(self._scores(alone), self._scores(batch)[:1], what, batch)

        items = self.ordinary.items
        first_rows = range(0, len(items), len(items) if self.slow else 3)
        self._over([self.ordinary.with_items(items[row:] + items[:row]) for row in first_rows], judge)

        def backwards(batch: RewardCall) -> None:
            scores = self._scores(batch.with_items(items[::-1]))
            self._agree(self._scores(batch), scores[::-1], "in order and the other way round", batch)

        self._over([self.ordinary], backwards)

    def outcomes(self) -> None:
        column = RewardDeclaration.of(self.reward).reference_column
        if column is None:
            raise NotChecked("it has no reference_column, so it compares with nothing")
        self._deterministic_only()
        if column not in self.ordinary.columns:
            raise NotChecked(f"there is no column {column!r}; give one in columns")
        items = self.ordinary.items
        scored = [(s, item) for s, item in zip(self._scores(self.ordinary), items, strict=True) if s is not None]
        wrong, right = (choose((s for s, _ in scored), default=0.0) for choose in (min, max))
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
            for row, score in enumerate(check_scores(self._raw(batch), len(batch.items), self.name)):
                if isinstance(score, Parts):
                    with_parts += 1
                    names.update(part.name for part in score.parts)
                    _check_places(score, batch.items[row].completion, row, batch)

        items = self.ordinary.items
        self._over([self.ordinary], judge)
        if not with_parts:
            raise NotChecked("it returns no Parts")
        if with_parts > 1 and names and max(names.values()) == 1:
            listed = ", ".join(map(shown, list(names)[:3]))
            raise Broken(f"each of its parts has a name of its own ({listed}, ...)", self.ordinary)
        hostile = [replace(items[row % len(items)], completion=text) for row, text in enumerate(HOSTILE)]
        self._over([self.ordinary.with_items(hostile)], judge, "hostile text")

    def _keeps_contract(self, completions: Sequence[Any], where: str) -> None:
        """No exception, and values that keep the contract, in all forms that it takes."""
        items = self.ordinary.items

        def judge(batch: RewardCall) -> None:
            for row, value in enumerate(check_scores(self._raw(batch), len(batch.items), self.name)):
                _check_value(value, row, batch)

        rows = [replace(items[row % len(items)], completion=text) for row, text in enumerate(completions)]
        texts = any(isinstance(text, str) for text in completions)
        forms = self._forms if texts and not self.slow else self._forms[:1]
        together = [rows] if self.slow else [*([row] for row in rows), rows]
        self._over([RewardCall(tuple(some), form) for form in forms for some in together], judge, where)

    # ------------------------------------------------------------------------------------------ what else it does

    def inputs(self) -> None:
        def judge(batch: RewardCall) -> None:
            arguments, untouched = batch.arguments(), batch.arguments()
            call(self.reward, arguments)
            for name, value in untouched.items():
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
        backwards = self.ordinary.with_items(self.ordinary.items[::-1])
        expected = (self._scores(batch), self._scores(backwards))
        rounds = _ROUNDS if min(self.seconds, default=0.0) * len(batch.items) < _QUICK else 1
        both: dict[int, list[Scores]] = {}

        def score(place: int, which: RewardCall) -> None:
            with plugin_code(batch, before="called by two other threads at once "):
                both[place] = [self._scores(which) for _ in range(rounds)]

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)  # threads take turns often, so that what they share is met half done
        try:
            run_together(score, (batch, backwards))
        finally:
            sys.setswitchinterval(interval)
        if not self.deterministic:
            return
        for which, wanted, found in zip((batch, backwards), expected, (both[0], both[1]), strict=True):
            for scores in found:
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


def run_together(work: Callable[[int, Any], None], items: Sequence[Any]) -> None:
    """Work on each item in a thread of its own, which nobody waits for if this one is interrupted."""
    errors: list[BaseException] = []

    def guarded(place: int, item: Any) -> None:
        try:
            work(place, item)
        except BaseException as error:  # raised below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=pair, daemon=True) for pair in enumerate(items)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


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


def process_state() -> dict[str, Any]:
    """The global state of the process that others rely on, by name."""
    state: dict[str, Any] = {
        "the state of `random`": random.getstate(),
        "the working directory": Path.cwd(),
        "the limit on digits of int": sys.get_int_max_str_digits(),
        "standard output": id(sys.stdout),
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


def _check_places(score: Parts, completion: Any, row: int, batch: RewardCall) -> None:
    """Places of characters must be in the text that counts, or in that of the turn that they name."""
    said = (
        [completion]
        if isinstance(completion, str)
        else [
            content_text(message.get("content"))
            for message in completion
            if message.get("role", "assistant") == "assistant"
        ]
    )
    for part in score.parts:
        for place in part.places or ():
            _, end, turn, _ = place
            if turn is not None and turn >= len(said):
                raise Broken(f"the part {shown(part.name)} at row {row} is in turn {turn} of {len(said)}", batch)
            text = completion_text(completion) if turn is None else said[turn]
            if end is not None and end > len(text):
                where = f"the characters up to {end} of a text of {len(text)}"
                raise Broken(f"the part {shown(part.name)} at row {row} has {where}", batch)
