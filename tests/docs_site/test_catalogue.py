"""The catalogue: every built-in has a page with all that a reader looks for, and a worked example that runs."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.site import catalogue, compatibility
from docs.site.notation import formulas
from docs.site.worked import Worked, all_worked
from trl_grpo_ext import available
from trl_grpo_ext.plugins.description import describe
from trl_grpo_ext.plugins.selection import parse_selection

BUILT_IN = catalogue.built_in()
WORKED = all_worked()


@pytest.mark.parametrize(("key", "worked"), WORKED.items(), ids=[name for _, name in WORKED])
def test_an_example_selects_the_plugin_whose_page_it_is_on(key: tuple[str, str], worked: Worked) -> None:
    assert parse_selection(key[0], worked.selection).name == key[1]
    assert all(len(column) == len(worked.rows) for column in worked.given.values())


@pytest.mark.parametrize(
    ("key", "result"),
    [
        (("advantage_hook", "reward_schedule"), {"reward after": [1.25, 0.25]}),
        (("prompt_sampler", "in_order"), {"drawn in rounds": [[1, 4], [1, 4], [2], [2], [3], [3]]}),
        (("prompt_sampler", "retire_solved"), {"drawn in rounds": [[1], [1, 4], [2, 4], [2], [3, 5], [3, 5]]}),
        (("prompt_sampler", "difficulty_pool"), {"weight": [0.05, 0.2875, 1.0, 0.2875, 0.05]}),
        (("prompt_sampler", "curriculum"), {"share of the data": [0.2, 0.28**0.5, 0.52**0.5, 1.0]}),
        (("prompt_sampler", "mixture"), {"drawn in rounds": [[1, 2], [1, 3], [2, 3], [1], [2], [3]]}),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_an_example_has_the_values_worked_out_by_hand(key: tuple[str, str], result: dict[str, Any]) -> None:
    found = WORKED[key].result()
    assert found.keys() == result.keys()
    for head, values in result.items():
        assert [pytest.approx(value) for value in values] == list(found[head])


TOKEN_LOSSES = {
    # ln(1.2)² = .033241, ln(.5)² = .480453 and ln(1.1)² = .009084, times .05
    "squared_log_ratio": [0.00166, 0.00166, 0.02402, 0.00045],
    "kl_cov": [0, 0, 0, 0.00454],  # the covariances are .631, -.062, -.408 and .978; half of the square of ln 1.1
    "smooth_clip": [-1.15232, -1.15232, 0.80268, 1.09242],  # tanh of 1, 1, -2.5 and .5
    "clip_cov": [-1.2, -1.2, 0.8, 0],  # the last is left out; the clip holds .5 at .8
    "topr": [0.51083, 1.20397, -0.88519, -1.214],  # -ln .6, -ln .3, .55·ln .2, .55·ln .11
}


@pytest.mark.parametrize("name", [name for kind, name in WORKED if kind == "token_loss"])
def test_token_losses_by_hand(name: str) -> None:
    assert WORKED["token_loss", name].result()["loss"] == pytest.approx(TOKEN_LOSSES[name], abs=1e-5)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("catalogue")
    catalogue.write(folder)
    return folder / "catalogue"


@pytest.mark.parametrize("info", BUILT_IN, ids=lambda info: info.name)
def test_a_page_has_all_that_a_reader_looks_for(info: Any, pages: Path) -> None:
    text = (pages / catalogue.FOLDERS[info.kind] / f"{info.name}.md").read_text(encoding="utf-8")
    docs = describe(info, available())
    assert text.startswith(f"# `{info.name}`\n")
    for alias in info.aliases:
        assert f"`{alias}`" in text
    for parameter in docs.parameters:
        row = re.search(rf"^\| `{parameter.name}` \|.*\| (.*) \|$", text, re.MULTILINE)
        assert row, f"no row for {parameter.name}"
        assert row[1].strip(), f"{info.name} does not say what {parameter.name} is"
    for paper in docs.doc.papers:
        assert f"https://arxiv.org/abs/{paper}" in text
    assert f"#L-{docs.line}" in text
    for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL):
        (key,) = yaml.safe_load(block)
        settings = ("rewards", "advantage_hooks", "loss_aggregation", "resample", "prompt_sampler", "token_losses")
        assert key in settings
    assert "## Worked example\n" in text
    assert text.count("```math") + text.count("{math}`") >= len(formulas(docs.doc.description))


def test_the_pages_of_a_kind_list_all_of_it(pages: Path) -> None:
    for kind, folder in catalogue.FOLDERS.items():
        text = (pages / folder / "index.md").read_text(encoding="utf-8")
        assert set(re.findall(r"\]\((\w+)\.md\)", text)) == {info.name for info in BUILT_IN if info.kind == kind}


def test_compatibility_page_agrees_with_the_files() -> None:
    text = compatibility.PAGE.read_text(encoding="utf-8")
    python = compatibility.tested_pythons(text)[0]
    assert compatibility.renewed(text, python) == text, "run: python -m docs.site.compatibility"
