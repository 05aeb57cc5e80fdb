"""`MathAccuracy` as a reward: outcomes, columns, processes; and TRL's own verdicts, but for what differs on purpose."""

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rewards.math_corpus import PAIRS
from trl_grpo_ext.guard.outcomes import Outcome
from trl_grpo_ext.plugins.loading import load_rewards
from trl_grpo_ext.rewards.math_accuracy import MathAccuracy

accuracy_rewards = pytest.importorskip("trl.rewards.accuracy_rewards", reason="TRL's own reward is the oracle here")
pytestmark = pytest.mark.filterwarnings("ignore:math_accuracy cannot read the reference")

NEVER_ENDS = "9^{9^{9^9}}"


@pytest.fixture(scope="module")
def reward(with_math_workers: Any) -> MathAccuracy:
    made: MathAccuracy = with_math_workers(timeout=1.0)
    return made


NINES = f"\\boxed{{{'9' * 5000}}}"
# By outcome, references and completions.
VERDICTS: dict[Outcome, list[tuple[Any, Any]]] = {
    Outcome.RIGHT: [
        *(("18", "\\boxed{18}"), ("$x+1$", "\\boxed{1+x}"), (f"${NEVER_ENDS}$", f"\\boxed{{{NEVER_ENDS}}}")),
        *(("18", "x" * 199_000 + "\\boxed{18}"), ("18", [{"role": "assistant", "content": "\\boxed{18}"}])),
        *(("18", "\ud800\x00 \\boxed{18}"), ("$x$", "\ud800\x00 \\boxed{x}")),
    ],
    Outcome.WRONG: [("18", "\\boxed{17}"), ("$x+1$", "\\boxed{x+2}")],
    Outcome.NO_ANSWER: [
        *(("18", "I don't know"), ("$x+1$", "I don't know"), ("$x+1$", ""), ("18", None)),
        ("18", [{"role": "assistant", "content": None}]),
    ],
    Outcome.UNPARSEABLE: [
        *(("", "\\boxed{18}"), ("no number", "I don't know"), (None, "\\boxed{18}"), (18, "\\boxed{18}")),
        *((f"${NEVER_ENDS}$", "\\boxed{18}"), (f"${'(' * 500}1{')' * 500}$", "\\boxed{18}"), ("no number", NINES)),
        ("\ud800", "\\boxed{18}"),
    ],
    Outcome.REFUSED: [
        *(("18", f"\\boxed{{{NEVER_ENDS}}}"), ("$x+1$", f"\\boxed{{{NEVER_ENDS}}}"), ("18", NINES), ("$x+1$", NINES)),
        ("18", "x" * 200_001),
    ],
}


def outcomes(reward: MathAccuracy, references: Any, completions: Any) -> list[Outcome]:
    return [one.outcome for one in reward.judge(completions=completions, solution=references)]


def test_every_way_to_end_has_its_outcome_alone_and_in_any_batch(reward: MathAccuracy) -> None:
    rows = [(*pair, outcome) for outcome, pairs in VERDICTS.items() for pair in pairs]
    for order in (1, -1):
        references, completions, expected = zip(*rows[::order], strict=True)
        assert outcomes(reward, references, completions) == [*expected]
    with pytest.warns(UserWarning, match="8 of 27 "):
        reward(completions=completions, solution=references)


def test_outcomes_and_what_was_read_are_logged(reward: MathAccuracy) -> None:
    metrics: dict[str, float] = {}
    columns: dict[str, list[Any]] = {}
    completions = ["\\boxed{18}", "\\boxed{x + 1}", "none", "\\boxed{\ud800}", f"\\boxed{{{'1+' * 5000}1}}"]
    loggers: Any = {"log_metric": metrics.__setitem__, "log_extra": columns.__setitem__}
    reward(completions=completions, solution=["18", "$1+x$", "18", "$y$", "$y$"], **loggers)
    assert [metrics[f"outcomes/math_accuracy/{name}"] for name in ("right", "no_answer", "died")] == [0.4, 0.2, 0.0]
    assert columns["math_accuracy_outcome"][:4] == ["right", "right", "no_answer", "wrong"]
    assert columns["solution"] == ["18", "$1+x$", "18", "$y$", "$y$"]
    assert columns["gold_parsed"][:4] == ["18", "1+x", "18", "y"]
    assert columns["answer_parsed"][:3] == ["18", "x + 1", ""]
    assert all(len(text) <= 1000 and text.encode() for column in columns.values() for text in column if text)


def test_math_accuracy_caches_verdicts(with_math_workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = with_math_workers(cache=2)
    asked: list[int] = []
    run = reward._pool.run

    def counting(jobs: Any, **limits: Any) -> Any:
        asked.append(len(jobs))
        return run(jobs, **limits)

    monkeypatch.setattr(reward._pool, "run", counting)
    for completions, times in ((["x"] * 8, 1), (["x", "y"], 2), (["z", "x"], 3)):
        boxed = [f"\\boxed{{{text}}}" for text in completions]
        assert reward(completions=boxed, solution=["$x$"] * len(boxed)) == [float(text == "x") for text in completions]
        assert asked == [1] * times


@pytest.mark.slow
def test_math_accuracy_of_plain_numbers_without_sympy() -> None:
    unwanted = "assert not {'sympy', 'math_verify', 'torch', 'transformers', 'trl'} & set(sys.modules)\n"
    script = (
        "import os, sys\nfrom trl_grpo_ext.rewards.math_accuracy import math_accuracy\n"
        f"assert math_accuracy(completions=['\\\\boxed{{18}}', 'no'], solution=['18', '18']) == [1.0, 0.0]\n{unwanted}"
        "assert open(f'/proc/self/task/{os.getpid()}/children').read() == ''\n"
        f"assert math_accuracy(completions=['\\\\boxed{{x}}'], solution=['$x$']) == [1.0]\n{unwanted}"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_load_rewards_starts_the_workers_imports() -> None:
    (reward,) = load_rewards([{"name": "math_accuracy", "workers": 1}])
    assert reward._pool._processes._server is not None
    reward.close()


AFTER_REASONING: dict[Outcome, list[tuple[Any, Any]]] = {
    Outcome.RIGHT: [
        *(("18", "<think>\\boxed{17}</think> \\boxed{18}"), ("18", "</think>\\boxed{17}</think>\\boxed{18}")),
        *(("$x+1$", "<think></think>\\boxed{1+x}"), ("18", "9" * 300_000 + "</think>\\boxed{18}")),
    ],
    Outcome.WRONG: [("18", "<think>\\boxed{18}</think> \\boxed{17}")],
    Outcome.NO_ANSWER: [
        *(("18", "<think>\\boxed{18}</think>"), ("18", "<think>\\boxed{18}"), ("18", "\\boxed{18}"), ("18", None)),
        *(("no number", "\\boxed{1+x}"), (None, "\\boxed{1+x}")),  # 0, even where the reference cannot be read
    ],
    Outcome.UNPARSEABLE: [("no number", "<think></think>\\boxed{1+x}")],
    Outcome.REFUSED: [("18", "</think>" + "9" * 300_000 + "\\boxed{18}")],
}


@pytest.mark.parametrize("outcome", AFTER_REASONING)
def test_only_what_follows_the_reasoning_counts(with_math_workers: Any, outcome: Outcome) -> None:
    reward = with_math_workers(reasoning_delimiters=["</think>"], timeout=5.0)
    pairs = AFTER_REASONING[outcome]
    assert outcomes(reward, *zip(*pairs, strict=True)) == [outcome] * len(pairs)


parts = st.sampled_from(
    ["</think>", "<think>", "<answer>", "\\boxed{18}", "\\boxed{17}", "\\boxed{x}", " so ", "$", "answer is $x$", "\n"]
)


@given(
    completion=st.lists(parts, max_size=8).map("".join),
    reference=st.sampled_from(["18", "$x$", "none", "$18$"]),
    delimiters=st.sampled_from([["</think>"], ["<answer>", "</think>"], ["</think>", "<answer>"]]),
)
@settings(max_examples=60)
def test_it_is_trls_verdict(with_math_workers: Any, completion: str, reference: str, delimiters: list[str]) -> None:
    ours = with_math_workers(reasoning_delimiters=delimiters)
    theirs = accuracy_rewards.reasoning_accuracy_reward([[{"content": completion}]], [reference], delimiters)
    assert ours(completions=[completion], solution=[reference]) == theirs


# Where the corpus has what math-verify misreads: our score and TRL's.
DEPARTURES = {
    (reference, wrapped.format(content)): scores
    for reference, content, *scores in [
        ("1234", "1 234", 1.0, 0.0),
        ("1234", r"1\,234", 1.0, 0.0),
        (r"$\frac{3}{4}$", r"\tfrac34", 1.0, 0.0),
        (r"\$18", "18", 1.0, None),
        ("300000", "3e5", 1.0, 0.0),
        ("$i^2$", "-1", 1.0, 0.0),
        (r"$\frac{1}{i}$", "-i", 1.0, 0.0),
        (r"$\langle 1,2\rangle$", "(1,2)", 1.0, 0.0),
        (r"$\frac{1}{$", r"\frac{1}{", None, 0.0),
    ]
    for wrapped in ("So the answer is \\boxed{{{}}}.", "Thus\n$$x = \\boxed{{{}}}$$\n")
}


def both(reward: MathAccuracy, pairs: list[tuple[str, str]]) -> tuple[list[float | None], list[float | None]]:
    references, completions = map(list, zip(*pairs, strict=True))
    ours = reward(prompts=["?"] * len(pairs), completions=completions, solution=references, trainer_state=None)
    messages = [[{"role": "assistant", "content": completion}] for completion in completions]
    return ours, accuracy_rewards.accuracy_reward(messages, references)


@pytest.mark.slow
def test_every_pair_of_the_corpus_has_trls_verdict(with_math_workers: Any) -> None:
    ours, theirs = both(with_math_workers(timeout=10.0), PAIRS)
    differ = {pair: [own, trl] for pair, own, trl in zip(PAIRS, ours, theirs, strict=True) if own != trl}
    on_purpose = {pair: scores for pair, scores in DEPARTURES.items() if pair in differ}
    assert differ == on_purpose
    assert len({reference for reference, _ in differ}) == len({reference for reference, _ in DEPARTURES})
    assert len(set(PAIRS)) >= 250
    assert min(theirs.count(1.0), theirs.count(0.0), theirs.count(None)) >= 5


def test_departure_the_last_message_counts(reward: MathAccuracy) -> None:
    messages = [{"role": "assistant", "content": f"It is \\boxed{{{number}}}"} for number in (17, 18)]
    assert accuracy_rewards.accuracy_reward([messages], ["18"]) == [0.0]
    assert reward(completions=[messages], solution=["18"]) == [1.0]


def test_departure_exact_fractions_that_differ_are_not_equal(reward: MathAccuracy) -> None:
    pairs = [("$\\frac{1}{2006!}$", "\\boxed{\\frac{1}{2004!}}"), ("$10^{-30}$", "\\boxed{10^{-31}}")]
    assert both(reward, pairs) == ([0.0, 0.0], [1.0, 1.0])
    # The same numbers, written otherwise, still are.
    others = ["\\boxed{\\frac{1}{2006 \\cdot 2005!}}", "\\boxed{\\frac{1}{10^{30}}}"]
    assert reward(completions=others, solution=[reference for reference, _ in pairs]) == [1.0, 1.0]
