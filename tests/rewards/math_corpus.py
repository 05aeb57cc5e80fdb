"""Pairs of a reference and a completion on which `math_accuracy` and TRL's `accuracy_reward` must agree."""

# A reference, and contents of a box with `¦` between them.
_TABLE = r"""
18 :: 18 ¦ 81 ¦ 018 ¦ 18.0 ¦ 18. ¦ \$18 ¦ $18 ¦ 18\text{ apples} ¦ 18 \text{ dollars} ¦ 18 dollars ¦ 18\ \text{cm}^2
18 :: 18\mathrm{~cm} ¦ 18 \, \text{km/h} ¦ 18 cm ¦ \text{18} ¦ \textbf{18} ¦ \mathbf{18} ¦ \frac{1}{ ¦ }{ ¦ x +
-7 :: -7 ¦ 7
7 :: +7 ¦ --7
1234 :: 1,234 ¦ 1 234 ¦ 1{,}234 ¦ 1\,234 ¦ 12,34
1,234 :: 1234
1,234,567 :: 1234567 ¦ 1,234,568
$1234$ :: 1\!,234
0 :: 0 ¦ -0
123456789012345678901234567890 :: 123456789012345678901234567890 ¦ 123456789012345678901234567891
#### 72 :: 72
0.5 :: 0.5 ¦ .5 ¦ 0,5 ¦ 50\%
$0.5$ :: \frac{1}{2}
12.50 :: 12.5
12.5 :: 12.50
18.0 :: 18
0.333333 :: \frac{1}{3}
$\frac{1}{3}$ :: 0.333333 ¦ 0.3333333 ¦ 0.33333
3.14159 :: \pi
$\pi$ :: 3.141593
0.1234567 :: 0.1234568 ¦ 0.1234567
2.0000004 :: 2
0.0 :: 0.0000001
100000000.5 :: 100000000.50
$\frac{3}{4}$ :: \frac{3}{4} ¦ \dfrac{6}{8} ¦ \tfrac34 ¦ 3/4
3/4 :: 0.75 ¦ \frac{3}{4}
10/5 :: 2
$\frac{-3}{4}$ :: -\frac{3}{4}
$-\frac{3}{4}$ :: \frac{3}{-4}
$\frac34$ :: 0.75
$\frac{1}{0}$ :: \frac{1}{0}
$2\frac{1}{2}$ :: \frac{5}{2} ¦ 2.5
$\frac{5}{2}$ :: 2 \frac{1}{2}
$\frac{1}{1+\frac{1}{2}}$ :: \frac{2}{3} ¦ \frac{3}{2}
$\frac{\frac{1}{2}}{\frac{3}{4}}$ :: \frac{2}{3}
$\frac{\sqrt{3}}{3}$ :: \frac{1}{\sqrt{3}}
$\frac{x+1}{x-1}$ :: \frac{1+x}{x-1}
$\frac{a}{b}$ :: a/b
50 :: 50\% ¦ 50 percent
50\% :: 50
$50\%$ :: 0.5 ¦ \frac{1}{2}
50% :: 50%
12.5% :: 12.5\%
\$18 :: 18
$18 :: 18
$18.50 :: \$18.50
5 km :: 5
90 :: 90^\circ
$90^\circ$ :: 90 ¦ 90^{\circ}
$45^\circ$ :: \frac{\pi}{4}
5 :: 5\text{ or so} ¦ 5\text{ percent}
$\sqrt{2}$ :: \sqrt{2} ¦ 1.414214
$\sqrt{8}$ :: 2\sqrt{2}
$\sqrt[3]{27}$ :: 3
$2^{10}$ :: 1024 ¦ 2^10
$10^{-3}$ :: 0.001
$3 \times 10^5$ :: 300000
$3 \times 10^{5}$ :: 3 \cdot 10^5
300000 :: 3e5
$6.02\times10^{23}$ :: 6.02 \times 10^{23}
$2\pi$ :: 2\pi ¦ 6.283185 ¦ \pi
$e^2$ :: e^{2}
$\ln 2$ :: \ln(2)
$\log_2 8$ :: 3
$5!$ :: 120
$\binom{5}{2}$ :: 10
$\frac{1}{2006!}$ :: \frac{1}{2006!}
$\sin 30^\circ$ :: \frac{1}{2}
$|{-3}|$ :: 3
$\infty$ :: \infty
$-\infty$ :: \infty
infinity :: \infty
$x^2+2x+1$ :: (x+1)^2 ¦ x^2+1+2x ¦ (x-1)^2
$2x$ :: 2y
$ab$ :: ba
$x$ :: X
$\sin^2 x+\cos^2 x$ :: 1
$\frac{x^2-1}{x-1}$ :: x+1
$n(n+1)/2$ :: \frac{n^2+n}{2}
$\sum_{k=1}^{3} k$ :: 6
$\int_0^1 x\,dx$ :: \frac{1}{2}
$3+4i$ :: 3+4i ¦ 4i+3 ¦ 3-4i
$i^2$ :: -1
$\frac{1}{i}$ :: -i
$\pm 2$ :: \pm 2 ¦ 2, -2
$\{1,2,3\}$ :: \{3,2,1\} ¦ 1, 2, 3 ¦ \{1,2\}
$1,2$ :: 1 \text{ and } 2 ¦ 2,1
$\emptyset$ :: \emptyset
$(1,2)$ :: (1,2) ¦ (2,1) ¦ [1,2]
$[1,2]$ :: [1,2]
$(1,2,3)$ :: \left(1,2,3\right)
$(-\infty,3)$ :: (-\infty, 3)
$(-\infty,3]$ :: x \le 3
$(0,1)\cup(2,3)$ :: (2,3)\cup(0,1)
$[0,1]\cup[2,3]$ :: [0,1]
$x \in [0,1]$ :: [0,1]
$\mathbb{R}$ :: \mathbb{R}
$x=3$ :: 3 ¦ y=3 ¦ x=3
$3$ :: x=3
$x=1+2=3$ :: 3
$y=2x+1$ :: 2x+1 ¦ y=1+2x ¦ y=x+1
$y=c_1 e^x$ :: y=C_1 e^x ¦ y=c_2 e^x
$y=\sqrt{-2}$ :: y=\sqrt{-3}
$2x+3y=6$ :: 6=2x+3y ¦ 4x+6y=12
$x=1,y=2$ :: x=1, y=2 ¦ y=2, x=1
$x<3$ :: x<3 ¦ 3>x
$1<x<2$ :: (1,2) ¦ 1<x<2
$x\geq 2$ :: [2,\infty)
$x \neq 2$ :: x \neq 2
$\begin{pmatrix}1&2\\3&4\end{pmatrix}$ :: \begin{pmatrix}1&2\\3&4\end{pmatrix}
$\begin{pmatrix}1&2\\3&4\end{pmatrix}$ :: \begin{bmatrix}1 & 2\\ 3 & 4\end{bmatrix}
$\begin{pmatrix}1&2\\3&4\end{pmatrix}$ :: \begin{pmatrix}1&2\\3&5\end{pmatrix}
$\begin{pmatrix}1\\2\end{pmatrix}$ :: \begin{pmatrix}1.0\\2\end{pmatrix}
$\langle 1,2\rangle$ :: (1,2)
$\text{yes}$ :: \text{yes} ¦ \text{Yes}
$\text{(B)}$ :: \text{B}
$B$ :: \textbf{(B)}
B :: B
Monday :: \text{Monday}
\boxed{\text{even}} :: \text{even}
no number here :: 18
$x +$ :: x +
$\frac{1}{$ :: \frac{1}{
\boxed{18} :: 18
$\boxed{18}$ :: 18
\boxed{\frac{1}{2}} :: 0.5
$18$ :: 18
\(18\) :: 18
\[18\] :: 18
The answer is 18. :: 18
**18** :: 18
"""

ANSWERS: list[tuple[str, str]] = [
    (reference, content)
    for line in _TABLE.strip().splitlines()
    for reference, contents in [line.split(" :: ")]
    for content in contents.split(" ¦ ")
]
ANSWERS += [
    *(("\uff12", "2"), ("2", "\uff12"), ("", "18"), ("18", " ")),
    ("48/2 = 24 clips in May.\n48+24 = 72 clips altogether.\n#### 72", "72"),
    ("48/2 = <<48/2=24>>24 clips in May.\n#### 1,072", "1072"),
    ("She earns $18 a day, so $36 in two.\n#### 36", "36"),
]

# By reference, completions.
_COMPLETIONS: dict[str, list[str]] = {
    "18": [
        *("She sells 16-3-4 = 9 eggs for 9*2 = $18 a day. The answer is \\boxed{18}.", "The answer is 18."),
        *("The answer is $18$.", "Answer: $18$", "Answer: \\(18\\)"),
        "The final answer is $18$. I hope it is correct.",
        "The final answer is $17$. I hope so. \\boxed{18}",
        *("\\boxed{18} The final answer is $17$. I hope so.", "The final answer is $18$", "$18$", "18", ""),
        *("\\boxed{}", "\\boxed{18", "\\boxed 18", "\\boxed {18}", "\\fbox{18}", "boxed{18}", "$\\boxed{18}$"),
        *("$$\\boxed{18}$$", "\\[\\boxed{18}\\]", "\\[\n\\boxed{18}\n\\]", "\\(\\boxed{18}\\)"),
        *("$x = \\boxed{18}$ dollars", "$\\boxed{18}\\%$", "$\\boxed{18}$ %", "$\\boxed{18}$ percent"),
        *("\\boxed{17} no, \\boxed{18}", "\\boxed{18} no, \\boxed{17}", "\\boxed{18}. Again: \\boxed{18}"),
        *("\\boxed{18} and a set {1, 2}", "First \\boxed{3}" + " and so on" * 20 + " \\boxed{18}"),
        *("\\boxed{\\boxed{18}}", "\\boxed{x = 18}", "costs $5 and $6, \\boxed{18}, change $3"),
        *("costs $5 and \\boxed{$18}, change $3$", "[ \\boxed{18} ] ", "\x00 \\boxed{18} \x00"),
        *("\ud800 \\boxed{18}", "\\boxed{18\x00}", "\\boxed{\n18\n}", "\\boxed{\\text{Answer: }18}"),
        "\u7b54\u6848\u662f \\boxed{18}\u3002",
        "\u043e\u0442\u0432\u0435\u0442 \\boxed{18} \u0440\u0443\u0431\u043b\u0435\u0439",
    ],
    "0.18": ["$\\boxed{18}$%"],
    "$17,18$": ["\\boxed{17} and \\boxed{18}", "$\\boxed{17}$ and $\\boxed{18}$"],
    "$\\frac{3}{4}$": [
        *("so $p = \\frac{1}{4}$ and the answer is \\boxed{\\frac{3}{4}}", "The answer is \\frac{3}{4}"),
        "\\[ \\boxed{\\frac{3}\n{4}} \\]",
    ],
    "$x^2$": ["**Answer:** $x^2$"],
    "$\\{1,2\\}$": ["The solutions are \\boxed{1} and \\boxed{2}."],
    "$(1,2)$": ["\\[\\boxed{(1,\n2)}\\]"],
}
COMPLETIONS = [(reference, completion) for reference, listed in _COMPLETIONS.items() for completion in listed]

PAIRS: list[tuple[str, str]] = [
    *((reference, f"So the answer is \\boxed{{{content}}}.") for reference, content in ANSWERS),
    *((reference, f"Thus\n$$x = \\boxed{{{content}}}$$\n") for reference, content in ANSWERS[::3]),
    *COMPLETIONS,
]
