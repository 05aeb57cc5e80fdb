"""Rewards with one planted defect each, published ones among them, and some that keep all rules."""

from __future__ import annotations

import functools
import os
import random
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from tests.testing.wrong_aggregations import noise
from trl_grpo_ext import completion_text
from trl_grpo_ext.types import Parts, RewardDeclaration


def text_of(completion: Any) -> str:
    """A careful reading of either form."""
    if isinstance(completion, str):
        return completion
    return "".join(message.get("content") or "" for message in completion)


class Simple:
    """1.0 where there is an 18; compares with nothing."""

    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        return self.scores([text_of(completion) for completion in completions], columns)

    def scores(self, texts: list[str], columns: Any) -> Any:
        return [float("18" in text) for text in texts]


class By(Simple):
    """A reward by a function of its texts and the columns."""

    def __init__(self, function: Callable[[list[str], Any], Any]) -> None:
        self.function = function

    def scores(self, texts: list[str], columns: Any) -> Any:
        return self.function(texts, columns)


def found(texts: list[str]) -> list[float]:
    return [float("18" in text) for text in texts]


class Right(Simple):
    """1.0 where the reference's number stands in the completion; None where the reference has none."""

    declares = RewardDeclaration(reference_column="answer")

    def scores(self, texts: list[str], columns: Any) -> Any:
        return [self.score(text, answer) for text, answer in zip(texts, columns["answer"], strict=True)]

    def score(self, text: str, answer: Any) -> float | None:
        number = re.search(r"\d+", str(answer))
        return None if number is None else float(number.group() in text)


class Declared(Simple):
    """Random, and says so."""

    declares = RewardDeclaration(deterministic=False)

    def scores(self, texts: list[str], columns: Any) -> Any:
        return [score + int.from_bytes(os.urandom(2)) / 2**16 for score in found(texts)]


async def right_async(completions: list[Any], **columns: Any) -> list[float]:
    return found([text_of(c) for c in completions])


def only_keywords(**everything: Any) -> list[float]:
    return found([text_of(c) for c in everything["completions"]])


def logs(completions: list[Any], log_extra: Any = None, log_metric: Any = None, **columns: Any) -> list[float]:
    """Talks, warns and logs."""
    print("scoring", len(completions))
    warnings.warn("careful", stacklevel=1)
    if log_metric is not None:
        log_metric("seen", float(len(completions)))
        log_extra("seen", [True] * len(completions))
    return found([text_of(c) for c in completions])


def in_parts(completions: list[Any], **columns: Any) -> list[Parts]:
    texts = [completion_text(completion) for completion in completions]
    return [Parts({"first": (float(text[:1].isdigit()), (0, min(1, len(text)))), "rest": 0.5}) for text in texts]


SOUND: list[Any] = [
    in_parts,
    *(Right(), Simple(), right_async, Declared(), only_keywords, logs),
    functools.partial(only_keywords, unused=True),
]


def names_its_columns(completions: list[Any], answer: list[str]) -> list[float]:
    return [0.0] * len(completions)


def reads_the_brackets(completions: list[Any], **columns: Any) -> list[float]:
    return [float(str(c).startswith("<think>")) for c in completions]


def strips(completions: list[Any], **columns: Any) -> list[float]:
    for completion in completions:
        for message in completion if isinstance(completion, list) else ():
            message["content"] = (message.get("content") or "").strip()
    return found([text_of(c) for c in completions])


class FirstRowOnly(Right):
    """Every completion against the first prompt's answer."""

    def scores(self, texts: list[str], columns: Any) -> Any:
        return [self.score(text, columns["answer"][0]) for text in texts]


class OneNoneSpoilsAll(Right):
    def scores(self, texts: list[str], columns: Any) -> Any:
        return [None] * len(texts) if None in columns["answer"] else super().scores(texts, columns)


class NoReferenceIsWrong(Right):
    def score(self, text: str, answer: Any) -> float | None:
        return super().score(text, answer) or 0.0


class RemembersOnItself(Simple):
    """Novelty, each object for itself."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def scores(self, texts: list[str], columns: Any) -> Any:
        fresh = [text not in self.seen for text in texts]
        self.seen.update(texts)
        return [score + 0.1 * new for score, new in zip(found(texts), fresh, strict=True)]


class KeepsItsTexts(Simple):
    def scores(self, texts: list[str], columns: Any) -> Any:
        self.texts = texts
        time.sleep(0.001)
        return found(self.texts)


def after(do: Callable[[list[str], Any], Any]) -> By:
    """The simple scores after something else, which no reward should do."""
    return By(lambda texts, columns: (do(texts, columns), found(texts))[1])


def exit_with(status: Any) -> None:
    raise SystemExit(status)


def sleep_in_a_thread(texts: list[str], columns: Any) -> None:
    if threading.current_thread() is not threading.main_thread():
        time.sleep(1000)


in_words = By(lambda texts, columns: [str(score) for score in found(texts)])

BREAKS: list[tuple[str, Any]] = [
    ("reward.run", names_its_columns),
    ("reward.run", after(lambda texts, columns: exit_with(0))),
    ("reward.run", By(lambda texts, columns: [1.0])),  # huggingface/trl#6533: torch spreads it over all
    ("reward.run", in_words),
    ("reward.run", By(lambda texts, columns: [float("nan")] * len(texts))),
    ("reward.run", By(lambda texts, columns: [1e39] * len(texts))),
    ("reward.determinism", By(lambda texts, columns: [score + noise() for score in found(texts)])),
    ("reward.determinism", RemembersOnItself),
    ("reward.neighbours", FirstRowOnly),
    ("reward.inputs", after(lambda texts, columns: columns["answer"].insert(0, "seen"))),
    ("reward.inputs", strips),
    ("reward.formats", reads_the_brackets),
    ("reward.hostile_text", after(lambda texts, columns: [text.encode() for text in texts])),  # a lone surrogate
    *(("reward.outcomes", reward) for reward in (NoReferenceIsWrong, OneNoneSpoilsAll)),
    ("reward.parts", By(lambda texts, columns: [Parts({text or "a": float("18" in text)}) for text in texts])),
    ("reward.threads", KeepsItsTexts),
    ("reward.threads", after(lambda t, c: signal.signal(signal.SIGUSR2, signal.getsignal(signal.SIGUSR2)))),
    ("reward.global_state", after(lambda texts, columns: random.seed(0))),
    ("reward.global_state", after(lambda texts, columns: os.environ.update(SET_BY_A_REWARD="1"))),  # the first time
]

HANGS: list[tuple[str, Any]] = [
    ("reward.run", after(lambda texts, columns: time.sleep(1000))),
    ("reward.threads", after(sleep_in_a_thread)),
]
