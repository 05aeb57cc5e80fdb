"""What a training script knows beyond TRL's settings, read from its source without running it."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError
from .settings_file import MOST_BYTES, shown


@dataclass(frozen=True)
class Script:
    """A training script.

    Attributes:
        path: Its file.
        settings: The fields of its dataclasses, with their defaults where these are plain values, else None.
        defaults: Its `SCRIPT_DEFAULTS`: settings that hold where neither file nor command line says otherwise.
        defaults_file: The settings file of a constant such as `DEFAULTS = HERE / "folder" / "file.yaml"`, whose name
            ends in `DEFAULTS`.
        embedded_defaults: Likewise, of a name that begins with `EMBEDDED`: for runs on what comes with the script.
        embedded_model: The folder of `EMBEDDED_MODEL`.
        script_arguments: Whether it takes TRL's `ScriptArguments` too.
        is_recipe: Whether it checks its settings with the recipes' own `check_setup`.
    """

    path: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    defaults_file: Path | None = None
    embedded_defaults: Path | None = None
    embedded_model: Path | None = None
    script_arguments: bool = False
    is_recipe: bool = False


def read_script(path: str | Path) -> Script:
    """Read a script's dataclasses and constants; nothing is imported or run.

    Raises:
        ConfigurationError: The file is missing or no Python.
    """
    name, here = shown(str(path)), Path(path)
    try:
        if not here.is_file() or here.stat().st_size > MOST_BYTES:
            raise ConfigurationError(f"There is no script {name} (--script).")
        source = here.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, OSError) as error:
        raise ConfigurationError(f"{name} (--script) is not Python: {shown(error)}") from error
    settings: dict[str, Any] = {}
    constants: dict[str, ast.expr] = {}
    imported: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    settings[item.target.id] = _default(item.value)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            constants[node.target.id] = node.value
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    literal = _literal(constants.get("SCRIPT_DEFAULTS"))
    files = {name: _beside(here, value) for name, value in constants.items() if name.endswith("DEFAULTS")}
    return Script(
        path=str(path),
        settings=settings,
        defaults={str(k): v for k, v in literal.items()} if isinstance(literal, dict) else {},
        defaults_file=next((p for name, p in files.items() if p and not name.startswith("EMBEDDED")), None),
        embedded_defaults=next((p for name, p in files.items() if p and name.startswith("EMBEDDED")), None),
        embedded_model=_beside(here, constants.get("EMBEDDED_MODEL")),
        script_arguments=any(name.endswith(".ScriptArguments") for name in imported),
        is_recipe="common.settings.check_setup" in imported,
    )


def _default(value: ast.expr | None) -> Any:
    """The default of a dataclass field: a plain value, or the `default` of `field(...)`; else None."""
    if isinstance(value, ast.Call):
        value = next((keyword.value for keyword in value.keywords if keyword.arg == "default"), None)
    return _literal(value)


def _literal(value: ast.expr | None) -> Any:
    try:
        return None if value is None else ast.literal_eval(value)
    except (ValueError, TypeError, RecursionError):
        return None


def _beside(script: Path, value: ast.expr | None) -> Path | None:
    """`HERE / "a" / "b"` as a path, where `HERE` is the script's folder; None for anything else."""
    parts: list[str] = []
    while isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div):
        part = _literal(value.right)
        if not isinstance(part, str):
            return None
        parts.insert(0, part)
        value = value.left
    if not parts or not isinstance(value, ast.Name) or value.id != "HERE":
        return None
    return script.resolve().parent.joinpath(*parts)
