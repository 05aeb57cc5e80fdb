"""The commands that answer at once: what they import. How long that takes is measured by `bench/discovery.py`."""

import json
import os
import subprocess
import sys

HEAVY = {"torch", "trl", "transformers", "accelerate", "numpy", "pyarrow", "jinja2", "datasets", "peft"}
COMMANDS = (
    *(["--help"], ["--version"], ["list"], ["list", "--json"], ["show", "--help"]),
    *([name, "--help"] for name in ("check", "new", "compare", "report", "doctor", "audit")),
)
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


def test_commands_import_nothing_heavy() -> None:
    command = [sys.executable, "-c", PROBE.format(commands=COMMANDS)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True, check=True)
    plugins = ("trl_grpo_ext.rewards", "trl_grpo_ext.advantages", "trl_grpo_ext.aggregation")
    for answer in json.loads(done.stdout):
        assert answer["status"] == 0, answer["words"]
        assert answer["out"], answer["words"]
        assert not HEAVY.intersection(answer["modules"]), answer["words"]
        assert [name for name in answer["modules"] if name.startswith(plugins)] == [], answer["words"]
