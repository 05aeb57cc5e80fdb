"""The shipped launch and run files, and the command lines in the comments at their heads."""

import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
LAUNCH_FILES = sorted((RECIPES / "accelerate").iterdir())
RUN_FILES = sorted((RECIPES / "configs").iterdir())


def header(path: Path) -> list[str]:
    """The comment at the head of a file, without its marks."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return [line[1:] for line in lines if not line.startswith(("#!", "#SBATCH"))]


def commands(path: Path) -> list[list[str]]:
    """The command lines in the comment at the head of a file, as a shell would split them."""
    shown = "\n".join(line.strip() for line in header(path) if line.startswith("   ")).replace("\\\n", "")
    return [shlex.split(line) for line in shown.splitlines()]


def launches(path: Path) -> list[list[str]]:
    """Those that start `accelerate launch`, from the words behind it on."""
    found = [list(itertools.dropwhile(lambda word: "=" in word, words)) for words in commands(path)]
    return [words[2:] for words in found if words[:2] == ["accelerate", "launch"]]


def option(words: Sequence[str], name: str) -> str | None:
    """The word behind an option."""
    return words[words.index(name) + 1] if name in words else None
