r"""Sixty-four completions that hang, crash or bloat a verifier, and as many that are ordinary."""


def _nested(opening: str, inner: str, closing: str, depth: int) -> str:
    return opening * depth + inner + closing * depth


def _box(content: str) -> str:
    return f"The answer is \\boxed{{{content}}}."


_MATRIX = "\\\\".join("&".join(f"x^{{{row}}}+{column}" for column in range(50)) for row in range(50))

_DETERMINANT = "\\\\".join("&".join(f"a_{{{row}{column}}}" for column in range(9)) for row in range(9))

_TABLE = r"""
9^{9^{9^9}} ¦ 9^{9^{9^{9^{9}}}} ¦ \dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}
2^{2^{2^{2^{2^2}}}} - 1 ¦ 9^{999999999} ¦ 10^{10^{10}} + 1 ¦ (1+10^{-9})^{10^{9}} ¦ 7^{7^{7^7}} \mod 100
\sqrt{9^{9^{9^9}}} ¦ \log(9^{9^{9^9}}) ¦ \sin(9^{9^{9^9}}) ¦ 1.000001^{9^{9^{9}}} ¦ (x+1)^{100000}
(x+y+z+1)^{300} ¦ (9!)! ¦ ((5!)!)! ¦ 100000000! ¦ \frac{100000!}{99999!} ¦ \binom{1000000000}{500000000}
\binom{10^{9}}{10^{8}} ¦ \sum_{k=1}^{10^9} \frac{1}{k^2} ¦ \sum_{k=1}^{10^9} k^k ¦ \prod_{k=1}^{10^8} k
\prod_{k=1}^{100000} (x+k) ¦ \int_0^1 \sin(\cos(\sin(\cos(x^x))))\,dx ¦ \int_0^{\infty} e^{-x^{7}} \ln(1+x^{3})\,dx
\lim_{x \to 0} \frac{\sin(\tan x)-\tan(\sin x)}{x^{77}} ¦ \int \int \int x^{y^{z}}\,dx\,dy\,dz
\begin{pmatrix}1&2\\3&4\end{pmatrix}^{1000000000} ¦ x^5 - x - 1 = 0, y^5 + xy = 3, z^7 = x + y
"""
"""Towers and powers, factorials and binomials, sums, products, integrals and limits."""

_IN_A_BOX: list[str] = [
    *(content for line in _TABLE.strip().splitlines() for content in line.split(" ¦ ")),
    # nesting, long numbers and long lists
    *(_nested(opening, opening[0], "}", depth) for opening, depth in (("2^{", 60), ("x^{", 90))),
    *(_nested("\\frac{1}{1+", "1", "}", depth) for depth in (95, 1000)),
    *(_nested("\\sqrt{1+", "2", "}", depth) for depth in (99, 3000)),
    *(_nested("(", "1", ")", depth) for depth in (99, 20_000)),
    *(_nested("\\left(", "1", "\\right)", 90), _nested("[", "1", "]", 500), _nested("\\{", "1", "\\}", 5000)),
    *("{" * 50_000, _nested("-(", "x", ")", 80), "9" * 4_000, "9" * 200_000),
    "0." + "3" * 1_900,
    "-" * 5_000 + "1",
    ",".join(str(number) for number in range(5_000)),
    "\\{" + ",".join(f"\\frac{{1}}{{{number}}}" for number in range(1, 1_200)) + "\\}",
    "+".join(f"x^{{{number}}}" for number in range(1_500)),
    "=".join(["x+1"] * 2_000),
    "1" + " \\pm 1" * 60,
    "<".join(f"x_{{{number}}}" for number in range(500)),
    "\\begin{pmatrix}" + _MATRIX + "\\end{pmatrix}",
    "\\det\\begin{pmatrix}" + _DETERMINANT + "\\end{pmatrix}",
    "\u0000" * 1_000 + "18",
    "\ud800\udfff\udc80" * 300,
    "١٨ + अठारह + 十八 + \u202e81\u202c" * 20,
]

_WHOLE: list[str] = [
    "\\boxed{1} " * 4_000,
    "$" * 3_001 + "answer" + "$x" * 1_000,
    "answer " * 2_000 + "\\boxed{" * 2_000,
    "final answer is " * 1_000 + "$1$ and " * 1_000,
    "$\\boxed{1}$ and " * 1_500 + "$\\boxed{",
    "\\[" * 2_000 + "\\boxed{1" + "}" * 2_000,
]

HOSTILE: list[str] = [*(_box(content) for content in _IN_A_BOX), *_WHOLE]
assert len(HOSTILE) == 64 == len(set(HOSTILE))

ORDINARY: list[tuple[str, str, float]] = [
    row
    for number in range(16)
    for row in (
        (f"{number}", f"So she makes \\boxed{{{number}}} dollars.", 1.0),
        (f"$x^2+{number}$", f"Hence \\boxed{{{number}+x^2}}.", 1.0),
        (f"$\\frac{{{number}+1}}{{\\sqrt{{2}}}}$", f"Hence $\\boxed{{\\frac{{({number}+1)\\sqrt{{2}}}}{{2}}}}$.", 1.0),
        (f"$({number},7)$", f"Hence \\boxed{{({number + 1},7)}}.", 0.0),
    )
]
"""(reference, completion, score): sixty-four pairs, of which forty-eight need math-verify itself."""

HOSTILE_REFERENCES: list[str] = [
    f"${content}$"
    for content in ("9^{9^{9^9}}", "(9!)!", "9^{999999999}", _nested("(", "1", ")", 20_000), "9" * 200_000)
]
