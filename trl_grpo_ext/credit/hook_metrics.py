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

    Tokens, mean A, Σ (A - mean)², sign flips, Σ |change|, Σ |A before|. Deviations from the completion's own mean, and
    no squares of A, so that advantages that are all alike have a spread of nothing and not of what rounding leaves.
    """
    live_B_T = (mask_B_T > 0).float()
    before_B_T, after_B_T = before_B_T.float(), after_B_T.float()
    tokens_B = live_B_T.sum(dim=1)
    means_B = (after_B_T * live_B_T).sum(dim=1) / tokens_B.clamp(min=1.0)
    flips_B_T = torch.sign(before_B_T) * torch.sign(after_B_T) < 0
    columns = [
        (after_B_T - means_B.unsqueeze(1)) ** 2,
        flips_B_T.float(),
        (after_B_T - before_B_T).abs(),
        before_B_T.abs(),
    ]
    return torch.stack([tokens_B, means_B, *((column * live_B_T).sum(dim=1) for column in columns)], dim=1)


def change_metrics(name: str, table_N_C: torch.Tensor) -> dict[str, float]:
    """The metrics of one hook from the `change_table` of all ranks; NaN where they are not defined."""
    tokens_N, means_N, within_N, flips_N, moved_N, mass_N = table_N_C.detach().cpu().double().unbind(dim=1)
    tokens, mass = tokens_N.sum(), mass_N.sum()
    mean = (tokens_N * means_N).sum() / tokens
    spread = within_N.sum() + (tokens_N * (means_N - mean) ** 2).sum()
    return {
        f"advantage/{name}/mean": float(mean),
        f"advantage/{name}/std": float((spread / tokens).sqrt()),
        f"advantage/{name}/sign_flips": float(flips_N.sum() / tokens),
        f"advantage/{name}/mass_moved": float(moved_N.sum() / mass) if mass > 0 else math.nan,
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
