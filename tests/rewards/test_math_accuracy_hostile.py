"""`MathAccuracy` with completions made to hang, crash or bloat it: it comes back in time, and others are not harmed."""

import contextlib
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
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

# Nothing in it is large, so that only the time that it takes ends it.
UNBOUNDED = "\\boxed{\\sum_{k=1}^{\\infty} \\frac{\\sin(k^k)}{k^2}}"
SLOW = [  # honest, and about a second of CPU time each
    ("$\\frac{\\pi}{4}$", "\\boxed{\\int_0^1 \\frac{1}{1+x^2} dx}", 1.0),
    ("$\\frac{\\pi^2}{6}$", "\\boxed{\\sum_{k=1}^{\\infty} \\frac{1}{k^2}}", 1.0),
]


@pytest.fixture(scope="module")
def reward(with_math_workers: Any) -> MathAccuracy:
    made: MathAccuracy = with_math_workers(timeout=0.5, cache=0)
    return made


def scores(reward: MathAccuracy, rows: list[tuple[str, str, float]]) -> list[float | None]:
    return reward(completions=[row[1] for row in rows], solution=[row[0] for row in rows])


def test_math_accuracy_survives_a_hostile_batch(reward: MathAccuracy) -> None:
    right = [row[2] for row in ORDINARY]
    assert scores(reward, ORDINARY) == right
    memory = psutil.Process().memory_info().rss
    judgements = reward.judge(completions=HOSTILE, solution=["18"] * len(HOSTILE))
    assert psutil.Process().memory_info().rss - memory < 100 * 2**20
    found = Counter(judgement.outcome for judgement in judgements)
    assert found.keys() <= {Outcome.WRONG, Outcome.NO_ANSWER, Outcome.TIMEOUT, Outcome.DIED, Outcome.REFUSED}
    assert found[Outcome.REFUSED] >= 45  # known from the answer alone, whatever the machine does
    assert reward.judge(completions=[UNBOUNDED], solution=["18"])[0].outcome is Outcome.TIMEOUT
    assert scores(reward, ORDINARY) == right


@pytest.mark.parametrize("order", [1, -1])
def test_math_accuracy_judges_honest_beside_hostile(order: int) -> None:
    rows = [*(("18", text, 0.0) for text in [UNBOUNDED] * 3 + HOSTILE), *SLOW, *ORDINARY][::order]
    with contextlib.closing(MathAccuracy(cache=0)) as reward, busy(2 if order == 1 else 0):
        for row in SLOW:
            assert scores(reward, [row]) == [row[2]]
        assert scores(reward, rows) == [row[2] for row in rows]


def test_hostile_references_are_nobodys_fault(reward: MathAccuracy) -> None:
    references = [reference for reference in HOSTILE_REFERENCES for _ in range(4)]
    completions = ["\\boxed{18}", "\\boxed{x+1}", "The answer is $\\frac{1}{2}$", "\\boxed{18.5}"] * 5
    judgements = reward.judge(completions=completions, solution=references)
    assert {judgement.outcome for judgement in judgements} == {Outcome.UNPARSEABLE}


TOKENS = r"""
    \boxed{ \frac{ }{ } \sqrt x 2 ^ _ $ \[ \] \pm \text{ \begin{pmatrix} \end{pmatrix} & \\ \sum \infty \% , = < \{ \} !
"""
tokens = st.sampled_from(["answer ", *re.findall(r"\S+", TOKENS)])
mathematics = st.text("0123456789+-*/^_=<>(){}[]\\$%,.! xyi\n") | st.lists(tokens, max_size=30).map("".join)


@given(reference=st.text() | mathematics, completion=st.text() | mathematics, boxed=st.booleans())
@settings(max_examples=60)
def test_no_text_raises(reward: MathAccuracy, reference: str, completion: str, boxed: bool) -> None:
    text = f"\\boxed{{{completion}}}" if boxed else completion
    [judgement] = reward.judge(completions=[text], solution=[f"${reference}$" if boxed else reference])
    assert judgement.outcome is not Outcome.ERROR


def odd_texts(seed: int, count: int) -> list[str]:
    """Random bytes in and around boxes, decoded in the ways in which tokenizers leave them."""
    rng = random.Random(seed)
    made = []
    for row in range(count):
        data = rng.randbytes(rng.randrange(1, 60))
        text = data.decode("utf-8", ("surrogateescape", "replace", "backslashreplace")[row % 3])
        made.append((text, f"\\boxed{{{text}}}", f"answer ${text}$", f"\\boxed{{{rng.randrange(99)}}} {text}")[row % 4])
    return made


@pytest.mark.parametrize("count", [120, pytest.param(800, marks=pytest.mark.nightly)])
def test_math_accuracy_outcome_depends_on_the_answer(count: int) -> None:
    others = set(psutil.Process().children(recursive=True))
    reward = MathAccuracy(cache=0)
    rows = [(("18", "$x+1$")[row % 2], text) for row, text in enumerate([*HOSTILE[:24], *odd_texts(1, count)])]

    def outcomes(some: list[tuple[str, str]]) -> list[Outcome]:
        judged = reward.judge(completions=[text for _, text in some], solution=[reference for reference, _ in some])
        return [judgement.outcome for judgement in judged]

    together = outcomes(rows)
    assert Outcome.ERROR not in together
    assert outcomes(rows[::-1])[::-1] == together
    alone = rows if count > 120 else rows[::6]
    assert [outcomes([row])[0] for row in alone] == together[:: 1 if count > 120 else 6]
    left = set(psutil.Process().children(recursive=True)) - others
    assert len(left) <= reward._pool.workers + 1
    reward.close()
    assert psutil.wait_procs(left, timeout=30)[1] == [], "a process is left"
