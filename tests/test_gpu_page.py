"""`make gpu`: every run is a row of the page, a failure is a sentence in it, and what was measured is kept."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench import gpu
from bench.gpu import PAGE, QUOTED, Here, Work, page, quote_in_header, read_figures
from bench.gpu_plan import LEARN, ROOT, SECTIONS, Run, Section, all_sections

ANSWER = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--folder") + 1])
def say(rows, **more):
    (folder / "answer.json").write_text(json.dumps({"rows": rows, **more}))
"""


def a_section(**scripts: str) -> Section:
    """A section whose runs are these few lines of Python."""
    runs = [Run("f", (row,), 2, launcher=(sys.executable, "-c", ANSWER + code)) for row, code in scripts.items()]
    return Section("7", "A title", "A text.", ("seconds", "GB"), tuple(runs))


def work(path: Path, section: Section, *, code: str = "1", minutes: float = 1.0, again: bool = False) -> Work:
    options = argparse.Namespace(tiny=False, device="cpu", again=again)
    here = Here("a device", {"torch": "9"}, code, "a command")
    path.parent.mkdir(exist_ok=True)
    return Work(path, (section,), read_figures(path), here, options, time.monotonic() + 60 * minutes, path.parent)


def measured(path: Path, section: Section, **how: Any) -> list[str]:
    """The rows that a call measures, in its order."""
    job = work(path, section, **how)
    return [run.name for section, run in job.todo([section]) if not job.measure(section, run).startswith("left")]


def cells(path: Path) -> dict[str, list[str]]:
    """What the tables of a page show, by row."""
    lines = [line.strip("| ").split(" | ") for line in path.read_text().splitlines() if line.startswith("| ")]
    return {line[0]: line[1:] for line in lines if not (line[0].startswith("---") or line[0] == "seconds")}


def test_the_page_of_the_repository_is_what_the_script_makes_of_its_figures() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(all_sections(), read_figures(PAGE))


def test_the_headers_of_run_files_say_what_the_page_does(tmp_path: Path) -> None:
    for name, quotes in QUOTED.items():
        file = ROOT / "recipes" / "configs" / name
        assert file.read_text(encoding="utf-8") == quote_in_header(file, read_figures(PAGE))
        columns = {section.name: (section.rows, section.columns) for section in SECTIONS}
        assert all(row in columns[section][0] and column in columns[section][1] for section, row, column, _ in quotes)
    found = {"5": {"run": {"device": "a device", "rows": {"generation": {"seconds": 31.04, "reserved, GB": None}}}}}
    assert "\n# On a GPU (docs/gpu.md): generation 31 s; a device.\nNot" in quote_in_header(file, found).replace(
        "# Not", "Not"
    )


@pytest.mark.slow
def test_whatever_happens_to_a_run_is_in_its_row_and_the_next_one_runs(tmp_path: Path) -> None:
    section = a_section(
        good="say({'good': {'seconds': 1.5, 'GB': None}})",
        out_of_memory="say({'out_of_memory': {'seconds': 2.0}}, failed='OutOfMemoryError: 9 GB'); sys.exit(1)",
        killed="os.kill(os.getpid(), signal.SIGKILL)",
        crashed="print('one'); sys.exit('the | last line')",
        endless="say({'endless': {'GB': 3.0}}); time.sleep(60)",
        at_the_end="say({'at_the_end': {'seconds': 1, 'GB': 2}}); sys.exit(3)",
        last="say({'last': {'seconds': 1234.5, 'GB': 0.00123}})",
    )
    path = tmp_path / "work" / "page.md"
    assert measured(path, section) == list(section.rows)
    assert cells(path) == {
        "good": ["1.5", "–"],
        "out_of_memory": ["2", "failed: OutOfMemoryError: 9 GB"],
        "killed": ["failed: ended with status -9: it said nothing", "not run yet"],
        "crashed": ["failed: ended with status 1: the / last line", "not run yet"],
        "endless": ["failed: it took longer than 6 s", "3"],
        "at_the_end": ["1", "2; failed: ended with status 3: it said nothing"],
        "last": ["1234", "0.00123"],
    }
    assert "a device; torch 9; code 1; `a command`" in path.read_text()


def test_what_was_measured_is_kept_and_what_failed_comes_last(tmp_path: Path) -> None:
    path = tmp_path / "work" / "page.md"
    flag = tmp_path / "there"
    one = "say({'one': {'seconds': 1, 'GB': 1}})"
    two = f"if not os.path.exists({str(flag)!r}): sys.exit(1)\nsay({{'two': {{'seconds': 2, 'GB': 2}}}})"
    three = "say({'three': {'seconds': 3, 'GB': 3}})"
    assert measured(path, a_section(one=one, two=two)) == ["one", "two"]
    flag.touch()
    section = a_section(one=one, two=two, three=three)
    assert measured(path, section) == ["three", "two"]
    assert measured(path, section) == []
    assert measured(path, section, again=True) == ["one", "two", "three"]
    assert measured(path, section, code="2") == ["one", "two", "three"]


def call(path: Path, *more: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "bench.gpu",
        "--tiny",
        "--device",
        "cpu",
        "--file",
        str(path),
        "--minutes",
        "60",
        *more,
    ]


@pytest.mark.nightly
def test_all_sections_on_the_cpu_and_an_interrupted_call_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(call(path), cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    for line in first.stdout:
        if line.startswith("2. "):
            break
    first.send_signal(signal.SIGTERM)
    first.communicate()
    assert first.returncode == 128 + signal.SIGTERM
    assert {name for name, runs in read_figures(path).items() if any(run["done"] for run in runs.values())} == {
        "1",
        "2",
    }

    runs_left = sum(len(section.runs) for section in SECTIONS) - 2
    for arguments, runs in (([], runs_left), (["--learn"], 4)):
        said = ""
        for expected in (runs, 0):
            done = subprocess.run(
                call(path, *arguments), cwd=ROOT, env=environment, capture_output=True, text=True, check=True
            )
            said = done.stdout
            assert f"{expected} run(s) to make" in said, said
        assert "complete" in said
    found = read_figures(path)
    for section in (*SECTIONS, *LEARN):
        assert {name for name, run in found[section.name].items() if run["done"]} == {r.name for r in section.runs}
        rows = {row: figures for run in found[section.name].values() for row, figures in run["rows"].items()}
        assert set(rows) == set(section.rows)
        for row in section.rows:
            assert set(section.columns) - {gpu.TIMES} <= set(rows[row]), row
    assert not [row for row, shown in cells(path).items() if any("failed" in cell for cell in shown)]
    assert gpu.NOT_YET not in path.read_text().partition("## ")[2].lower()
    compact = found["2"]["; ".join(SECTIONS[1].runs[0].rows)]["rows"]
    assert compact["float32"]["gradient gap"] < 1e-5
    for row in ("bf16 with checkpointing", "QLoRA in bf16"):
        assert 0 < compact[row]["gradient gap"] < compact[row]["gap of the precision itself"]
    [resumed] = found["10"].values()
    assert resumed["rows"]["resumed"]["gap of the weights"] == 0.0
    assert json.dumps(found)  # no figure is anything but JSON
