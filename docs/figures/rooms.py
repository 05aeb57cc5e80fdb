"""The rooms of the package and who imports whom: `python docs/figures/rooms.py` draws the figure of CONTRIBUTING.md.

`tests/test_layers.py` holds the package to `LAYERS`, with the same reading of the imports. Imports that only a type
checker sees count like any other.
"""

import ast
import subprocess
from html import escape
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "trl_grpo_ext"
FIGURE = Path(__file__).parents[1] / "images" / "rooms.svg"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("completions",),
    ("types",),
    ("guard",),
    ("credit",),
    ("rewards", "advantages", "aggregation", "filters", "token_losses", "prompt_samplers"),
    ("plugins",),
    ("records",),
    ("testing",),
    ("trainer",),
    ("asynchronous", "history"),
    ("launch",),
    ("cli",),
)
"""The rooms from the lowest layer to the highest. A room imports from lower layers only."""

CONTENTS = {
    "errors": "one tree of exceptions",
    "completions": "parts, places, turns",
    "types": "what an author meets",
    "guard": "outcomes, workers, agreement of ranks",
    "credit": "the flow: pure tensors, the chain, text",
    "rewards": "catalogue",
    "advantages": "catalogue",
    "aggregation": "catalogue",
    "filters": "catalogue",
    "token_losses": "catalogue",
    "prompt_samplers": "catalogue",
    "plugins": "selecting, finding, loading",
    "records": "what a run leaves on disk",
    "testing": "the conformance kit",
    "trainer": "the adapter to TRL",
    "asynchronous": "TRL's asynchronous trainer",
    "history": "report, compare",
    "launch": "doctor, engine, checkpoints",
    "cli": "the commands",
}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported(module: str, files: dict[str, Path]) -> set[str]:
    """The modules of the package that a module imports, in functions and under `TYPE_CHECKING` too."""
    file = files[module]
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*above, *([node.module] if node.module else [])])
            found |= {name if (name := f"{stem}.{alias.name}") in files else stem for alias in node.names}
    return found & files.keys() - {module}


def room_of(module: str) -> str:
    """The room of a module; empty for the package's face, which may name everything."""
    return module.split(".")[1] if "." in module else ""


def graph() -> dict[str, set[str]]:
    """Which rooms each room imports."""
    files = modules()
    rooms: dict[str, set[str]] = {room: set() for layer in LAYERS for room in layer}
    for module in files:
        if here := room_of(module):
            rooms.setdefault(here, set()).update({room_of(other) for other in imported(module, files)} - {here, ""})
    return rooms


def without_shortcuts(rooms: dict[str, set[str]]) -> dict[str, set[str]]:
    """The graph without arrows to rooms that another arrow already leads to."""

    def reached(room: str) -> set[str]:
        return rooms[room].union(*(reached(below) for below in rooms[room]))

    return {room: below - set().union(*(reached(other) for other in below)) for room, below in rooms.items()}


def arrows() -> set[tuple[str, str]]:
    """The arrows of the figure: who imports whom, without what a longer way implies."""
    return {(room, other) for room, below in without_shortcuts(graph()).items() for other in below}


def dot() -> str:
    """The figure in Graphviz' language: lower layers at the bottom, with the size of each room."""
    lines = dict.fromkeys(CONTENTS, 0)
    for module, file in modules().items():
        if room := room_of(module):
            lines[room] += len(file.read_text(encoding="utf-8").splitlines())
    parts = [
        'digraph "The rooms of trl_grpo_ext; arrows are imports" {',
        "  rankdir=TB; nodesep=0.3; ranksep=0.35;",
        '  node [shape=box, style="rounded,filled", fillcolor="#fde6c8", color="#a85b00", fontname="sans-serif"];',
        '  edge [color="#5b6675", arrowsize=0.7];',
    ]
    for room, contents in CONTENTS.items():
        size = f"{round(lines[room], -2) or lines[room]:,} lines"
        parts.append(
            f'  {room} [label=<<b>{room}</b><br/><font point-size="11">{escape(contents)}<br/>{size}</font>>];'
        )
    parts += ["  {rank=same; " + "; ".join(layer) + "}" for layer in LAYERS if len(layer) > 1]
    parts += [f"  {room} -> {other};" for room, other in sorted(arrows())]
    return "\n".join([*parts, "}", ""])


if __name__ == "__main__":
    subprocess.run(["dot", "-Tsvg", "-o", str(FIGURE)], input=dot(), text=True, check=True)  # Debian: graphviz
