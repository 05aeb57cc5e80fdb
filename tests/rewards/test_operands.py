"""A number that is only part of an expression, or that the text denies, is not the answer; a dressed number is."""

from __future__ import annotations

import re
import time

import pytest

from trl_grpo_ext.rewards._text.final_answer import extract_final_answer


def _items(table: str) -> list[str]:
    """The entries of a table; two spaces or more stand between them."""
    return re.split(r"\s{2,}", table.strip())


EXPRESSIONS = _items(
    r"""
    18!   \sqrt{18}   18^{-1}   18\pi   18²   18^x   18^{x}   18^{n+1}   18_{10}   18_8   √18   18√2   18π   \sqrt 18
    \sqrt[3]{18}   \sqrt{ 18 }   \sqrt{\text{ }18}   \sqrt{x + 18}   \left(18\right)^{-1}   (18)^x   18x   18i
    18\,x   18n   18xy   18\mathrm{i}   18\cdot x   x\cdot 18   2\cdot 18   2 \times 18   18\sqrt{2}   18\theta
    18\infty   18\log 2   \ln 18   \log_2 18   \log_{2}{18}   \sin(18)   f(18)   \pi + 18   x + 18   18 + x
    18 - \pi   18 - x   x - 18   20 - 18   18 + 2   2(18)   (2)(18)   18(x+1)   18 \bmod 5   18 \pmod{5}
    \frac{18}{x}   \frac{x}{18}   \frac{18\pi}{3}   \frac{\sqrt{18}}{1}   \dfrac{18 + 2}{5}   \binom{18}{2}
    \overline{18}   0.\overline{18}   \pm 18   \mp 18   ±18   e^{18}   x^18   x_{18}   -\text{\$}18   {-}18   -(18)
    \frac{1}{2} \cdot 18   18 \div x   18 \cdot \frac{1}{x}   18:5   18/x   18/\pi   18*x   9*18   9**18   18 ∗ x
    18\text{ squared}   18 \text{ cubed}   \text{half of } 18   \text{twice }18   \text{the square root of } 18
    18\% \text{ of } 50   18\text{ cm}\sqrt{2}   18\text{ factorial}   \cancel{18}   \neq 18   \text{not } 18   ≠18
    """
)
PROSE = _items(
    r"""
    18 squared   18 cubed   18 factorial   18²   18-squared   **18** squared   $18$ squared   18 to the power of 3
    18 to the third   18 raised to the 4th power   18 choose 2   18 mod 5   18 modulo 7   18 over 5   18 times 2
    18 times three   18 plus 2   18 minus 2   18 divided by 4   18 multiplied by 2   18 percent of 50   18% of 50
    half of 18   a third of 18   two-thirds of 18   1/2 of 18   ½ of 18   20% of 18   twice 18   double 18
    the square root of 18   the cube of 18   the factorial of 18   the sum of 3 and 18   the product of 2 and 18
    2 times 18   20 minus 18   3 plus 18   90 divided by 18   5 multiplied by 18   18 point five   18 more than 5
    18 and three quarters   18 and a third   18 hundredths   18 less than 20   sqrt(18)   log(18)   18^-1   18 ** x
    $18!$   \(18!\)   $18^2 x$   18!/17   18! = x   48 -18   36-3-18   20-18   9 x 18   9 * 18   9 + 18   5 / 18 x
    —18   −18   –18   minus 18   not 18   certainly not 18   not equal to 18   not $18   not **18**   ≠ 18   != 18
    less than 18   more than 18   anything but 18   never 18   eighteen squared   eighteen factorial
    """
)
DENIALS = [
    "The answer is not 18",
    "The answer is not 18.",
    "The answer is not: 18",
    "The answer isn't 18.",
    "The answer isn’t $18.",
    "The answer is not equal to 18.",
    "The answer cannot be 18.",
    "The answer can't be 18 dollars.",
    "The final answer is not **18**.",
    "The answer ≠ 18",
    r"The answer is not $\boxed{18}$.",
    r"\boxed{\ne 18}",
    r"\boxed{x \not= 18}",
    "#### not 18",
    "Answer: not 18",
    "<answer>not 18</answer>",
    "18 is not the answer.",
    "18 isn't the right answer.",
    "$18 is wrong.",
    "18 eggs is not correct.",
]
PREAMBLES = ["", "She sells 9 eggs for 2 dollars each.\n", "So 9 * 2 = 18.\n"]
WRAPPERS = ["#### {}", "Answer: {}", "The answer is {}.", "<answer>{}</answer>", "So she gets {}.", "{}", "x = {}"]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_part_of_an_expression_in_a_box_is_not_the_answer(expression: str) -> None:
    for preamble in PREAMBLES:
        assert extract_final_answer(f"{preamble}\\boxed{{{expression}}}") != 18
        assert extract_final_answer(f"{preamble}So it is $\\boxed{{x = {expression}}}$.") != 18
        assert extract_final_answer(f"{preamble}The answer is 18. No: \\boxed{{{expression}}}") != 18


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_nor_is_it_in_formulas_outside_of_a_box(expression: str) -> None:
    if r"\text{not" not in expression and "neq" not in expression and "≠" not in expression:
        assert extract_final_answer(f"The answer is ${expression}$.") != 18
        assert extract_final_answer(f"9 * 2 = 18. The answer is \\({expression}\\).") != 18


@pytest.mark.parametrize("expression", PROSE)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_part_of_an_expression_in_prose_is_not_the_answer(wrapper: str, expression: str) -> None:
    assert extract_final_answer(wrapper.format(expression)) != 18


@pytest.mark.parametrize("denial", DENIALS)
def test_a_number_that_is_denied_is_not_the_answer(denial: str) -> None:
    for preamble in [*PREAMBLES, "The answer is 18. Wait.\n"]:
        assert extract_final_answer(preamble + denial) != 18
    assert extract_final_answer(f"She makes 20. {denial}") == 20
    assert extract_final_answer(f"{denial} The answer is 20.") == 20


HONEST = _items(
    r"""
    18   $18   \$18   18.00   18.   18 dollars   18\text{ dollars}   18 \text{ m}^2   18 m^2   18m^2   18 m²   18m
    18\text{ cm}^2   18\text{ cm}^{2}   18\,\text{km}   18\ \mathrm{km/h}   18\frac{\text{km}}{\text{h}}   18 km/h
    18 square meters   18 squared meters   18 cubic feet   18 meters squared   18 cm squared   18 (eighteen)   18 L
    18 g   18%   18\%   18 percent   18^\circ   18^{\circ}   18°C   18^\circ\text{C}   18 hours   18 h   18 hrs
    18 mph   \left(18\right)   (18)   \textbf{18}   \mathbf{18}   \text{18 dollars}   \color{red}{18}
    \textcolor{blue}{18}   \underline{18}   \text{(B) } 18   \textbf{(B)}\ 18   (B) 18   x = 18   x=18\text{ eggs}
    \text{Total: } 18   \text{Total} = 18   \sqrt{324} = 18   3! \cdot 3 = 18   2x = 36 \Rightarrow x = 18
    9 * 2 = 18   \frac{36}{2} = 18   \approx 18   18 times   18 times as many   18 a day   18 an hour   18 per day
    18/\text{day}   18/day   18 each   18 quarters   18 halves   18 more   18 more than Tom   18 of the 20
    18 years old   18 plus tax   18 to 2 friends   18x as many   18 in all   18 and that is all   **18**   18\,
    18\;\text{eggs}   18 \quad   at least 18   no more than 18   x \geq 18   18\\   18$   18 people are not coming
    18, not 20   18 (not 20)
    """
)


@pytest.mark.parametrize("written", HONEST)
def test_a_dressed_number_is_the_answer(written: str) -> None:
    assert extract_final_answer(f"\\boxed{{{written}}}") == 18
    assert extract_final_answer(f"So the answer is $\\boxed{{{written}}}$.") == 18
    if "\\" not in written:
        assert extract_final_answer(f"#### {written}") == 18
        assert extract_final_answer(f"Answer: {written}\n") == 18
        assert extract_final_answer(f"<answer>{written}</answer>") == 18


SENTENCES = [
    ("The answer is 18!", 18),
    ("**18!**", 18),
    ("She makes $18! Great.", 18),
    ("She makes 18!!", 18),
    ("The answer is 18, not 20.", 18),
    ("The answer is 18 dollars, not 18 cents.", 18),
    ("It is 18, not 20.", 18),
    ("It is not 20 but 18.", 18),
    ("It is not only 18.", 18),
    ("The answer is not 20 but 18.", 18),
    ("The answer is not 20, it is 18.", 18),
    ("It isn't hard to see that she makes 18.", 18),
    ("It did not rain on 18 days.", 18),
    ("The answer is 18. It is not 20.", 18),
    ("He has 18, which is more than 5.", 18),
    ("He needs no fewer than 18", 18),
    ("- 18", 18),
    ("* 18", 18),
    ("Total: *18*", 18),
    ("**Total:** 18", 18),
    ("**Step 2** 18", 18),
    ("the total — 18 dollars", 18),
    ("the total is—18 dollars", 18),
    ("She read for 9 days and/or 18", 18),
    ("They need 5-18 apples", 18),
    ("They need 5–18 apples", 18),
    ("between 5 - 18 apples", 18),
    ("3 * 6. That makes 18.", 18),
    ("The answer is 9 times 2, which is 18.", 18),
    ("The answer is 9 times 2 = 18.", 18),
    ("The answer is 3 * 6. That makes 18.", 18),
    ("18 = 3 * 6", None),
    ("The answer is 18 = 3 squared times 2.", 18),
    ("18! = 6402373705728000", 6402373705728000),
    (r"\boxed{18! = 6402373705728000}", 6402373705728000),
    (r"\boxed{x^2 = 324, x = 18}", 18),
    (r"\begin{align} 9 \cdot 2 &= 18 \end{align}", 18),
    (r"\[ 9 \times 2 = 18 \]", 18),
    (r"9 \times 2 = 18 \\ \text{so } 18", 18),
    (r"Profit: $9 \times \$2 = \$18$", 18),
    (r"so $x = 18$ and we are done", 18),
    ("x=18", 18),
    ("2x = 36 so x=18", 18),
    ("The answer is —18.", -18),
    ("The answer is minus 18.", -18),
    (r"\boxed{—18}", -18),
    (r"\boxed{5-7}", None),
    ("They need 5-7 apples", 7),
    ("20-18", None),
    ("The train carries 960 - 732 = 228 passengers more than 2 airplanes.", 228),
    ("He can buy 400, because 400 is greater than 300", 400),
    ("He gets the 3rd, not the 18th", 3),
]


@pytest.mark.parametrize(("text", "value"), SENTENCES)
def test_what_a_sentence_says_of_a_number(text: str, value: int | None) -> None:
    assert extract_final_answer(text) == value


LONG = 100_000
HOSTILE = {
    "denials": "not 18 " * (LONG // 7),
    "answers denied": "the answer is not 18 " * (LONG // 21),
    "roots": r"\sqrt{18" * (LONG // 8),
    "factorials": "18!" * (LONG // 3),
    "braces": "{" * LONG + "18" + "}" * LONG,
    "emphasis": "*1" * (LONG // 2),
    "commands": "\\a" * (LONG // 2) + "18",
    "sums": "the sum of " + "1, " * (LONG // 3) + "18",
    "comparatives": "er than " * (LONG // 8) + "18",
    "fillers": "not " + "the " * (LONG // 4) + "18",
    "spaces": "half of" + " " * LONG + "18" + " " * LONG + "squared",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_the_neighbours_of_a_number_take_no_time(name: str) -> None:
    started = time.process_time()
    extract_final_answer(HOSTILE[name])
    assert time.process_time() - started < 1.0
