"""Run the grid of parity and write its table into `docs/how_it_works.md`: `python -m bench.parity_table`.

It takes some two minutes on one core.
"""

import gc
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.tables import markdown, write_block
from tests.support import OWN_AGGREGATION, save_tiny_model
from tests.trainer import parity_grid

PAGE = Path(__file__).parents[1] / "docs" / "how_it_works.md"


@dataclass(frozen=True)
class Gap:
    """The largest gaps of one loss type with one TRL."""

    gradient: float
    loss: float


@dataclass(frozen=True)
class Measured:
    """One run of the grid. `versions` are of the packages it ran with, TRL's first."""

    versions: dict[str, str]
    gaps: dict[str, Gap]


def measure() -> Measured:
    """Run every cell with the TRL of this process."""
    gaps: dict[str, Gap] = {}
    with TemporaryDirectory() as folder:
        model = save_tiny_model(Path(folder) / "model")
        gc.freeze()  # or else transformers' collection after every training takes longer than the trainings
        for loss_type in OWN_AGGREGATION:
            measured = [parity_grid.gaps(model, Path(folder), cell) for cell in parity_grid.cells_of(loss_type)]
            gradients, losses = zip(*measured, strict=True)
            gaps[loss_type] = Gap(max(gradients), max(losses))
    return Measured({name: version(name) for name in ("trl", "transformers", "torch")}, gaps)


def block(run: Measured) -> str:
    """The table and the versions."""
    rows = []
    for loss_type, aggregation in OWN_AGGREGATION.items():
        gap = run.gaps[loss_type]
        cells = str(len(parity_grid.cells_of(loss_type)))
        rows.append([f"`{loss_type}`", f"`{aggregation}`", cells, _number(gap.gradient), _number(gap.loss)])
    table = markdown(["Loss type", "Aggregation", "Cells", "gradient", "loss"], rows)
    return "\n\n".join([table, f"TRL {run.versions['trl']}: {_versions(run)}, CPU."])


def _number(gap: float) -> str:
    return "0" if gap == 0 else f"{gap:.0e}"


def _versions(run: Measured) -> str:
    return ", ".join(f"{name} {number}" for name, number in run.versions.items() if name != "trl")


if __name__ == "__main__":
    write_block(PAGE, "gaps to TRL", block(measure()))
