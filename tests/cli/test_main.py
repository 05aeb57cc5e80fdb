"""The command: what it imports before it answers, and what it prints at any width, with hostile plugins too."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.distributions import MARKED, write_distribution
from tests.cli.terminal import assert_readable, invoke, run_command

HEAVY = {"torch", "trl", "transformers", "accelerate", "numpy", "pyarrow", "jinja2", "datasets", "peft"}
NAMES = ("list", "show", "check", "new", "compare", "report", "audit", "doctor")
COMMANDS = (["--help"], ["--version"], ["list"], ["list", "--json"], *([name, "--help"] for name in NAMES))
PROBE = """
import contextlib, io, json, sys
from trl_grpo_ext.cli.main import app
answers = []
for words in {commands!r}:
    sys.argv = ["trl-grpo-ext", *words]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            app()
        except SystemExit as end:
            status = end.code
    answers.append(dict(words=words, status=status, out=out.getvalue(), modules=sorted(sys.modules)))
print(json.dumps(answers))
"""
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
    names = dict.fromkeys(("[bold]name", LONG, f"esc{CLEAR}", "漢字" * 20, TURNED, "$(touch x)"), "wi_hostile:reward")
    write_distribution(folder, "wi-hostile", {"reward": names}, {"wi_hostile.py": text})
    metadata = folder / "wi_hostile-1.0.dist-info" / "METADATA"
    metadata.write_text(f"Metadata-Version: 2.1\nName: wi-hostile\nVersion: 1[red]{CLEAR.split(chr(7))[0]}\n")
    return folder


def test_every_name_and_alias_can_be_read_whole() -> None:
    done = invoke("list", width=60)
    assert_readable(done.out, 60)
    assert "\x1b[" in done.out
    for entry in json.loads(invoke("list", "--json").out):
        assert [name for name in (entry["name"], *entry["aliases"]) if name not in done.plain] == []


@pytest.mark.parametrize("command", ["", *NAMES])
def test_help_can_be_read(command: str) -> None:
    done = invoke(*command.split(), "--help", width=60)
    assert_readable(done.out, 60)
    options = done.plain.partition("Options:")[2]
    assert ("--version" if command == "" else "--help") in options
    assert "..." not in options  # nothing is cut


def test_the_installed_command() -> None:
    assert run_command("list").out == invoke("list").out
    done = run_command("list", "rewrds")
    assert (done.status, done.out) == (2, "")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("width", [60, None])
@pytest.mark.parametrize("words", [["list", "--distribution", "wi-hostile"], ["show", "[bold]name"]], ids=" ".join)
def test_hostile_plugins_are_text(folder: Path, words: list[str], width: int | None) -> None:
    done = invoke(*words, width=width, env={"PYTHONPATH": str(folder)})
    assert_readable(done.out, width)
    joined = "".join(done.plain.split())
    for text in ("[bold]name", "[red]notred[/red][link=http://x]y[/link]:smile:", "\\x1b", "\\u202e", LONG):
        assert text in joined
    for character in (*"\x07\x9b\x7f\u202e\u2066\u200b\u2028", "\x1b]0;"):
        assert character not in done.out


def test_commands_import_nothing_heavy() -> None:
    command = [sys.executable, "-c", PROBE.format(commands=COMMANDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    plugins = ("trl_grpo_ext.rewards", "trl_grpo_ext.advantages", "trl_grpo_ext.aggregation")
    for answer in json.loads(done.stdout):
        assert answer["status"] == 0, answer["words"]
        assert answer["out"], answer["words"]
        assert not HEAVY.intersection(answer["modules"]), answer["words"]
        assert not any(name.startswith(plugins) for name in answer["modules"]), answer["words"]
