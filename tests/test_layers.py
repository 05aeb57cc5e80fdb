"""Imports point down, nothing is imported in a circle, and plugins are reached by entry point alone."""

import ast
import re
import sys
from graphlib import CycleError, TopologicalSorter

import pytest

import trl_grpo_ext
from docs.figures import rooms

FILES = rooms.modules()
LEVEL = {room: level for level, layer in enumerate(rooms.LAYERS) for room in layer}
CATALOGUES = ("rewards", "advantages", "aggregation", "filters", "prompt_samplers")

KNOW_TRL = {"trainer", "asynchronous", "records", "history", "testing", "launch"}
"""Rooms that may import TRL, transformers or accelerate, besides those whose plugins load models."""

IN_CHILD_PROCESSES = {
    "trl_grpo_ext.rewards._math.references": {"latex2sympy2_extended"},
    "trl_grpo_ext.rewards._math.verification": {"antlr4", "math_verify", "latex2sympy2_extended", "sympy"},
}
"""What modules import that only a process of their own loads."""


def outside(module: str) -> set[str]:
    """Top-level names that a module imports from elsewhere at run time, without the standard library."""
    names: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(FILES[module].read_text(encoding="utf-8"))]
    for node in nodes:
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - {"trl_grpo_ext", "__future__"}


def test_every_import_points_down() -> None:
    upward = []
    for module in FILES:
        for other in rooms.imported(module, FILES):
            here, there = rooms.room_of(module), rooms.room_of(other)
            if here and there and here != there and LEVEL[there] >= LEVEL[here]:
                upward.append(f"{module} imports {other}")
    assert not upward, f"imports of the same or a higher layer: {upward}"


def test_no_modules_import_each_other() -> None:
    # A package's own `__init__` runs before its modules anyway.
    graph = {module: {o for o in rooms.imported(module, FILES) if not module.startswith(f"{o}.")} for module in FILES}
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(error.args[1])}")
    assert len(order) == len(FILES)


def test_rooms_import_what_they_may() -> None:
    for module in FILES:
        room = rooms.room_of(module)
        assert room in KNOW_TRL or not outside(module) & {"trl", "transformers", "accelerate", "peft"}, module
        if room in ("advantages", "aggregation", "filters"):
            assert outside(module) <= {"torch"}, module
        elif room == "rewards":  # rewards also run where there is no torch
            assert outside(module) <= IN_CHILD_PROCESSES.get(module, set()), module


def test_no_plugin_is_reached_but_by_its_entry_point() -> None:
    # Static imports point down; a module's name in a string would be an import in disguise.
    disguised = re.compile(rf"""["'](trl_grpo_ext)?\.({"|".join(CATALOGUES)})\.""")
    for module, file in FILES.items():
        room = rooms.room_of(module)
        if room in CATALOGUES:
            continue
        assert not {o for o in rooms.imported(module, FILES) if room and rooms.room_of(o) in CATALOGUES}, module
        assert not disguised.search(file.read_text(encoding="utf-8")), module


def test_every_module_says_what_it_is_for() -> None:
    for module, file in FILES.items():
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
        assert docstring, module
        assert docstring.split("\n")[0].endswith((".", "?", ":", "!")), module


def test_the_figure_shows_these_imports() -> None:
    titles = re.findall(r"<title>(\w+)&#45;&gt;(\w+)</title>", rooms.FIGURE.read_text(encoding="utf-8"))
    assert set(titles) == rooms.arrows(), "draw it again: python docs/figures/rooms.py"
    assert rooms.CONTENTS.keys() == LEVEL.keys()


def test_the_face_is_small() -> None:
    assert len(trl_grpo_ext.__all__) <= 24
    for name in trl_grpo_ext.__all__:
        assert getattr(trl_grpo_ext, name) is not None
