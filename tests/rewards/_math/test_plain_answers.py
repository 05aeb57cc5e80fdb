"""Numbers that are decided without math-verify: by hand, and against math-verify itself on thousands of texts."""

from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trl_grpo_ext.guard.outcomes import Outcome
from trl_grpo_ext.rewards._math import plain_answers as plain

of_completion, of_reference = plain.excess_of_completion, plain.excess_of_reference


def value(number: object) -> Fraction | None:
    return None if number is None else number.value  # type: ignore[attr-defined]


REFERENCES = dict.fromkeys(("18", " 18\n", "$18$", "$\\boxed{18}$"), 18) | {
    "#### 1,234": 1234,
    "12.50": Fraction(25, 2),
    "\\boxed{-1,234.5}": Fraction(-2469, 2),
    "3/4": Fraction(3, 4),
    "-\\frac{3}{4}": Fraction(-3, 4),
    "-\\frac{-3}{4}": Fraction(3, 4),
    "$\\dfrac{6}{8}$": Fraction(3, 4),
}
OTHER_REFERENCES = [
    *("", "18.", "+18", "12,34", "0,5", "50%", "\\$18", "$18", "1 234", "\\dfrac{3}{4}", "3/0", "0/3", "x", "18 cm"),
    *("\uff12", "9" * 31, "0.1234567", "2\\frac{1}{2}", "$\\frac34$", "1/2/3", "#### 3/4", "a $18$", "18\n19", "1e5"),
    *(".5", "007", "-01", "00"),
]
COMPLETIONS = {
    "She makes 9*2 = $18 per day. The answer is \\boxed{18}.": 18,
    "costs $5 and $6, \\boxed{11}, change $3": 11,
    "$$x = \\boxed{ 18 }$$": 18,
    "\\boxed{\\$1,234.50}": Fraction(2469, 2),
    "\\boxed{\\$18 \\text{ dollars}}": 18,
    "50% of 36 is \\boxed{18}": 18,
    "\\boxed{-\\dfrac{3}{4}} and a set {1}": Fraction(-3, 4),
}
OTHER_COMPLETIONS = [
    *("", "18", "$18$", "\\boxed{17} \\boxed{18}", "\\boxed{18} \\boxed", "\\boxed{18} \\fbox{17}", "\\boxed {18}"),
    *("\\boxed{18", "\\boxed{}", "\\boxed{18} The final answer is $17$. I hope it is right.", "$\\boxed{18}$ %"),
    *("$\\boxed{18}$ percent", "\\boxed{18\\%}", "\\boxed{18\\text{ percent}}", "\\boxed{18\\text{ or so}}"),
    *("\\boxed{18 cm}", "\\boxed{18\\text{ cm}^2}", "\\boxed{x=18}", "\\boxed{{18}}", "\\boxed{1 234}"),
    *("\\boxed{\u0663}", "\\boxed{18\x00}", "\\boxed{" + "9" * 200 + "}"),
]


def test_plain_answers_reads_plain_numbers_alone() -> None:
    assert {text: value(plain.plain_reference(text)) for text in REFERENCES} == REFERENCES
    assert [text for text in OTHER_REFERENCES if plain.plain_reference(text) is not None] == []
    assert {text: value(plain.plain_answer(text)) for text in COMPLETIONS} == COMPLETIONS
    assert [text for text in OTHER_COMPLETIONS if plain.plain_answer(text) is not None] == []


def test_numbers_are_compared_exactly_and_near_decimals_are_left() -> None:
    right, wrong = Outcome.RIGHT, Outcome.WRONG
    for reference, answer, outcome in (
        *(("18", "18.00", right), ("18", "36/2", right), ("1,234", "1234", right), ("0.75", "\\frac{3}{4}", right)),
        *(("18", "17", wrong), ("18", "-18", wrong), ("1/3", "0.3333", wrong), ("1/3", "333333/1000000", wrong)),
        *(("1/3", "0.333333", None), ("2", "2.000001", None), ("2", "2.000003", wrong)),
    ):
        gold, found = plain.plain_reference(reference), plain.plain_answer(f"\\boxed{{{answer}}}")
        assert gold is not None
        assert found is not None
        assert plain.verdict(gold, found) == outcome


def test_a_text_has_no_answer_where_nothing_can_begin_one() -> None:
    assert all(map(plain.has_no_answer, ("", "18", "the answer is 18", "$18$", "\\boxed 18")))
    # A long s is an s to a regular expression that ignores case.
    assert not any(map(plain.has_no_answer, ("ANSWER: \\frac{1}{2}", "an\u017fwer: $18$", "\\boxed{}")))


digits = st.integers(0, 10**7) | st.integers(0, 30) | st.integers(0, 10**30 - 1)
signs = st.sampled_from(["", "", "-"])
tails = st.sampled_from(["0", "00", "5", "50", "25", "75", "333333", "333334", "000001", "142857", "999999", "1"])
small = st.integers(0, 40)
numbers = st.one_of(
    st.builds("{}{}".format, signs, digits),
    st.builds("{}{:,}".format, signs, digits),
    st.builds("{}0{}".format, signs, digits),
    st.builds("{}{}.{}".format, signs, st.integers(0, 10**8), tails),
    st.builds("{}{:,}.{}".format, signs, st.integers(0, 10**8), tails),
    st.builds("{}{}/{}".format, signs, small, small),
    st.builds("{}\\frac{{{}}}{{{}}}".format, signs, small, small),
    st.builds("{}\\{}frac{{{}{}}}{{{}}}".format, signs, st.sampled_from("dt"), signs, small, small),
)
pieces = st.sampled_from(
    [
        *("She makes 9*2 = $18 per day. ", "The answer is ", "$", "$$", "\\[", "\\]", "\\(", "\\)", " [", "] "),
        *("\n", "%", "{", "}", "final answer is ", " I hope", "answer: ", "= 3", " percent", " and ", ", "),
        *("\\$5 ", "\\", "#### 5 ", "**", "^2", "\\frac{1}{2} ", "x", ".", "\\text{", "\x00", "1,234", " or "),
    ]
)
texts = st.lists(pieces, max_size=6).map("".join)
forms = st.sampled_from(
    [
        *("{}", "{}", "{}", "${}", "\\${}", " {} ", "{}\\text{{ apples}}", "{} \\text{{ dollars}}"),
        *("{}%", "{}\\text{{inches}}", "{}$"),
    ]
)
reference_forms = st.sampled_from(["{}", "{}", "#### {}", "${}$", "\\boxed{{{}}}", "$\\boxed{{{}}}$", "\\({}\\)"])


@st.composite
def spellings(draw: st.DrawFn) -> tuple[str, str]:
    """A number, and with even odds another spelling of it or another number."""
    written = draw(numbers)
    number = plain.plain_answer(f"\\boxed{{{written}}}")
    if number is None or draw(st.booleans()):
        return written, draw(numbers)
    above, below = number.value.numerator, number.value.denominator
    ways = [written, f"{above}/{below}", f"\\frac{{{above}}}{{{below}}}", f"{above * 3}/{below * 3}"]
    ways += [f"{float(number.value):.{places}f}" for places in (0, 2, 5, 6)]
    ways += [f"{above:,}", f"{above}.0"] if below == 1 else []
    return written, draw(st.sampled_from(ways))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[str, str]:
    reference, answer = draw(spellings())
    box = "\\boxed{" if draw(st.integers(0, 9)) else draw(st.sampled_from(["boxed{", "$", "{", "\\boxed{1}\\boxed{"]))
    completion = f"{draw(texts)}{box}{draw(forms).format(answer)}}}{draw(texts)}"
    return draw(reference_forms).format(reference), completion


@pytest.mark.slow
@given(pair=pairs())
@example(pair=("1.5", "\\boxed{3/2}"))
@example(pair=("2/3", "\\boxed{0.666667}"))
@example(pair=("-01", "boxed{-01}"))
@settings(max_examples=300)
def test_what_is_decided_here_is_math_verifys_verdict(pair: tuple[str, str]) -> None:
    accuracy_rewards = pytest.importorskip("trl.rewards.accuracy_rewards", reason="TRL's own reward is the oracle here")
    reference, completion = pair
    gold = plain.plain_reference(reference)
    if gold is None:
        return
    found = plain.plain_answer(completion)
    outcome = plain.verdict(gold, found) if found is not None else None
    if outcome is None and plain.has_no_answer(completion):
        outcome = Outcome.NO_ANSWER
    if outcome is not None:
        [theirs] = accuracy_rewards.accuracy_reward([[{"content": completion}]], [reference])
        assert theirs == float(outcome is Outcome.RIGHT)


def nested(opening: str, closing: str, depth: int) -> tuple[str, str]:
    within, beyond = (f"{opening * count}1{closing * count}" for count in (depth, depth + 1))
    return within, beyond


@pytest.mark.parametrize(
    ("within", "beyond"),
    [
        *(nested(*pair, plain.DEEPEST) for pair in ("()", "{}", "[]", ("\\left(", "\\right)"))),
        nested("x^{", "}", plain.MOST_POWERS),
        ("9" * plain.MOST_DIGITS, "9" * (plain.MOST_DIGITS + 1)),
        ("\\binom{9999999}{3}", "\\binom{9999999}{999999}"),
        ("\\det 1" + "&1" * 35, "\\det 1" + "&1" * 36),
    ],
)
def test_what_would_take_the_parser_too_long_is_refused(within: str, beyond: str) -> None:
    for excess, form in ((of_completion, "\\boxed{{{}}}"), (of_reference, "{}")):
        assert excess(form.format(within), 10**6) is None
        assert excess(form.format(beyond), 10**6) is not None
    assert of_completion("\\boxed{" * 9 + "{" * 50, 10**6) == f"brackets more than {plain.DEEPEST} deep"


@pytest.mark.slow
@given(before=texts, content=texts | spellings().map("+".join), after=texts)
@settings(max_examples=200)
def test_the_box_alone_is_read_like_the_whole_completion(before: str, content: str, after: str) -> None:
    from trl_grpo_ext.rewards._math import verification

    completion = f"{before}\\boxed{{{content}}}{after}"
    with verification.replaced():
        alone, whole = (
            verification._parsed(text, verification._ANSWER, "first_match")
            for text in (plain.answer_alone(completion), completion)
        )
    assert str(alone) == str(whole)


def test_a_box_stands_alone_only_where_nothing_else_can_be_read() -> None:
    assert plain.answer_alone("50% of it is \\boxed{(1,2]} in all") == "\\boxed{(1,2]}"
    two = ("\\boxed{1} \\boxed{2}", "$\\boxed{5}$ %", "\\boxed{a $b$}", "x [ \\boxed{[1,2] }", "\\boxed{ }", "none")
    for text in two:
        assert plain.answer_alone(text) == text
    # A hostile middle does not count beside an ordinary box.
    assert of_completion(f"\\boxed{{{'9,' * (plain.LONGEST_ANSWER // 2)}}}", 10**6) is None
    assert of_completion(f"\\boxed{{{'9,' * plain.LONGEST_ANSWER}}}", 10**6) is not None
    assert of_completion("(" * 5000 + "9" * 5000 + " so \\boxed{18}", 20_000) is None
    for excess in (of_completion, of_reference):
        assert excess("x" * 20_001, 20_000) is not None
