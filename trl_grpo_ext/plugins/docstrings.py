"""A docstring in Google's style, in its parts."""

import inspect
import re
import textwrap
from collections import defaultdict
from dataclasses import dataclass, field

_TITLES = {
    **dict.fromkeys(("args", "arguments", "parameters", "params", "keyword args", "other parameters"), "Args"),
    **dict.fromkeys(("source", "sources", "reference", "references", "paper", "papers"), "Source"),
    **dict.fromkeys(("departures", "departure"), "Departures"),
    **dict.fromkeys(("example", "examples", "usage"), "Example"),
    **dict.fromkeys(("note", "notes", "warning", "warns"), "Note"),
    **{name.lower(): name for name in ("Returns", "Yields", "Raises", "Attributes")},
}
_BLOCK = re.compile(
    r"^(?P<title>[A-Z][A-Za-z ]{2,20}):[ \t]*\n(?P<text>(?:[ \t]+\S.*(?:\n|\Z)|[ \t]*\n)+)", re.MULTILINE
)
_INLINE = re.compile(
    r"^(?P<title>Sources?|References?|Papers?|Departures?)(?P<more> [^:\n]{1,80})?:[ \t]+"
    r"(?P<text>\S.*(?:\n(?!Departures?\b).*\S.*)*)",
    re.MULTILINE,
)
"""A section that begins on the line of its title is one paragraph; departures may follow the source at once."""
_ITEM = re.compile(
    r"^(?P<names>\**\w+(?:, *\**\w+)*)(?: \([^\n]*?\))?:[ \t]*(?P<text>[^\n]*(?:\n[ \t]+[^\n]*)*)", re.MULTILINE
)
_ARXIV = re.compile(r"(?<![\d.])\d{2}(?:0[1-9]|1[0-2])\.\d{4,5}(?![\d.]*\d)")
_SENTENCE_END = re.compile(r"[.!?](?=\s+[A-Z(`]|$)")
_ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|cf|vs|al|etc|eq|Dr|Eq|No|Sec|Fig)|\b[A-Z])\.$")
_LONGEST = 20_000  # characters of a docstring that are looked at


@dataclass(frozen=True)
class Docstring:
    """A docstring: the text outside the sections, that in `Args` by name, the sections, the text's arXiv numbers."""

    summary: str = ""
    description: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    sections: dict[str, str] = field(default_factory=dict)
    papers: tuple[str, ...] = ()


def first_sentence(text: str) -> str:
    """The first sentence of a docstring, on one line; without a full stop, the whole first paragraph."""
    paragraph = " ".join(text[:_LONGEST].strip().split("\n\n")[0].split())
    for match in _SENTENCE_END.finditer(paragraph):
        if not _ABBREVIATION.search(paragraph, max(0, match.start() - 10), match.start() + 1):
            return paragraph[: match.start() + 1]
    return paragraph


def read_docstring(whole: str) -> Docstring:
    """Parse a docstring, dedented as by `inspect.getdoc`; it may also have `Source: ...` and `Departures: ...`."""
    sections: dict[str, list[str]] = defaultdict(list)
    parameters: dict[str, str] = {}

    def take(match: re.Match[str]) -> str:
        title = _TITLES.get(match["title"].lower())
        text = match["text"]
        if title is None:
            return match[0]
        if title == "Args":
            for item in _ITEM.finditer(textwrap.dedent(text)):
                names = (name.strip().lstrip("*") for name in item["names"].split(","))
                parameters.update(dict.fromkeys(names, " ".join(item["text"].split())))
        else:  # "Departures from the paper: none." keeps what they are from
            more = match.groupdict().get("more")
            sections[title].append((f"{more.strip()}: " if more else "") + inspect.cleandoc(text))
        return "\n"

    text = whole[:_LONGEST]
    outside = _BLOCK.sub(take, _INLINE.sub(take, text))
    description = re.sub(r"\n{3,}", "\n\n", outside).strip("\n")
    joined = {name: "\n\n".join(texts) for name, texts in sections.items()}
    papers = tuple(dict.fromkeys(_ARXIV.findall(text)))
    return Docstring(first_sentence(whole), description, parameters, joined, papers)
