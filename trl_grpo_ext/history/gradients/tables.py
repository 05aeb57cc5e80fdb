"""The numbers as tables of text, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Sequence

from . import PLAIN, POLICY_GRADIENT, GradientQuality
from .statistics import Estimate

Lines = list[tuple[str, list[str]]]
Titled = tuple[str, Sequence[str], Lines]
"""Title, names of the columns, and the lines: a name and a cell for each column."""

ABSENT = "-"


def head(found: GradientQuality) -> list[str]:
    """Sentences on what was measured."""
    error = "exact" if found.sketch_error == 0 else f"squared norms to {found.sketch_error:.1%}"
    return [
        f"{found.source}: {found.completions:,} completions in {found.groups:,} groups of {found.prompts:,} "
        f"prompts, {found.tokens:,} tokens; "
        f"{found.model}: {found.parameters:,} trained parameters in {found.dimensions:,} dimensions ({error})"
    ]


def main_table(found: GradientQuality) -> Titled:
    """One line per selection."""
    columns = (
        f"signal / noise of {found.batch_size} completions",
        "worth x completions",
        "p",
        "cosine to plain TRL",
        "cosine to policy gradient",
        "p below 1",
        "halves",
    )
    lines = []
    for one in found.selections:
        reference = one.name in (PLAIN, POLICY_GRADIENT)
        cells = [
            format_estimate(one.ratio),
            ABSENT if one.name == PLAIN else format_estimate(one.worth, 2),
            ABSENT if reference else format_p(one.worth_p),
            ABSENT if one.name == PLAIN else format_estimate(one.to_plain, 2),
            ABSENT if one.name == POLICY_GRADIENT else format_estimate(one.to_policy_gradient, 2),
            ABSENT if reference else format_p(one.bias_p),
            format_estimate(one.halves, 2),
        ]
        lines.append((one.name, cells))
    return "gradients, with 95 % intervals; p corrected by Holm's method", columns, lines


def share_tables(found: GradientQuality) -> list[Titled]:
    """The sources of the batch gradient's squared norm, one column per selection."""
    tables: list[Titled] = []
    names = [one.name for one in found.selections]
    for title, kind in (
        ("by the sign of the advantage", "by_sign"),
        ("by length of the completion", "by_length"),
        ("by position in the completion", "by_position"),
    ):
        columns = [getattr(one, kind) for one in found.selections]
        if columns[0]:
            lines = [
                (parts[0].name, [format_share(part.share) for part in parts]) for parts in zip(*columns, strict=True)
            ]
            tables.append((f"share of the gradient's squared norm, {title}", names, lines))
    return tables


def format_estimate(one: Estimate, digits: int | None = None) -> str:
    """A number and its interval."""
    if one.value is None:
        return ABSENT
    number = _significant if digits is None else lambda value: f"{value:.{digits}f}"
    bounds = [ABSENT if bound is None else number(bound) for bound in (one.low, one.high)]
    return f"{number(one.value)} [{bounds[0]}, {bounds[1]}]"


def format_share(one: Estimate) -> str:
    """A share and its interval."""
    if one.value is None:
        return ABSENT
    bounds = [ABSENT if bound is None else f"{bound:.0%}" for bound in (one.low, one.high)]
    return f"{one.value:.0%} [{bounds[0]}, {bounds[1]}]"


def format_p(p: float | None) -> str:
    """A p-value."""
    return ABSENT if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _significant(value: float) -> str:
    return f"{value:.3g}"
