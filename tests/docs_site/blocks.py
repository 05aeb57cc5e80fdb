"""Every block of code on every page, and what a Python block needs around it to be run as it stands."""

import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]
OUTPUT = frozenset({"", "text", "math"})
"""Languages of blocks that hold nothing to execute: what a command prints, drawings, formulas."""

_BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>[\w-]*)\n(?P<text>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One block: its page, its language, the line of its first fence, and what is inside."""

    page: str
    language: str
    line: int
    text: str

    @property
    def id(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """All pages that are written by hand."""
    top = [ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY", "CODE_OF_CONDUCT")]
    return [*top, *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "examples").glob("**/README.md"))]


def blocks_of(page: Path) -> list[Block]:
    """The blocks of one page, in their order."""
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT).as_posix()
    return [
        Block(name, match["language"], text.count("\n", 0, match.start()) + 1, dedent(match["text"]))
        for match in _BLOCK.finditer(text)
    ]


def output_after(block: Block) -> str:
    """What the page says that a block prints: the next block, if it is one of text."""
    of_page = blocks_of(ROOT / block.page)
    following = of_page[of_page.index(block) + 1 :]
    return following[0].text if following and following[0].language == "text" else ""


def all_blocks() -> list[Block]:
    """The blocks of all pages that hold something to execute."""
    return [block for page in pages() for block in blocks_of(page) if block.language not in OUTPUT]


RUN: dict[tuple[str, str], tuple[str, str]] = {
    ("docs/pipelines.md", "class Mine(GRPOExtMixin, Theirs)"): (
        "from trl import GRPOTrainer as Theirs",
        "Mine.__mro__.index(GRPOExtMixin) < Mine.__mro__.index(Theirs)",
    ),
    ("docs/pipelines.md", "def counts("): (
        "detect = range",  # two things in the picture 2
        "counts([[{'content': '2'}], [{'content': '3'}]], [2, 2], None) == [1.0, 0.0]",
    ),
    ("docs/rewards.md", "def card("): ("", "card(['Name: Ada, Born: 1816'], ['Ada'], [1815]) == [0.5]"),
    ("docs/rewards.md", "def judged("): ("", "judged(['a 5', 'b'], ['5', None]) == [1.0, None]"),
    ("docs/launching.md", "class MyTrainer(SafeCheckpoints"): (
        "from trl_grpo_ext import GRPOExtTrainer",
        "MyTrainer.__bases__ == (SafeCheckpoints, GRPOExtTrainer) and callable(last_complete_checkpoint)",
    ),
}
"""By page and a part of a Python block that is run as it stands: what comes before it, and what holds afterwards."""


def surroundings(block: Block) -> tuple[str, str] | None:
    """What `RUN` says of a block."""
    return next((value for (page, part), value in RUN.items() if page == block.page and part in block.text), None)
