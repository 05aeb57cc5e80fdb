"""`math_accuracy` gives the verdicts of TRL's own `accuracy_reward` on a corpus, but for what differs on purpose."""

from typing import Any

import pytest

from tests.rewards.math_corpus import PAIRS
from trl_grpo_ext.rewards.math_accuracy import MathAccuracy

accuracy_rewards = pytest.importorskip("trl.rewards.accuracy_rewards", reason="TRL's own reward is the oracle here")
pytestmark = pytest.mark.filterwarnings("ignore:math_accuracy cannot read the reference")


@pytest.fixture(scope="module")
def reward(with_math_workers: Any) -> MathAccuracy:
    made: MathAccuracy = with_math_workers(timeout=10.0)
    return made


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
def test_every_pair_of_the_corpus_has_trls_verdict(reward: MathAccuracy) -> None:
    ours, theirs = both(reward, PAIRS)
    differ = {pair: [own, trl] for pair, own, trl in zip(PAIRS, ours, theirs, strict=True) if own != trl}
    on_purpose = {pair: scores for pair, scores in DEPARTURES.items() if pair in differ}
    assert differ == on_purpose
    assert len({reference for reference, _ in differ}) == len({reference for reference, _ in DEPARTURES})
    assert len(set(PAIRS)) >= 250
    assert min(theirs.count(1.0), theirs.count(0.0), theirs.count(None)) >= 5


def test_departure_the_last_message_counts_and_endless_references_do_not(reward: MathAccuracy) -> None:
    messages = [
        {"role": "assistant", "content": "Let me think: \\boxed{17}"},
        {"role": "user", "content": "Are you sure?"},
        {"role": "assistant", "content": "It is \\boxed{18}"},
    ]
    assert accuracy_rewards.accuracy_reward([messages], ["18"]) == [0.0]
    with pytest.raises(TypeError):
        accuracy_rewards.accuracy_reward(["\\boxed{18}"], ["18"])
    assert reward(completions=[messages, "\\boxed{18}"], solution=["18", "18"]) == [1.0, 1.0]
    assert reward(completions=["\\boxed{5}"], solution=["$9^{9^{9^9}}$"]) == [None]


def test_departure_exact_fractions_that_differ_are_not_equal(reward: MathAccuracy) -> None:
    pairs = [("$\\frac{1}{2006!}$", "\\boxed{\\frac{1}{2004!}}"), ("$10^{-30}$", "\\boxed{10^{-31}}")]
    assert both(reward, pairs) == ([0.0, 0.0], [1.0, 1.0])
    # The same numbers, written otherwise, still are.
    others = ["\\boxed{\\frac{1}{2006 \\cdot 2005!}}", "\\boxed{\\frac{1}{10^{30}}}"]
    assert reward(completions=others, solution=[reference for reference, _ in pairs]) == [1.0, 1.0]
