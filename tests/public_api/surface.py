"""What others build on, read off the code: names, signatures, fields, plugin parameters, settings, commands.

`python -m tests.public_api.surface` writes it to `tests/public_api/VERSION.json`. That is done once for a release. The
tests compare the code with the latest of these files and hold every difference against the changelog.
"""

import dataclasses
import enum
import inspect
import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from trl_grpo_ext import __version__, available
from trl_grpo_ext.cli.main import app
from trl_grpo_ext.plugins.building import import_plugin
from trl_grpo_ext.records import token_records
from trl_grpo_ext.trainer.config import GRPOExtConfig

FOLDER = Path(__file__).parent
MODULES = (
    "trl_grpo_ext",
    "trl_grpo_ext.types",
    "trl_grpo_ext.errors",
    "trl_grpo_ext.advantages",
    "trl_grpo_ext.plugins.loading",
    "trl_grpo_ext.guard.outcomes",
    "trl_grpo_ext.guard.workers",
    "trl_grpo_ext.testing",
    "trl_grpo_ext.records.manifest",
    "trl_grpo_ext.history.compare",
    "trl_grpo_ext.records.log",
    "trl_grpo_ext.history.report",
    "trl_grpo_ext.cli.audit",
    "trl_grpo_ext.launch.engine",
    "trl_grpo_ext.launch.checkpoints",
)
"""The public modules; what each offers is in its `__all__`. Everything else may change in any release."""


def surface() -> dict[str, str]:
    """Every public thing by its name, with what a user of it relies on as text."""
    found: dict[str, str] = {}
    for module_name in MODULES:
        module = import_module(module_name)
        for name in module.__all__:
            found.update(described(f"{module_name}.{name}", getattr(module, name)))
    for info in available():
        if info.builtin:
            exported = import_plugin(info)
            found[f"plugin {info.kind} {info.name}"] = signature(exported) if inspect.isclass(exported) else "()"
            for alias in info.aliases:
                found[f"plugin {info.kind} {alias}"] = f"alias of {info.name}"
    for field in own_fields(GRPOExtConfig):
        found[f"setting {field.name}"] = f"= {field.default!r}"
    for name, command in commands().items():
        found[f"command {name}"] = " ".join(sorted("/".join([*p.opts, *p.secondary_opts]) for p in command.params))
    for name in token_records.COLUMNS:
        found[f"token record {name}"] = ""
    return found


def commands() -> dict[str, Any]:
    """The commands of `trl-grpo-ext` by name."""
    return dict(sorted(typer.main.get_command(app).commands.items()))  # type: ignore[attr-defined]


def own_fields(config: Any) -> Iterator[dataclasses.Field[Any]]:
    """The fields that our config adds to TRL's."""
    inherited = {field.name for base in config.__bases__ for field in dataclasses.fields(base)}
    return (field for field in dataclasses.fields(config) if field.name not in inherited)


def described(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """One public name; a class also with its public methods, fields and members."""
    if isinstance(value, type) and issubclass(value, enum.Enum):
        yield name, "enum"
        for member in value:
            yield f"{name}.{member.name}", repr(member.value)
    elif isinstance(value, type):
        bases = ", ".join(base.__name__ for base in value.__bases__)
        extends_others = dataclasses.is_dataclass(value) and not all(map(is_ours, value.__mro__[:-1]))
        yield name, f"class({bases}){'' if extends_others else signature(value)}"
        for attribute, member in sorted(vars(value).items()):
            if attribute.startswith("_"):
                continue
            if inspect.isroutine(member) or isinstance(member, property):
                of = member.fget if isinstance(member, property) else getattr(value, attribute)
                yield f"{name}.{attribute}", ("property " if isinstance(member, property) else "") + signature(of)
        if dataclasses.is_dataclass(value):
            # By the annotations: TRL's argument parser changes the fields' types while it reads them.
            annotations = {n: a for base in reversed(value.__mro__) if is_ours(base) for n, a in own_annotations(base)}
            for field in dataclasses.fields(value):
                if field.repr and field.name in annotations:
                    yield f"{name}.{field.name}", str(annotations[field.name])
    elif callable(value):
        yield name, signature(value)
    elif isinstance(value, str | int | float | tuple):
        # The version is a constant whose value is no promise.
        yield name, "" if name.endswith("__version__") else repr(value)
    else:
        yield name, str(value) if "typing" in type(value).__module__ else type(value).__name__


def is_ours(owner: type) -> bool:
    """Whether a class is of this package: TRL's fields are its own affair, and differ from release to release."""
    return owner.__module__.partition(".")[0] == "trl_grpo_ext"


def own_annotations(owner: type) -> Iterator[tuple[str, Any]]:
    """The fields that a class itself declares."""
    return iter(vars(owner).get("__annotations__", {}).items())


def signature(value: Any) -> str:
    """Parameters and defaults, without the annotations, which may be reworded."""
    try:
        given = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    if isinstance(value, type) and value.__init__ is object.__init__ and value.__new__ is object.__new__:
        return "()"
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for name, parameter in given.parameters.items()
        if name not in ("self", "cls")
    ]
    text = str(given.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def latest() -> tuple[str, dict[str, str]] | None:
    """The latest released surface: its version and what was in it; None before the first release."""
    files = {tuple(map(int, file.stem.split("."))): file for file in FOLDER.glob("*.json")}
    if not files:
        return None
    file = files[max(files)]
    return file.stem, json.loads(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    path = FOLDER / f"{__version__}.json"
    path.write_text(json.dumps(dict(sorted(surface().items())), indent=1) + "\n", encoding="utf-8")
    print(path)
