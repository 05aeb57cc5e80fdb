"""What the commands print at widths 60 and 100 and into a pipe, without colour, and with hostile plugins."""

import json
from pathlib import Path

import pytest

from tests.cli.distributions import MARKED, write_distribution
from tests.cli.terminal import assert_readable, invoke, run_command

LONG = "long_" * 60
CLEAR = "\x1b[2J\x1b]0;title\x07\x9b31m\x7f"
TURNED = "\u202eevil\u2066\u200b"
HOSTILE_DOCS = (
    f"Markup [red]not red[/red] [link=http://x]y[/link] :smile: {CLEAR}{TURNED}\u2028 "
    f"{'א' * 5} 👩‍👩‍👧 漢字 {LONG} end. More."
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("path")
    text = f"{MARKED}def reward(completions, **columns):\n    {HOSTILE_DOCS!r}\n"
    names = {"[bold]name": "wi_hostile:reward", LONG: "wi_hostile:reward", f"esc{CLEAR}": "wi_hostile:reward"}
    names |= {"漢字" * 20: "wi_hostile:reward", TURNED: "wi_hostile:reward", "$(touch x)": "wi_hostile:reward"}
    write_distribution(folder, "wi-hostile", {"reward": names}, {"wi_hostile.py": text}, version="1.0")
    metadata = folder / "wi_hostile-1.0.dist-info" / "METADATA"
    metadata.write_text(f"Metadata-Version: 2.1\nName: wi-hostile\nVersion: 1[red]{CLEAR.split(chr(7))[0]}\n")
    return folder


def test_every_name_and_alias_can_be_read_whole() -> None:
    done = invoke("list", width=60)
    assert_readable(done.out, 60)
    assert "\x1b[" in done.out
    shown = done.plain
    for entry in json.loads(invoke("list", "--json").out):
        for name in (entry["name"], *entry["aliases"]):
            assert name in shown


@pytest.mark.parametrize("command", ["", "list", "show", "check", "new", "compare", "report", "audit", "doctor"])
def test_help_can_be_read(command: str) -> None:
    done = invoke(*command.split(), "--help", width=60)
    assert done.status == 0
    assert_readable(done.out, 60)
    assert "Usage" in done.plain
    assert "..." not in done.plain.partition("Options:")[2]  # nothing is cut
    for option in ("--help", *({"": ["--version"], "list": ["--json"]}.get(command, []))):
        assert option in done.plain


def test_the_installed_command() -> None:
    assert run_command("list").out == invoke("list").out
    done = run_command("list", "rewrds")
    assert (done.status, done.out) == (2, "")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("width", [60, None])
@pytest.mark.parametrize("words", [["list", "--distribution", "wi-hostile"], ["show", "[bold]name"]], ids=" ".join)
def test_hostile_plugins_are_text(folder: Path, words: list[str], width: int | None) -> None:
    done = invoke(*words, width=width, env={"PYTHONPATH": str(folder)})
    assert done.status == 0
    assert_readable(done.out, width)
    joined = "".join(done.plain.split())
    for text in ("[bold]name", "[red]notred[/red][link=http://x]y[/link]:smile:", "\\x1b", "\\u202e", LONG):
        assert text in joined
    for character in (*"\x07\x9b\x7f\u202e\u2066\u200b\u2028", "\x1b]0;"):
        assert character not in done.out
