"""How long the walk of `docs/writing_plugins.md` takes, command by command, and where.

    python bench/first_plugin.py

Follows the page in a fresh environment over the packages that are installed here, without a package index: pip has
nothing to download.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.tables import machine, versions
from tests.cli.scaffold.author import make_author
from tests.first_plugin_walk import PAGE, make_clone, read_steps, walk, walk_of

PACKAGES = ("trl-grpo-ext", "trl", "transformers", "torch", "accelerate")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        author = make_author(Path(folder) / "venv")
        walked = walk(read_steps(walk_of(PAGE.read_text(encoding="utf-8"))), author, make_clone(Path(folder) / "clone"))
    print("| command | seconds |\n| --- | --- |")
    for done in walked:
        print(f"| `{' '.join(done.step.text.split()[:3])}` | {done.seconds:.1f} |")
        if done.status:
            raise SystemExit(f"{done.step.text}exited with {done.status}:\n{done.err}")
    print(f"| total | {sum(done.seconds for done in walked):.1f} |\n")
    print(f"{machine()}, {versions(*PACKAGES)}")


if __name__ == "__main__":
    main()
