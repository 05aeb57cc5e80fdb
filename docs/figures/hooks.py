"""What runs when: `python docs/figures/hooks.py` draws the figure of docs/how_it_works.md, with Graphviz.

The roles, their methods and their order are the package's own (`trl_grpo_ext.types.ROLES`).
"""

import subprocess
from html import escape
from itertools import pairwise
from pathlib import Path

from trl_grpo_ext.types import ROLES

FIGURE = Path(__file__).parents[1] / "images" / "hooks.svg"

TRL, YOURS, OURS = "#e6e9ee", "#cfe3f7", "#fde6c8"  # the colours of flow.svg, words say the same

STEPS: tuple[tuple[str, str, str, str], ...] = (
    ("completions", "generated, by TRL", "", "texts, tokens"),
    ("rewards", "reward functions, weighted, by TRL", "", "r (B,)"),
    ("shaper", "any number: changes rewards", "sees log-probabilities, texts, groups", "r' (B,)"),
    ("estimator", "at most one: makes advantages of r'", "without one, TRL's own advantages of r'", "A (B, T)"),
    ("transform", "any number: changes the advantages", "in the order selected", "A (B, T)"),
    ("mask", "transforms with last=True", "after the other transforms", "A (B, T)"),
    ("signal", "which groups have an advantage that is not 0?", "skipping, compacting, RL-ZVP ask here", ""),
    ("weights", "loss aggregation", "a weight for every token", "w (B, T)"),
    (
        "forward",
        "any number: sees the policy as it is now",
        "after each, what the masks took away is 0 again",
        "A (B, T)",
    ),
    ("loss", "TRL's own loss, and Σ w · l", "", "scalar"),
)
"""Name, what happens, more of it, and the shape of what leaves it."""

BY_PLUGINS = {*ROLES, "mask", "weights"}
STAGES = {
    "once for every generation batch": [name for name, *_ in STEPS[:8]],
    "at every forward pass of the loss": ["forward", "loss"],
}


def dot() -> str:
    """The figure in Graphviz' language."""
    parts = [
        "digraph hooks {",
        '  graph [rankdir=TB, ranksep=0.32, fontname="Helvetica", tooltip="What runs when"];',
        '  node [shape=box, style="filled,rounded", fontname="Helvetica", fontsize=13, margin="0.18,0.07", width=4.6];',
        '  edge [color="#5b6675", fontname="Helvetica", fontsize=12, fontcolor="#5b6675"];',
    ]
    for number, (stage, names) in enumerate(STAGES.items()):
        parts.append(f"  subgraph cluster_{number} {{")
        parts.append(f'    label="{stage}"; labeljust=l; fontsize=13; color="#9aa4b1"; style=rounded;')
        parts += [f"    {name};" for name in names]
        parts.append("  }")
    for name, what, more, _ in STEPS:
        method = f" · {ROLES[name]}" if name in ROLES else " · on_rollout" if name == "mask" else ""
        lines = [
            f"<b>{name}{method}</b>",
            *(f'<font point-size="11">{escape(line)}</font>' for line in (what, more) if line),
        ]
        colour = YOURS if name in BY_PLUGINS else OURS if name == "signal" else TRL
        parts.append(f'  {name} [label=<{"<br/>".join(lines)}>, fillcolor="{colour}"];')
    for (one, _, _, shape), (other, *_) in pairwise(STEPS):
        parts.append(f'  {one} -> {other} [label="  {shape}"];')
    return "\n".join([*parts, "}", ""])


if __name__ == "__main__":
    subprocess.run(["dot", "-Tsvg", "-o", str(FIGURE)], input=dot(), text=True, check=True)  # Debian: graphviz
