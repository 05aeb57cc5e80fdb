"""What a reference is read as covers all of it: answers of its own kind, right and wrong, and what cannot be read."""

import pytest

from trl_grpo_ext.guard.outcomes import Outcome

pytestmark = pytest.mark.slow  # imports sympy

# A reference, right answers and wrong ones, with `¦` between them.
_TABLE = r"""
3x-y+13=0 :: 3x-y+13=0 ¦ -3x+y-13=0 ¦ y=3x+13 :: 3x+4y+14=0 ¦ 3x-y+14=0 ¦ 0 ¦ 3x-y-13=0
$3x-y+13=0$ :: 3x - y = -13 :: 3x+4y+14=0 ¦ 0
(x-1)^2+(y+2)^2=9 :: (y+2)^2+(x-1)^2=9 :: (x-1)^2+(y+2)^2=8 ¦ (x+1)^2+(y+2)^2=9 ¦ 9
x^2+y^2=25 :: y^2+x^2=25 :: x^2+y^2=24 ¦ x^2-y^2=25 ¦ 25
y=2x+3 :: 2x+3 ¦ y=3+2x ¦ y - 2x = 3 :: y=2x+4 ¦ 3 ¦ 2x
\frac{x^2}{4}+\frac{y^2}{9}=1 :: \frac{y^2}{9}+\frac{x^2}{4}=1 ¦ 9x^2+4y^2=36 :: \frac{x^2}{4}-\frac{y^2}{9}=1 ¦ 1
k \text{ is even} :: k \text{ is even} :: k \text{ is odd} ¦ k
$k \text{ is even}$ :: k \text{ is even} :: k \text{ is odd} ¦ k
$n \text{ odd}$ :: n \text{ odd} :: n \text{ even} ¦ n
\forall x>0, f(x)=0 :: \forall x>0, f(x)=0 :: f(x)=0 ¦ 0 ¦ \exists x>0, f(x)=0
$\forall x>0, f(x)=0$ :: \forall x>0, f(x)=0 :: f(x)=0 ¦ 0
n \equiv 1 \pmod 4 :: n \equiv 1 \pmod 4 ¦ n\equiv 1 \pmod 4 :: n \equiv 3 \pmod 4 ¦ 4 ¦ 1
$n \equiv 1 \pmod{4}$ :: n \equiv 1 \pmod{4} :: n \equiv 2 \pmod{4} ¦ 4
x = 2k, k \in \mathbb{Z} :: x = 2k, k \in \mathbb{Z} :: x=2k+1, k\in \mathbb{Z} ¦ 2
\pm 2021 :: \pm 2021 ¦ 2021, -2021 ¦ -2021 \text{ or } 2021 :: 2021 ¦ -2021 ¦ \pm 2020
x=\pm 3 :: \pm 3 ¦ x = \pm 3 :: 3 ¦ x=3 ¦ \pm 4
1 \pm \sqrt{5} :: 1+\sqrt5, 1-\sqrt{5} ¦ 1\pm\sqrt{5} :: 1+\sqrt{5} ¦ 1 ¦ 2\pm\sqrt{5}
\frac{1 \pm \sqrt{5}}{2} :: \frac{1+\sqrt{5}}{2}, \frac{1-\sqrt{5}}{2} :: \frac{1+\sqrt{5}}{2} ¦ \frac{1\pm\sqrt{5}}{3}
10\% :: 0.1 ¦ 10\% ¦ \frac{1}{10} :: 1 ¦ 0.01 ¦ 11\%
12.5\% :: 0.125 ¦ 12.5\% :: 0.0125
1\,000 :: 1000 ¦ 1,000 ¦ 1\,000 :: 1 ¦ 0 ¦ 100 ¦ 1\,001
1\ 000 :: 1000 ¦ 1{,}000 :: 1 ¦ 0
1 000 000 :: 1000000 :: 0 ¦ 1000
12\,345.5 :: 12345.5 :: 5 ¦ 345.5
1{,}234 :: 1234 :: 234 ¦ 1
x\le 3 :: (-\infty,3] ¦ x \le 3 ¦ x \leq 3 ¦ 3 \ge x :: 3 ¦ x<3 ¦ x\ge 3 ¦ (-\infty,3)
x > 5 :: (5,\infty) ¦ x>5 ¦ 5<x :: 5 ¦ x<5 ¦ x\ge 5
1 < x < 5 :: (1,5) ¦ 1<x<5 :: 5 ¦ 1<x<6 ¦ 1 \le x < 5
e^{i\pi} :: -1 ¦ e^{i\pi} :: 1 ¦ e^{2i\pi} ¦ -i
e^{\frac{i\pi}{2}} :: i :: -i ¦ 1
$2e^{i\pi/3}$ :: 1+\sqrt{3}i ¦ 1+i\sqrt{3} :: 1-i\sqrt{3}
(1, 2) :: (1,2) ¦ (1, 2) :: 2 ¦ (1,3) ¦ (2,1)
(-1,2,3) :: (-1,2,3) :: 3 ¦ (1,2,3)
[1,2) :: [1,2) :: (1,2) ¦ 2
(-\infty, -1) \cup (2, \infty) :: (2,\infty) \cup (-\infty,-1) :: (-\infty,-1) ¦ (-\infty,-1]\cup(2,\infty)
\{1,2,3\} :: 1,2,3 ¦ \{3,2,1\} :: \{1,2\} ¦ 3
{1, 2} :: \{1,2\} :: 2
3,5 :: 3,5 ¦ 5, 3 ¦ \{3,5\} :: 3.5 ¦ 35 ¦ 3 ¦ 5
-1,2 :: -1,2 ¦ 2, -1 :: -1.2 ¦ 2
0,125 :: 0, 125 ¦ 0,125 :: 0125 ¦ 12
1,2345 :: 1, 2345 ¦ 1,2345 :: 1234 ¦ 12345
#### 3,5 :: 3, 5 :: 3.5
1,234,567 :: 1234567 :: 1, 234, 567 ¦ 1
€3,50 :: 3.5 :: 350 ¦ 3, 50
3,50 euros :: 3.5 :: 350 ¦ 3, 50
12,5% :: 12.5\% :: 125\% ¦ 12, 5
1, 2, 3 :: 3,2,1 :: 3 ¦ 1,2,4
3 and 4 :: 3, 4 ¦ 4 \text{ and } 3 :: 4 ¦ 3
x=1 \text{ or } x=2 :: x=2 \text{ or } x=1 :: x=1 ¦ x=2 ¦ 2
a=1, b=2 :: a=1,b=2 :: 2 ¦ a=1, b=3
3:4 :: 3:4 ¦ \frac{3}{4} :: 3 ¦ 4 ¦ 4:3
2:3:5 :: 2:3:5 :: 5 ¦ 2:3:4
\begin{pmatrix}1\\2\end{pmatrix} :: \begin{bmatrix}1\\2\end{bmatrix} :: \begin{pmatrix}1\\3\end{pmatrix} ¦ 2
\begin{bmatrix}1&2\\3&4\end{bmatrix} :: \begin{pmatrix}1&2\\3&4\end{pmatrix} :: \begin{pmatrix}1&2\\3&5\end{pmatrix} ¦ 4
\frac{\pi}{2} :: \frac{\pi}{2} ¦ \pi/2 :: 2 ¦ \pi
2\sqrt{3} :: \sqrt{12} :: 2 ¦ 3 ¦ 2\sqrt{2}
\frac{1}{2}x :: \frac{x}{2} ¦ 0.5x :: \frac{1}{2} ¦ x
\dfrac{3}{4} :: 0.75 ¦ 3/4 :: 4 ¦ 3
x^2+2x+1 :: (x+1)^2 :: 1 ¦ x^2+2x+2
5t :: 5t ¦ t \cdot 5 :: 5 ¦ 5s ¦ 5 \text{ s}
$3ab$ :: 3ba :: 3 ¦ 3bc
$\frac{1}{2} g t^2$ :: \frac{gt^2}{2} :: \frac{1}{2} ¦ \frac{1}{2} g
1\frac{1}{2} :: \frac{3}{2} ¦ 1.5 :: \frac{1}{2} ¦ 1
1 1/2 :: 1.5 ¦ 1\frac{1}{2} :: 1 ¦ \frac{1}{2}
0.\overline{3} :: \frac{1}{3} ¦ 0.\overline{3} :: 0 ¦ 0.3 ¦ 3
$0.\overline{142857}$ :: \frac{1}{7} :: 0 ¦ \frac{1}{8}
1010_2 :: 1010_2 ¦ 1010_{2} :: 1010_3 ¦ 1011_2 ¦ 2
2^{10} :: 1024 :: 2 ¦ 10
2^{31}-1 :: 2147483647 :: 1 ¦ 2
5! :: 120 :: 5
\binom{10}{3} :: 120 :: 10 ¦ 3
3\pi :: 3\pi :: 3 ¦ 2\pi
3π :: 3\pi :: 3
2√3 :: 2\sqrt{3} :: 2 ¦ 3
90° :: 90 ¦ 90^\circ :: 9
30^\circ 15' :: 30^\circ 15' ¦ 30.25 :: 45 ¦ 30
\ln 2 :: \ln 2 ¦ \ln(2) :: 2 ¦ \ln 3
ln 2 :: \ln 2 :: 2
x \approx 3.14 :: 3.14 :: 3.15
y''+y=0 :: y''+y=0 ¦ y^{\prime\prime}+y=0 :: y'+y=0 ¦ 0 ¦ y+y=0
f'(x)=2x :: 2x ¦ f'(x)=2x :: 3x ¦ 2
3\mathbf{i}-2\mathbf{j} :: 3\mathbf{i}-2\mathbf{j} :: 3 ¦ 3\mathbf{i}+2\mathbf{j} ¦ 3\mathbf{i}-2\mathbf{k}
\langle 1,-2,3\rangle :: \langle 1,-2,3 \rangle ¦ (1,-2,3) :: 3 ¦ \langle 1,2,3\rangle
1,2,\ldots,10 :: 1,2,\ldots,10 :: 1,2,10 ¦ 10
1.5e3 :: 1500 ¦ 1.5\times 10^3 :: 1.5 ¦ 3
3 \times 10^{8} :: 300000000 :: 3 ¦ 8 ¦ 3\times 10^7
1.6e-19 :: 1.6e-19 ¦ 1.60 \times 10^{-19} ¦ 16e-20 :: 1.7e-19 ¦ 9.1e-31 ¦ -1.6e-19 ¦ 0.0 ¦ 0 ¦ 1.602e-19
$6.626\times 10^{-34}$ :: 6.626 \times 10^{-34} ¦ 66.26e-35 :: 1.05\times 10^{-34} ¦ 0.0 ¦ \frac{1}{10^{34}}
$m = 9.1\times 10^{-31}$ :: m = 9.1\times 10^{-31} ¦ 9.1e-31 :: m = 1.6\times 10^{-19} ¦ m = 0 ¦ 9.2e-31
(1.5e-9, 2) :: (1.5\times 10^{-9}, 2) :: (2.5\times 10^{-9}, 2) ¦ (0, 2)
0.00000025 :: 0.00000025 ¦ \frac{1}{4000000} :: 0 ¦ 0.0000003
0.0 :: 0.0000001 ¦ 0 :: 0.001
0.333333 :: \frac{1}{3} :: 0.33333
5 km :: 5 ¦ 5 \text{ km} :: 6
18 \text{ cm}^2 :: 18 ¦ 18\text{ cm}^2 :: 2 ¦ 17
$9.8 \mathrm{~m} / \mathrm{s}^{2}$ :: 9.8 ¦ 9.8 \text{ m/s}^2 :: 2 ¦ 9.9
€10 :: 10 :: 1
\$3.50 :: 3.5 ¦ \$3.50 :: 3 ¦ 50
-5^\circ \text{C} :: -5 ¦ -5^\circ\text{C} :: 5
\text{(A)} :: A ¦ \text{A} ¦ (A) :: B ¦ \text{(B)}
$\text{no solution}$ :: \text{no solution} ¦ \text{No solution} :: \text{one solution} ¦ 0
\text{even} :: \text{even} ¦ \text{Even} :: \text{odd}
\emptyset :: \emptyset ¦ \varnothing :: 0
x \in [0,1] :: [0,1] ¦ x\in[0,1] :: [0,1) ¦ 1
\mathbb{R}\setminus\{0\} :: \mathbb{R} \setminus \{0\} :: \mathbb{R} ¦ 0
|x|<3 :: |x|<3 :: 3 ¦ |x|>3
x \neq 2 :: x\ne 2 :: 2 ¦ x=2
2 \mid n :: 2 \mid n :: n ¦ 2 ¦ 3 \mid n
\frac{x^3}{3}+C :: \frac{x^3}{3}+C ¦ C+\frac{1}{3}x^3 :: 3 ¦ \frac{x^3}{3} ¦ \frac{x^2}{3}+C
A \cup B :: A\cup B :: A\cap B ¦ A
\sqrt[3]{2} :: 2^{1/3} :: 2 ¦ 3 ¦ \sqrt{2}
\lfloor x \rfloor :: \lfloor x\rfloor :: x ¦ \lceil x \rceil
f(x)=x+1 :: x+1 ¦ f(x)=x+1 :: 1 ¦ f(x)=x+2
O(n \log n) :: O(n \log n) :: O(n) ¦ O(n^2 \log n)
p \land q :: p \land q :: p \lor q ¦ p
x^{2}+y^{2} \leq 4 :: x^2+y^2\le 4 :: 4 ¦ x^2+y^2<4
\frac{\pi}{4} :: \int_0^1 \frac{1}{1+x^2} dx :: \int_0^1 \frac{2}{1+x^2} dx
18 :: 18 :: \int_0^\infty e^{-x^2} dx
(-\infty, 2) \cup (3, \infty) :: (3,\infty) \cup (-\infty,2) :: (3,\infty) ¦ (-\infty,3)\cup(3,\infty)
[0, 2) \cup (2, 5] :: (2,5]\cup[0,2) :: (2,5] ¦ [0,5]
(x + 2) (x + 3) :: x^2+5x+6 ¦ (x+3)(x+2) :: x+3 ¦ 3 ¦ (x+2)(x-3)
2(x + y) - 3 :: 2x+2y-3 :: 2x+2y ¦ -3
(x - 3) / 2 :: \frac{x-3}{2} :: 2 ¦ x-3
\frac{n (n + 1) (2n + 1)}{6} :: \frac{n(n+1)(2n+1)}{6} :: 6 ¦ n+1
\frac{2}{3} \pi (r + h) r^2 :: \frac{2\pi r^2(r+h)}{3} :: \frac{2}{3} ¦ \frac{2}{3}\pi r^2
(1, 2) \text{ and } (3, 4) :: (3,4),(1,2) :: (1,2) ¦ 4
f(x + 1) = 2x :: f(x+1)=2x :: 2 ¦ f(x+1)=3x
e^x (x + 1) + C :: C+(x+1)e^x :: e^x(x+1) ¦ C
2 \cos (3 t) - \sin (3 t) :: 2\cos(3t)-\sin(3t) :: 2\cos(3t) ¦ 3
\cos (x) e^{\sin (x)} :: e^{\sin x}\cos x :: e^{\sin x} ¦ \cos x
3 (x) + 2 :: 3x+2 :: 3 ¦ 2 ¦ x
(n) + 1 :: n+1 :: 1 ¦ n
\forall x \in A: x > 0 :: \forall x \in A: x > 0 :: x>0 ¦ 0
\left[\begin{array}{rrr}1 & 2 & 3\end{array}\right] :: \begin{bmatrix}1&2&3\end{bmatrix} :: 3 ¦ 1,2,4
n! :: n! :: n ¦ (n+1)!
The answer is $3x-y+13=0$. :: 3x-y+13=0 :: 0 ¦ 3x+4y+14=0
So the answer is $k \text{ is even}$ :: k \text{ is even} :: k \text{ is odd} ¦ k
"""

_UNREADABLE = r"""
She has 3 of 4 ¦ at least 5 ¦ 5 or more apples ¦ between 3 and 4 ¦ all $n \ge 3$ ¦ $x$ is even ¦ $n$ odd ¦ 12 dozen
3 million ¦ twice 5 ¦ no more than 7 ¦ 3 red and 4 blue ¦ 10 to 12 ¦ 2x more than y ¦ 5 + 3 apples = 8 apples
3 hours 20 minutes ¦ Let $x=3$. Then $y=4$. ¦ Case 1: $5$ ¦ (a) 5 ¦ A: 5 B: 6 ¦ 5-7 apples ¦ Monday ¦ even ¦ A ¦ yes
She earns $18 a day, so $36 in two. ¦ 48/2 = 24 clips in May, 72 altogether
A) 5 ¦ 1) 5 2) 36 ¦ (a) 5 (b) 36 ¦ (x+1) b) 5 ¦ x=1 (b) x=5 ¦ 3 (b) 5 ¦ J: $5$, S: $36$ ¦ x = 3, B: 5
"""

_WHY = r"""
(b) 5 :: '(b)' may be a label ¦ x y a) 5 :: 'a)' may be a label ¦ C: 5 :: 'C:' may be a label
5-7 apples :: 'apples' may be words ¦ $n$ odd, say :: 'odd', 'say' may be words ¦ abc + 1 :: 'abc' may be words
A :: no digit and no sign of mathematics ¦ x y :: no digit and no sign of mathematics
\frac{1}{2} of it :: 'of', 'it' may be words
"""


def judged(reference: str, answer: str) -> dict[str, str]:
    from trl_grpo_ext.rewards._math import verification

    return verification.check({"reference": reference, "answer": f"\\boxed{{{answer}}}"})


def test_answers_of_the_same_shape_are_told_apart() -> None:
    differ = []
    for line in _TABLE.strip().splitlines():
        reference, *answers = line.split(" :: ")
        for is_right, listed in zip((True, False), answers, strict=True):
            for answer in listed.split(" ¦ "):
                found = judged(reference, answer)
                if (found["outcome"] == Outcome.RIGHT) != is_right:
                    differ.append((reference, answer, found))
    assert differ == []


def test_what_holds_more_than_a_number_is_unreadable_and_says_so() -> None:
    for reference in (one for line in _UNREADABLE.strip().splitlines() for one in line.split(" ¦ ")):
        for answer in ("5", "36", "72", "n \\ge 3", "x"):
            found = judged(reference, answer)
            assert (reference, found["outcome"]) == (reference, Outcome.UNPARSEABLE)
            assert "\\boxed{}" in found["detail"]


def test_it_says_truly_why_a_reference_is_unreadable() -> None:
    for row in (one for line in _WHY.strip().splitlines() for one in line.split(" ¦ ")):
        reference, why = row.split(" :: ")
        assert judged(reference, "5")["detail"].split(";")[0] == why, reference


def test_references_with_marks_and_units() -> None:
    for reference, gold, left in (
        ("48/2 = 24 clips in May.\n#### 1,072", "1072", ""),
        ("So $a=3$ and hence $b=4$, thus \\boxed{12}.", "12", ""),
        ("The final answer is: $x=3$.", "x=3", ""),
        ("**18**", "18", ""),
        ("18 apples", "18", "apples"),
        ("$\\frac{2}{3}$ cup", "\\frac{2}{3}", "cup"),
    ):
        found = judged(reference, "0")
        assert (found["gold"], found["left"]) == (gold, left)
    # What does not parse is compared as text.
    for reference in ("n \\equiv 1 \\pmod 4", "$\\forall x>0, f(x)=0$", "2 \\mid n"):
        assert judged(reference, reference.strip("$").replace(" ", "  "))["outcome"] == Outcome.RIGHT
        assert judged(reference, "5")["outcome"] == Outcome.UNPARSEABLE
