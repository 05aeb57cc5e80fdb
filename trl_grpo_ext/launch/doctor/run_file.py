"""What a run's settings say: YAML files, the script's own defaults and the command line, read by TRL's own parser."""

import argparse
import contextlib
import dataclasses
import difflib
import itertools
import logging
import math
import os
import re
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
from . import Problem

PLUGIN_FIELDS = ("rewards", "advantage_hooks", "loss_aggregation", "resample")
_OF_THE_LAUNCH = ("deepspeed", "fsdp", "fsdp_config", "parallelism_config", "accelerator_config")
_REFUSALS = (ValueError, TypeError, ImportError, OSError, RuntimeError, AttributeError, ArithmeticError)
_LAUNCHER_VARIABLES = ("ACCELERATE_", "FSDP_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "PMI_", "OMPI_", "SLURM_")


@dataclass(frozen=True)
class Script:
    """A training script: where it is, and every word of its source, among them the names of its own settings."""

    path: str
    words: frozenset[str]

    @property
    def is_recipe(self) -> bool:
        """Whether it calls the recipes' own `check_setup`."""
        return "check_setup" in self.words


@dataclass(frozen=True)
class RunPlan:
    """The settings of a run."""

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
        """Whether the script is one of the recipes, which see to some things that TRL leaves undone."""
        return self.script is not None and self.script.is_recipe


class _Parser(TrlParser):
    """TRL's parser, called for one setting at a time to find every mistake; errors are exceptions."""

    def __init__(self) -> None:
        classes: list[Any] = [GRPOExtConfig, ModelConfig, ScriptArguments]
        super().__init__(classes, allow_abbrev=False)
        self.fields: dict[str, dataclasses.Field[Any]] = {}
        self.hints: dict[str, Any] = {}
        for cls in classes:
            self.fields |= {f.name: f for f in dataclasses.fields(cls) if f.init}
            self.hints |= typing.get_type_hints(cls)
        self.actions = {action.dest: action for action in self._actions if action.dest in self.fields}
        for action in self._actions:
            action.default = argparse.SUPPRESS

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


def read_run(paths: Sequence[str | Path], words: Sequence[str] = (), *, script: Script | None = None) -> RunPlan:
    """Read a run's settings; later files override earlier ones, and the command line overrides all.

    Problems of the files are in the plan.
    """
    parser = _Parser()
    given: dict[str, Any] = {}
    problems: list[Problem] = []
    for path in paths:
        try:
            given.update(read_settings(path))
        except ConfigurationError as error:
            problems.append(Problem("error", "settings", str(error), "Correct the file of --config."))
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
    from_words, wrong = _from_words(words, parser, script)
    for name, value in from_words.items():
        (settings if name in settings else own)[name] = value
    return RunPlan(settings=settings, own=own, script=script, problems=(*wrong, *problems))


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


def _from_words(words: Sequence[str], parser: _Parser, script: Script | None) -> tuple[dict[str, Any], list[Problem]]:
    """Read a command line option by option, to find every mistake."""
    starts = [number for number, word in enumerate(words) if word.startswith("--") or number == 0]
    given: dict[str, Any] = {}
    problems = []
    for start, end in itertools.pairwise([*starts, len(words)]):
        first, *rest = words[start:end]
        name, _, value = first.lstrip("-").partition("=")
        name = name.replace("-", "_")
        try:
            parsed, unknown = parser.parse_known_args([first, *rest])
        except (ConfigurationError, TypeError, ValueError) as error:
            problems.append(Problem("error", "command line", f"{one_line(error, 500)}.", "Change that word."))
            continue
        given.update(vars(parsed))
        if unknown and script is not None and name in script.words:
            given[name] = value or next(iter(rest), True)
        elif unknown:
            near = difflib.get_close_matches(name, [*parser.actions], n=2)
            fix = f"Did you mean {' or '.join(f'--{n}' for n in near)}?" if near else "Remove it, or name the --script."
            if name == "config":
                fix = "TRL's parser knows --config FILE as two words alone; for the doctor they stand before the `--`."
            message = f"There is no setting {one_line(unknown[0], 100)!r} (command line)."
            problems.append(Problem("error", "command line", message, fix))
    return given, problems


def _unknown(name: str, parser: _Parser, script: Script | None) -> list[Problem]:
    if script is not None and name in script.words:
        return []
    near = difflib.get_close_matches(name, [*parser.actions], n=2, cutoff=0.8)
    message = f"There is no setting {one_line(name, 100)!r} in TRL, transformers or trl-grpo-ext"
    if near:
        return [Problem("error", "settings", f"{message}.", f"Did you mean {' or '.join(map(repr, near))}?")]
    if script is not None:
        message += f", nor in {one_line(Path(script.path).name)}."
        return [Problem("error", "settings", message, "Remove it: TRL's parser refuses unknown settings.")]
    message += ": the training script must know it."
    return [Problem("note", "settings", message, "Name the script with --script to have this checked.")]


def read_script(path: str | Path) -> Script:
    """Read a script's source; nothing is imported or run."""
    if Path(path).stat().st_size > MOST_BYTES:
        raise ConfigurationError(f"{one_line(path, 300)} (--script) is too long for a training script.")
    source = Path(path).read_text(encoding="utf-8", errors="replace")
    return Script(str(path), frozenset(re.findall(r"\w+", source)))
