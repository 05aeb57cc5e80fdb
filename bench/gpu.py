"""Everything that only a GPU can show, measured by one command and written into docs/gpu.md: `make gpu`.

    python -m bench.gpu                              # what is missing, in order, for at most nine and a half minutes
    python -m bench.gpu --learn                      # the trainings of `make gpu LEARN=1`
    python -m bench.gpu --only 3 5 --again           # two sections, also where they were measured
    python -m bench.gpu --page                       # write the page again from its own figures, and measure nothing
    python -m bench.gpu --tiny --device cpu --file outputs/gpu/tiny.md

Each run is a process of its own, so that its peaks are its own and its crash ends nothing else. It hands its figures
over as they come, and each goes into the page at once. The page keeps them, in comments that nobody sees, so it is all
that has to be carried to go on: what is on it for this device, these versions and this code is not measured again. A
run that does not fit into the rest of the time is left for the next call. One that failed is a sentence in its row, and
is tried again by the next call, after what is still missing.

Nothing is downloaded: the models have the shapes of Qwen2.5 and random weights. What is measured is in `gpu_runs`.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.gpu_plan import DIFFER, HALF, LEARN, OURS, ROOT, SECTIONS, TIMES, Run, Section, all_sections
from bench.tables import markdown

PAGE = ROOT / "docs" / "gpu.md"
CURVES = "gpu_learning.png"
"""Beside the page, once there are trainings."""
PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "bitsandbytes")
NOT_YET = "not run yet"
NONE_HERE = "–"
TINY_LIMIT = 300
"""Seconds of a run with tiny shapes."""


# ------------------------------------------------------------------------------------------------------------- page

INTRODUCTION = """# On a GPU

What only a GPU can show. `make gpu` (or `python -m bench.gpu`) measures it and writes each figure into this page, for
at most nine and a half minutes; the next call continues. It downloads nothing: models have the shapes of Qwen2.5 and
random weights. `make gpu LEARN=1` runs the trainings near the end. "Not run yet" was never measured, "failed" was
tried, and "–" is a figure that the device does not have (a CPU has no peaks of torch's allocator).
GB are 10⁹ bytes."""


def markers(section: Section) -> tuple[str, str]:
    return f"<!-- section {section.name} -->", f"<!-- end of section {section.name} -->"


def read_figures(path: Path) -> dict[str, dict[str, Any]]:
    """The figures in a page: by section and run its rows, their origin, and whether they are complete."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = re.findall(r"<!-- figures of (\S+): (.*) -->", text)
    return {name: json.loads(figures) for name, figures in found}


def page(sections: Sequence[Section], found: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole page, of these sections."""
    titles = {s.name: f"Section {s.name}: {s.title}" if s.name.isdigit() else s.title for s in sections}
    missing = [titles[section.name] for section in sections if not found.get(section.name)]
    parts = [
        INTRODUCTION,
        *(["\n".join([f"{NOT_YET.capitalize()}:\n", *(f"- {title}" for title in missing)])] if missing else []),
    ]
    for section in sections:
        if titles[section.name] in missing:
            continue
        begin, end = markers(section)
        runs = found.get(section.name, {})
        body = [begin, table(section, runs), provenance(runs), figures_comment(section, runs), end]
        if curves(section, runs):
            body.insert(2, f"![Right answers in training batches, on the GPU and on the CPU]({CURVES})")
        parts += [f"## {titles[section.name]}", section.text, "\n\n".join(part for part in body if part)]
    return "\n\n".join(parts) + "\n"


def table(section: Section, runs: Mapping[str, Any]) -> str:
    lines = []
    rows = {row: figures for run in runs.values() for row, figures in run["rows"].items()}
    for run in section.runs:
        failed = runs.get(run.name, {}).get("failed")
        whole = all(name in rows.get(row, {}) for row in run.rows for name in section.columns if name != TIMES)
        for row in run.rows:
            figures = dict(rows.get(row, {}))
            if section.against and row in section.against[1]:
                column, other = section.against[0], rows.get(section.against[1][row], {})
                if figures.get(column) and other.get(column):
                    figures[TIMES] = other[column] / figures[column]
            elif section.against:
                figures[TIMES] = None
            cells = [format_figure(figures[name]) if name in figures else NOT_YET for name in section.columns]
            if failed and NOT_YET in cells:
                cells[cells.index(NOT_YET)] = f"failed: {failed}"
            elif failed and whole and row == run.rows[-1]:
                cells[-1] += f"; failed: {failed}"
            lines.append([row, *cells])
    return markdown(["", *section.columns], lines)


def curves(section: Section, runs: Mapping[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """The curves of a section's rows, where it has any."""
    rows = {row: figures for run in runs.values() for row, figures in run["rows"].items()}
    return {row: rows[row]["curve"] for row in section.rows if "curve" in rows.get(row, {})}


def draw(path: Path, found: Mapping[str, Any]) -> None:
    """The curves of the trainings, a task beside the other, beside the page."""
    [section] = LEARN
    if not (lines := curves(section, found.get(section.name, {}))):
        return
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(row.rpartition(", ")[0] for row in section.rows))
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks)), tasks, strict=True):
        for row, points in lines.items():
            if row.startswith(task):
                axes.plot(*zip(*points, strict=True), ".-", label=row.rpartition(", ")[2])
        axes.set(title=task, xlabel="optimizer step", ylabel="right answers in a training batch")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    figure.savefig(path.with_name(CURVES), dpi=120)


def format_figure(value: Any) -> str:
    if value is None:
        return NONE_HERE
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def provenance(runs: Mapping[str, Any]) -> str:
    """Where, when and how the figures were measured."""
    ways: dict[str, list[str]] = {}
    for run in runs.values():
        versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
        ways.setdefault(f"{run['device']}; {versions}; code {run['code']}; `{run['command']}`", []).append(run["date"])
    return "\n\n".join(f"{way}; {min(dates)}." for way, dates in ways.items())


def figures_comment(section: Section, runs: Mapping[str, Any]) -> str:
    written = json.dumps(runs, ensure_ascii=False, sort_keys=True).replace("<", "\\u003c").replace(">", "\\u003e")
    return f"<!-- figures of {section.name}: {written} -->"


def write(path: Path, sections: Sequence[Section], found: Mapping[str, Any]) -> None:
    """The page, its picture, and the headers of the run files that quote it."""
    write_text(path, page(sections, found))
    draw(path, found)
    if path == PAGE:
        for name in QUOTED:
            file = ROOT / "recipes" / "configs" / name
            write_text(file, quote_in_header(file, found))


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, so that a killed run leaves a complete one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


QUOTED: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    HALF: (
        ("3", f"{OURS}, {DIFFER}", "update, s", "update {} s"),
        ("3", f"{OURS}, {DIFFER}", "reserved, GB", "in {} GB"),
        ("4", OURS, "step, s", "step with generation {} s"),
        ("4", OURS, "reserved, GB", "in {} GB"),
    ),
    "qwen2.5_7b_qlora_24gb.yaml": (
        ("5", "generation", "seconds", "generation {} s"),
        ("5", "generation", "reserved, GB", "in {} GB"),
        ("5", "update", "seconds", "update {} s"),
        ("5", "update", "reserved, GB", "in {} GB"),
    ),
}
"""What a run file's header says of the page: section, row, column and words."""
QUOTE = "# On a GPU (docs/gpu.md): "


def quote_in_header(path: Path, found: Mapping[str, Mapping[str, Any]]) -> str:
    """A run file with the page's figures in its header."""
    said, places = [], set()
    for section, row, column, words in QUOTED[path.name]:
        for run in found.get(section, {}).values():
            if isinstance(figure := run["rows"].get(row, {}).get(column), float | int):
                said.append(words.format(format_figure(figure)))
                places.add(run["device"])
    quote = f"{', '.join(said)}; {', '.join(sorted(places))}" if said else NOT_YET
    lines = path.read_text(encoding="utf-8").splitlines()
    [place] = [number for number, line in enumerate(lines) if line.startswith(QUOTE)]
    lines[place] = f"{QUOTE}{quote}."
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------------------------- runs


@dataclass(frozen=True)
class Here:
    """The conditions of a figure: with another device, other versions or other code it is measured again."""

    device: str
    versions: dict[str, str]
    code: str
    command: str

    def made(self, run: Mapping[str, Any]) -> bool:
        return (run["device"], run["versions"], run["code"]) == (self.device, self.versions, self.code)


def describe_here(options: argparse.Namespace, command: str) -> Here:
    if options.device == "cpu":
        device = f"{platform.machine()} CPU{', tiny shapes' if options.tiny else ''}"
    else:  # in a process of its own: this one must hold nothing on the device
        asked = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
        device = subprocess.run(
            [sys.executable, "-c", asked], capture_output=True, text=True, check=True
        ).stdout.strip()
        if not device:
            raise SystemExit("error: there is no CUDA device here; --tiny --device cpu shows that the script works")
    versions = {name: number for name in PACKAGES if (number := _version(name))}
    return Here(device, {"Python": platform.python_version(), **versions}, code_hash(), command)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except ModuleNotFoundError:
        return None


def code_hash() -> str:
    """Of the package, the recipes and these scripts, but not of comments in YAML files, which quote the page."""
    digest = hashlib.sha256()
    files = [path for room in ("trl_grpo_ext", "recipes") for path in (ROOT / room).rglob("*")]
    files += [ROOT / "bench" / name for name in ("gpu.py", "gpu_plan.py", "gpu_runs.py", "compact_rollouts.py")]
    for path in sorted(files):
        if path.suffix in (".py", ".yaml", ".json"):
            lines = path.read_bytes().splitlines(keepends=True)
            settings = [line for line in lines if path.suffix != ".yaml" or not line.startswith(b"#")]
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"".join(settings))
    return digest.hexdigest()[:8]


@dataclass
class Work:
    """A call: what is known, where it goes, and until when."""

    path: Path
    sections: tuple[Section, ...]
    found: dict[str, dict[str, Any]]
    here: Here
    options: argparse.Namespace
    until: float
    folder: Path

    def todo(self, sections: Sequence[Section]) -> list[tuple[Section, Run]]:
        """What is missing, in order, and then what failed."""
        missing, failed = [], []
        for section in sections:
            for run in section.runs:
                state = self.found.get(section.name, {}).get(run.name)
                made = state is not None and self.here.made(state) and not self.options.again
                if state is not None and made and state["failed"]:
                    failed.append((section, run))
                elif state is None or not (made and state["done"]):
                    missing.append((section, run))
        return [*missing, *failed]

    def measure(self, section: Section, run: Run) -> str:
        """Run one process, and write what it says as it says it. Returns how it ended, in a few words."""
        tiny = self.options.tiny
        left, own = self.until - time.monotonic(), TINY_LIMIT if tiny else 3 * run.seconds
        if left < (1 if tiny else run.seconds):
            return "left for the next call: too little time"
        answer, log = self.folder / "answer.json", self.folder / "log.txt"
        answer.unlink(missing_ok=True)
        keywords = json.dumps({**run.keywords, "rows": run.rows})
        words = [*(run.launcher or (sys.executable,)), str(ROOT / "bench" / "gpu_runs.py"), run.function, keywords]
        words += ["--folder", str(self.folder), "--device", self.options.device, *(["--tiny"] if tiny else [])]
        environment = {**os.environ, **run.environment, "HF_HUB_OFFLINE": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        # TRL spreads a model over all GPUs that one process sees.
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        deadline, seen, state = time.monotonic() + min(left, own), 0.0, self._state()
        with start_process(words, environment, log) as process:
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.2)
                if answer.exists() and (changed := answer.stat().st_mtime) != seen:
                    seen, state["rows"] = changed, json.loads(answer.read_text(encoding="utf-8"))["rows"]
                    self._put(section, run, state)
            ended = process.poll()
        given = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else {"rows": {}}
        state["rows"], cut = given["rows"], ended is None and left < own
        state["failed"] = given.get("failed")
        if ended is None and not cut:
            state["failed"] = f"it took longer than {own:.0f} s"
        elif ended and not state["failed"]:
            last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it said nothing"])[-1]
            state["failed"] = f"ended with status {ended}: {_one_line(last)}"
        state["done"] = ended == 0 and not state["failed"]
        if cut and not state["rows"]:
            return "left for the next call: the time was over"
        self._put(section, run, state)
        if state["failed"] and log.exists():
            logs = self.path.parent / "gpu_logs"
            logs.mkdir(exist_ok=True)
            (logs / f"{section.name} {run.function}.txt").write_bytes(log.read_bytes()[-100_000:])
        return state["failed"] or ("done" if state["done"] else "cut off: the rest is left for the next call")

    def _state(self) -> dict[str, Any]:
        own = {"device": self.here.device, "versions": self.here.versions, "code": self.here.code}
        now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        return {"rows": {}, "done": False, "failed": None, "date": now, "command": self.here.command, **own}

    def _put(self, section: Section, run: Run, state: dict[str, Any]) -> None:
        self.found.setdefault(section.name, {})[run.name] = state
        write(self.path, self.sections, self.found)


@contextmanager
def start_process(words: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in its own group, which is gone at the end."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            words, cwd=ROOT, env=dict(environment), stdout=file, stderr=file, start_new_session=True
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:300]


def main(given: Sequence[str] | None = None) -> None:
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.5, help="start nothing that would not end within these")
    parser.add_argument("--again", action="store_true", help="also what was measured on this device with this code")
    parser.add_argument("--only", nargs="+", choices=names, help="these sections")
    parser.add_argument("--learn", action="store_true", help="the trainings")
    parser.add_argument("--page", action="store_true", help="write the page again and measure nothing")
    parser.add_argument("--file", type=Path, default=PAGE, help="the page")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to see that the script works")
    options = parser.parse_args(given)
    if options.device == "cpu" and not (options.tiny and options.file != PAGE) and not options.page:
        parser.error("--device cpu needs --tiny and another --file: docs/gpu.md is for GPUs")
    everything, found = all_sections(), read_figures(options.file)
    write(options.file, everything, found)
    if options.page:
        return
    # A killed call ends what it started: `start_process` does it on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    wanted = LEARN if options.learn else SECTIONS
    chosen = [section for section in wanted if options.only is None or section.name in options.only]
    command = shlex.join(["python", "-m", "bench.gpu", *(sys.argv[1:] if given is None else given)])
    until = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="gpu_") as folder:
        work = Work(options.file, everything, found, describe_here(options, command), options, until, Path(folder))
        todo = work.todo(chosen)
        print(f"{work.here.device}; {len(todo)} run(s) to make", flush=True)
        for section, run in todo:
            begun = time.monotonic()
            ended = work.measure(section, run)
            print(f"{section.name}. {run.name}: {ended} ({time.monotonic() - begun:.0f} s)", flush=True)
            for row, figures in work.found.get(section.name, {}).get(run.name, {}).get("rows", {}).items():
                print(f"    {row}: {figures}", flush=True)
        left = work.todo(chosen)
        print(f"{options.file}: {f'{len(left)} run(s) left; the same command goes on' if left else 'complete'}")


if __name__ == "__main__":
    main()
