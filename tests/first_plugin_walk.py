"""The walk of `docs/writing_plugins.md` as something that can be followed: its commands, its edits, its outputs."""

import re
import time
from dataclasses import dataclass
from pathlib import Path

from tests.cli.scaffold.author import Author

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "writing_plugins.md"

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_DECIMAL = re.compile(r"[+-]?\d+\.\d+")


@dataclass(frozen=True)
class Step:
    """One block of the page."""

    language: str  # "sh" for a command, "diff" for an edit
    text: str
    expected: str = ""  # the "text" block behind a command


@dataclass(frozen=True)
class Walked:
    """One command after it was run."""

    step: Step
    status: int
    out: str
    err: str
    seconds: float


def read_steps(page: str) -> list[Step]:
    """All blocks in order, each output with its command."""
    steps: list[Step] = []
    for language, text in _BLOCK.findall(page):
        if language == "text":
            assert steps[-1].language == "sh", f"an output without its command: {text}"
            assert not steps[-1].expected, f"a second output: {text}"
            steps[-1] = Step("sh", steps[-1].text, text)
        else:
            assert language in ("sh", "diff"), f"nobody knows how to follow a block of {language!r}"
            steps.append(Step(language, text))
    return steps


def walk_of(page: str) -> str:
    """The section of the page that is walked."""
    return page.split("\n## Your first plugin")[1].split("\n## ")[0]


def make_clone(directory: Path) -> Path:
    """What a reader's clone has, without what other tests left in ours: the recipes."""
    directory.mkdir()
    (directory / "recipes").symlink_to(ROOT / "recipes")
    return directory


def walk(steps: list[Step], author: Author, clone: Path) -> list[Walked]:
    """Follow the page. Stops behind the first command that fails."""
    walked: list[Walked] = []
    for step in steps:
        if step.language == "diff":
            apply_edits(step.text, clone)
            continue
        start = time.perf_counter()
        done = author.shell(step.text, cwd=clone)
        walked.append(Walked(step, done.returncode, done.stdout, done.stderr, time.perf_counter() - start))
        if done.returncode != 0:
            break
    return walked


def apply_edits(diff: str, folder: Path) -> None:
    """Replace lines as a diff says: each `-` line is in the file exactly once, and the `+` line takes its place."""
    for name, edits in re.findall(r"^--- (.*)\n((?:(?!--- )[-+].*\n?)+)", diff, re.MULTILINE):
        file = folder / name
        for old, new in re.findall(r"^-(.*)\n\+(.*)$", edits, re.MULTILINE):
            lines = file.read_text(encoding="utf-8").split("\n")
            assert lines.count(old) == 1, f"{old!r} is in {file} {lines.count(old)} times"
            lines[lines.index(old)] = new
            file.write_text("\n".join(lines), encoding="utf-8")


def differences(expected: str, printed: str) -> list[str]:
    """The lines of the page that the command did not print, in this order; dots, gaps and decimals stand for any."""
    wrong = []
    position = 0
    for line in (line for line in expected.splitlines() if line.strip() not in ("", "...")):
        words = [_DECIMAL.pattern.join(map(re.escape, _DECIMAL.split(word))) for word in line.split()]
        pattern = r"\s+".join(words).replace(re.escape("..."), ".*?")
        if found := re.compile(pattern).search(printed, position):
            position = found.end()
        else:
            wrong.append(line)
    return wrong
