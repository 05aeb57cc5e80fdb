"""The figure of `docs/how_it_works.md`: from completions to the loss. `python docs/figures/flow.py` writes it.

It is drawn as SVG by hand, so that it is text that a diff can show, needs no font but the reader's, and comes out the
same on every machine. It is tall instead of wide, so that it can be read on a phone.
"""

from dataclasses import dataclass
from html import escape
from pathlib import Path

FIGURE = Path(__file__).parents[1] / "images" / "flow.svg"

TRL, YOURS, OURS = "TRL", "plugins", "this package"
COLOURS = {TRL: "#e6e9ee", YOURS: "#cfe3f7", OURS: "#fde6c8"}  # words say the same
EDGES = {TRL: "#5b6675", YOURS: "#0b5cad", OURS: "#a85b00"}


@dataclass(frozen=True)
class Step:
    """One box: what happens, who does it, and the shape of what leaves it."""

    title: str
    detail: str
    who: str
    shape: str


STEPS = (
    Step("Completions", "G of each of Q prompts", TRL, "texts, B"),
    Step("Rewards", "K functions score each completion", YOURS, "(B, K)"),
    Step("Shapers", "on_rewards: one more column each", YOURS, "(B, K + 1)"),
    Step("Baseline", "less the group's mean; or your estimator", TRL, "(B,)"),
    Step("Transforms, then masks", "on_rollout: which tokens earn the credit?", YOURS, "(B, T)"),
    Step("Hooks that see the policy", "on_forward: entropies, log-probabilities", YOURS, "(B, T)"),
    Step("TRL's own loss, untouched", "ratio, clipping, KL, entropy bonus", TRL, "scalar L"),
    Step("Per-token losses, recovered", "A · ∂L/∂A, by automatic differentiation", OURS, "(B, T)"),
    Step("Aggregation", "a weight w for every token, global counts", YOURS, "(B, T)"),
    Step("Loss", "Σ w · l, the same however the batch is cut", OURS, "scalar"),
)
WIDTH, LEFT, BOX, HEIGHT, GAP, TOP = 560, 12, 400, 62, 26, 52


def draw() -> str:
    """The figure as SVG."""
    bottom = TOP + len(STEPS) * (HEIGHT + GAP) - GAP + 46
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom}" width="{WIDTH}" height="{bottom}" '
        'role="img" aria-labelledby="flow-title flow-text" font-family="system-ui, sans-serif">',
        '<title id="flow-title">From completions to the loss</title>',
        f'<desc id="flow-text">{escape(in_words())}</desc>',
        f'<rect width="{WIDTH}" height="{bottom}" rx="8" fill="#ffffff"/>',
        _text(LEFT, 34, "what happens, and who does it", 15, "#5b6675"),
        _text(WIDTH - 12, 34, "what leaves it", 15, "#5b6675", "end"),
    ]
    for place, step in enumerate(STEPS):
        top = TOP + place * (HEIGHT + GAP)
        parts += _box(step, top)
        if place:
            middle = LEFT + BOX / 2
            parts.append(f'<path d="M{middle} {top - GAP} V{top - 3}" stroke="#5b6675" stroke-width="2"/>')
            parts.append(
                f'<path d="M{middle - 6} {top - 9} L{middle} {top - 1} L{middle + 6} {top - 9} Z" fill="#5b6675"/>'
            )
    legend = "B completions on this rank, G per prompt, K reward functions, T tokens"
    parts.append(_text(LEFT, bottom - 16, legend, 14, "#5b6675"))
    return "\n".join([*parts, "</svg>", ""])


def _box(step: Step, top: int) -> list[str]:
    edge = EDGES[step.who]
    return [
        f'<rect x="{LEFT}" y="{top}" width="{BOX}" height="{HEIGHT}" rx="6" '
        f'fill="{COLOURS[step.who]}" stroke="{edge}"/>',
        _text(LEFT + 14, top + 26, step.title, 18, "#15202b", weight="600"),
        _text(LEFT + 14, top + 48, step.detail, 15, "#15202b"),
        _text(LEFT + BOX - 10, top + 24, step.who, 13, edge, "end"),
        _text(LEFT + BOX + 16, top + 38, step.shape, 18, "#15202b", weight="600"),
    ]


def _text(x: float, y: float, text: str, size: int, fill: str, anchor: str = "start", weight: str = "400") -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{fill}">'
        f"{escape(text)}</text>"
    )


def in_words() -> str:
    """The same for those who cannot see it."""
    return "; ".join(f"{step.title} ({step.who}): {step.detail}, {step.shape}" for step in STEPS) + "."


if __name__ == "__main__":
    FIGURE.write_text(draw(), encoding="utf-8")
