"""Run the grid of parity and write its table, `docs/parity.md`: `python -m bench.parity_table`.

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

from bench.tables import markdown
from tests.support import OWN_AGGREGATION, save_tiny_model
from tests.trainer import parity_grid
from tests.trainer.parity_grid import FACTORS
from tests.trainer.upstream import test_other_trl as other_trl
from trl_grpo_ext.trainer.upstream import contract

PAGE = other_trl.ROOT / "docs" / "parity.md"
COMMAND = "python -m bench.parity_table"

BESIDE = "\n## Every causal architecture\n"
"""Where what another table says begins."""

INTRODUCTION = f"""# Parity with TRL

The aggregation that equals TRL's own reduction must give TRL's loss and gradient, whatever else is in the loss. To
check this, TRL's trainer and ours train the tests' tiny Llama of two layers on the same scripted rollouts for each
`loss_type`, in 32 cells of settings, and the gradient of every optimizer step and the losses are compared. Plain SGD
takes large steps, so that tokens are clipped.

`{COMMAND}` made this page. The grid is `tests/trainer/parity_grid.py`;
`tests/trainer/test_parity.py` runs it as tests and shows that each of the settings changes TRL's gradient."""

SETTINGS = """The 32 cells are an orthogonal array: any three settings occur together in all eight combinations with
every loss type. `make quick` and `make test` run as many of the cells as hold every combination of two, and of three,
of loss type and settings; `make nightly` runs them all, with both releases of TRL."""

RESULTS = f"""The largest relative gap between the two trainers, over cells and optimizer steps. 0 is equality to the
bit; the tests allow {parity_grid.TOLERANCE:.0e}. A gradient's gap is ‖ours − TRL's‖ / ‖TRL's‖ over all parameters; a
loss's is relative to the loss, or to 1 where the loss is smaller. The policy's weights are float64. Where TRL computes
its log-probabilities in float32 all the same, the gap is the rounding of sums that are taken in another order."""


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


def page(runs: list[Measured]) -> str:
    """The page, oldest TRL first."""
    settings = [
        [f"`{factor.name}`" if factor.name.isidentifier() else factor.name, factor.off, factor.on] for factor in FACTORS
    ]
    columns = [f"{what}, TRL {run.release}" for run in runs for what in ("gradient", "loss")]
    rows = []
    for loss_type, aggregation in OWN_AGGREGATION.items():
        gaps = [_number(gap) for run in runs for gap in (run.gaps[loss_type].gradient, run.gaps[loss_type].loss)]
        rows.append([f"`{loss_type}`", f"`{aggregation}`", str(len(parity_grid.cells_of(loss_type))), *gaps])
    parts = [
        INTRODUCTION,
        f"## The settings\n\n{SETTINGS}",
        markdown(["Setting", "Off", "On"], settings),
        "\n".join(f"- {exception}" for exception in parity_grid.EXCEPTIONS),
        f"## The gaps\n\n{RESULTS}",
        markdown(["Loss type", "Aggregation", "Cells", *columns], rows),
        *(f"TRL {run.release}: {_versions(run)}, CPU." for run in runs),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    with TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        if problem := other_trl.install(contract.OLDEST_TESTED, site):
            sys.exit(problem)
        runs = [_in_a_process(site, Path(folder) / "oldest.json"), _in_a_process(None, Path(folder) / "newest.json")]
    _, heading, beside = PAGE.read_text(encoding="utf-8").partition(BESIDE)
    PAGE.write_text(f"{page(runs)}{heading}{beside}", encoding="utf-8")


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
