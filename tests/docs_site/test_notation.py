"""Formulas of docstrings in LaTeX."""

import xml.etree.ElementTree as ElementTree

import pytest
from latex2mathml.converter import convert

from docs.site.notation import formulas, latex
from trl_grpo_ext import available
from trl_grpo_ext.plugins.description import describe


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("A_i = r_i - Σ_j L_j / Σ_j", r"A_{i}=r_{i}-\frac{\sum _{j}\; L_{j}}{\sum _{j}}"),
        ("σ = √(R̄ (1 - R̄))", r"\sigma =\sqrt{\bar{R}\; (1-\bar{R})}"),
        ("clip(exp(F), 1 - epsilon_low, 1)", r"\text{clip}(\exp (F),\, 1-\text{epsilon_low},\, 1)"),
        ("(a + b) / c · d", r"\frac{a+b}{c} \cdot d"),
    ],
)
def test_by_hand(formula: str, expected: str) -> None:
    assert latex(formula).replace("  ", " ") == expected


FORMULAS = [
    (info.name, formula)
    for info in available()
    if info.builtin
    for formula in formulas(describe(info, available()).doc.description)
]


@pytest.mark.parametrize(("name", "formula"), FORMULAS)
def test_every_formula_of_the_package_is_set_and_loses_no_letter(name: str, formula: str) -> None:
    tree = ElementTree.fromstring(convert(latex(formula), display="block"))
    assert not list(tree.iter("merror"))
    letters = sorted(letter for letter in formula if letter.isascii() and letter.isalnum())
    text = "".join(tree.itertext())
    assert sorted(letter for letter in text if letter.isascii() and letter.isalnum()) == letters
