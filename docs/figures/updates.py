"""Draw the README's figure, update time against plain TRL, from the tables in docs/evidence.md.

python docs/figures/updates.py
"""

from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot

DOCS = Path(__file__).parents[1]
OUTPUT = DOCS / "images" / "updates.svg"
COMPACT, SHARED = "compact updates on the CPU", "shared prompts on the CPU"
CASES = (
    ("all completions equally long", COMPACT, ("all equal", "0 %"), (2, 3)),
    ("different lengths", COMPACT, ("log-normal", "0 %"), (2, 3)),
    ("different lengths, 40 % without signal", COMPACT, ("log-normal", "40 %"), (2, 3)),
    ("the same, each prompt computed once*", COMPACT, ("log-normal", "40 %"), (2, 4)),
    ("different lengths, 80 % without signal", COMPACT, ("log-normal", "80 %"), (2, 3)),
    ("prompts of 600 tokens, short completions*", SHARED, ("uniform short", "600"), (2, 4)),
)
"""What a bar shows, and where its two figures are: a table, the first cells of a line, the columns of TRL and of us."""


def seconds(table: str, line: tuple[str, ...], columns: tuple[int, int]) -> tuple[float, float]:
    """The seconds of an update with plain TRL and with this package, as the page gives them."""
    page = (DOCS / "evidence.md").read_text(encoding="utf-8")
    rows = page.split(f"<!-- {table} -->")[1].split(f"<!-- end of {table} -->")[0].splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if row.startswith("|")]
    (found,) = [row for row in cells if tuple(row[: len(line)]) == line]
    return float(found[columns[0]]), float(found[columns[1]])


def main() -> None:
    """Draw two bars for each case, as shares of TRL's time."""
    mpl.rcParams["svg.hashsalt"] = "updates"  # the same file for the same figures
    figure, panel = pyplot.subplots(figsize=(8.2, 3.4))
    for at, (_, table, line, columns) in enumerate(CASES):
        trl, ours = seconds(table, line, columns)
        panel.barh(at - 0.2, 1.0, 0.36, color="#b0b0b0", label=None if at else "plain TRL")
        panel.barh(at + 0.2, ours / trl, 0.36, color="#1060c0", label=None if at else "compact updates")
        faster = "no difference" if trl / ours < 1.05 else f"{trl / ours:.1f}× faster"
        panel.text(ours / trl + 0.012, at + 0.2, faster, va="center", fontsize=9)
    panel.set_yticks(range(len(CASES)), [case[0] for case in CASES])
    panel.invert_yaxis()
    panel.set(xlim=(0, 1.22), xlabel="update time relative to plain TRL        *with share_prompts")
    panel.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(axis="y", length=0)
    panel.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0)
    figure.tight_layout()
    figure.savefig(OUTPUT, metadata={"Date": None})


if __name__ == "__main__":
    main()
