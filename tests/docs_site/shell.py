"""What a page tells its reader to type, parsed by the very parser that would run it, without running it."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import typer
from accelerate.commands.launch import launch_command_parser

from tests.docs_site.blocks import ROOT

PLACEHOLDERS = (
    *("a.yaml", "b.yaml", "my.yaml", "run.yaml", "columns.yaml"),
    *("train.jsonl", "mbpp.jsonl", "completions.jsonl"),
)
"""Files that the reader is supposed to have."""
READERS_SCRIPTS = frozenset({"train.py"})
RECIPES = ("gsm8k_grpo", "sort_grpo", "detox_grpo")
_ON_THIS_MACHINE = ("--output_dir", "unused", "--use_cpu", "true", "--bf16", "false")
_OTHERS = frozenset({"jq", "export", "cd", "source", "ls", "cat", "mkdir", "open", "pytest"})
"""Commands that are nobody's here."""


class RefusedCommandError(AssertionError):
    """A command of a page that its program would refuse."""


def commands(block: str) -> Iterator[list[str]]:
    """The simple commands of a block: comments off, lines joined, pipes and `&&` apart."""
    joined = re.sub(r"\\(?:\s+#.*)?\n", " ", block)
    for line in joined.split("\n"):
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in lexer:
            if set(word) <= set("|&;"):
                if command:
                    yield command
                command = []
            else:
                command.append(word)
        if command:
            yield command


def check(words: list[str]) -> str:
    """Parse a command; what it was parsed by.

    Raises:
        RefusedCommandError: Its parser refuses it, or it names a file or a target that is not there.
    """
    while re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", words[0]):  # variables before a command
        words = words[1:]
        if not words:
            return "a variable"
    program, *rest = words
    program = re.sub(r"^\.venv(-vllm)?/bin/", "", program)  # where `make` puts it
    if program in ("srun", "env"):
        return check(rest)
    if "..." in rest:
        rest = _without_dots(rest)
    if program == "trl-grpo-ext":
        return _our_command(rest)
    if program == "accelerate" and rest[:1] == ["launch"]:
        return _launch(rest[1:])
    if program in ("python", "python3"):
        return _python(rest)
    if program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for target in rest:
            _need("=" in target or re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), f"no target {target}")
        return "make"
    if program == "pip":
        _need(rest[:1] and rest[0] in ("install", "uninstall"), f"pip {rest[:1]}")
        for word in rest[1:]:
            _need("/" not in word or word.startswith("./grpo-") or (ROOT / word).exists(), f"{word} is not there")
        return "pip"
    if program == "sbatch":
        _need((ROOT / rest[0]).is_file(), f"{rest[0]} is not there")
        return "sbatch"
    _need(program in _OTHERS, f"nobody knows {program!r}")
    return program


def _need(condition: object, why: str) -> None:
    if not condition:
        raise RefusedCommandError(why)


def _without_dots(words: list[str]) -> list[str]:
    """Without `...`, and without the option whose value it stands for."""
    kept: list[str] = []
    for word in words:
        if word == "...":
            if kept and kept[-1].startswith("--"):
                kept.pop()
        else:
            kept.append(word)
    return kept


def _our_command(words: list[str]) -> str:
    from trl_grpo_ext.cli.main import app

    group = typer.main.get_command(app)
    _need(words and words[0] in group.commands, f"trl-grpo-ext has no command {words[:1]}")  # type: ignore[attr-defined]
    command = group.commands[words[0]]  # type: ignore[attr-defined]
    try:
        command.make_context(words[0], list(words[1:]))
    except Exception as error:
        if type(error).__module__.split(".")[0] in ("click", "typer"):
            raise RefusedCommandError(f"trl-grpo-ext {' '.join(words)}: {error}") from error
        raise
    return f"trl-grpo-ext {words[0]}"


def _launch(words: list[str]) -> str:
    try:
        arguments = launch_command_parser().parse_args(words)
    except SystemExit as error:
        raise RefusedCommandError(f"accelerate launch {' '.join(words)}") from error
    _need(not arguments.config_file or (ROOT / arguments.config_file).is_file(), f"no {arguments.config_file}")
    return _script(arguments.training_script, arguments.training_script_args)


def _script(script: str, words: list[str]) -> str:
    if script in READERS_SCRIPTS:
        return "a script of the reader's"
    _need((ROOT / script).is_file(), f"{script} is not there")
    name = Path(script).stem
    if name in RECIPES and Path(script).parent.name == "recipes":
        _recipe(name, words)
    return script


def _recipe(name: str, words: list[str]) -> None:
    """What a recipe's own parser makes of the words."""
    sys.path.insert(0, str(ROOT / "recipes"))
    try:
        from importlib import import_module

        from common.settings import RecipeParser
        from trl import ModelConfig

        from trl_grpo_ext import GRPOExtConfig

        extra = import_module(name).RecipeArguments
        parser = RecipeParser([extra, GRPOExtConfig, ModelConfig])
        if "--config" in words:
            place = words.index("--config")
            file = words[place + 1]
            _need(file in PLACEHOLDERS or (ROOT / file).is_file(), f"{file} is not there")
            words = words[:place] + words[place + 2 :]
        words = [
            re.sub(r"\b(?:no_guess|no_shouting)\b", "think_format", word) for word in words
        ]  # the reader's plugins
        *_, unknown = parser.parse_args_into_dataclasses([*_ON_THIS_MACHINE, *words], return_remaining_strings=True)
    finally:
        sys.path.remove(str(ROOT / "recipes"))
    _need(not unknown, f"{name} has no settings {unknown}")


def _python(words: list[str]) -> str:
    if words[:1] == ["-m"]:
        module = words[1]
        _need(find_spec(module) is not None, f"no module {module}")
        return f"-m {module}"
    if words and words[0].startswith("-"):
        return "python"
    return _script(words[0], words[1:])
