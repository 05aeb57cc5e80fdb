"""Time of the quick commands, with no third-party plugin installed and with 200.

    python bench/discovery.py [--plugins 200] [--repeats 5]

Every time is that of a fresh process, from its start to its end; the first of each series is shown by itself, since the
files may not be in the page cache yet. `available()` is timed inside its process, without Python's own start. The last
column is CPU time, which is more reliable than wall-clock time on a busy machine.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.tables import machine, versions
from tests.cli.distributions import write_distribution
from tests.cli.terminal import COMMAND

COMMANDS = (["--help"], ["list"], ["list", "--json"], ["show", "entropy_shaping"])
AVAILABLE = (
    "import time\nstart = time.perf_counter()\nfrom trl_grpo_ext import available\navailable()\n"
    "print(time.perf_counter() - start)"
)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--plugins", type=int, default=200, help="third-party distributions, with a plugin each")
    options.add_argument("--repeats", type=int, default=5)
    asked = options.parse_args()
    print(f"{machine()}, load {os.getloadavg()[0]:.1f}", versions("trl-grpo-ext", "typer", "rich"), sep="\n")
    print(f"\n{'plugins':>8}  {'command':<22}  {'first':>6}  {'median':>6}  {'worst':>6}  {'CPU':>6}  seconds")
    with tempfile.TemporaryDirectory() as folder:
        for count in (0, asked.plugins):
            _write(Path(folder), count)
            environ = {**os.environ, "PYTHONPATH": folder if count else ""}
            for words in COMMANDS:
                _print(
                    count, " ".join(words), [_seconds([str(COMMAND), *words], environ) for _ in range(asked.repeats)]
                )
            code = [sys.executable, "-c", AVAILABLE]
            _print(count, "available()", [_seconds(code, environ, inside=True) for _ in range(asked.repeats)])


def _write(folder: Path, count: int) -> None:
    for number in range(count):
        name = f"bench_{number:03}"
        text = f'"""A plugin."""\n\n\ndef reward(completions, **columns):\n    """Score {number}."""\n' * 10
        write_distribution(folder, name, {"reward": {name: f"{name}:reward"}}, {f"{name}/__init__.py": text})


def _seconds(command: list[str], environ: dict[str, str], inside: bool = False) -> tuple[float, float]:
    start = time.perf_counter()
    used = os.times()
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - start
    now = os.times()
    cpu = now.children_user + now.children_system - used.children_user - used.children_system
    return float(done.stdout) if inside else seconds, cpu


def _print(count: int, what: str, runs: list[tuple[float, float]]) -> None:
    clock, cpu = zip(*runs, strict=True)
    values = (clock[0], statistics.median(clock), max(clock), statistics.median(cpu))
    print(f"{count:>8}  {what:<22}  {'  '.join(f'{value:>6.2f}' for value in values)}")


if __name__ == "__main__":
    main()
