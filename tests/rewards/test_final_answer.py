"""Where the final number of a completion stands, and what it is worth: one table per idea, written by hand."""

from __future__ import annotations

import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.rewards._text.final_answer import extract_final_answer, final_number, parse_reference

MARKERS = [
    "#### 18",
    "####18",
    "##### 18",
    "#### $18",
    "#### 18 eggs",
    "#### 18, altogether.",
    "#### **18**",
    "#### \\boxed{18}",
    "#### Answer: 18",
    "#### <<9*2=18>>18",
    "#### 18.",
    "#### eighteen",
    r"\boxed{18}",
    r"\boxed 18",
    r"\fbox{18}",
    r"\boxed{\boxed{18}}",
    r"\boxed{\text{\$}18}",
    r"\boxed{\$18.00}",
    r"\boxed{18 \text{ dollars}}",
    r"\boxed{\text{18 dollars}}",
    r"\boxed{\textbf{18}}",
    r"\boxed{\mathbf{18}}",
    r"\boxed{x = 18}",
    r"\boxed{3x = 54, x = 18}",
    r"\boxed{\text{Janet makes } 18}",
    r"\boxed{\text{Total: } 18}",
    r"\boxed{18\%}",
    r"\boxed{18^\circ}",
    r"\boxed{18\text{ m}^2}",
    r"\boxed{18\,\text{km/h}}",
    r"\boxed{\frac{36}{2}}",
    r"\boxed{\frac{54}{3} = 18}",
    r"\boxed{9 \times 2 = 18}",
    r"\boxed{18",
    r"So the answer is $\boxed{18}$.",
    "So the answer is: \n\n$$\\boxed{18}$$",
    "\\[\n\\boxed{18}\n\\]",
    r"Therefore, Janet makes \(\boxed{18}\) dollars every day.",
    "<answer>18</answer>",
    "<answer>\n$18\n</answer>",
    "<ANSWER>18</ANSWER>",
    "<answer>18",
    "<answer>eighteen</answer>",
    r"<answer>\boxed{18}</answer>",
    "<answer>The answer is 18.</answer>",
    "<answer>Janet makes $18 per day.</answer>",
    "<answer>She sells 9 eggs, so 9 * 2 = 18</answer>",
    "<answer>3 * 6 = 18</answer> I used 4 steps.",
    "The answer is 18",
    "The answer is $18.",
    "The answer is \\$18.",
    "The answer is $18$.",
    "The answer is \\(18\\).",
    "The answer is $\\$18$.",
    "The answer is $$18$$",
    "The answer is 18 dollars.",
    "The answer is **18**.",
    "The answer is **$18**.",
    "The answer is `18`.",
    "The answer is: 18",
    "The answer is:\n\n18 dollars",
    "The answer is:\n- 18 eggs",
    "The answer is:\n$$\n18\n$$",
    "The answer is x = 18.",
    "The answer is approximately 18.",
    "The answer is therefore 18.",
    "The answer, therefore, is 18.",
    "The answer is equal to 18.",
    "The answer would be 18.",
    "The answer should be $18.",
    "The answer's 18.",
    "The answer to the question is 18.",
    "The answer in dollars is 18.",
    "The answer (in dollars) is 18.",
    "The answer is eighteen.",
    "The answer is eighteen dollars.",
    "the final answer is 18.",
    "Final Answer: The final answer is $18$. I hope it is correct.",
    "The final answer is: $\\boxed{18}$",
    "Final answer 18",
    "A: 18",
    "**A:** 18",
    "A: $18 per day",
    "Ans: 18",
    "ANSWER: 18",
    "Answer: 18",
    "Answer = 18",
    "Answer → 18",
    "**Answer:** 18",
    "**Answer**: 18",
    "**Answer: 18**",
    "**Final Answer:** $18",
    "\\textbf{Answer:} 18",
    "### Final Answer: 18",
    "### Answer\n18",
    "**Final Answer**\n\n$18",
    "Answer:\n```\n18\n```",
    '{"reasoning": "9 * 2", "answer": 18}',
    '{"final_answer": "18"}',
    "答案是：18",
    "答案：１８。",
]


@pytest.mark.parametrize("text", MARKERS)
def test_a_marked_answer_is_read_and_what_surrounds_it_is_not(text: str) -> None:
    assert extract_final_answer(text) == 18
    assert extract_final_answer(f"She eats 3 + 4 = 7 of the 16 eggs.\n{text}") == 18
    assert extract_final_answer(f"The answer is 5.\nWait, that is 5 too many.\n{text}") == 18


NUMBERS = [
    ("1,234", 1234),
    ("1,234,567.50", Fraction("1234567.5")),
    ("1{,}234", 1234),
    (r"1\,234", 1234),
    (r"1\!234", 1234),
    (r"1,\!234", 1234),
    (r"1\ 234", 1234),
    ("1\u00a0234", 1234),
    ("1\u2009234\u2009567", 1234567),
    ("1\u202f234", 1234),
    ("1'234", 1234),
    ("1_234", 1234),
    ("1,00,000", 100000),
    ("1234,567", 1234567),
    ("10 000", 10000),
    ("1 500 000", 1500000),
    ("$12 500", 12500),
    ("18.0", 18),
    ("18.00", 18),
    ("018", 18),
    ("0", 0),
    ("7.41", Fraction("7.41")),
    (".5", Fraction(1, 2)),
    ("0.5", Fraction(1, 2)),
    ("18,50 €", Fraction("18.5")),
    ("-18", -18),
    ("−18", -18),
    ("－18", -18),
    ("–18", -18),
    ("+18", 18),
    ("negative 18", -18),
    ("minus eighteen", -18),
    ("-$18", -18),
    ("$-18", -18),
    ("-1,234.5", Fraction("-1234.5")),
    ("(-18)", -18),
    ("１８", 18),
    ("１，２３４．５", Fraction("1234.5")),
    ("١٨", 18),
    ("𝟏𝟖", 18),
    ("1\u200b8", 18),
    ("$18", 18),
    ("£18", 18),
    ("€18", 18),
    ("18€", 18),
    ("₹18", 18),
    ("US$18", 18),
    ("USD 18", 18),
    ("Rs. 18", 18),
    ("18%", 18),
    ("18 %", 18),
    ("18\\%", 18),
    ("18kg", 18),
    ("18 kg", 18),
    ("$18/hour", 18),
    ("18 m^2", 18),
    ("18 m²", 18),
    ("18 m2", 18),
    ("18 cups of H2O", 18),
    ("18 (eighteen)", 18),
    ("5pm", 5),
    ("5:00 PM", 5),
    ("18th", 18),
    ("1/2", Fraction(1, 2)),
    ("-3/4", Fraction(-3, 4)),
    ("1 1/2", Fraction(3, 2)),
    ("2-1/2", Fraction(5, 2)),
    ("1 and 1/2", Fraction(3, 2)),
    ("½", Fraction(1, 2)),
    ("1½", Fraction(3, 2)),
    ("2⅔", Fraction(8, 3)),
    ("1⁄2", Fraction(1, 2)),
    (r"\frac{1}{2}", Fraction(1, 2)),
    (r"\dfrac12", Fraction(1, 2)),
    (r"\tfrac{1}{2}", Fraction(1, 2)),
    (r"-\frac{1}{2}", Fraction(-1, 2)),
    (r"\frac{-1}{2}", Fraction(-1, 2)),
    (r"1\frac{1}{2}", Fraction(3, 2)),
    (r"\frac{1,000}{3}", Fraction(1000, 3)),
    ("1.8e3", 1800),
    ("1.8E+3", 1800),
    ("5e-1", Fraction(1, 2)),
    (r"1.8 \times 10^{3}", 1800),
    ("1.8 × 10^3", 1800),
    ("1.8 x 10^3", 1800),
    ("10^3", 1000),
    ("2^{10}", 1024),
    ("$1.5 million", 1500000),
    ("two million", 2000000),
    ("3 hundred", 300),
    ("$70k", 70000),
    ("18 dollars and 50 cents", Fraction("18.5")),
    ("18 and a half", Fraction("18.5")),
    ("two and a half", Fraction("2.5")),
    ("twenty-one", 21),
    ("one hundred and five", 105),
    ("three thousand, two hundred", 3200),
    ("zero", 0),
]


@pytest.mark.parametrize(("written", "value"), NUMBERS)
def test_a_number_is_worth_what_it_says(written: str, value: Fraction) -> None:
    assert extract_final_answer(f"#### {written}") == value
    assert extract_final_answer(f"The answer is {written}.") == value
    assert extract_final_answer(f"**Answer:** {written}\n") == value
    assert extract_final_answer(f"<answer>{written}</answer>") == value
    assert extract_final_answer(f"\\boxed{{{written}}}") == value


@pytest.mark.parametrize(
    "ending", ["", ".", ",", ".,", "!", "?", ";", ":", "**", ".**", '"', "”", ")", "$.", "\\)", "\n", " .", "。"]
)
@pytest.mark.parametrize("number", ["18", "1,818", "18.50"])
def test_punctuation_behind_a_number_is_no_part_of_it(number: str, ending: str) -> None:
    value = Fraction(number.replace(",", ""))
    assert extract_final_answer(f"The answer is {number}{ending}") == value
    assert extract_final_answer(f"So she makes ${number}{ending}") == value


FALLBACK = [
    ("She makes 9 * 2 = 18", 18),
    ("She makes 9 * 2 = $18 every day at the farmers' market.", 18),
    ("9 eggs\n= 18", 18),
    ("= - 18", -18),
    ("#### - 18", -18),
    (r"\boxed{- 18}", -18),
    ("- 18", 18),
    ("48 -40 = 8", 8),
    ("The rest is 48 -40", None),
    ("16-3-4", None),
    ("The temperature fell to -5 degrees", -5),
    ("So she makes **$18** every day, selling 9 eggs.", 18),
    ("So she makes **$18** every day.\n\nLet me know if you have any questions!", 18),
    ("Total: **9 × 2 = 18** for 2 people", 18),
    ("**9** eggs at $2 each are 9 * 2 = $18", 18),
    ("**Step 3:** Janet makes $18", 18),
    ("She is left with 57 seats after the 2nd stop.", 57),
    ("She gained 1 place, which makes 7 - 1 = 6th", 6),
    ("She gained 1 place: 7-1=6th", 6),
    ("It rained on the 13th", 13),
    ("She makes 18 dollars.\n1. This is per day.", 18),
    ("1. Eggs: 9\n2. Money: 9 * 2 = 18\n3. Done.", 18),
    ("| eggs | 9 |\n| total | 18 |", 18),
    ("Step 1: 16 - 7 = 9\nStep 2: 9 * 2 = 18", 18),
    ("He is done by 18 on 12/25/2020", 18),
    ("She makes 18, see x_1 and x_{2}", 18),
    ("The area is 18 m^2.", 18),
    ("一共18元", 18),
    ("It takes 2 1/2 hours", Fraction(5, 2)),
    ("They need 5-7 apples", 7),
    ("The price is 1.234.", Fraction("1.234")),
    ("18", 18),
    ("  18  \n\n", 18),
    ("\x0018\x00", 18),
    ("\ud80018\udfff", 18),
    ("eighteen", None),
    ("I don't know.", None),
    ("H2O", None),
    ("", None),
    ("It is 12:30", None),
    ("1/0", None),
    ("#### ", None),
    (r"\boxed{}", None),
    ("<answer></answer>", None),
    ("The answer is", None),
    ("The answer is one of these.", None),
]


@pytest.mark.parametrize(("text", "value"), FALLBACK)
def test_without_a_marker_the_last_number_counts(text: str, value: Fraction | None) -> None:
    assert extract_final_answer(text) == value


PROSE_AND_EQUATIONS = [
    ("The answer is 18 because 3 * 6 = 18 and 2 were left.", 18),
    ("The answer is 18 since 20 - 2 = 18, not 5.", 18),
    ("The answer is 18 because total = 20 - 2.", 18),
    ("Answer: 18 (since 16 - 3 - 4 = 9 and 9 × 2 = 18, for 4 days)", 18),
    ("The answer is 18 dollars for 9 eggs at $2.", 18),
    ("The answer is 18. She had 2 left.", 18),
    ("The answer is 18.\n1. First she eats 3.\n2. Then she bakes 4.", 18),
    ("The answer is 3 * 6 = 18", 18),
    ("The answer is 3 × 6 = 18 for 2 days.", 18),
    ("The answer is $18 + $2 = $20.", 20),
    ("The answer is $9 \\times 2 = \\$18$ dollars.", 18),
    ("The answer is 18 = 3 * 6", 18),
    ("The answer is 100 / 3 = 33.333 ≈ 33", 33),
    ("The answer is 15 gallons * 8 pints / gallon = <<15*8=120>>120 pints", 120),
    ("The answer is <<8=8>>8.", 8),
    ("The answer is 16 - 3 - 4 = 9 eggs, and 9 * 2 = 18.", 18),
    ("The answer is\n\\[ 9 \\times 2 = 18 \\]", 18),
    ("The answer is 50% of 36 = 18.", 18),
    ("The answer is 18 of the 20.", 18),
    ("The answer is 18 of 20.", 18),
    ("<answer>16 - 7 = 9\n9 * 2 = 18</answer>", 18),
    ("Answer: 16 - 7 = 9 eggs.\nThis gives 9 * 2 = 18 dollars.\n\nNote: 5 of 16 = 31.25%", 18),
    ("Answer: 3 * 6 = 18\n\nExplanation: 36 = 6 * 6", 18),
    ("Answer: x = 18\nExplanation: 3 boxes of 6", 18),
    ("#### 3 + 15 = 18", 18),
    ("#### 5 hours = 300 minutes", 300),
    ("Answer: Janet makes $18 every day at the farmers' market.", 18),
    ("Answer: She has 16 - 3 - 4 = 9 eggs left, so she makes 9 * 2 = $18", 18),
    ("Answer: 16 - 3 - 4 = 9 eggs are left, so she makes 9 * 2 = $18", 18),
    ("Answer: Let's see.\n\n1. 16 - 7 = 9 eggs\n2. 9 * 2 = 18 dollars", 18),
    ("A: There are 15 trees originally. Then there were 21. 21 - 15 = 6. The answer is 6.", 6),
    ("A: There are 15 trees originally. Then there were 21. 21 - 15 = 6.", 6),
    ("the answer is not 5 but 6", 6),
    ("The answer is the sum of 3 and 15. 3 + 15 = 18.", 18),
    ("#### 18\nThe answer is found by multiplying 9 by 2.", 18),
    ("The answer is between 5 and 18", 18),
    ("The answer is 3 * 6, so 18", 18),
]


@pytest.mark.parametrize(("text", "value"), PROSE_AND_EQUATIONS)
def test_prose_and_equations_inside_an_answer(text: str, value: int) -> None:
    assert extract_final_answer(text) == value


PRECEDENCE = [
    ("The answer is 17. Wait, that is wrong. The answer is 18.", 18),
    ("#### 17\n#### 18", 18),
    (r"\boxed{17} and then \boxed{18}", 18),
    (r"\boxed{18} and then \boxed{}", 18),
    (r"#### 17" "\n" r"\boxed{18}", 18),
    (r"\boxed{17}" "\n#### 18", 18),
    (r"The answer is \boxed{18}. Note that 18 / 2 = 9 and 2 * 9 = 18, as 7 eggs were used.", 18),
    ("#### 18\n\nExplanation: 16 - 7 = 9, and that in 2 lines.", 18),
    ("#### 18\n#### Explanation: 9 * 2", 18),
    ("So 18 eggs. \\boxed{}", 18),
    ("#### 1. Eggs\n16 - 7 = 9\n#### 2. Money\n9 * 2 = $18", 18),
    ("#### Step 1: Eggs\n16 - 7 = 9\n#### Step 2: Money\n9 * 2 = $18", 18),
    ("Each correct answer is 5 points. A wrong answer is 2 points. Together that is 18.", 18),
    ("The first answer was 1800, the second answer was 1400, together that is 3200", 3200),
    ("The answer to the first question is 1200. The last one is 2000, together 3200", 3200),
    ("A: 5\nB: 6\nTogether: 11", 11),
    ("The answers are 3 and 15, in total 18", 18),
    ("He answered 5 questions, then 18", 18),
]


@pytest.mark.parametrize(("text", "value"), PRECEDENCE)
def test_the_last_explicit_answer_wins_over_bare_numbers(text: str, value: int) -> None:
    assert extract_final_answer(text) == value


THOUGHTS_AND_RUN_ON = [
    ("<think>The answer is 17</think>\n\nShe makes 18.", 18),
    ("<think>9 * 2 = 18</think>\n\nAs computed.", 18),
    ("<reasoning>#### 17</reasoning><answer>18</answer>", 18),
    ("<think>So 18. Or is the answer 18", 18),
    ("#### 18\n\nQuestion: Tom has 5 apples and buys 3. How many?\nAnswer: 5 + 3 = 8\n#### 8", 18),
    ("The answer is 18.\n\nQ: There are 15 trees.\nA: 21 - 15 = 6. The answer is 6.", 18),
    ("18 eggs.\nAnswer: 18\n\n**Problem 2:** Tom has 5 apples.", 18),
    (r"\boxed{18}" "\n\nHuman: And in 2 days?\n\nAssistant: \\boxed{36}", 18),
    ("Question: Janet has 16 eggs and eats 7.\nAnswer: She sells 9.\n#### 9", 9),
    ("Q: Janet has 16 eggs.\nShe sells 9.\nQ: How many dollars?\nAnswer: 18", 18),
    ("She makes 18<|im_end|>\n<|im_start|>user\nAnd in 2 days?", 18),
    ("<|im_start|>assistant\nShe makes 18<|im_end|>", 18),
    ("#### 18<|endoftext|>Human: 5 + 5 = 10", 18),
    ("#### 18</s> 7", 18),
]


@pytest.mark.parametrize(("text", "value"), THOUGHTS_AND_RUN_ON)
def test_thoughts_before_and_other_questions_after_do_not_count(text: str, value: int) -> None:
    assert extract_final_answer(text) == value


def test_a_scale_word_keeps_the_face_of_the_number() -> None:
    number = final_number("The answer is $60 million.")
    assert number is not None
    assert (number.value, number.face) == (60_000_000, 60)


REFERENCES = [
    ("She makes 9 * 2 = $<<9*2=18>>18.\n#### 18", 18),
    ("#### 1,234", 1234),
    ("#### -5", -5),
    ("#### 7.41", Fraction("7.41")),
    ("first #### 17\n#### 18", 18),
    ("18", 18),
    (" 18\n", 18),
    ("$18", 18),
    ("1,000", 1000),
    ("1/2", Fraction(1, 2)),
    ("18 dollars", 18),
    ("18%", 18),
    ("eighteen", 18),
    (18, 18),
    (-18, -18),
    (18.0, 18),
    (0.1, Fraction(1, 10)),
    (1e21, 10**21),
    (Fraction(1, 3), Fraction(1, 3)),
    (Decimal("18.50"), Fraction("18.5")),
    ("", None),
    ("####", None),
    ("#### none", None),
    ("blue", None),
    ("She sells 9 eggs for 18 dollars", None),
    ("18 or 20", None),
    ("12:30", None),
    (None, None),
    (True, None),
    (float("nan"), None),
    (float("inf"), None),
    ([18], None),
    ({"answer": 18}, None),
]


@pytest.mark.parametrize(("reference", "value"), REFERENCES, ids=repr)
def test_a_reference_is_a_number_or_nothing(reference: object, value: Fraction | None) -> None:
    assert parse_reference(reference) == value


STYLES = [
    "{}",
    "So the total is {}.",
    "3 + 4 = {}",
    "#### {}",
    "A: {}",
    "Answer: {}\n",
    "**Answer:** {}",
    "**Final Answer**\n\n{}",
    "The answer is {}.",
    "The answer is ${}. She had 7 left.",
    "The answer is **{}** dollars, from 3 * 4 eggs.",
    "\\boxed{{{}}}",
    "$$\\boxed{{\\${} \\text{{ dollars}}}}$$",
    "<answer>{}</answer> in 12 steps",
    "<think>The answer is 12.</think>{}",
    "The answer is 2 + 3 = {}",
    "The answer is {}%, that is {} in 100.",
]


def _written(value: Decimal) -> list[str]:
    plain = f"{value:f}"
    return [plain, f"{value:,f}", plain.replace("-", "−"), f"{value:,f}".replace(",", "{,}"), f"{value:.4f}"]


@given(
    value=st.decimals(min_value=-(10**12), max_value=10**12, places=2) | st.integers(-(10**30), 10**30).map(Decimal),
    other=st.integers(-(10**9), 10**9),
    style=st.sampled_from(STYLES),
    form=st.integers(0, 4),
)
def test_every_number_is_read_back_from_every_style(value: Decimal, other: int, style: str, form: int) -> None:
    written = _written(value)[form]
    found = extract_final_answer(style.format(*[written] * style.count("{}")))
    assert found == Fraction(value)
    assert (found == other) == (value == other)


@given(st.text() | st.text(alphabet="0123456789 .,-/$\\{}()^_#*:=<>\nabcdefqrsw%½é１–\ud800\x00", max_size=200))
def test_no_text_raises(text: str) -> None:
    found = extract_final_answer(text)
    assert found is None or isinstance(found, Fraction)


@given(
    st.lists(st.sampled_from([*MARKERS, "Question: 5?", "</think>", "**", "\n", "{", "= ", "1 ", "one "]), max_size=12)
)
def test_no_medley_of_markers_raises(parts: list[str]) -> None:
    found = extract_final_answer(" ".join(parts))
    assert found is None or isinstance(found, Fraction)


LONG = 100_000
HOSTILE = {
    "one huge integer": "9" * 200_000,
    "marked huge integer": "The answer is " + "9" * 200_000,
    "huge with groups": "#### 1" + ",000" * (LONG // 4),
    "spaced groups": "1" + " 111" * (LONG // 4),
    "commas": "1," * (LONG // 2),
    "indian groups": "11," * (LONG // 3),
    "huge exponent": "The answer is 1e" + "9" * LONG,
    "huge power": "The answer is 9^" + "9" * LONG,
    "powers": r"1 \times 10^" * (LONG // 12),
    "open boxes": "\\boxed{" * (LONG // 7),
    "nested boxes": "\\boxed{" * (LONG // 14) + "}" * (LONG // 14),
    "open fractions": "\\frac{1}{" * (LONG // 9),
    "open answers": "<answer>" * (LONG // 8),
    "answers of words": "<answer>x " * (LONG // 10),
    "hashes": "#" * LONG,
    "empty markers": "####\n" * (LONG // 5),
    "answer is": "the answer is " * (LONG // 14),
    "answer to": "answer to a b c d e f g h i j k l m n o p q r s t u " * (LONG // 52),
    "answer headings": "Answer:\n" * (LONG // 8),
    "letters": "A:\n" * (LONG // 3),
    "questions": "Question: 1\nanswer is\n" * (LONG // 22),
    "turn ends": "</s>" * (LONG // 4) + "1",
    "thoughts": "1</think>" * (LONG // 9),
    "spaces": "The answer is" + " " * LONG,
    "newlines": "1\n" * (LONG // 2),
    "labels": "1. a\n" * (LONG // 5),
    "ordinals": "1st " * (LONG // 4),
    "equations": "The answer is " + "1=" * (LONG // 2),
    "variables": "The answer is " + "x=" * (LONG // 2),
    "units": "The answer is 1 " + "a " * (LONG // 2),
    "words": "The answer is " + "one " * (LONG // 4),
    "bold": "**1" * (LONG // 3),
    "stars": "*" * LONG,
    "minuses": "-" * LONG,
    "slashes": "1/" * (LONG // 2),
    "nul": "\x00" * LONG,
    "surrogates": "\ud800" * LONG,
    "scripts": "".join(chr(c) for c in range(0x100, 0x100 + LONG) if not 0xD800 <= c < 0xE000),
    "arabic digits": "٣" * LONG,
    "combining marks": "a" + "\u0301\u0316" * (LONG // 2),
    "leading zeros": "0" * LONG,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_take_linear_time(name: str) -> None:
    text = HOSTILE[name]
    started = time.perf_counter()
    extract_final_answer(text)
    assert time.perf_counter() - started < 1.0


def test_a_number_too_long_to_evaluate_equals_nothing_and_hides_nothing_behind_it() -> None:
    assert extract_final_answer("The answer is " + "9" * 200_000) is None
    assert extract_final_answer("The answer is " + "9" * 200_000 + ". No: the answer is 18.") == 18
    assert extract_final_answer("The answer is 18. Not " + "9" * 200_000) == 18
    assert extract_final_answer("0" * 200_000 + "18") == 18
    assert extract_final_answer("18." + "0" * 200_000) == 18
    assert extract_final_answer("1e99999") is None
