"""Every block of code on every page is executed or, where it needs more than a page, compiled."""

import dataclasses
import doctest
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from trl import ModelConfig, ScriptArguments

from tests.docs_site import blocks, shell
from tests.docs_site.blocks import Block, all_blocks, surroundings
from trl_grpo_ext import GRPOExtConfig
from trl_grpo_ext.plugins.loading import GROUPS

PYTHON = [block for block in all_blocks() if block.language == "python"]
WITH_PROMPTS = [block for block in PYTHON if ">>> " in block.text]
RUN = [block for block in PYTHON if surroundings(block)]
COMPILED = [block for block in PYTHON if block not in WITH_PROMPTS and block not in RUN]
"""These need more than a page: a GPU, runs, an environment; or another test runs them with what they need."""


def each(chosen: Sequence[Block]) -> Any:
    return pytest.mark.parametrize("block", chosen, ids=lambda block: block.id)


def in_language(language: str) -> Any:
    return each([block for block in all_blocks() if block.language == language])


def test_every_block_is_executed() -> None:
    assert {block.language for block in all_blocks()} == {"python", "yaml", "toml", "sh", "diff"}
    patched = [block.page for block in all_blocks() if block.language == "diff"]
    assert patched == ["docs/pipelines.md", "docs/writing_plugins.md"]  # other tests apply them
    assert len(RUN) == len(blocks.RUN)


@pytest.mark.parametrize("page", sorted({block.page for block in WITH_PROMPTS}))
def test_examples_with_prompts_print_what_the_page_says(page: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    parser = doctest.DocTestParser()
    said: list[str] = []
    for block in WITH_PROMPTS:
        if block.page == page:  # one after the other in one session, as a reader would type them
            test = parser.get_doctest(block.text, names, page, page, block.line)
            test.globs = names
            runner.run(test, out=said.append, clear_globs=False)
    assert runner.tries > 0
    assert runner.failures == 0, "".join(said)


@each(RUN)
def test_a_block_that_stands_by_itself_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before, afterwards = surroundings(block) or ("", "")
    names: dict[str, Any] = {"__name__": "a_reader"}
    exec(before, names)
    exec(compile(block.text, block.id, "exec"), names)
    assert eval(afterwards, names), afterwards


@each(COMPILED)
def test_a_block_that_needs_more_compiles_and_imports(block: Block) -> None:
    whole = re.sub(r", \.\.\.\)", ")", block.text)  # "and your other arguments"
    compile(whole, block.id, "exec")
    imports = [line for line in whole.split("\n") if re.match(r"(?:from|import) (?!politeness|grpo_)", line)]
    names: dict[str, Any] = {}
    exec("\n".join(imports), names)
    assert len(names) > len(imports)  # Python adds its builtins


@in_language("yaml")
def test_yaml_is_settings_of_a_run(block: Block, tmp_path: Path) -> None:
    settings = yaml.safe_load(re.sub(r"\bmy_reward\b", "tests.test_docs:my_reward", block.text))
    if block.page.startswith("docs/examples/grpo-"):  # `tests/examples` installs these and trains with them
        project = tomllib.loads((blocks.ROOT / block.page).with_name("pyproject.toml").read_text("utf-8"))["project"]
        offered = {name for group in project["entry-points"].values() for name in group}
        assert any(f'"{name}"' in json.dumps(settings) for name in offered)
        return
    others = {field.name for one in (ModelConfig, ScriptArguments) for field in dataclasses.fields(one)}
    if "model_name_or_path" in settings:  # the file of a whole run: `TrlParser` deals its settings out
        settings = {name: value for name, value in settings.items() if name not in others}
    config = GRPOExtConfig(**{"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, **settings})
    for name in {"rewards", "advantage_hooks", "loss_aggregation"} & set(settings):
        assert getattr(config, name) == settings[name]


@in_language("toml")
def test_toml_parses_and_names_groups_that_exist(block: Block) -> None:
    table = tomllib.loads(block.text)
    for group in table.get("project", {}).get("entry-points", {}):
        assert group in GROUPS.values() or group in {f"{name}.aliases" for name in GROUPS.values()}


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's clone and the files that pages suppose in it, as the working directory."""
    row = {"prompt": "9 * 2?", "question": "9 * 2?", "answer": "#### 18", "solution": "\\boxed{18}"}
    task = {"prompt": "Square x.", "tests": ["assert f(3) == 9"], "code": "def f(x):\n    return x * x"}
    for name in shell.PLACEHOLDERS:
        content = {"train.jsonl": row, "mbpp.jsonl": task}.get(name, {})
        (tmp_path / name).write_text(json.dumps(content) + "\n", encoding="utf-8")
    for name in ("recipes", "docs", "tests"):
        (tmp_path / name).symlink_to(blocks.ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@in_language("sh")
def test_commands_can_be_typed(block: Block, clone: Path) -> None:
    typed = list(shell.commands(block.text))
    assert typed or block.text.strip().startswith("#")
    for words in typed:
        shell.check(words)


@pytest.mark.slow
@in_language("sh")
def test_commands_that_need_only_the_clone_run_as_written(block: Block, clone: Path) -> None:
    typed = list(shell.commands(block.text))
    printed = ""
    for program, *words in filter(shell.runs_here, typed):
        command = [str(Path(sys.executable).with_name(program)), *words]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode == 0, f"{words}\n{ended.stdout}{ended.stderr}"
        printed += ended.stdout + ended.stderr
    if all(map(shell.runs_here, typed)):
        assert " ".join(blocks.output_after(block).split()) in " ".join(printed.split())
