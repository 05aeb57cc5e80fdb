"""A docstring read in its parts; whatever an author writes there is read, and at once."""

import pytest

from trl_grpo_ext.plugins.docstrings import first_sentence, read_docstring

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

What follows the sections is description again, with w = 2.
"""


def test_read_docstring_in_its_parts() -> None:
    read = read_docstring(WHOLE)
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
    }
    assert read.papers == ("1907.01234", "2401.00001", "2509.07558")
    assert read_docstring("See 2413.00001, 12345.67890, 2401.123, 1.2401.01234 or 2400.12345.").papers == ()
    assert read.description.endswith("is description again, with w = 2.")


def test_first_sentence() -> None:
    assert (
        first_sentence("As Dr. GRPO does, e.g. This,\n   by 1.0. `code` begins.")
        == "As Dr. GRPO does, e.g. This, by 1.0."
    )
    assert first_sentence("No full stop\n\nMore.") == "No full stop"
    assert first_sentence("   ") == ""


@pytest.mark.parametrize("piece", ["`", "a. ", "Source: ", "    a (", "2401.", "\n\n    = "])
def test_read_docstring_of_a_hostile_megabyte(piece: str) -> None:
    for start in ("", "Args:\n"):  # a blow-up would take hours
        assert len(read_docstring(start + piece * (1_000_000 // len(piece))).description) <= 20_000
