"""What a page tells its reader to type, parsed by the very parser that would run it, without running it."""

import itertools
import re
import shlex
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from accelerate.commands.launch import launch_command_parser
from trl import ModelConfig

from tests.docs_site.blocks import ROOT
from trl_grpo_ext import GRPOExtConfig
from trl_grpo_ext.cli.main import app

_SETTINGS = ("a.yaml", "b.yaml", "my.yaml", "run.yaml", "columns.yaml")
PLACEHOLDERS = (*_SETTINGS, "train.jsonl", "mbpp.jsonl", "completions.jsonl")
"""Files that the reader is supposed to have."""
_ON_THIS_MACHINE = ("--output_dir", "unused", "--use_cpu", "true", "--bf16", "false")
_OTHERS = frozenset({"python", "python3", "jq", "export", "cd", "source", "ls", "cat", "mkdir", "open", "pytest"})
"""Commands that are nobody's here."""
_MADE_UP = re.compile(r"my[-_]|polite|no[-_]guess|OUTPUT_DIR|openai/")  # what a reader has, and this clone has not


def runs_here(words: list[str]) -> bool:
    """Whether a command only reads and needs nothing but a clone, so that a test runs it as it is written."""
    program, subcommand, *rest = [*words, ""]
    only_reads = subcommand in ("list", "show", "check", "doctor", "audit")
    return program == "trl-grpo-ext" and only_reads and not _MADE_UP.search(" ".join(rest))


def commands(block: str) -> Iterator[list[str]]:
    """The simple commands of a block: comments off, lines joined, pipes and `&&` apart."""
    for line in re.sub(r"\\(?:\s+#.*)?\n", " ", block).split("\n"):
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
        lexer.whitespace_split = True
        for separates, words in itertools.groupby(lexer, key=lambda word: set(word) <= set("|&;")):
            if not separates:
                yield list(words)


def check(words: list[str]) -> None:
    """Parse a command; its parser must take it, and the files and targets that it names must be there."""
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
        case ["trl-grpo-ext", name, *given]:
            known: Any = typer.main.get_command(app)
            known.commands[name].make_context(name, given)
        case ["accelerate", "launch", *launched]:
            arguments = launch_command_parser().parse_args(launched)
            assert not arguments.config_file or (ROOT / arguments.config_file).is_file(), arguments.config_file
            _script(arguments.training_script, arguments.training_script_args)
        case ["python" | "python3", "-m", module, *_]:
            assert find_spec(module) is not None, module
        case ["python" | "python3", script, *given] if not script.startswith("-"):
            _script(script, given)
        case ["make", *targets]:
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            for name in targets:
                assert "=" in name or re.search(rf"^{re.escape(name)}:", makefile, re.MULTILINE), name
        case ["pip", "install" | "uninstall", *packages]:
            for word in packages:
                assert "/" not in word or word.startswith("./grpo-") or (ROOT / word).exists(), word
        case ["sbatch", script, *_]:
            assert (ROOT / script).is_file(), script
        case _:
            assert program in _OTHERS, program


def _script(script: str, words: list[str]) -> None:
    assert script == "train.py" or (ROOT / script).is_file(), script
    if re.fullmatch(r"recipes/\w+_grpo\.py", script):
        _recipe(Path(script).stem, words)


def _recipe(name: str, words: list[str]) -> None:
    """What a recipe's own parser makes of the words."""
    sys.path.insert(0, str(ROOT / "recipes"))
    try:
        from common.settings import RecipeParser

        extra = import_module(name).RecipeArguments
        parser = RecipeParser([extra, GRPOExtConfig, ModelConfig])
        if "--config" in words:
            place = words.index("--config")
            file = words[place + 1]
            assert file in PLACEHOLDERS or (ROOT / file).is_file(), file
            words = words[:place] + words[place + 2 :]
        # The reader's plugins are not installed here.
        words = [re.sub(r"\b(?:no_guess|no_shouting)\b", "think_format", word) for word in words]
        *_, unknown = parser.parse_args_into_dataclasses([*_ON_THIS_MACHINE, *words], return_remaining_strings=True)
    finally:
        sys.path.remove(str(ROOT / "recipes"))
    assert not unknown, unknown
