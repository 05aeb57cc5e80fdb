"""Imports point one way, plugins are reached by entry point alone, and every file stays readable."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "trl_grpo_ext"
FILES = {file.relative_to(PACKAGE).with_suffix("").as_posix(): file for file in sorted(PACKAGE.rglob("*.py"))}

PLUGIN_FOLDERS = ("rewards", "advantages", "aggregation")
HELPERS = {
    "rewards": {
        *("text", "checks", "numerals", "final_answer", "json_text", "nested", "regex_cost", "sorting_task"),
        *("math_judge", "math_limits", "math_verification", "math_workers", "plain_answers"),
        *("python_test_forms", "sandbox", "sandbox_child", "sandbox_layers", "sandbox_values"),
    },
    "advantages": {"group_statistics", "other_policies", "parameter_checks", "returns", "segments"},
}
"""Modules of a plugin folder that are no plugin and may be imported by their siblings."""

IN_CHILD_PROCESSES = {
    "rewards/math_verification": {"math_verify", "latex2sympy2_extended", "sympy"},
    "rewards/sandbox_child": {"sandbox_layers"},  # a script, run by its path
}
"""What modules import that only a process of their own loads."""

_DATA = {"types", "errors"}
_PLUGINS = {
    *("plugins", "plugin_building", "plugin_contract", "plugin_discovery", "plugin_metadata", "plugin_selection"),
}
MAY_IMPORT: dict[str, set[str]] = {
    "__init__": set(),  # at run time; what it offers is loaded lazily
    "errors": set(),
    "types": {"errors"},
    "agreement": {"errors"},
    "guard": _DATA,
    "reward_watch": {"guard", *_DATA},
    "pipeline": _DATA,
    "zero_variance": _DATA,
    "decoder_steps": set(),
    "text_alignment": {"decoder_steps", "errors"},
    "weight_metrics": _DATA,
    "plugin_selection": _DATA,
    "plugin_metadata": set(),
    "plugin_discovery": {"plugin_metadata", "plugin_selection", *_DATA},
    "plugin_contract": {"plugin_discovery", *_DATA},
    "plugin_building": {"plugin_contract", "plugin_discovery", "plugin_metadata", "plugin_selection", *_DATA},
    "plugins": {"composition", "guard", "zero_variance", *(_PLUGINS - {"plugins"}), *_DATA},
    "config": {*_PLUGINS, *_DATA},
    "composition": {"pipeline", *_DATA},
    "hook_metrics": set(),
    "hook_chain": {"hook_metrics", "pipeline", *_DATA},
    "hook_states": {"pipeline", *_DATA},
    "scoring": {"pipeline", "text_alignment", *_DATA},
    "contexts": {"text_alignment", "zero_variance", *_DATA},
    "token_records": _DATA,
    "phase_times": set(),
    "printable": set(),
    "live": {"guard", "printable", *_DATA},
    "upstream": _DATA,
    "reaggregation": {"upstream", "pipeline", *_DATA},
    "self_check": {"reaggregation", "upstream", "pipeline", *_DATA},
    "own_loss": {"compact_rows", "pipeline", "upstream", *_DATA},
    "compact_plan": set(),
    "compact_exchange": {"compact_plan"},
    "compact_rows": {"compact_plan"},
    "compact": {"compact_exchange", "compact_plan", "compact_rows", "upstream", *_DATA},
    "trainer": {
        *(
            "agreement",
            "compact",
            "compact_rows",
            "config",
            "contexts",
            "hook_chain",
            "hook_states",
            "live",
            "manifest",
            "own_loss",
            "phase_times",
            "pipeline",
            "reaggregation",
        ),
        *(
            "guard",
            "reward_watch",
            "scoring",
            "self_check",
            "token_records",
            "upstream",
            "weight_metrics",
            "zero_variance",
        ),
        *(*_PLUGINS, *_DATA),
    },
    "testing": {"contexts", "guard", "pipeline", "plugin_docs", "weight_metrics", *_PLUGINS, *_DATA},
    "report": {"guard", "manifest", "printable", "token_records", *_PLUGINS, *_DATA},
    "audit": {"guard", *_DATA},
    "plugin_docs": {*_PLUGINS, *_DATA},
    "scaffold": {"plugin_metadata", *_DATA},
    "manifest": {"pipeline", "printable", *_PLUGINS, *_DATA},
    "replay": {
        *(
            "guard",
            "hook_chain",
            "pipeline",
            "reward_watch",
            "text_alignment",
            "token_records",
            "weight_metrics",
            "zero_variance",
        ),
        *(*_PLUGINS, *_DATA),
    },
    "checkpoint_check": {"errors"},
    "checkpoint_staging": {"checkpoint_check", "errors"},
    "stop_signal": {"errors"},
    "safe_checkpoints": {
        *("agreement", "checkpoint_check", "checkpoint_staging", "errors", "stop_signal", "upstream"),
    },
    "engine": {"errors"},
    "doctor": {"compact", "config", "upstream", *_PLUGINS, *_DATA},
    "commands": {"audit", "plugin_docs", "replay", "report", "scaffold", "testing", *_PLUGINS, *_DATA},
    "cli": {"commands", "doctor", "errors"},
    **dict.fromkeys(PLUGIN_FOLDERS, _DATA),
    "rewards": {"guard", *_DATA},
}
"""What each module, or folder, may import of this package besides itself."""

KNOW_TRL = {
    *("compact", "config", "trainer", "scoring", "hook_states", "live", "manifest", "replay", "testing"),
    *("doctor", "engine", "own_loss", "safe_checkpoints", "stop_signal"),
}
"""The only ones that may import TRL or transformers."""


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def nodes_at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes, inside functions too, but for the blocks that only a type checker sees."""
    yield node
    for child in [*node.orelse] if is_type_checking(node) else ast.iter_child_nodes(node):  # type: ignore[attr-defined]
        yield from nodes_at_run_time(child)


def imports(module: str) -> set[str]:
    """Absolute dotted names that a module of the package imports; `from . import x` gives `trl_grpo_ext.x`."""
    package = ["trl_grpo_ext", *module.split("/")[:-1]]
    names: set[str] = set()
    for node in nodes_at_run_time(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += node.module.split(".") if node.module else []
            names |= {".".join([*base, alias.name]) for alias in node.names} if node.level else {".".join(base)}
    return names


def inside(names: set[str]) -> set[tuple[str, ...]]:
    """Those that are in the package, as the parts behind its name."""
    return {tuple(name.split(".")[1:]) for name in names if name.split(".")[0] == "trl_grpo_ext"}


def outside(names: set[str]) -> set[str]:
    """The distributions' top-level names, without the standard library."""
    tops = {name.split(".")[0] for name in names}
    return tops - set(sys.stdlib_module_names) - {"trl_grpo_ext", "__future__"}


def place(module: str) -> str:
    return module.split("/")[0]


def test_the_reading_of_imports_itself() -> None:
    assert {"trl_grpo_ext.credit.flow", "trl_grpo_ext.errors.UpstreamError", "trl"} <= imports("trainer")
    assert "trl_grpo_ext.errors.ConfigurationError" in imports("aggregation/constant_length")
    assert "trl_grpo_ext.rewards._text.completions.completion_text" in imports("rewards/think_format")
    assert "torch" not in imports("types")  # for type checkers only
    assert "yaml" in imports("plugin_selection")  # inside a function


@pytest.mark.parametrize("module", FILES)
def test_imports_point_one_way(module: str) -> None:
    assert place(module) in MAY_IMPORT, f"say in MAY_IMPORT where {module} stands"
    used = {parts[0] if parts else "__init__" for parts in inside(imports(module))} - {place(module)}
    too_much = used - MAY_IMPORT[place(module)]
    assert not too_much, f"{module} imports {sorted(too_much)}"


def test_that_way_has_no_circle() -> None:
    above: dict[str, set[str]] = {name: set(below) for name, below in MAY_IMPORT.items()}
    while above:
        bottom = {name for name, below in above.items() if not below & above.keys()}
        assert bottom, f"these import each other: {sorted(above)}"
        above = {name: below for name, below in above.items() if name not in bottom}


@pytest.mark.parametrize("module", FILES)
def test_only_the_adapter_knows_trl(module: str) -> None:
    if place(module) not in KNOW_TRL:
        assert not outside(imports(module)) & {"trl", "transformers", "accelerate", "peft"}


# ---------------------------------------------------------------------------------------------- plugins


def entry_points() -> dict[str, dict[str, str]]:
    """By plugin folder: entry-point name and module, as the source tree declares them."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    declared: dict[str, dict[str, str]] = {folder: {} for folder in PLUGIN_FOLDERS}
    for group, points in groups.items():
        plugins = group.startswith("trl_grpo_ext.") and not group.endswith(".aliases")
        for name, target in points.items() if plugins else ():
            folder, module = target.partition(":")[0].split(".")[1:]
            declared[folder][name] = module
    return declared


PLUGIN_FILES = [module for module in FILES if place(module) in PLUGIN_FOLDERS and not module.endswith("__init__")]


@pytest.mark.parametrize("module", PLUGIN_FILES)
def test_a_plugin_stands_alone(module: str) -> None:
    folder = place(module)
    siblings = {parts[1] for parts in inside(imports(module)) if parts[0] == folder}
    assert siblings <= HELPERS.get(folder, set()), f"{module} imports the plugins {sorted(siblings)}"
    if folder != "rewards":
        assert outside(imports(module)) <= {"torch"}
    else:
        allowed = IN_CHILD_PROCESSES.get(module, set())
        assert outside(imports(module)) <= allowed, "rewards also run where there is no torch"


@pytest.mark.parametrize("folder", PLUGIN_FOLDERS)
def test_one_file_for_each_plugin(folder: str) -> None:
    files = {module.split("/")[1] for module in PLUGIN_FILES if place(module) == folder}
    declared = entry_points()[folder]
    assert files - HELPERS.get(folder, set()) == set(declared.values())
    assert all(name == module for name, module in declared.items())
    assert inside(imports(f"{folder}/__init__")) == set()


def test_no_plugin_is_reached_but_by_its_entry_point() -> None:
    # Static imports are ruled out above; a module's name in a string would be an import in disguise.
    for module, file in FILES.items():
        if place(module) in PLUGIN_FOLDERS:
            continue
        tree = ast.parse(file.read_text())
        texts = {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        for folder in PLUGIN_FOLDERS:
            disguised = [t for t in texts if t.startswith((f"trl_grpo_ext.{folder}.", f".{folder}."))]
            assert not disguised, f"{module} names a plugin's module: {disguised}"


# ---------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("module", FILES)
def test_a_file_says_what_it_is_for_and_stays_short(module: str) -> None:
    source = FILES[module].read_text()
    docstring = ast.get_docstring(ast.parse(source))
    assert docstring, f"{module} has no docstring"
    assert docstring.split("\n")[0].endswith((".", "?", ":", "!"))
    assert len(source.splitlines()) <= 400
