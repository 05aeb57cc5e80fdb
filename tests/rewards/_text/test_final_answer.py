"""Where the final number of a completion stands, and what it is worth: tables written by hand, one per idea.

A line of a table is a value and texts of that value, with `¦` between them and `⏎` for a line break.
"""

import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.rewards._text.final_answer import extract_final_answer, parse_reference


def texts(lines: str) -> list[str]:
    return [text.replace("⏎", "\n") for line in lines.strip().splitlines() for text in line.split(" ¦ ")]


def table(lines: str, odd: list[tuple[str, str]] = ()) -> Iterator[tuple[str, Fraction | None]]:  # type: ignore[assignment]
    rows = [line.partition(": ") for line in lines.strip().splitlines()]
    for value, text in [*((value, text) for value, _, line in rows for text in texts(line)), *odd]:
        yield text, None if value == "None" else Fraction(value)


def misread(pairs: Any, read: Any = extract_final_answer) -> list[Any]:
    return [(text, value, read(text)) for text, value in pairs if read(text) != value]


MARKERS = texts(
    r"""
#### 18 ¦ ####18 ¦ ##### 18 ¦ #### $18 ¦ #### 18 eggs ¦ #### 18, altogether. ¦ #### **18** ¦ #### \boxed{18}
#### Answer: 18 ¦ #### <<9*2=18>>18 ¦ #### 18. ¦ #### eighteen ¦ \boxed{18} ¦ \boxed 18 ¦ \fbox{18}
\boxed{\boxed{18}} ¦ \boxed{\text{\$}18} ¦ \boxed{\$18.00} ¦ \boxed{18 \text{ dollars}}
\boxed{\text{18 dollars}} ¦ \boxed{\textbf{18}} ¦ \boxed{\mathbf{18}} ¦ \boxed{x = 18} ¦ \boxed{3x = 54, x = 18}
\boxed{\text{Janet makes } 18} ¦ \boxed{\text{Total: } 18} ¦ \boxed{18\%} ¦ \boxed{18^\circ}
\boxed{18\text{ m}^2} ¦ \boxed{18\,\text{km/h}} ¦ \boxed{\frac{36}{2}} ¦ \boxed{\frac{54}{3} = 18}
\boxed{9 \times 2 = 18} ¦ \boxed{18 ¦ So the answer is $\boxed{18}$. ¦ So the answer is: ⏎⏎$$\boxed{18}$$
\[⏎\boxed{18}⏎\] ¦ Therefore, Janet makes \(\boxed{18}\) dollars every day. ¦ <answer>18</answer>
<answer>⏎$18⏎</answer> ¦ <ANSWER>18</ANSWER> ¦ <answer>18 ¦ <answer>eighteen</answer>
<answer>\boxed{18}</answer> ¦ <answer>The answer is 18.</answer> ¦ <answer>Janet makes $18 per day.</answer>
<answer>She sells 9 eggs, so 9 * 2 = 18</answer> ¦ <answer>3 * 6 = 18</answer> I used 4 steps. ¦ The answer is 18
The answer is $18. ¦ The answer is \$18. ¦ The answer is $18$. ¦ The answer is \(18\). ¦ The answer is $\$18$.
The answer is $$18$$ ¦ The answer is 18 dollars. ¦ The answer is **18**. ¦ The answer is **$18**.
The answer is `18`. ¦ The answer is: 18 ¦ The answer is:⏎⏎18 dollars ¦ The answer is:⏎- 18 eggs
The answer is:⏎$$⏎18⏎$$ ¦ The answer is x = 18. ¦ The answer is approximately 18. ¦ The answer is therefore 18.
The answer, therefore, is 18. ¦ The answer is equal to 18. ¦ The answer would be 18. ¦ The answer should be $18.
The answer's 18. ¦ The answer to the question is 18. ¦ The answer in dollars is 18.
The answer (in dollars) is 18. ¦ The answer is eighteen. ¦ The answer is eighteen dollars.
the final answer is 18. ¦ Final Answer: The final answer is $18$. I hope it is correct.
The final answer is: $\boxed{18}$ ¦ Final answer 18 ¦ A: 18 ¦ **A:** 18 ¦ A: $18 per day ¦ Ans: 18 ¦ ANSWER: 18
Answer: 18 ¦ Answer = 18 ¦ **Answer:** 18 ¦ **Answer**: 18 ¦ **Answer: 18** ¦ **Final Answer:** $18
\textbf{Answer:} 18 ¦ ### Final Answer: 18 ¦ ### Answer⏎18 ¦ **Final Answer**⏎⏎$18 ¦ Answer:⏎```⏎18⏎```
{"reasoning": "9 * 2", "answer": 18} ¦ {"final_answer": "18"}
"""
)
MARKERS += ["Answer \u2192 18", "\u7b54\u6848\u662f\uff1a18", "\u7b54\u6848\uff1a\uff11\uff18\u3002"]


def test_a_marked_answer_is_read_and_what_surrounds_it_is_not() -> None:
    before = ("", "She eats 3 + 4 = 7 of the 16 eggs.\n", "The answer is 5.\nWait, that is 5 too many.\n")
    assert misread((start + text, 18) for text in MARKERS for start in before) == []


NUMBERS = r"""
1234: 1,234 ¦ 1{,}234 ¦ 1\,234 ¦ 1\!234 ¦ 1,\!234 ¦ 1\ 234 ¦ 1'234 ¦ 1_234
2469135/2: 1,234,567.50
1234567: 1234,567
100000: 1,00,000
10000: 10 000
1500000: 1 500 000 ¦ $1.5 million
12500: $12 500
18: 18.0 ¦ 18.00 ¦ 018 ¦ +18 ¦ $18 ¦ US$18 ¦ USD 18 ¦ Rs. 18 ¦ 18% ¦ 18 % ¦ 18\% ¦ 18kg ¦ 18 kg ¦ $18/hour ¦ 18 m^2
18: 18 m2 ¦ 18 cups of H2O ¦ 18 (eighteen) ¦ 18th
0: 0 ¦ zero
741/100: 7.41
1/2: .5 ¦ 0.5 ¦ 1/2 ¦ \frac{1}{2} ¦ \dfrac12 ¦ \tfrac{1}{2} ¦ 5e-1
37/2: 18 dollars and 50 cents ¦ 18 and a half
-18: -18 ¦ negative 18 ¦ minus eighteen ¦ -$18 ¦ $-18 ¦ (-18)
-2469/2: -1,234.5
5: 5pm ¦ 5:00 PM
-3/4: -3/4
3/2: 1 1/2 ¦ 1 and 1/2 ¦ 1\frac{1}{2}
5/2: 2-1/2 ¦ two and a half
-1/2: -\frac{1}{2} ¦ \frac{-1}{2}
1000/3: \frac{1,000}{3}
1800: 1.8e3 ¦ 1.8E+3 ¦ 1.8 \times 10^{3} ¦ 1.8 x 10^3
1000: 10^3
1024: 2^{10}
2000000: two million
300: 3 hundred
70000: $70k
21: twenty-one
105: one hundred and five
3200: three thousand, two hundred
"""
ODD_NUMBERS = [
    *(("1234", "1\xa0234"), ("1234", "1\u202f234"), ("1234567", "1\u2009234\u2009567"), ("18", "\uff11\uff18")),
    *(("18", "\u0661\u0668"), ("18", "\U0001d7cf\U0001d7d6"), ("18", "1\u200b8"), ("18", "\xa318")),
    *(("18", "\u20ac18"), ("18", "18\u20ac"), ("18", "\u20b918"), ("18", "18 m\xb2"), ("1/2", "\xbd")),
    *(("1/2", "1\u20442"), ("37/2", "18,50 \u20ac"), ("-18", "\u221218"), ("-18", "\uff0d18")),
    *(("-18", "\u201318"), ("2469/2", "\uff11\uff0c\uff12\uff13\uff14\uff0e\uff15"), ("3/2", "1\xbd")),
    *(("8/3", "2\u2154"), ("1800", "1.8 \xd7 10^3")),
]


def test_a_number_is_worth_what_it_says_in_every_place() -> None:
    places = ("#### {}", "The answer is {}.", "**Answer:** {}\n", "<answer>{}</answer>", "\\boxed{{{}}}")
    assert misread((place.format(text), v) for text, v in table(NUMBERS, ODD_NUMBERS) for place in places) == []
    # Punctuation after a number is no part of it.
    endings = ["", " .", "\n", "\u201d", "\u3002", *items(r'.  ,  .,  !  ?  ;  :  **  .**  "  )  $.  \)')]
    numbers = {"18": Fraction(18), "1,818": Fraction(1818), "18.50": Fraction(37, 2)}
    starts = ("The answer is ", "So she makes $")
    assert misread((start + n + end, v) for n, v in numbers.items() for start in starts for end in endings) == []


TABLES = {
    "without a marker the last number counts": r"""
18: She makes 9 * 2 = 18 ¦ She makes 9 * 2 = $18 every day at the farmers' market. ¦ 9 eggs⏎= 18 ¦ - 18
18: So she makes **$18** every day, selling 9 eggs.
18: So she makes **$18** every day.⏎⏎Let me know if you have any questions! ¦ **9** eggs at $2 each are 9 * 2 = $18
18: **Step 3:** Janet makes $18 ¦ She makes 18 dollars.⏎1. This is per day. ¦ 1. Eggs: 9⏎2. Money: 9 * 2 = 18⏎3. Done.
18: | eggs | 9 |⏎| total | 18 | ¦ Step 1: 16 - 7 = 9⏎Step 2: 9 * 2 = 18 ¦ He is done by 18 on 12/25/2020
18: She makes 18, see x_1 and x_{2} ¦ The area is 18 m^2. ¦ 18
-18: = - 18 ¦ #### - 18 ¦ \boxed{- 18}
8: 48 -40 = 8
None: The rest is 48 -40 ¦ 16-3-4 ¦ eighteen ¦ I don't know. ¦ H2O ¦ It is 12:30 ¦ 1/0 ¦ \boxed{} ¦ <answer></answer>
None: The answer is ¦ The answer is one of these.
-5: The temperature fell to -5 degrees
57: She is left with 57 seats after the 2nd stop.
6: She gained 1 place, which makes 7 - 1 = 6th ¦ She gained 1 place: 7-1=6th
13: It rained on the 13th
5/2: It takes 2 1/2 hours
7: They need 5-7 apples
617/500: The price is 1.234.
""",
    "prose and equations inside an answer": r"""
18: The answer is 18 because 3 * 6 = 18 and 2 were left. ¦ The answer is 18 since 20 - 2 = 18, not 5.
18: The answer is 18 because total = 20 - 2. ¦ The answer is 18 dollars for 9 eggs at $2.
18: The answer is 18. She had 2 left. ¦ The answer is 18.⏎1. First she eats 3.⏎2. Then she bakes 4.
18: The answer is 3 * 6 = 18 ¦ The answer is $9 \times 2 = \$18$ dollars. ¦ The answer is 18 = 3 * 6
18: The answer is 16 - 3 - 4 = 9 eggs, and 9 * 2 = 18. ¦ The answer is⏎\[ 9 \times 2 = 18 \]
18: The answer is 50% of 36 = 18. ¦ The answer is 18 of the 20. ¦ The answer is 18 of 20.
18: <answer>16 - 7 = 9⏎9 * 2 = 18</answer>
18: Answer: 16 - 7 = 9 eggs.⏎This gives 9 * 2 = 18 dollars.⏎⏎Note: 5 of 16 = 31.25%
18: Answer: 3 * 6 = 18⏎⏎Explanation: 36 = 6 * 6 ¦ Answer: x = 18⏎Explanation: 3 boxes of 6 ¦ #### 3 + 15 = 18
18: Answer: Janet makes $18 every day at the farmers' market.
18: Answer: She has 16 - 3 - 4 = 9 eggs left, so she makes 9 * 2 = $18
18: Answer: 16 - 3 - 4 = 9 eggs are left, so she makes 9 * 2 = $18
18: Answer: Let's see.⏎⏎1. 16 - 7 = 9 eggs⏎2. 9 * 2 = 18 dollars ¦ The answer is the sum of 3 and 15. 3 + 15 = 18.
18: #### 18⏎The answer is found by multiplying 9 by 2. ¦ The answer is 3 * 6, so 18
20: The answer is $18 + $2 = $20.
120: The answer is 15 gallons * 8 pints / gallon = <<15*8=120>>120 pints
8: The answer is <<8=8>>8.
300: #### 5 hours = 300 minutes
6: A: There are 15 trees originally. Then there were 21. 21 - 15 = 6. The answer is 6.
6: A: There are 15 trees originally. Then there were 21. 21 - 15 = 6. ¦ the answer is not 5 but 6
""",
    "the last explicit answer wins over bare numbers": r"""
18: The answer is 17. Wait, that is wrong. The answer is 18. ¦ #### 17⏎#### 18 ¦ \boxed{17} and then \boxed{18}
18: \boxed{18} and then \boxed{} ¦ #### 17⏎\boxed{18} ¦ \boxed{17}⏎#### 18
18: The answer is \boxed{18}. Note that 18 / 2 = 9 and 2 * 9 = 18, as 7 eggs were used.
18: #### 18⏎⏎Explanation: 16 - 7 = 9, and that in 2 lines. ¦ #### 18⏎#### Explanation: 9 * 2 ¦ So 18 eggs. \boxed{}
18: #### 1. Eggs⏎16 - 7 = 9⏎#### 2. Money⏎9 * 2 = $18 ¦ #### Step 1: Eggs⏎16 - 7 = 9⏎#### Step 2: Money⏎9 * 2 = $18
18: Each correct answer is 5 points. A wrong answer is 2 points. Together that is 18.
18: The answers are 3 and 15, in total 18 ¦ He answered 5 questions, then 18
3200: The first answer was 1800, the second answer was 1400, together that is 3200
3200: The answer to the first question is 1200. The last one is 2000, together 3200
11: A: 5⏎B: 6⏎Together: 11
""",
    "thoughts before and other questions after do not count": r"""
18: <think>The answer is 17</think>⏎⏎She makes 18. ¦ <think>9 * 2 = 18</think>⏎⏎As computed.
18: <reasoning>#### 17</reasoning><answer>18</answer> ¦ <think>So 18. Or is the answer 18
18: #### 18⏎⏎Question: Tom has 5 apples and buys 3. How many?⏎Answer: 5 + 3 = 8⏎#### 8
18: The answer is 18.⏎⏎Q: There are 15 trees.⏎A: 21 - 15 = 6. The answer is 6.
18: 18 eggs.⏎Answer: 18⏎⏎**Problem 2:** Tom has 5 apples. ¦ \boxed{18}⏎⏎Human: And in 2 days?⏎⏎Assistant: \boxed{36}
18: Q: Janet has 16 eggs.⏎She sells 9.⏎Q: How many dollars?⏎Answer: 18
18: She makes 18<|im_end|>⏎<|im_start|>user⏎And in 2 days? ¦ <|im_start|>assistant⏎She makes 18<|im_end|>
18: #### 18<|endoftext|>Human: 5 + 5 = 10 ¦ #### 18</s> 7
9: Question: Janet has 16 eggs and eats 7.⏎Answer: She sells 9.⏎#### 9
""",
    "what a sentence says of a number": r"""
18: The answer is 18! ¦ **18!** ¦ She makes $18! Great. ¦ She makes 18!! ¦ The answer is 18, not 20.
18: The answer is 18 dollars, not 18 cents. ¦ It is 18, not 20. ¦ It is not 20 but 18. ¦ It is not only 18.
18: The answer is not 20 but 18. ¦ The answer is not 20, it is 18. ¦ It isn't hard to see that she makes 18.
18: It did not rain on 18 days. ¦ The answer is 18. It is not 20. ¦ He has 18, which is more than 5.
18: He needs no fewer than 18 ¦ - 18 ¦ * 18 ¦ Total: *18* ¦ **Total:** 18 ¦ **Step 2** 18
18: She read for 9 days and/or 18 ¦ They need 5-18 apples ¦ between 5 - 18 apples ¦ 3 * 6. That makes 18.
18: The answer is 9 times 2, which is 18. ¦ The answer is 9 times 2 = 18. ¦ The answer is 3 * 6. That makes 18.
18: The answer is 18 = 3 squared times 2. ¦ \boxed{x^2 = 324, x = 18} ¦ \begin{align} 9 \cdot 2 &= 18 \end{align}
18: \[ 9 \times 2 = 18 \] ¦ 9 \times 2 = 18 \\ \text{so } 18 ¦ Profit: $9 \times \$2 = \$18$
18: so $x = 18$ and we are done ¦ x=18 ¦ 2x = 36 so x=18
None: 18 = 3 * 6 ¦ \boxed{5-7} ¦ 20-18
6402373705728000: 18! = 6402373705728000 ¦ \boxed{18! = 6402373705728000}
-18: The answer is minus 18.
7: They need 5-7 apples
228: The train carries 960 - 732 = 228 passengers more than 2 airplanes.
400: He can buy 400, because 400 is greater than 300
3: He gets the 3rd, not the 18th
""",
}
ODD = [
    *(("18", "Total: **9 \xd7 2 = 18** for 2 people"), ("18", "\u4e00\u517118\u5143"), ("18", "  18  \n\n")),
    *(("18", "\x0018\x00"), ("18", "\ud80018\udfff"), ("None", ""), ("None", "#### ")),
    ("18", "Answer: 18 (since 16 - 3 - 4 = 9 and 9 \xd7 2 = 18, for 4 days)"),
    *(("18", "The answer is 3 \xd7 6 = 18 for 2 days."), ("33", "The answer is 100 / 3 = 33.333 \u2248 33")),
    *(("18", "the total \u2014 18 dollars"), ("18", "the total is\u201418 dollars")),
    *(("18", "They need 5\u201318 apples"), ("-18", "The answer is \u201418."), ("-18", "\\boxed{\u201418}")),
]


@pytest.mark.parametrize("name", [*TABLES, "odd"])
def test_texts_by_hand(name: str) -> None:
    assert misread(table(TABLES.get(name, ""), ODD if name == "odd" else [])) == []


def items(lines: str) -> list[str]:
    """The entries of a table; two spaces or more stand between them."""
    return re.split(r"\s{2,}", lines.strip())


EXPRESSIONS = items(
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
PROSE = items(
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
DENIALS = texts(
    r"""
The answer is not 18 ¦ The answer is not 18. ¦ The answer is not: 18 ¦ The answer isn't 18.
The answer is not equal to 18. ¦ The answer cannot be 18. ¦ The answer can't be 18 dollars.
The final answer is not **18**. ¦ The answer is not $\boxed{18}$. ¦ \boxed{\ne 18} ¦ \boxed{x \not= 18}
#### not 18 ¦ Answer: not 18 ¦ <answer>not 18</answer> ¦ 18 is not the answer. ¦ 18 isn't the right answer.
$18 is wrong. ¦ 18 eggs is not correct.
"""
)
DENIALS += ["The answer isn\u2019t $18.", "The answer \u2260 18"]
PREAMBLES = ["", "She sells 9 eggs for 2 dollars each.\n", "So 9 * 2 = 18.\n"]
WRAPPERS = ["#### {}", "Answer: {}", "The answer is {}.", "<answer>{}</answer>", "So she gets {}.", "{}", "x = {}"]
HONEST = items(
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


def read_as_18(tried: Any) -> list[str]:
    return [text for text in tried if extract_final_answer(text) == 18]


def test_a_part_of_an_expression_or_a_denied_number_is_not_the_answer() -> None:
    boxes = ("{}\\boxed{{{}}}", "{}So it is $\\boxed{{x = {}}}$.", "{}The answer is 18. No: \\boxed{{{}}}")
    assert read_as_18(box.format(start, e) for e in EXPRESSIONS for start in PREAMBLES for box in boxes) == []
    formulas = [e for e in EXPRESSIONS if r"\text{not" not in e and "neq" not in e and "\u2260" not in e]
    assert read_as_18(f"The answer is ${e}$." for e in formulas) == []
    assert read_as_18(f"9 * 2 = 18. The answer is \\({e}\\)." for e in formulas) == []
    assert read_as_18(wrapper.format(e) for e in PROSE for wrapper in WRAPPERS) == []
    starts = [*PREAMBLES, "The answer is 18. Wait.\n"]
    assert read_as_18(start + denial for start in starts for denial in DENIALS) == []
    assert misread((f"She makes 20. {denial}", 20) for denial in DENIALS) == []
    assert misread((f"{denial} The answer is 20.", 20) for denial in DENIALS) == []


def test_a_dressed_number_is_the_answer() -> None:
    boxes = ("\\boxed{{{}}}", "So the answer is $\\boxed{{{}}}$.")
    lines = ("#### {}", "Answer: {}\n", "<answer>{}</answer>")
    assert misread((box.format(written), 18) for written in HONEST for box in boxes) == []
    assert misread((line.format(w), 18) for w in HONEST if "\\" not in w for line in lines) == []


REFERENCES = r"""
18: She makes 9 * 2 = $<<9*2=18>>18.⏎#### 18 ¦ first #### 17⏎#### 18 ¦ 18 ¦ $18 ¦ 18 dollars ¦ 18% ¦ eighteen
1234: #### 1,234
-5: #### -5
741/100: #### 7.41
1000: 1,000
1/2: 1/2
None: #### ¦ #### none ¦ blue ¦ She sells 9 eggs for 18 dollars ¦ 18 or 20 ¦ 12:30
None: #### 18! ¦ #### 18j ¦ 18! ¦ #### \sqrt{18}
"""
OTHER_REFERENCES = [
    *((18, 18), (-18, -18), (18.0, 18), (0.1, Fraction(1, 10)), (1e21, 10**21), (Fraction(1, 3), Fraction(1, 3))),
    *((Decimal("18.50"), Fraction(37, 2)), (None, None), (True, None), (float("nan"), None), (float("inf"), None)),
    *(([18], None), ({"answer": 18}, None), ("", None), (" 18\n", 18)),
]


def test_a_reference_is_a_number_or_nothing() -> None:
    assert misread([*table(REFERENCES), *OTHER_REFERENCES], parse_reference) == []


STYLES = texts(
    r"""
{} ¦ So the total is {}. ¦ 3 + 4 = {} ¦ #### {} ¦ A: {} ¦ Answer: {}⏎ ¦ **Answer:** {} ¦ **Final Answer**⏎⏎{}
The answer is {}. ¦ The answer is ${}. She had 7 left. ¦ The answer is **{}** dollars, from 3 * 4 eggs. ¦ \boxed{{{}}}
$$\boxed{{\${} \text{{ dollars}}}}$$ ¦ <answer>{}</answer> in 12 steps ¦ <think>The answer is 12.</think>{}
The answer is 2 + 3 = {} ¦ The answer is {}%, that is {} in 100.
"""
)


DECIMALS = st.decimals(min_value=-(10**12), max_value=10**12, places=2) | st.integers(-(10**30), 10**30).map(Decimal)


@given(value=DECIMALS, style=st.sampled_from(STYLES), form=st.integers(0, 4))
def test_every_number_is_read_back_from_every_style(value: Decimal, style: str, form: int) -> None:
    plain = f"{value:f}"
    forms = [plain, f"{value:,f}", plain.replace("-", "−"), f"{value:,f}".replace(",", "{,}"), f"{value:.4f}"]
    assert extract_final_answer(style.format(*[forms[form]] * style.count("{}"))) == Fraction(value)


@given(st.text() | st.text(alphabet="0123456789 .,-/$\\{}()^_#*:=<>\nabcdefqrsw%½é１–\ud800\x00", max_size=200))
def test_no_text_raises(text: str) -> None:
    found = extract_final_answer(text)
    assert found is None or isinstance(found, Fraction)


LONG = 100_000
REPEATED = items(
    r"""
    1,  11,  1 \times 10^  \boxed{  \frac{1}{  <answer>  <answer>x  #  </s>  1</think>  1st  **1  *  -  1/  0  9  ,000
    the answer is  answer to a b c d e f g h i j k l m n o p q r s t u  not 18  the answer is not 18  \sqrt{18  18!  *1
    \a  er than
    """
)
REPEATED += ["####\n", "A:\n", "Answer:\n", "1\n", "Question: 1\nanswer is\n", "1. a\n", " 111", "\x00", "\ud800"]
REPEATED += ["\u0663", "the answer is ", "not 18 ", "er than ", "1st ", "a\u0301\u0316"]
AFTER_A_MARKER = ["9", " ", "1=", "x=", "one ", "1 a ", "not the ", "{", "(", "1e9", "9^9"]


def test_hostile_texts_are_read_in_time_that_is_linear_in_them() -> None:
    """A scan that is not would take minutes for one of them; and none hides the answer after it."""
    texts = [unit * (LONG // len(unit)) for unit in REPEATED]
    texts += ["The answer is " + unit * (LONG // len(unit)) for unit in AFTER_A_MARKER]
    texts += ["\\boxed{" * (LONG // 14) + "}" * (LONG // 14), "{" * LONG + "18" + "}" * LONG, "1e" + "9" * LONG]
    texts += ["half of" + " " * LONG + "18" + " " * LONG + "squared", "the sum of " + "1, " * (LONG // 3) + "18"]
    texts += ["".join(chr(c) for c in range(0x100, 0x100 + LONG) if not 0xD800 <= c < 0xE000)]
    for text in texts:
        extract_final_answer(text)
        assert extract_final_answer(f"{text}\n#### 42") == 42, text[:20]


def test_final_answer_with_a_number_too_long() -> None:
    long = "9" * 200_000
    right = (f"The answer is {long}. No: the answer is 18.", f"The answer is 18. Not {long}", "18." + "0" * 200_000)
    assert misread([(f"The answer is {long}", None), ("1e99999", None), *((text, 18) for text in right)]) == []
