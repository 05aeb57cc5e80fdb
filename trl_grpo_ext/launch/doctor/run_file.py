"""What a run's settings say: YAML files and the command line, with the meaning that TRL's parser gives them."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import logging
import math
import os
import types
import typing
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ...errors import ConfigurationError
from .problem import Problem
from .script_file import Script
from .settings_file import read_settings, shown

if TYPE_CHECKING:
    from trl import ModelConfig

    from ...trainer.config import GRPOExtConfig

PLUGIN_FIELDS = ("rewards", "advantage_hooks", "loss_aggregation")
BATCH_FIELDS = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "num_generations"),
    *("num_generations_eval", "generation_batch_size", "steps_per_generation", "num_iterations"),
)
_OF_THE_LAUNCH = ("deepspeed", "fsdp", "fsdp_config", "parallelism_config", "accelerator_config")
_LAUNCHER_VARIABLES = ("ACCELERATE_", "FSDP_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "PMI_", "OMPI_", "SLURM_")


@dataclass(frozen=True)
class RunPlan:
    """The settings of a run.

    Attributes:
        sources: The files that were read.
        given: What files, script and command line set, as they set it.
        settings: Every setting of `GRPOExtConfig` and `ModelConfig`, with its default where nothing was given; those
            whose value has the wrong type are at their default.
        own: Settings that are the script's own, and those that nobody is known to have.
        script: The training script, where one was named.
        config: The real configuration object; None where it could not be made.
        model: Likewise.
        problems: What can be told of the settings alone.
    """

    sources: tuple[str, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    script: Script | None = None
    config: GRPOExtConfig | None = None
    model: ModelConfig | None = None
    problems: tuple[Problem, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.settings[name]

    def get(self, name: str, default: Any = None) -> Any:
        """A setting, or what is set for the script."""
        return self.settings.get(name, self.own.get(name, default))

    @property
    def engine(self) -> str | None:
        """The engine that the settings were made for, if they say so."""
        value = self.own.get("engine")
        return None if value is None else str(value)

    @property
    def processes(self) -> Any:
        """Likewise, the number of processes."""
        return self.own.get("processes")


class _Parser(argparse.ArgumentParser):
    """For single words of a command line: an error is an exception."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(message)


def read_run(
    paths: Sequence[str | Path], words: Sequence[str] = (), *, script: Script | None = None, has_gpu: bool = True
) -> RunPlan:
    """Read a run's settings; a later file beats an earlier one, and the command line beats all.

    Args:
        paths: YAML files.
        words: The command line behind the script.
        script: The script, for its own settings and defaults.
        has_gpu: Whether the run has a GPU: recipes choose their defaults by it.

    Raises:
        ConfigurationError: A file cannot be read. What is wrong inside is among the plan's problems.
    """
    hints, actions = _fields(script)
    problems: list[Problem] = []
    given: dict[str, Any] = {}
    for path in paths:
        read = read_settings(path)
        problems += read.problems
        given.update(read.settings)
    told, more = _from_words(words, actions, script)
    problems += more
    given.update(told)
    given = {**_defaults(script, given, has_gpu), **given}
    problems += _environment_of(given.pop("env", None))

    settings = {name: _default_of(f) for name, (f, _) in hints.items()}
    wrong: set[str] = set()
    own: dict[str, Any] = {}
    for name, value in given.items():
        if name not in hints:
            own[name] = value
            problems += _unknown(name, hints, script)
            continue
        converted, problem = _fitting(name, value, hints[name][1], actions.get(name))
        if problem is not None:
            problems.append(problem)
            wrong.add(name)
        else:
            settings[name] = converted
    return RunPlan(
        sources=tuple(map(str, paths)),
        given=given,
        settings=settings,
        own=own,
        script=script,
        problems=tuple(problems),
    )


def with_configs(plan: RunPlan, *, processes: int, leave_out: Iterable[str] = ()) -> RunPlan:
    """Build the real configuration objects; what they refuse becomes a problem.

    The objects describe a run of `processes` processes on a machine that need not be this one, so settings that
    `TrainingArguments` compares with this machine's GPU are left out where there is none.

    Args:
        plan: As read.
        processes: Of the run; divisibility depends on it.
        leave_out: Settings about which problems are known already: with their defaults, the next problem shows.
    """
    import torch
    from trl import ModelConfig

    from ...trainer.config import GRPOExtConfig

    class Described(GRPOExtConfig):
        """The configuration in a job of that many processes."""

        @property
        def world_size(self) -> int:
            return processes

    names = {f.name for f in dataclasses.fields(GRPOExtConfig) if f.init}
    left_out = {*leave_out, *_OF_THE_LAUNCH}
    values = {name: value for name, value in plan.settings.items() if name in names and name not in left_out}
    if not torch.cuda.is_available():
        values |= {"use_cpu": True, "tf32": None}  # bf16 and fp16 are then not compared with this machine
    if values.get("output_dir") is None:
        values["output_dir"] = "trainer_output"
    config, model, problems = None, None, list(plan.problems)
    with _quietly():
        try:
            config = Described(**values)
        except (ValueError, TypeError, ImportError, OSError, RuntimeError, AttributeError) as error:
            problems.append(_refused(error))
        try:
            known = {f.name for f in dataclasses.fields(ModelConfig)}
            model = ModelConfig(**{name: value for name, value in plan.settings.items() if name in known})
        except (ValueError, TypeError) as error:
            problems.append(_refused(error))
    return dataclasses.replace(plan, config=config, model=model, problems=tuple(problems))


def _refused(error: Exception) -> Problem:
    return Problem("error", "settings", shown(error, 600), "Change that setting: the run would stop at once.")


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without warnings, and without the variables of a launcher: they would make this process wait for others."""
    kept = {name: os.environ[name] for name in os.environ if name.startswith(_LAUNCHER_VARIABLES)}
    for name in kept:
        del os.environ[name]
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        os.environ.update(kept)


def _fields(script: Script | None) -> tuple[dict[str, tuple[Any, Any]], dict[str, argparse.Action]]:
    """By setting: its dataclass field with the type, and the parser's action for it."""
    from trl import ModelConfig, ScriptArguments, TrlParser

    from ...trainer.config import GRPOExtConfig

    classes: list[Any] = [GRPOExtConfig, ModelConfig]
    if script is None or script.script_arguments:
        classes.append(ScriptArguments)
    hints: dict[str, tuple[Any, Any]] = {}
    for cls in classes:
        types_of = typing.get_type_hints(cls)
        hints |= {f.name: (f, types_of[f.name]) for f in dataclasses.fields(cls) if f.init}
    actions = {action.dest: action for action in TrlParser(classes)._actions if action.dest in hints}
    return hints, actions


def _default_of(f: Any) -> Any:
    if f.default_factory is not dataclasses.MISSING:
        return f.default_factory()
    return None if f.default is dataclasses.MISSING else f.default


def _defaults(script: Script | None, given: Mapping[str, Any], has_gpu: bool) -> dict[str, Any]:
    """What the script itself sets where nobody does."""
    if script is None:
        return {}
    wanted = given.get("embedded")
    embedded = str(wanted).lower() in ("true", "1", "yes") if wanted is not None else False
    embedded = embedded or (wanted is None and given.get("model_name_or_path") is None and not has_gpu)
    path = script.embedded_defaults if embedded and script.embedded_defaults else script.defaults_file
    settings = {**script.settings, **script.defaults}
    settings = {name: value for name, value in settings.items() if value is not None}
    if path is not None and path.is_file():
        settings.update(read_settings(path).settings)
    if embedded and script.embedded_model is not None:
        settings["model_name_or_path"] = str(script.embedded_model)
    if script.is_recipe and not has_gpu:
        settings |= {"use_cpu": True, "bf16": False}
    return settings


def _from_words(
    words: Sequence[str], actions: Mapping[str, argparse.Action], script: Script | None
) -> tuple[dict[str, Any], list[Problem]]:
    """Read a command line, option by option, so that every mistake in it is told."""
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    seen: set[str] = set()
    for action in actions.values():
        for option in action.option_strings:
            keywords: dict[str, Any] = {"dest": action.dest, "default": argparse.SUPPRESS}
            if isinstance(action, argparse._StoreFalseAction):
                keywords["action"] = "store_false"
            else:
                keywords |= {"type": action.type, "nargs": action.nargs}
                keywords |= {"const": action.const} if action.nargs == "?" else {}
            parser.add_argument(option, **keywords)
            seen.add(option)
    for name in script.settings if script is not None else ():
        if f"--{name}" not in seen:
            parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name, nargs="?", const=True)
    given: dict[str, Any] = {}
    problems = []
    for group in _options(words):
        try:
            parsed, rest = parser.parse_known_args(group)
        except (ConfigurationError, TypeError, ValueError) as error:
            problems.append(Problem("error", "command line", f"{shown(error)}.", "Change that word."))
            continue
        given.update(vars(parsed))
        problems += [_unknown_word(word, actions, script) for word in rest[:1]]  # the rest are its values
    return given, problems


def _unknown_word(word: str, actions: Mapping[str, argparse.Action], script: Script | None) -> Problem:
    name = word.lstrip("-").split("=")[0].replace("-", "_")
    if name == "config":
        message = f"TRL's parser ignores {shown(word)!r}: it knows `--config FILE` in two words alone."
        return Problem(
            "error", "command line", message, "Give files to the doctor with --config FILE, before the `--`."
        )
    near = difflib.get_close_matches(name, [*actions, *(script.settings if script else ())], n=2)
    fix = f"Did you mean {' or '.join(f'--{n}' for n in near)}?" if near else "Take it out, or name the --script."
    return Problem("error", "command line", f"There is no setting {shown(word)!r} (command line).", fix)


def _options(words: Sequence[str]) -> list[list[str]]:
    """Each option with its values."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups


def _unknown(name: str, known: Iterable[str], script: Script | None) -> list[Problem]:
    if script is not None and name in script.settings:
        return []
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.8)
    near += difflib.get_close_matches(name, script.settings, n=1, cutoff=0.8) if script is not None else []
    message = f"There is no setting {shown(name)!r} in TRL, transformers or trl-grpo-ext"
    if near:
        return [Problem("error", "settings", f"{message}.", f"Did you mean {' or '.join(map(repr, near))}?")]
    if script is not None:
        message += f", nor in {shown(Path(script.path).name)}."
        return [Problem("error", "settings", message, "Take it out: TRL's parser refuses what it does not know.")]
    message += ": the training script must know it."
    return [Problem("note", "settings", message, "Name the script with --script, and this is checked.")]


def _environment_of(env: object) -> list[Problem]:
    """What the file's `env` sets."""
    if env is None:
        return []
    if not isinstance(env, dict):
        fix = "Write a mapping of names and values."
        return [Problem("error", "env", f"`env` is {shown(repr(env), 60)}, not a mapping.", fix)]
    message = f"`env` sets {shown(', '.join(map(str, env)))} when the script parses its settings"
    fix = "Set variables that torch reads at import, such as CUDA_VISIBLE_DEVICES, in the shell."
    return [Problem("note", "env", f"{message}, after its imports.", fix)]


def _fitting(name: str, value: Any, hint: Any, action: argparse.Action | None) -> tuple[Any, Problem | None]:
    """The value as TRL gets it, or what is wrong with it. TRL checks only texts, and only those from a file."""
    kinds = _kinds(hint)
    choices = _choices(action, kinds)
    if isinstance(value, str) and str not in kinds and action is not None and callable(action.type):
        try:
            value = action.type(value)  # as argparse does with a default that is a text
        except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
            if not any(_is(kind, value) for kind in kinds):
                return None, _wrong(name, value, kinds, f" ({shown(error)})")
    if choices and value is not None:
        if value in choices or (not isinstance(value, str) and any(_is(kind, value) for kind in kinds)):
            return value, None
        listed = ", ".join(map(str, choices)) if len(choices) <= 12 else f"its {len(choices)} choices"
        near = difflib.get_close_matches(str(value), list(map(str, choices)), n=1)
        near += [c for c in map(str, choices) if c.startswith("b") and str(value) == "bf16"][:1]
        fix = f"Did you mean {near[0]!r}? " if near else ""
        if isinstance(value, bool):
            fix = f'YAML reads no, off, yes and on as truth values: write {name}: "no" in quotes. '
        message = f"{name} is {shown(repr(value), 60)}, which is none of {listed}."
        return None, Problem("error", "settings", message, f"{fix}TRL's parser does not check it.".strip())
    if any(_is(kind, value) for kind in kinds) or Any in kinds:
        if isinstance(value, float) and not math.isfinite(value):
            fix = "Write a number."
            return None, Problem("error", "settings", f"{name} is {value}, which is not finite.", fix)
        return value, None
    return None, _wrong(name, value, kinds, "")


def _wrong(name: str, value: Any, kinds: Sequence[Any], why: str) -> Problem:
    names = {"str": "a text", "int": "a whole number", "float": "a number", "bool": "true or false", "list": "a list"}
    wanted = " or ".join(names.get(_type_name(kind), _type_name(kind)) for kind in kinds if kind is not type(None))
    hint = ""
    if isinstance(value, bool) and str in kinds:
        hint = " YAML reads no, off, yes and on as truth values: write it in quotes."
    message = f"{name} is {shown(repr(value), 60)}, which is not {wanted}{why}. TRL's parser does not check it.{hint}"
    return Problem("error", "settings", message, f"Write {wanted}.")


def _type_name(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind))


def _kinds(hint: Any) -> list[Any]:
    """The plain types of a hint: `int | None` is int and NoneType."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(hint) for kind in _kinds(part)]
    if origin is typing.Literal:
        return [type(argument) for argument in typing.get_args(hint)]
    return [origin or hint]


def _choices(action: argparse.Action | None, kinds: Sequence[Any]) -> list[Any]:
    if action is not None and action.choices is not None:
        return list(action.choices)
    return [item.value for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum) for item in kind]


def _is(kind: Any, value: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is list:
        return isinstance(value, list | tuple | str)  # one value for a list: argparse and ours take it
    return isinstance(value, kind) if isinstance(kind, type) else True
