"""`MathAccuracy` with completions made to hang, crash or bloat it: it comes back in time, and others are not harmed."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.busy import busy
from tests.rewards.hostile_texts import HOSTILE, HOSTILE_REFERENCES, ORDINARY
from trl_grpo_ext.guard.outcomes import Outcome
from trl_grpo_ext.rewards.math_accuracy import MathAccuracy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:math_accuracy cannot read the reference"),
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc"),
]


@pytest.fixture(scope="module")
def reward(with_math_workers: Any) -> MathAccuracy:
    made: MathAccuracy = with_math_workers(timeout=0.5)
    return made


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def children() -> dict[int, str]:
    """The state of every process below this one: R, S, Z, ..."""
    parents, states = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(folder.name)], states[int(folder.name)] = int(parent), state
    below, grown = {os.getpid()}, True
    while grown:
        found = {pid for pid, parent in parents.items() if parent in below} - below
        below |= found
        grown = bool(found)
    return {pid: states[pid] for pid in below - {os.getpid()}}


def verdicts_on_ordinary(reward: MathAccuracy) -> list[float | None]:
    reward._verifier._verdicts = type(reward._verifier._verdicts)(0)
    return reward(completions=[row[1] for row in ORDINARY], solution=[row[0] for row in ORDINARY])


def test_a_batch_of_hostile_completions_ends_and_the_next_one_is_as_before(reward: MathAccuracy) -> None:
    right = [row[2] for row in ORDINARY]
    assert verdicts_on_ordinary(reward) == right
    memory = resident_mb()
    judgements = reward.judge(completions=HOSTILE, solution=["18"] * len(HOSTILE))
    assert resident_mb() - memory < 100
    found = {judgement.outcome for judgement in judgements}
    assert found <= {Outcome.WRONG, Outcome.NO_ANSWER, Outcome.TIMEOUT, Outcome.DIED, Outcome.REFUSED}
    assert {Outcome.TIMEOUT, Outcome.REFUSED} <= found
    assert verdicts_on_ordinary(reward) == right


SLOW = [
    ("$\\frac{\\pi}{4}$", "\\boxed{\\int_0^1 \\frac{1}{1+x^2} dx}", 1.0),
    ("$\\frac{\\pi^2}{6}$", "\\boxed{\\sum_{k=1}^{\\infty} \\frac{1}{k^2}}", 1.0),
]
"""Honest, and about a second of CPU time each."""


@pytest.mark.parametrize("order", [1, -1])
def test_honest_completions_among_hostile_ones_have_the_verdicts_that_they_have_alone(order: int) -> None:
    honest = [*SLOW, *ORDINARY]
    rows = [*(("18", text, 0.0) for text in HOSTILE[:16]), *honest][::order]
    reward = MathAccuracy(timeout=3.0, cache=0)
    with contextlib.closing(reward), busy(2 if order == 1 else 0):
        for reference, completion, score in SLOW:
            assert reward(completions=[completion], solution=[reference]) == [score]
        scores = reward(completions=[row[1] for row in rows], solution=[row[0] for row in rows])
    assert scores == [row[2] for row in rows]


def test_hostile_references_are_nobodys_fault(reward: MathAccuracy) -> None:
    references = [reference for reference in HOSTILE_REFERENCES for _ in range(4)]
    completions = ["\\boxed{18}", "\\boxed{x+1}", "The answer is $\\frac{1}{2}$", "\\boxed{18.5}"] * len(
        HOSTILE_REFERENCES
    )
    judgements = reward.judge(completions=completions, solution=references)
    found = [judgement.outcome for judgement in judgements]
    assert set(found) <= {Outcome.UNPARSEABLE, Outcome.WRONG}  # wrong where math-verify did come to an end
    assert found.count(Outcome.UNPARSEABLE) >= 16


def test_a_worker_that_is_killed_from_outside_again_and_again_is_an_outcome(with_math_workers: Any) -> None:
    reward = with_math_workers(timeout=20.0)
    over = threading.Event()

    def kill_workers() -> None:
        while not over.wait(0.1):
            for pid in children():
                with contextlib.suppress(OSError):
                    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                    if parent != os.getpid():  # the server of the workers is ours, the workers are its own
                        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_workers)
    killer.start()
    try:
        [judgement] = reward.judge(completions=[HOSTILE[0]], solution=["18"])
    finally:
        over.set()
        killer.join()
    assert judgement.outcome is Outcome.DIED
    assert "twice" in judgement.detail
    assert reward(completions=["\\boxed{1+x}"], solution=["$x+1$"]) == [1.0]


TOKENS = r"""
    \boxed{ \frac{ }{ } \sqrt x 2 ^ _ $ \[ \] \pm \text{ \begin{pmatrix} \end{pmatrix} & \\ \sum \infty \% , = < \{ \} !
"""
mathematics = st.text("0123456789+-*/^_=<>(){}[]\\$%,.! xyi\n") | st.lists(
    st.sampled_from(["answer ", *re.findall(r"\S+", TOKENS)]),
    max_size=30,
).map("".join)


@given(reference=st.text() | mathematics, completion=st.text() | mathematics, boxed=st.booleans())
@settings(max_examples=60)
def test_no_text_raises(reward: MathAccuracy, reference: str, completion: str, boxed: bool) -> None:
    text = f"\\boxed{{{completion}}}" if boxed else completion
    [judgement] = reward.judge(completions=[text], solution=[f"${reference}$" if boxed else reference])
    assert judgement.outcome is not Outcome.ERROR


def random_texts(seed: int, count: int) -> list[str]:
    """Random bytes in and around boxes, decoded in the ways in which tokenizers leave them."""
    rng = random.Random(seed)
    made = []
    for row in range(count):
        data = rng.randbytes(rng.randrange(1, 60))
        text = data.decode("utf-8", ("surrogateescape", "replace", "backslashreplace")[row % 3])
        made.append((text, f"\\boxed{{{text}}}", f"answer ${text}$", f"\\boxed{{{rng.randrange(99)}}} {text}")[row % 4])
    return made


def test_a_thousand_random_completions_leave_no_process_behind() -> None:
    reward = MathAccuracy(cache=0, timeout=0.5)
    others = set(children())
    for batch in range(2):
        completions = random_texts(batch, 500)
        judgements = reward.judge(completions=completions, solution=["18", "$x+1$"] * 250)
        assert Outcome.ERROR not in {judgement.outcome for judgement in judgements}
        assert len(judgements) == 500
    running = {pid: state for pid, state in children().items() if pid not in others}
    assert len(running) <= reward._verifier.pool.workers + 1
    assert "Z" not in running.values()
    reward.close()
    patience = time.monotonic() + 10
    while set(children()) - others and time.monotonic() < patience:
        time.sleep(0.05)
    assert set(children()) - others == set()
