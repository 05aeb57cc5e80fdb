"""Every block of code on every page is executed or, where it needs more than a page, compiled."""

import dataclasses
import doctest
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from trl import ModelConfig, ScriptArguments

from tests.docs_site import blocks, shell
from tests.docs_site.blocks import Block, all_blocks, claimed
from trl_grpo_ext import GRPOExtConfig
from trl_grpo_ext.plugins.loading import GROUPS

COLUMNS = frozenset({"rewards", "advantage_hooks", "loss_aggregation"})


def of(way: str) -> Any:
    return pytest.mark.parametrize("block", claimed(way), ids=lambda block: block.id)


@pytest.mark.parametrize("block", all_blocks(), ids=lambda block: block.id)
def test_every_block_is_executed_in_exactly_one_way(block: Block) -> None:
    ways = [way for way, claims in blocks.CLAIMS.items() if claims(block)]
    assert len(ways) == 1, f"{block.id} ({block.language}) is executed by {ways or 'nobody'}; tests/docs_site/blocks.py"


def test_no_claim_is_left_without_its_block() -> None:
    texts = {(block.page, block.text) for block in all_blocks() if block.language == "python"}
    for page, part in blocks.RUN:
        assert sum(of_page == page and part in text for of_page, text in texts) == 1, (page, part)


PAGES_WITH_PROMPTS = sorted({block.page for block in claimed("with prompts")})


@pytest.mark.parametrize("page", PAGES_WITH_PROMPTS)
def test_examples_with_prompts_print_what_the_page_says(page: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    parser = doctest.DocTestParser()
    said: list[str] = []
    for block in claimed("with prompts"):
        if block.page == page:  # one after the other in one session, as a reader would type them
            test = parser.get_doctest(block.text, names, page, page, block.line)
            test.globs = names
            runner.run(test, out=said.append, clear_globs=False)
    assert runner.tries > 0
    assert runner.failures == 0, "".join(said)


@of("run")
def test_a_block_that_stands_by_itself_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before, afterwards = blocks.claim(block)
    names: dict[str, Any] = {"__name__": "a_reader"}
    exec(before, names)
    exec(compile(block.text, block.id, "exec"), names)
    assert eval(afterwards, names), afterwards


@of("compiled")
def test_a_block_that_needs_more_compiles_and_imports(block: Block) -> None:
    whole = re.sub(r", \.\.\.\)", ")", block.text)  # "and your other arguments"
    compile(whole, block.id, "exec")
    imports = [line for line in whole.split("\n") if re.match(r"(?:from|import) (?!politeness|grpo_)", line)]
    exec("\n".join(imports), {})


@of("settings")
def test_yaml_is_settings_of_a_run(block: Block, tmp_path: Path) -> None:
    text = re.sub(r"\bmy_reward\b", "tests.test_docs:my_reward", block.text)
    settings = yaml.safe_load(text)
    others = {field.name for one in (ModelConfig, ScriptArguments) for field in dataclasses.fields(one)}
    if "model_name_or_path" in settings:  # the file of a whole run: `TrlParser` deals its settings out
        settings = {name: value for name, value in settings.items() if name not in others}
    config = GRPOExtConfig(**{"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, **settings})
    for name in COLUMNS & set(settings):
        assert getattr(config, name) == settings[name]


@of("settings of an example")
def test_yaml_of_an_example_selects_what_it_offers(block: Block) -> None:
    """`tests/examples` installs the distributions and trains with such selections."""
    project = tomllib.loads((blocks.ROOT / block.page).with_name("pyproject.toml").read_text("utf-8"))["project"]
    offered = {name for group in project["entry-points"].values() for name in group}
    selected = json.dumps(yaml.safe_load(block.text))
    assert {name for name in offered if f'"{name}"' in selected}


@of("toml")
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


@of("commands")
def test_commands_can_be_typed(block: Block, clone: Path) -> None:
    typed = list(shell.commands(block.text))
    assert typed or block.text.strip().startswith("#")
    for words in typed:
        shell.check(words)


@pytest.mark.slow
@of("commands")
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


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("trl-grpo-ext lst", "has no command"),
        ("accelerate launch recipes/gsm8k_grpo.py --lerning_rate 1", "has no settings"),
        ("make everything", "no target"),
        ("rm -rf site", "nobody knows"),
    ],
)
def test_a_command_that_would_be_refused_is_found(line: str, why: str) -> None:
    (words,) = shell.commands(line)
    with pytest.raises(shell.RefusedCommandError, match=why):
        shell.check(words)
