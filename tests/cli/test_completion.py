"""Shell completion through the protocol that the shells themselves speak."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.distributions import MARKED, imported, write_distribution
from tests.cli.terminal import COMMAND, Finished, invoke, run_command


def complete(shell: str, *words: str, env: dict[str, str] | None = None) -> Finished:
    """What the completion script of a shell is answered for a line that ends in the last word."""
    line = " ".join(["trl-grpo-ext", *words])
    asked: dict[str, str | None] = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(words))},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    return invoke(env={"_TRL_GRPO_EXT_COMPLETE": f"complete_{shell}", **asked, **(env or {})})


def test_the_answers_of_bash_are_words() -> None:
    assert complete("bash", "show", "seq_mean").out.split() == ["seq_mean_token_mean", "seq_mean_token_sum"]
    assert complete("bash", "show", "dr_g").out.split() == ["dr_grpo"], "an alias"
    assert complete("bash", "list", "ho").out.split() == ["hook"]
    assert complete("bash", "list", "--distribution", "trl-g").out.split() == ["trl-grpo-ext"]
    assert complete("bash", "check", "--kind", "agg").out.split() == ["aggregation"]
    assert {"list", "show", "check"} <= set(complete("bash", "").out.split())
    assert complete("bash", "show", "trl-grpo-ext:think").out.split() == ["trl-grpo-ext:think_format"]


def test_what_a_shell_would_evaluate_is_not_offered_and_nothing_is_imported(tmp_path: Path) -> None:
    names = {"co_good": "co_plugin:x", "co_$(touch evil)": "co_plugin:x", "co_`touch evil`": "co_plugin:x"}
    names |= {"co_'; touch evil": "co_plugin:x", 'co_"x': "co_plugin:x", "co_\x1b[31m": "co_plugin:x"}
    write_distribution(tmp_path, "co-plugin", {"reward": names}, {"co_plugin.py": f"{MARKED}def x(): ..."})
    for shell in ("bash", "zsh", "fish"):
        done = complete(shell, "show", "co_", env={"PYTHONPATH": str(tmp_path)})
        assert "co_good" in done.out
        assert "touch" not in done.out
        assert "\x1b" not in done.out
    assert imported(tmp_path) == []


def test_completing_imports_neither_torch_nor_a_plugin() -> None:
    env = {"PYTHONPROFILEIMPORTTIME": "1", "_TRL_GRPO_EXT_COMPLETE": "complete_bash"}
    done = run_command(env={**env, "COMP_WORDS": "trl-grpo-ext show entropy_s", "COMP_CWORD": "2"})
    modules = {line.rpartition("|")[2].strip() for line in done.err.splitlines() if line.startswith("import time:")}
    assert "trl_grpo_ext.plugins.discovery" in modules
    assert not modules & {"torch", "trl", "transformers", "trl_grpo_ext.rewards", "trl_grpo_ext.advantages"}


def test_bash_completes_with_the_installed_script(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    script = invoke(env={"_TRL_GRPO_EXT_COMPLETE": "source_bash"}).out
    line = f"PATH={COMMAND.parent}:$PATH\n{script}\n"
    line += "COMP_WORDS=(trl-grpo-ext show entropy_s); COMP_CWORD=2\n"
    line += '$(complete -p trl-grpo-ext | sed "s/.*-F \\([^ ]*\\).*/\\1/") trl-grpo-ext\necho "${COMPREPLY[@]}"\n'
    done = subprocess.run([bash, "--norc", "-c", line], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == ["entropy_shaping"]
