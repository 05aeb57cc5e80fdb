r"""Answers as college-level problem sets give them, with drawn numbers: rare in MATH, on which verifiers are tried.

The forms are those of public sets of college problems (algebra, calculus, differential equations, linear algebra,
series, vectors); the numbers are drawn. Some take math-verify a second, and none is meant to harm it.
"""

import random

FORMS = (
    r"$y=c_{1} e^{@ x}+c_{2} e^{-@ x}-\frac{@}{4}(2 x+@)$",
    r"$y=e^{-x / @}\left(c_{1} \cos @ x+c_{2} \sin @ x\right)+\frac{x^{2}}{@}$",
    r"$y=\frac{x^{@} e^{x}}{24}(@+x)+e^{x}\left(c_{1}+c_{2} x+c_{3} x^{2}\right)$",
    r"$y=x\left[c_{1} \cos (@ \ln x)+c_{2} \sin (@ \ln x)\right]$",
    r"$\left\{e^{x}, x e^{-@ x}, \cos @ x, x \sin @ x\right\}$",
    r"$\left(\frac{\pi}{\sqrt{@+\pi^{2}}},-\frac{@}{7}\right)$",
    r"$\left[0, \frac{\pi}{@}\right) \cup\left(\frac{@ \pi}{4}, \infty\right)$",
    r"$\frac{\pi}{@}, \frac{@ \pi}{7}, \pi, \frac{@ \pi}{3}$",
    r"$\frac{x^{2}+@ x-@}{(x-1)^{2}\left(x^{2}+@\right)}$",
    r"$\frac{@ \sqrt{x^{2}+@}-\ln |2 x-@|}{9}+C$",
    r"$\sum_{n=0}^{\infty} \frac{(-@)^{n} x^{2 n+1}}{(2 n+@) !}$",
    r"$\left[\begin{array}{rr}@ & -@ \\ \frac{5}{@} & @\end{array}\right]$",
    r"$@ v^{2} \sqrt[3]{@ u^{2} v^{2}}$",
    r"$x=\frac{-@ \pm \sqrt{@}}{@}$",
    r"$\frac{-@ \sin x \cos x}{\sqrt{1-\sin ^{2} @ x}}$",
    r"$(x-@)^{2}+(y+@)^{2}=@$",
    r"$@ x^{3}-@ x^{2}+@ x-@$",
    r"$(@ x+@)(x-@)(x^{2}+@)$",
    r"$\ln \left(\frac{x y^{@}}{z^{@}}\right)$",
    r"$@ \sqrt{3}\left(\cos \frac{@ \pi}{6}+i \sin \frac{@ \pi}{6}\right)$",
    r"$(-\infty,-@) \cup(@, \infty)$",
    r"$-\frac{@}{2} \leq x<@$",
    r"$\tan ^{-1}\left(\frac{@}{@}\right)$",
    r"$\frac{\frac{@}{x}+\frac{@}{y}}{x-y}$",
    r"$@.25 \times 10^{-@} \mathrm{~m} / \mathrm{s}$",
    r"$G=\frac{r}{@}+\left(G_{0}-\frac{r}{@}\right) e^{-@ t}$",
    r"$\{(@, @),(-@, @)\}$",
    r"$\langle @,-@, @\rangle$",
    r"$f^{\prime}(x)=@ x^{2}-\frac{@}{x^{3}}$",
    r"$\log _{@}(x+1)-@ \log _{@} x$",
    r"$@\%$",
    r"$x=@, y=-@, z=@$",
)


def college_pairs(seed: int = 0, each: int = 18) -> list[tuple[str, str]]:
    """Every form `each` times with new numbers: each expression as the answer to itself and to a different one."""
    rng = random.Random(seed)
    drawn = [_draw(form, rng) for _ in range(each) for form in FORMS]
    references = list(dict.fromkeys(drawn))
    others = [*references[1:], references[0]]
    return [(reference, _boxed(reference)) for reference in references] + [
        (reference, _boxed(other)) for reference, other in zip(references, others, strict=True)
    ]


def _draw(form: str, rng: random.Random) -> str:
    first, *rest = form.split("@")
    return first + "".join(f"{rng.randrange(2, 10)}{part}" for part in rest)


def _boxed(reference: str) -> str:
    return f"So the answer is \\boxed{{{reference.strip('$')}}}."
