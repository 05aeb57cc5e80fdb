"""The shipped launch and run files, and the command lines in the comments at their heads."""

import shlex
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
LAUNCH_FILES = sorted((RECIPES / "accelerate").iterdir())
RUN_FILES = sorted((RECIPES / "configs").iterdir())


def header(path: Path) -> list[str]:
    """The comment at the head of a file, without its marks."""
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return [line[1:] for line in lines[:end] if not line.startswith(("#!", "#SBATCH"))]


def commands(path: Path) -> list[list[str]]:
    """The command lines in the comment at the head of a file, as a shell would split them."""
    shown = "\n".join(line.strip() for line in header(path) if line.startswith("   ")).replace("\\\n", "")
    return [shlex.split(line) for line in shown.splitlines()]


def launches(path: Path) -> list[list[str]]:
    """Those that start `accelerate launch`, from the words behind it on."""
    found = []
    for words in commands(path):
        if words[:2] != ["accelerate", "launch"]:
            words = words[next((n for n, word in enumerate(words) if "=" not in word), 0) :]
        if words[:2] == ["accelerate", "launch"]:
            found.append(words[2:])
    return found


def option(words: Sequence[str], name: str) -> str | None:
    """The word behind an option."""
    return words[words.index(name) + 1] if name in words else None
