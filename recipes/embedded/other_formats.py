"""How the tiny model's pre-training texts answer: some right, the rest in the ways in which real models go wrong.

A model that has only seen right solutions leaves reinforcement learning nothing to do. A real base model knows more
than its samples show: it guesses, asks back, refuses, stays vague, slips. These writers give the tiny model the same
shape. It knows the right way, takes it about three times in ten, and rewards can teach it to take it.

Nothing but `right` may count as right under a lenient reader that takes the last number anywhere in a text. And all
ways begin alike ("Mia has ..."), with the choice after it. When they did not, training learned that certain first
letters led to wrong answers, and unlearned the names that start with them: right sums about "ax" in place of Max.
"""

import random
from collections.abc import Callable

from embedded.word_problems import Problem


def right(problem: Problem, rng: random.Random) -> str:
    """The solution as GSM8K writes it."""
    return problem.solution()


def slip(problem: Problem, rng: random.Random) -> str:
    """The right format with a result that is a little off."""
    return problem.solution(result=problem.result + rng.choice((-1, 1)))


def wrong_operation(problem: Problem, rng: random.Random) -> str:
    """Adds where it should subtract, and the other way round where that does not go below zero."""
    if problem.template.operation == "-":
        return problem.solution(operation="+", result=problem.a + problem.b)
    if problem.a < problem.b:
        return slip(problem, rng)
    return problem.solution(operation="-", result=problem.a - problem.b)


def guess(problem: Problem, rng: random.Random) -> str:
    """Takes a number of the question for the answer."""
    number = problem.a if problem.b == problem.result else problem.b
    return f"{problem.subject} {number} {problem.objects} or so."


def vague(problem: Problem, rng: random.Random) -> str:
    """Says how things went, without a number."""
    more = "more" if problem.template.operation == "+" else "fewer"
    return f"{problem.subject} {more} {problem.objects} than before."


def question(problem: Problem, rng: random.Random) -> str:
    """Asks back."""
    return f"{problem.subject} how many {problem.objects}?"


def refusal(problem: Problem, rng: random.Random) -> str:
    """Declines to answer."""
    return f"{problem.subject} {problem.objects}, but I lost count."


SHARES: dict[Callable[[Problem, random.Random], str], float] = {
    right: 0.28,
    slip: 0.04,
    wrong_operation: 0.04,
    guess: 0.16,
    vague: 0.16,
    question: 0.16,
    refusal: 0.16,
}
"""How often each way of answering is used. Right ones are rare enough to leave room, common enough to be found."""


def write_solution(problem: Problem, rng: random.Random) -> str:
    """Answer a problem in one of the ways above, drawn by its share."""
    (writer,) = rng.choices(list(SHARES), weights=list(SHARES.values()))
    return writer(problem, rng)
