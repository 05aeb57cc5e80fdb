"""Run the grid of parity and write its table into `docs/how_it_works.md`: `python -m bench.parity_table`.

It takes some four minutes on one core. The grid is run with the installed TRL and, in a directory of its own that pip
fills, with the oldest that we support; each in a process of its own.
"""

import gc
import json
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.tables import markdown, write_block
from tests.support import OWN_AGGREGATION, save_tiny_model
from tests.trainer import parity_grid
from tests.trainer.upstream import test_other_trl as other_trl
from trl_grpo_ext.trainer.upstream import contract

PAGE = other_trl.ROOT / "docs" / "how_it_works.md"


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

    @property
    def release(self) -> str:
        return self.versions["trl"]


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


def block(runs: list[Measured]) -> str:
    """The table and the versions, oldest TRL first."""
    columns = [f"{what}, TRL {run.release}" for run in runs for what in ("gradient", "loss")]
    rows = []
    for loss_type, aggregation in OWN_AGGREGATION.items():
        gaps = [_number(gap) for run in runs for gap in (run.gaps[loss_type].gradient, run.gaps[loss_type].loss)]
        rows.append([f"`{loss_type}`", f"`{aggregation}`", str(len(parity_grid.cells_of(loss_type))), *gaps])
    table = markdown(["Loss type", "Aggregation", "Cells", *columns], rows)
    return "\n\n".join([table, *(f"TRL {run.release}: {_versions(run)}, CPU." for run in runs)])


def main() -> None:
    with TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        if problem := other_trl.install(contract.OLDEST_TESTED, site):
            sys.exit(problem)
        runs = [_in_a_process(site, Path(folder) / "oldest.json"), _in_a_process(None, Path(folder) / "newest.json")]
    write_block(PAGE, "gaps to TRL", block(runs))


def read(text: str) -> Measured:
    """A run, as `main` hands it from process to process."""
    run = json.loads(text)
    return Measured(run["versions"], {loss_type: Gap(**gap) for loss_type, gap in run["gaps"].items()})


def _in_a_process(pythonpath: Path | None, answer: Path) -> Measured:
    done = other_trl.run("-m", "bench.parity_table", "--answer", answer, pythonpath=pythonpath)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return read(answer.read_text(encoding="utf-8"))


def _number(gap: float) -> str:
    return "0" if gap == 0 else f"{gap:.0e}"


def _versions(run: Measured) -> str:
    return ", ".join(f"{name} {number}" for name, number in run.versions.items() if name != "trl")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--answer"]:
        Path(sys.argv[2]).write_text(json.dumps(asdict(measure())), encoding="utf-8")
    else:
        main()
