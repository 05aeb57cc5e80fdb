"""What a page tells its reader to type, parsed by the very parser that would run it, without running it."""

import re
import shlex
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from accelerate.commands.launch import launch_command_parser

from tests.docs_site.blocks import ROOT

PLACEHOLDERS = (
    *("a.yaml", "b.yaml", "my.yaml", "run.yaml", "columns.yaml"),
    *("train.jsonl", "mbpp.jsonl", "completions.jsonl"),
)
"""Files that the reader is supposed to have."""
READERS_SCRIPTS = ("train.py",)
_ON_THIS_MACHINE = ("--output_dir", "unused", "--use_cpu", "true", "--bf16", "false")
_OTHERS = frozenset({"python", "python3", "jq", "export", "cd", "source", "ls", "cat", "mkdir", "open", "pytest"})
"""Commands that are nobody's here."""


_MADE_UP = re.compile(r"my[-_]|polite|no[-_]guess|OUTPUT_DIR|openai/")  # what a reader has, and this clone has not
_RUN_HERE = frozenset({"list", "show", "check", "doctor", "audit"})


def runs_here(words: list[str]) -> bool:
    """Whether a command only reads and needs nothing but a clone, so that a test runs it as it is written."""
    program, subcommand, *rest = [*words, ""]
    return program == "trl-grpo-ext" and subcommand in _RUN_HERE and not _MADE_UP.search(" ".join(rest))


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


def check(words: list[str]) -> None:
    """Parse a command.

    Raises:
        RefusedCommandError: Its parser refuses it, or it names a file or a target that is not there.
    """
    while words and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", words[0]):  # variables before a command
        words = words[1:]
    program, *rest = words or ["export"]
    program = re.sub(r"^\.venv(-vllm)?/bin/", "", program)  # where `make` puts it
    while "..." in rest:  # and the option whose value it stands for
        place = rest.index("...")
        del rest[place - 1 if place and rest[place - 1].startswith("--") else place : place + 1]
    match [program, *rest]:
        case ["srun" | "env", *_]:
            check(rest)
        case ["trl-grpo-ext", *_]:
            _our_command(rest)
        case ["accelerate", "launch", *launched]:
            _launch(launched)
        case ["python" | "python3", "-m", module, *_]:
            _need(find_spec(module) is not None, f"no module {module}")
        case ["python" | "python3", script, *given] if not script.startswith("-"):
            _script(script, given)
        case ["make", *targets]:
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            for name in targets:
                _need("=" in name or re.search(rf"^{re.escape(name)}:", makefile, re.MULTILINE), f"no target {name}")
        case ["pip", "install" | "uninstall", *packages]:
            for word in packages:
                _need("/" not in word or word.startswith("./grpo-") or (ROOT / word).exists(), f"{word} is not there")
        case ["sbatch", script, *_]:
            _need((ROOT / script).is_file(), f"{script} is not there")
        case _:
            _need(program in _OTHERS, f"nobody knows {program!r}")


def _need(condition: object, why: str) -> None:
    if not condition:
        raise RefusedCommandError(why)


def _our_command(words: list[str]) -> None:
    from trl_grpo_ext.cli.main import app

    known: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    _need(words and words[0] in known, f"trl-grpo-ext has no command {words[:1]}")
    try:
        known[words[0]].make_context(words[0], list(words[1:]))
    except Exception as error:
        if type(error).__module__.split(".")[0] in ("click", "typer"):
            raise RefusedCommandError(f"trl-grpo-ext {' '.join(words)}: {error}") from error
        raise


def _launch(words: list[str]) -> None:
    try:
        arguments = launch_command_parser().parse_args(words)
    except SystemExit as error:
        raise RefusedCommandError(f"accelerate launch {' '.join(words)}") from error
    _need(not arguments.config_file or (ROOT / arguments.config_file).is_file(), f"no {arguments.config_file}")
    _script(arguments.training_script, arguments.training_script_args)


def _script(script: str, words: list[str]) -> None:
    _need(script in READERS_SCRIPTS or (ROOT / script).is_file(), f"{script} is not there")
    if re.fullmatch(r"recipes/\w+_grpo\.py", script):
        _recipe(Path(script).stem, words)


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
        # The reader's plugins are not installed here.
        words = [re.sub(r"\b(?:no_guess|no_shouting)\b", "think_format", word) for word in words]
        *_, unknown = parser.parse_args_into_dataclasses([*_ON_THIS_MACHINE, *words], return_remaining_strings=True)
    finally:
        sys.path.remove(str(ROOT / "recipes"))
    _need(not unknown, f"{name} has no settings {unknown}")
