"""`guarded`: each knob by what it changes, in worker processes and without, and in TRL."""

import contextlib
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from trl_grpo_ext.errors import ConfigurationError, PluginOutputError, RewardError
from trl_grpo_ext.guard.guarded import Guarded, guarded
from trl_grpo_ext.types import END, Part, Parts, Place


def behave(completions: list[Any], **columns: Any) -> list[Any]:
    """A reward that does what its completions say; otherwise their lengths."""
    scores: list[Any] = []
    for text in completions:
        word, _, rest = text.partition(" ")
        if word == "sleep":
            time.sleep(float(rest))
        elif word == "exit":
            os._exit(1)
        elif word == "raise":
            raise ValueError(rest)
        elif word == "memory":
            bytearray(int(rest) * 2**20)
        scores.append({"none": None, "nan": float("nan"), "word": "word"}.get(word, len(text)))
    return scores


class Trace:
    """Appends to a file a line for each completion that it scores, from whichever process."""

    __name__ = "trace"

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self, completions: list[Any], **columns: Any) -> list[Any]:
        with self.file.open("a") as file:
            file.write("".join(f"{os.getpid()}\t{len(completions)}\t{sorted(columns)}\n" for _ in completions))
        return behave(completions)

    @property
    def lines(self) -> list[list[str]]:
        return [line.split("\t") for line in self.file.read_text().splitlines()] if self.file.exists() else []


@pytest.fixture(scope="module", autouse=True)
def _sent_by_value() -> Iterator[None]:
    # Else every server of worker processes would import this module, and with it torch and TRL.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return Trace(tmp_path / "trace")


Made = Callable[..., Guarded]


@pytest.fixture
def made() -> Iterator[Made]:
    """Makes guarded rewards, whose processes end with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda reward, **options: stack.enter_context(contextlib.closing(guarded(reward, **options)))


def outcomes(reward: Guarded, completions: list[Any], **columns: Any) -> list[str]:
    return [judgement.outcome.value for judgement in reward.judge(completions, **columns)]


@pytest.mark.slow
def test_guarded_timeout_uses_worker_processes(made: Made, trace: Trace) -> None:
    reward = made(trace, timeout=10.0, workers=2)
    assert reward(prompts=["?"] * 3, completions=["a", "bb", "none"], completion_ids=[[1]] * 3) == [1.0, 2.0, None]
    assert all(int(pid) != os.getpid() for pid, *_ in trace.lines)
    assert [calls for _, calls, _ in trace.lines] == ["1", "1", "1"]  # each completion by itself
    # Without a budget no call is made twice for being slow, and a timeout is not retried.
    assert reward(completions=["sleep 0.6"]) == [9.0]
    assert len(trace.lines) == 4
    assert outcomes(made(trace, timeout=1.0, workers=1, retries=3), ["sleep 60"]) == ["timeout"]
    assert len(trace.lines) == 5
    assert guarded(trace)(completions=["a", "a"]) == [1.0, 1.0]
    assert [pid for pid, *_ in trace.lines[5:]] == [str(os.getpid())] * 2


@pytest.mark.slow
def test_guarded_counts_outcomes_per_completion(made: Made) -> None:
    reward = made(behave, timeout=1.0, workers=2, memory_mb=200, on_error=None)
    completions = ["abc", "sleep 60", "exit", "raise no", "memory 1000", "none", "nan", "", "raise \ud800\x00"]
    judged = reward.judge(completions)
    assert [one.outcome.value for one in judged] == [
        *("scored", "timeout", "died", "error", "died", "none", "none", "scored", "error")
    ]
    assert judged[3].detail == "ValueError: 'no'"
    metrics: dict[str, float] = {}
    extra: dict[str, list[Any]] = {}
    scores = reward(completions=[*completions, "a"], log_metric=metrics.__setitem__, log_extra=extra.__setitem__)
    assert scores == [3.0, 0.0, 0.0, None, 0.0, None, None, 0.0, None, 1.0]
    shares = {"scored": 0.3, "none": 0.2, "timeout": 0.1, "died": 0.2, "error": 0.2}
    assert metrics == {f"outcomes/behave/{name}": share for name, share in shares.items()}
    assert extra == {"behave_outcome": [*(one.outcome.value for one in judged), "scored"]}


def test_an_error_stops_the_run_and_names_the_row(made: Made) -> None:
    reward = made(behave, workers=1)
    with pytest.raises(RewardError, match=r"behave: .*row 1 is 'error' \(ValueError: 'no\\ncan do'\)") as info:
        reward(completions=["a", "raise no\ncan do"])
    assert "in behave" in str(info.value.__cause__)  # the worker's own traceback
    here = guarded(behave)
    with pytest.raises(RewardError, match=r"row 2 .*'error' \(ValueError: x\)") as info:
        here(completions=["a", "b", "raise x"])
    assert isinstance(info.value.__cause__, ValueError)


def test_guarded_batch_shares_one_outcome(made: Made) -> None:
    reward = made(behave, timeout=1.0, workers=1, batch_size=None)
    assert reward(completions=["a", "bb"]) == [1.0, 2.0]
    assert reward(completions=["a", "sleep 60"]) == [None, None]
    assert reward(completions=["a", "exit"]) == [None, None]
    pairs = made(behave, timeout=5.0, workers=1, batch_size=2, on_error=-1.0)
    assert pairs(completions=["a", "b", "c", "raise x", "e"]) == [1.0, 1.0, -1.0, -1.0, 1.0]


def test_columns_are_cut_with_the_completions(made: Made) -> None:
    def check(completions: list[str], prompts: list[str], answer: list[str], level: str, **rest: Any) -> list[float]:
        assert not rest
        return [float(c + p == a and level == "easy") for c, p, a in zip(completions, prompts, answer, strict=True)]

    columns = {"prompts": ["1", "2", "3"], "answer": ["a1", "b2", "cX"], "level": "easy"}
    for options in ({}, {"batch_size": 2}, {"workers": 2, "batch_size": 2}):
        assert made(check, **options)(completions=["a", "b", "c"], **columns) == [1.0, 1.0, 0.0]


def test_what_cannot_travel_is_left_out_in_workers(made: Made, trace: Trace) -> None:
    logged: dict[str, Any] = {}
    columns = {
        "trainer_state": threading.Lock(),  # nothing that could be pickled
        "environments": [threading.Lock()],
        "log_extra": logged.__setitem__,
        "log_metric": logged.__setitem__,
        "answer": ["1"],
    }
    assert made(trace, workers=1)(completions=["abc"], **columns) == [3.0]
    assert trace.lines[0][2] == "['answer']"
    assert guarded(trace)(completions=["abc"], **columns) == [3.0]
    assert trace.lines[1][2] == "['answer', 'environments', 'log_extra', 'log_metric', 'trainer_state']"


PARTS = [Part("a", 1.0, 2.0, [(0, 1), END]), Part("b", None), Part("c", -0.5, places=Place(turn=1))]


def test_parts_survive_the_way_from_a_worker(made: Made) -> None:
    def spans(completions: list[str], **_: Any) -> list[Parts | None]:
        return [Parts(PARTS, len(c)) if c else None for c in completions]

    for options in ({"workers": 1}, {}):
        score, nothing = made(spans, **options)(completions=["abc", ""])
        assert isinstance(score, Parts)
        assert (score, score.parts) == (3.0, Parts(PARTS).parts)
        assert nothing is None


@pytest.mark.parametrize("options", [{"workers": 1}, {}])
def test_a_broken_contract_is_no_outcome(made: Made, options: dict[str, Any]) -> None:
    with pytest.raises(PluginOutputError, match=r"'word', at row 0; .* rows 1 to 1 of the batch's 3"):
        made(behave, on_error=0.0, **options)(completions=["a", "word", "b"])


@pytest.mark.parametrize("options", [{"workers": 1}, {}])
def test_a_call_that_raises_is_made_again_as_often_as_asked(
    made: Made, tmp_path: Path, options: dict[str, Any]
) -> None:
    def third_time(completions: list[str], **_: Any) -> list[float]:
        with (tmp_path / completions[0]).open("a") as file:
            file.write("x")
        if (tmp_path / completions[0]).stat().st_size < 3:
            raise ConnectionError("not yet")
        return [1.0]

    assert made(third_time, retries=2, **options)(completions=["a"]) == [1.0]
    reward = made(third_time, retries=1, on_error=None, **options)
    assert reward(completions=["b"]) == [None]
    assert (tmp_path / "b").stat().st_size == 2


def test_it_pickles_with_its_settings_and_without_its_processes(made: Made, trace: Trace) -> None:
    reward = made(trace, timeout=1.0, workers=1, outcomes={"timeout": -3.0}, name="mine")
    assert reward(completions=["a"]) == [1.0]
    with contextlib.closing(pickle.loads(pickle.dumps(reward))) as copy:
        assert copy(completions=["a", "sleep 60"]) == [1.0, -3.0]
        assert copy.__name__ == "mine"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 0}, "timeout .* got 0"),
        ({"memory_mb": 100}, "memory_mb"),
        ({"on_error": 0.0, "outcomes": {"error": 1.0}}, "on_error is 0.0"),
        ({"outcomes": {"right": 1.0}}, "'right'"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    async def waits(**columns: Any) -> list[float]:
        return [1.0]

    with pytest.raises(ConfigurationError, match=message):
        guarded(behave, **options)
    for what in (5, torch.nn.Linear(1, 1), waits):
        with pytest.raises(ConfigurationError):
            guarded(what)
