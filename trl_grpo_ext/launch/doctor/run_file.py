"""What a run's settings say: YAML files, the script's own defaults and the command line, read by TRL's own parser."""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import difflib
import logging
import math
import os
import typing
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from trl import ModelConfig, ScriptArguments, TrlParser

from ...errors import ConfigurationError
from ...guard.untrusted import MOST_BYTES, one_line, read_settings
from ...trainer.config import GRPOExtConfig
from ..ranges import wrong_values
from .problem import Problem

PLUGIN_FIELDS = ("rewards", "advantage_hooks", "loss_aggregation", "resample")
_OF_THE_LAUNCH = ("deepspeed", "fsdp", "fsdp_config", "parallelism_config", "accelerator_config")
_REFUSALS = (ValueError, TypeError, ImportError, OSError, RuntimeError, AttributeError, ArithmeticError)
_LAUNCHER_VARIABLES = ("ACCELERATE_", "FSDP_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "PMI_", "OMPI_", "SLURM_")


@dataclass(frozen=True)
class Script:
    """A training script, read from its source without running it."""

    path: str
    settings: Mapping[str, Any] = field(default_factory=dict)  # its dataclasses' fields, with their plain defaults
    defaults: Mapping[str, Any] = field(default_factory=dict)  # `SCRIPT_DEFAULTS`, below a file and the command line
    defaults_file: Path | None = None  # of a constant such as `DEFAULTS = HERE / "folder" / "file.yaml"`
    embedded_defaults: Path | None = None  # the same for `EMBEDDED...DEFAULTS`: runs on the embedded model
    embedded_model: Path | None = None  # the folder of `EMBEDDED_MODEL`
    script_arguments: bool = False  # whether it takes TRL's `ScriptArguments` too
    is_recipe: bool = False  # whether it calls the recipes' own `check_setup`


@dataclass(frozen=True)
class RunPlan:
    """The settings of a run."""

    sources: tuple[str, ...] = ()  # the files that were read
    given: Mapping[str, Any] = field(default_factory=dict)  # by script, files and command line, as they have it
    settings: Mapping[str, Any] = field(default_factory=dict)  # all of `GRPOExtConfig` and `ModelConfig`
    own: Mapping[str, Any] = field(default_factory=dict)  # the script's, and unknown ones
    script: Script | None = None
    config: GRPOExtConfig | None = None  # None if the real object could not be made
    model: ModelConfig | None = None
    problems: tuple[Problem, ...] = ()  # of the settings by themselves

    def __getitem__(self, name: str) -> Any:
        return self.settings[name]

    def get(self, name: str) -> Any:
        """A setting of the run or of the script; else None."""
        return self.settings.get(name, self.own.get(name))

    def value(self, name: str) -> str:
        """A setting as a text: an enumeration's member as its value."""
        return str(getattr(self.settings[name], "value", self.settings[name]))

    @property
    def is_recipe(self) -> bool:
        """Whether the script is one of the recipes."""
        return self.script is not None and self.script.is_recipe


class _Parser(TrlParser):
    """TRL's parser, called for one setting at a time to find every mistake; errors are exceptions."""

    def __init__(self, script: Script | None) -> None:
        classes: list[Any] = [GRPOExtConfig, ModelConfig]
        if script is None or script.script_arguments:
            classes.append(ScriptArguments)
        super().__init__(classes, allow_abbrev=False)
        self.fields: dict[str, dataclasses.Field[Any]] = {}
        self.hints: dict[str, Any] = {}
        for cls in classes:
            self.fields |= {f.name: f for f in dataclasses.fields(cls) if f.init}
            self.hints |= typing.get_type_hints(cls)
        self.actions = {action.dest: action for action in self._actions if action.dest in self.fields}
        for action in self._actions:
            action.default = argparse.SUPPRESS
        for name in script.settings if script is not None else ():
            if name not in self.actions:
                options = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
                self.add_argument(*options, dest=name, nargs="?", const=True, default=argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        """In place of argparse's page of usage."""
        raise ConfigurationError(one_line(message, 500).rstrip("."))

    def read(self, name: str, value: Any) -> Any:
        """A file's value as the command line would parse it, which TRL's parser does not."""
        hint, action = self.hints[name], self.actions[name]
        if value is None:
            if type(None) not in typing.get_args(hint) and self.fields[name].default is not None:
                raise ConfigurationError(f"{name} has no value")
            return None
        if isinstance(value, list) and action.nargs in ("+", "*"):
            return [self._one(name, item)[0] if not isinstance(item, dict | list) else item for item in value]
        if isinstance(value, dict | list):
            if any(kind in str(hint) for kind in ("dict", "list", "Any")):
                return value
            raise ConfigurationError(f"{name} is {one_line(repr(value), 60)}, not a single value")
        if action.nargs in ("+", "*") and not isinstance(value, str):
            raise ConfigurationError(f"{name} is {value!r}, which is not a list")
        return self._one(name, value)

    def _one(self, name: str, value: Any) -> Any:
        try:
            read = getattr(self.parse_args([f"--{name}={value}"]), name)
        except ConfigurationError as error:
            raise ConfigurationError(f"{name}: {str(error).partition(': ')[2]}") from error
        if isinstance(read, float) and not math.isfinite(read):
            raise ConfigurationError(f"{name} is {read}, which is not finite")
        return read


def read_run(
    paths: Sequence[str | Path], words: Sequence[str] = (), *, script: Script | None = None, has_gpu: bool = True
) -> RunPlan:
    """Read a run's settings; later files override earlier ones, and the command line overrides all.

    Recipes choose their defaults by `has_gpu`. Problems inside the files are in the plan.
    """
    parser = _Parser(script)
    given: dict[str, Any] = {}
    for path in paths:
        given.update(read_settings(path))
    from_words, problems = _from_words(words, parser)
    given = {**_defaults(script, {**given, **from_words}, has_gpu), **given}
    env = given.pop("env", {})
    if not isinstance(env, dict):
        message = f"`env` is {one_line(repr(env), 60)}, not a mapping."
        problems.append(Problem("error", "env", message, "Write a mapping of names and values."))
    settings = {name: _default_of(f) for name, f in parser.fields.items()}
    own: dict[str, Any] = {}
    for name, value in given.items():
        if name not in parser.actions:
            own[name] = value
            problems += _unknown(name, parser, script)
            continue
        try:
            settings[name] = parser.read(name, value)
        except ConfigurationError as error:
            fix = "Write a valid value; TRL's parser does not check those of a file."
            if isinstance(value, bool) and parser.actions[name].choices:
                fix += f' YAML reads no, off, yes and on as truth values: write {name}: "no" in quotes.'
            problems.append(Problem("error", "settings", f"{error}.", fix))
    for name, value in from_words.items():
        (settings if name in settings else own)[name] = value
    return RunPlan(
        sources=tuple(map(str, paths)),
        given={**given, **from_words},
        settings=settings,
        own=own,
        script=script,
        problems=tuple(problems),
    )


def build_configs(plan: RunPlan, *, processes: int, leave_out: Iterable[str] = ()) -> RunPlan:
    """Build the real configuration objects for so many processes; their errors become problems.

    What `TrainingArguments` checks against this machine's GPU is left out if it has none. Settings with known problems
    (`leave_out`) have their defaults, so that further problems show.
    """

    class Described(GRPOExtConfig):
        """The configuration in a job of that many processes."""

        @property
        def world_size(self) -> int:
            return processes

    def of(cls: type) -> dict[str, Any]:
        return {f.name: plan.settings[f.name] for f in dataclasses.fields(cls) if f.init}

    values = {name: value for name, value in of(GRPOExtConfig).items() if name not in {*leave_out, *_OF_THE_LAUNCH}}
    if not torch.cuda.is_available():
        values |= {"use_cpu": True, "tf32": None}  # bf16 and fp16 are then not compared with this machine
    values["output_dir"] = values["output_dir"] or "trainer_output"
    made: list[Any] = []
    problems = list(plan.problems)
    with _silence():
        for make, settings in ((Described, values), (ModelConfig, of(ModelConfig))):
            try:
                made.append(make(**settings))
            except _REFUSALS as error:
                made.append(None)
                if isinstance(error, ArithmeticError) and wrong_values(plan.settings):
                    continue  # a size of 0, which its name says
                fix = "Change that setting: the run would stop at once."
                problems.append(Problem("error", "settings", one_line(error, 600), fix))
    return dataclasses.replace(plan, config=made[0], model=made[1], problems=tuple(problems))


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """A context without warnings and without a launcher's variables, which would make this process wait for others."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(_LAUNCHER_VARIABLES)}
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        os.environ.update(kept)


def _default_of(f: dataclasses.Field[Any]) -> Any:
    if f.default_factory is not dataclasses.MISSING:
        return f.default_factory()
    return None if f.default is dataclasses.MISSING else f.default


def _defaults(script: Script | None, given: Mapping[str, Any], has_gpu: bool) -> dict[str, Any]:
    """The script's own defaults."""
    if script is None:
        return {}
    wanted = given.get("embedded")
    embedded = str(wanted).lower() in ("true", "1", "yes") if wanted is not None else False
    embedded = embedded or (wanted is None and given.get("model_name_or_path") is None and not has_gpu)
    path = script.embedded_defaults if embedded and script.embedded_defaults else script.defaults_file
    settings = {name: value for name, value in {**script.settings, **script.defaults}.items() if value is not None}
    if path is not None and path.is_file():
        settings.update(read_settings(path))
    if embedded and script.embedded_model is not None:
        settings["model_name_or_path"] = str(script.embedded_model)
    if script.is_recipe and not has_gpu:
        settings |= {"use_cpu": True, "bf16": False}
    return settings


def _from_words(words: Sequence[str], parser: _Parser) -> tuple[dict[str, Any], list[Problem]]:
    """Read a command line option by option, to find every mistake."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    given: dict[str, Any] = {}
    problems = []
    for group in groups:
        try:
            parsed, rest = parser.parse_known_args(group)
        except (ConfigurationError, TypeError, ValueError) as error:
            problems.append(Problem("error", "command line", f"{one_line(error, 500)}.", "Change that word."))
            continue
        given.update(vars(parsed))
        if rest:
            problems.append(_unknown_word(rest[0], parser))  # the rest are its values
    return given, problems


def _unknown_word(word: str, parser: _Parser) -> Problem:
    name = word.lstrip("-").split("=")[0].replace("-", "_")
    if name == "config":
        message = f"TRL's parser ignores {one_line(word, 100)!r}: it only knows `--config FILE` as two words."
        fix = "Give files to the doctor with --config FILE, before the `--`."
        return Problem("error", "command line", message, fix)
    near = difflib.get_close_matches(name, [action.dest for action in parser._actions], n=2)
    fix = f"Did you mean {' or '.join(f'--{n}' for n in near)}?" if near else "Remove it, or name the --script."
    return Problem("error", "command line", f"There is no setting {one_line(word, 100)!r} (command line).", fix)


def _unknown(name: str, parser: _Parser, script: Script | None) -> list[Problem]:
    if script is not None and name in script.settings:
        return []
    near = difflib.get_close_matches(name, [action.dest for action in parser._actions], n=2, cutoff=0.8)
    message = f"There is no setting {one_line(name, 100)!r} in TRL, transformers or trl-grpo-ext"
    if near:
        return [Problem("error", "settings", f"{message}.", f"Did you mean {' or '.join(map(repr, near))}?")]
    if script is not None:
        message += f", nor in {one_line(Path(script.path).name)}."
        return [Problem("error", "settings", message, "Remove it: TRL's parser refuses unknown settings.")]
    message += ": the training script must know it."
    return [Problem("note", "settings", message, "Name the script with --script to have this checked.")]


def read_script(path: str | Path) -> Script:
    """Read a script's dataclasses and constants; nothing is imported or run."""
    name, here = one_line(path, 300), Path(path)
    try:
        if not here.is_file() or here.stat().st_size > MOST_BYTES:
            raise ConfigurationError(f"There is no script {name} (--script).")
        tree = ast.parse(here.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, RecursionError, OSError) as error:
        raise ConfigurationError(f"{name} (--script) is not Python: {one_line(error, 300)}") from error
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
    files = {name: _path_from_here(here, value) for name, value in constants.items() if name.endswith("DEFAULTS")}
    return Script(
        path=str(path),
        settings=settings,
        defaults={str(k): v for k, v in literal.items()} if isinstance(literal, dict) else {},
        defaults_file=next((p for name, p in files.items() if p and not name.startswith("EMBEDDED")), None),
        embedded_defaults=next((p for name, p in files.items() if p and name.startswith("EMBEDDED")), None),
        embedded_model=_path_from_here(here, constants.get("EMBEDDED_MODEL")),
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


def _path_from_here(script: Path, value: ast.expr | None) -> Path | None:
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
