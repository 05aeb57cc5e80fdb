"""What an expression asks for is known before it is evaluated: little of what people answer, too much of the others."""

import time
from typing import Any

import pytest

pytestmark = pytest.mark.slow

WITHIN = r"""
2^{10} ¦ 10^{-9} ¦ 2^{10^{-9}} ¦ 2006! ¦ \frac{100000!}{99999!} ¦ 10^{1000000} ¦ 3^{2023} - 1 ¦ x^{10^{9}} ¦ e^{10^{9}}
2^{2^{2^{2^{2}}}} ¦ \pi^{1000000000} ¦ (1+x)^{2023} ¦ (x+y+z)^{20} ¦ 1^{10^{99}} ¦ \binom{10^{9}}{2} ¦ 7^{2023} \mod 100
\sum_{k=1}^{\infty} \frac{1}{k^2} ¦ \sum_{k=1}^{10^9} k ¦ \sum_{k=1}^{2023} \frac{1}{k}
\prod_{k=2}^{100} (1-\frac{1}{k}) ¦ \begin{pmatrix}1&2\\3&4\end{pmatrix}^{10} ¦ \int_0^1 x^{9}\,dx
\int_0^1 e^{\sin(\ln x)}\,dx ¦ \int_0^1 \int_0^1 \int_0^1 xyz\,dx\,dy\,dz
\frac{1}{0} ¦ 0^{0} ¦ (-8)^{1/3} ¦ 1000^{10000/3}
"""
BEYOND = (
    r"""
9^{9^{9^9}} ¦ \sqrt{9^{9^{9^9}}} ¦ 9^{999999999} ¦ 9^{-999999999} ¦ (1+10^{-9})^{10^{9}} ¦ 7^{7^{7^7}} \mod 100
((5!)!)! ¦ 100000000! ¦ \binom{10^{9}}{10^{8}} ¦ (x+1)^{100000} ¦ (x+y+z+1)^{300} ¦ \sum_{k=1}^{10^9} \frac{1}{k^2}
\prod_{k=1}^{10^8} k ¦ \begin{pmatrix}1&2\\3&4\end{pmatrix}^{1000000000} ¦ \{1, 9^{9^{9^9}}\} ¦ x = 9^{9^{9^9}}
\int_0^1 \sin(\cos(\sin(\cos(x^x))))\,dx
"""
    + f"2^{{{'9' * 400}}} ¦ {'9' * 400}!"
)


@pytest.fixture(scope="module")
def verification() -> Any:
    from trl_grpo_ext.rewards._math import verification  # imports sympy

    return verification


def test_work_of_an_expression(verification: Any) -> None:
    for table, is_too_much in ((WITHIN, False), (BEYOND, True)):
        for latex in (latex for line in table.strip().splitlines() for latex in line.split(" ¦ ")):
            parsed = verification._parsed(f"\\boxed{{{latex}}}", verification._ANSWER, "first_match")
            assert len(parsed) == 2, latex
            assert bool(verification.excess_of_work(parsed)) is is_too_much, latex


def test_what_is_read_is_bounded_wherever_it_stands(verification: Any) -> None:
    hostile = {
        f"{'(' * 60}x{')' * 60}": "brackets more than 40 deep",
        f"{'{' * 300}x{'}' * 300}": "brackets more than 40 deep",
        f"{'x^{' * 18}x{'}' * 18}": "powers more than 8 deep",
        "x+" * 5000 + "1": "characters, more than 3000",
        "9" * 2001: "more than 2000 digits in a row",
    }
    places = ["\\boxed{1} so \\boxed{%s}", "I hope so \\boxed{%s}", "\\fbox{1} or $\\boxed{%s}$", "The answer is $%s$."]
    for latex, why in hostile.items():
        for place in places:
            start = time.process_time()
            found = verification.check({"reference": "$x+1$", "answer": place % latex})
            assert found["outcome"] == "refused", place
            assert why in found["detail"], place
            assert time.process_time() - start < 1
            # What is not read does not count.
            after = verification.check({"reference": "$x+1$", "answer": f"{place % latex}{' so' * 40} \\boxed{{1+x}}"})
            assert after["outcome"] == "right", place
    found = verification.check({"reference": "x+" * 5000 + "1", "answer": "\\boxed{x}"})
    assert found["outcome"] == "unparseable_reference"
