"""What a docstring says, in Google's style: a first sentence, sections, formulas and papers.

Besides `Args:`, `Raises:` and the like there are two sections of this package's own, `Source: ...` and
`Departures: ...` (or `Departures from the paper: ...`), which may begin on the line of their title.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_TITLES = {
    **dict.fromkeys(("args", "arguments", "parameters", "keyword args"), "Args"),
    **dict.fromkeys(("source", "sources", "reference", "references", "paper", "papers"), "Source"),
    **dict.fromkeys(("departures", "departure"), "Departures"),
    **dict.fromkeys(("example", "examples", "usage"), "Example"),
    **dict.fromkeys(("note", "notes", "warning", "warnings"), "Note"),
    **{name.lower(): name for name in ("Returns", "Yields", "Raises", "Attributes")},
}
_TITLE = re.compile(r"(?P<title>[A-Z][A-Za-z]*(?: args)?)(?P<more> [^:]{1,80})?:(?:\s+(?P<text>.*))?")
_WITH_TEXT = ("Source", "Departures")  # the sections that may begin on the line of their title
_ITEM = re.compile(r"(?P<names>\*{0,2}[A-Za-z_]\w*(?:, ?\*{0,2}[A-Za-z_]\w*)*)\s*(?:\(.*?\))?:(?P<text>.*)")
_CODE = re.compile(r"``(.+?)``|:math:`([^`]+)`|`([^`]+)`|\$([^$\n]+)\$", re.DOTALL)
_ARXIV = re.compile(r"(?<![\d.])\d{2}(?:0[1-9]|1[0-2])\.\d{4,5}(?![\d.]*\d)")
_SENTENCE_END = re.compile(r"[.!?](?=\s+[A-Z(`]|$)")
_LONGEST = 50_000  # characters of a docstring that are looked at
_ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|cf|vs|al|etc|eq|Dr|Eq|No|Sec|Fig)|\b[A-Z])\.$")


@dataclass(frozen=True)
class Docstring:
    """A docstring in its parts.

    Attributes:
        text: All of it, without the indentation.
        summary: The first sentence, on one line.
        description: What stands outside the sections, the summary included.
        parameters: By name, what `Args` says.
        sections: By title ("Source", "Departures", "Raises", "Returns", ...), the text. `Args` is not among them.
        formulas: What is set as code and reads as a formula, in the order of the text; no section is searched.
        papers: The arXiv numbers in all of the text.
    """

    text: str = ""
    summary: str = ""
    description: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    sections: dict[str, str] = field(default_factory=dict)
    formulas: tuple[str, ...] = ()
    papers: tuple[str, ...] = ()


def first_sentence(text: str) -> str:
    """The first sentence of a docstring's first paragraph, on one line; without a full stop, all of the paragraph."""
    paragraph = " ".join(text[:_LONGEST].strip().split("\n\n")[0].split())
    for match in _SENTENCE_END.finditer(paragraph):
        if not _ABBREVIATION.search(paragraph, max(0, match.start() - 10), match.start() + 1):
            return paragraph[: match.start() + 1]
    return paragraph


def read_docstring(whole: str) -> Docstring:
    """Take a docstring apart. It is without indentation, as `ast.get_docstring` gives it."""
    outside: list[str] = []
    sections: dict[str, list[str]] = {}
    current, open_ended = outside, False
    for line in whole[:_LONGEST].split("\n"):
        title = _TITLE.fullmatch(line)
        name = _TITLES.get(title["title"].lower()) if title else None
        if title and name and (name in _WITH_TEXT or not (title["text"] or title["more"])):
            current = sections.setdefault(name, [])
            text, more = (
                title["text"] or "",
                title["more"],
            )  # "Departures from the paper: none." keeps what they are from
            current += filter(None, [f"{more.strip()}: {text}".strip() if more else text])
            open_ended = bool(current)
        elif current is not outside and (not line if open_ended else line and not line[0].isspace()):
            current, open_ended = outside, False  # a section is an indented block, or one paragraph
            outside.append(line)
        else:
            current.append(line)
    parameters = _items(sections.pop("Args", []))
    description = _paragraphs(outside)
    return Docstring(
        whole,
        first_sentence(whole),
        description,
        parameters,
        {name: _dedented(lines) for name, lines in sections.items()},
        tuple(dict.fromkeys(_formulas(description))),
        tuple(dict.fromkeys(_ARXIV.findall(whole[:_LONGEST]))),
    )


def _paragraphs(lines: list[str]) -> str:
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def _dedented(lines: list[str]) -> str:
    indents = [len(line) - len(line.lstrip()) for line in lines if line.startswith((" ", "\t"))]
    cut = min(indents, default=0)
    return _paragraphs([line[cut:] if line[:cut].isspace() else line for line in lines])


def _items(lines: list[str]) -> dict[str, str]:
    """`name: text` and `name (type): text`, each with the deeper lines behind it."""
    items: dict[str, str] = {}
    names: list[str] = []
    for line in _dedented(lines).split("\n"):
        match = None if line.startswith((" ", "\t")) else _ITEM.fullmatch(line)
        if match:
            names = [name.strip().lstrip("*") for name in match["names"].split(",")]
            items |= dict.fromkeys(names, match["text"].strip())
        elif line.strip():
            items |= {name: f"{items[name]} {line.strip()}".strip() for name in names}
    return items


def _formulas(description: str) -> list[str]:
    """Formulas: code with a relation between spaces or a sum in it, and indented lines that read so."""
    found = []
    for paragraph in description.split("\n\n"):
        lines = paragraph.split("\n")
        if all(line.startswith("    ") for line in lines) and _reads_as_formula(paragraph):
            found.append(_dedented(lines))
        else:
            code = (next(filter(None, match.groups())) for match in _CODE.finditer(paragraph))
            found += [" ".join(text.split()) for text in code if _reads_as_formula(text)]
    return found


def _reads_as_formula(text: str) -> bool:
    related = any(f" {relation} " in text for relation in ("=", "←", "∝", ":=", "≈", "\\sum"))
    return (related or any(sign in text for sign in "Σ∑·")) and "\n\n" not in text and len(text) <= 300
