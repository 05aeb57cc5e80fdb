"""What a chain of hooks does to the advantages, hook by hook.

| metric | over the live tokens of all ranks |
| --- | --- |
| `advantage/<hook>/mean` | mean of the advantages after the hook |
| `advantage/<hook>/std` | their standard deviation |
| `advantage/<hook>/sign_flips` | share of the tokens whose advantage went from above 0 to below, or back |
| `advantage/<hook>/mass_moved` | sum of the absolute changes, relative to the sum of the absolute advantages before |

A hook that halves all advantages moves 0.5 of the mass, one that turns them all moves 2. A hook that acts at both
stages is counted at the later one under `<hook>/forward`; one that is selected twice under `<hook>` and `<hook>_2`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

COLUMNS = 6


def change_table(before_B_T: torch.Tensor, after_B_T: torch.Tensor, mask_B_T: torch.Tensor) -> torch.Tensor:
    """What the metrics of one hook need of each completion, `(B, 6)`, to be gathered over all ranks.

    Tokens, Σ A, Σ A², sign flips, Σ |change|, Σ |A before|. In float32: a completion's own sums are short.
    """
    before_B_T, after_B_T = before_B_T.float(), after_B_T.float()
    flips_B_T = (torch.sign(before_B_T) * torch.sign(after_B_T) < 0) * mask_B_T
    columns = [mask_B_T, after_B_T, after_B_T**2, flips_B_T, (after_B_T - before_B_T).abs(), before_B_T.abs()]
    return torch.stack([(column * (mask_B_T > 0)).sum(dim=1) for column in columns], dim=1).to(torch.float32)


def change_metrics(name: str, table_N_C: torch.Tensor) -> dict[str, float]:
    """The metrics of one hook from the `change_table` of all ranks; NaN where they are not defined."""
    tokens, total, squares, flips, moved, mass = table_N_C.detach().cpu().double().sum(dim=0)
    mean = total / tokens
    return {
        f"advantage/{name}/mean": float(mean),
        f"advantage/{name}/std": float((squares / tokens - mean**2).clamp(min=0.0).sqrt()),
        f"advantage/{name}/sign_flips": float(flips / tokens),
        f"advantage/{name}/mass_moved": float(moved / mass) if mass > 0 else math.nan,
    }


def unique_names(names: Sequence[str]) -> list[str]:
    """The names, with `_2`, `_3` behind those that occur again."""
    unique: list[str] = []
    for position, name in enumerate(names):
        count = names[: position + 1].count(name)
        candidate = name if count == 1 else f"{name}_{count}"
        while candidate in unique:
            candidate += "_"
        unique.append(candidate)
    return unique
