"""Docstrings in their parts, by hand; and that no text breaks the reading."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.plugins.discovery import PluginInfo, available
from trl_grpo_ext.plugins.docs.docstring import Docstring, first_sentence, read_docstring
from trl_grpo_ext.plugins.docs.source import split_target

WHOLE = """Weigh tokens by `x`: `w_t = x / Σ_i |o_i|`, or so. More.

A second paragraph says: `not a formula`, `a=b`, and

    L = Σ_t w_t · l_t
      + λ·KL

in between. With α = 0 it is 1907.01234, which arXiv:2401.00001 says.

Args:
    alpha: The first. It goes
        on here.
    beta (dict[str, tuple(int)], optional): The second: with a colon.
    gamma, delta: Two at once.
    **more: The rest.

Source: A paper (2509.07558), which
goes on in the next line.

Departures from the authors' code: none
    but this.

Returns:
    Some text.

    Another paragraph.

Raises:
    ValueError: Why.

What follows the sections is description again, with w = 2.
"""


def test_a_docstring_in_its_parts() -> None:
    read = read_docstring(WHOLE)
    assert read.text == WHOLE
    assert read.summary == "Weigh tokens by `x`: `w_t = x / Σ_i |o_i|`, or so."
    assert read.parameters == {
        "alpha": "The first. It goes on here.",
        "beta": "The second: with a colon.",
        "gamma": "Two at once.",
        "delta": "Two at once.",
        "more": "The rest.",
    }
    assert read.sections == {
        "Source": "A paper (2509.07558), which\ngoes on in the next line.",
        "Departures": "from the authors' code: none\nbut this.",
        "Returns": "Some text.\n\nAnother paragraph.",
        "Raises": "ValueError: Why.",
    }
    assert read.formulas == ("w_t = x / Σ_i |o_i|", "L = Σ_t w_t · l_t\n  + λ·KL")
    assert read.papers == ("1907.01234", "2401.00001", "2509.07558")
    assert read.description.startswith("Weigh tokens by")
    assert read.description.endswith("is description again, with w = 2.")
    assert "Source" not in read.description
    assert "alpha" not in read.description


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("One. Two.", "One."),
        ("One, e.g. Two, i.e. this. Three.", "One, e.g. Two, i.e. this."),
        ("As Dr. GRPO does. More.", "As Dr. GRPO does."),
        ("Score 1.0 where it is. More.", "Score 1.0 where it is."),
        ("Is it? Yes.", "Is it?"),
        ("On two\n   lines. More.", "On two lines."),
        ("No full stop\n\nMore.", "No full stop"),
        ("Ends in code `a.b`. More.", "Ends in code `a.b`."),
        ("Ends. `code` begins.", "Ends."),
        ("", ""),
        ("   ", ""),
        ("...", "..."),
    ],
)
def test_first_sentences(text: str, sentence: str) -> None:
    assert first_sentence(text) == sentence


@pytest.mark.parametrize(
    "text",
    ["Note that: this is prose.", "Args: on the same line", "Shape: of things", "A sentence, Source: x", "args:"],
)
def test_what_only_looks_like_a_section(text: str) -> None:
    read = read_docstring(f"Summary.\n\n{text}")
    assert not read.sections or text == "args:"
    assert text in read.description or text == "args:"


@pytest.mark.parametrize("number", ["2413.00001", "12345.67890", "2401.123", "1.2401.01234", "2400.12345"])
def test_what_only_looks_like_a_paper(number: str) -> None:
    assert read_docstring(f"See {number} for it.").papers == ()


PIECES = (
    "Args:",
    "Source: x",
    "    a: b",
    "Departures from x: y",
    "`w = Σ`",
    "",
    " ",
    "Raises:",
    "x.",
    "$a = b$",
    "``",
    "(((",
    "\t",
)


@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES)).map("\n".join)))
def test_no_text_breaks_the_reading_and_none_of_it_gets_lost(text: str) -> None:
    read = read_docstring(text)
    assert isinstance(read, Docstring)
    assert "\n" not in read.summary
    kept = " ".join([read.description, *read.parameters.values(), *read.sections.values()])
    for word in text.split():
        said = word.rstrip(":").lower() in ("args", "raises", "source", "departures")
        if not said and word.isalpha() and "Args:" not in text:
            assert word in kept


@pytest.mark.parametrize("piece", ["`", "(", ":math:`", "$", "a. ", "Source: ", "    a (", "2401.", "\n\n    = "])
def test_a_megabyte_of_hostile_docs_is_read_at_once(piece: str) -> None:
    code = (
        "from trl_grpo_ext.plugins.docs.docstring import read_docstring\n"
        f"read = read_docstring({piece!r} * {1_000_000 // len(piece)})\n"
        "print(len(read.summary) + len(read.description) + sum(map(len, read.sections.values())))"
    )
    # A blow-up takes hours; the limit only makes it a failure that names the piece.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) > 0


@pytest.mark.parametrize("info", [info for info in available() if info.builtin], ids=lambda info: info.name)
def test_the_sections_that_every_built_in_has(info: PluginInfo) -> None:
    module, attribute = split_target(info.target)
    read = read_docstring(inspect.getdoc(getattr(importlib.import_module(module), attribute)) or "")
    if info.kind != "reward":
        assert read.sections["Source"]
        assert read.sections.keys() <= {"Source", "Departures", "Raises"}
    for line in read.description.split("\n"):
        assert not line.startswith(("Args:", "Raises:", "Source:", "Departures:"))
