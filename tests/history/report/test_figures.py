"""What the figures show is what was logged, read from their artists; what strangers named is text."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.history.report.trained import write_history
from trl_grpo_ext.history.report import Run, figures, load_run, load_runs
from trl_grpo_ext.history.report.figures import FINDINGS, INK, PLOTS, draw_lines, style, svgs

PAGE = Path(__file__).parents[3] / "docs" / "report.md"
TEMPLATES = Path(figures.__file__).parent / "templates"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def two(trained_once: tuple[Path, dict[str, Any]]) -> list[Run]:
    return load_runs([trained_once[0] / "one", trained_once[0] / "two"])


@pytest.fixture(scope="module")
def shown(two: list[Run]) -> dict[str, str | None]:
    return {plot.name: svg for plot, svg in svgs(two)}


def drawn(runs: Sequence[Run], name: str) -> Figure:
    (plot,) = [plot for plot in PLOTS if plot.name == name]
    with style():
        figure = draw_lines(runs, plot.panels(runs))
    assert figure is not None
    return figure


def panels(figure: Figure) -> dict[str, Axes]:
    return {axis.get_title(loc="left"): axis for axis in figure.axes}


def points(axis: Axes, name: str) -> list[tuple[float, float]]:
    (line,) = [line for line in axis.get_lines() if line.get_label() == name]
    return list(zip(*(np.asarray(data, dtype=float).tolist() for data in line.get_data()), strict=True))


def logged(history: list[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(entry["step"], entry[key]) for entry in history if entry.get(key) is not None]


def corners(area: Any) -> set[tuple[float, float]]:
    return {(round(float(x), 6), round(float(y), 6)) for path in area.get_paths() for x, y in path.vertices}


def a_run(folder: Path, *entries: dict[str, Any]) -> Run:
    return load_run(write_history(folder, entries))


def test_a_real_run_has_nearly_every_figure(shown: dict[str, str | None]) -> None:
    assert [name for name, svg in shown.items() if svg is None] == ["pass_at_k"]


def test_figures_of_rewards_are_as_logged(two: list[Run], trained_once: tuple[Path, dict[str, Any]]) -> None:
    found = panels(drawn(two, "reward_functions"))
    assert found.keys() == {"length_reward", "short_ones", "regex_match"}
    for name, axis in found.items():
        for run, area in zip(("one", "two"), axis.collections, strict=True):
            history = trained_once[1][run]
            means, stds = (dict(logged(history, f"rewards/{name}/{what}")) for what in ("mean", "std"))
            assert len(means) >= 2
            assert points(axis, run) == list(means.items())
            assert points(axis, f"{run} (held out)") == logged(history, f"eval_rewards/{name}/mean")
            for step, mean in means.items():
                assert {(step, round(mean + sign * stds[step], 6)) for sign in (-1, 1)} <= corners(area)
    total = panels(drawn(two, "reward_total"))["reward"]
    assert points(total, "two") == logged(trained_once[1]["two"], "reward")


def test_figures_of_metrics_and_hooks(two: list[Run], trained_once: Any) -> None:
    keys = {
        ("optimisation", "KL, nats per token"): "kl",
        ("optimisation", "loss"): "loss",
        ("no_signal", "groups without spread in the reward"): "frac_reward_zero_std",
    }
    for (figure, panel), key in keys.items():
        expected = logged(trained_once[1]["one"], key)
        assert len(expected) >= 2
        assert points(panels(drawn(two, figure))[panel], "one") == expected
    hooks = drawn(two, "hooks")
    axis = panels(hooks)["mass moved: sum of changes / sum of advantages"]
    for name, run in {"one · centred": "one", "one · entropy_shaping": "one", "two · leave_one_out": "two"}.items():
        assert points(axis, name) == logged(trained_once[1][run], f"advantage/{name.split(' · ')[1]}/mass_moved")
    names = [text.get_text() for legend in hooks.legends for text in legend.get_texts()]
    # Held-out values of hooks say nothing.
    assert names == ["one · centred", "one · entropy_shaping", "two · leave_one_out"]


def test_outcomes_have_a_line_each_and_are_zero_where_others_are_known(tmp_path: Path) -> None:
    shares = {"wrong": 0.25, "right": 0.5, "timeout": 0.125, "odd one": 0.125}
    names = {f"outcomes/sum/{name}": share for name, share in shares.items()}
    run = a_run(tmp_path, {"step": 1, **names}, {"step": 2, "outcomes/sum/right": 1.0}, {"step": 3, **names})
    figure = drawn([run], "outcomes")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["right", "wrong", "timeout", "odd one"]
    assert points(figure.axes[0], "timeout") == [(1, 0.125), (2, 0.0), (3, 0.125)]
    assert points(figure.axes[0], "right") == [(1, 0.5), (2, 1.0), (3, 0.5)]
    assert len({(line.get_color(), line.get_marker()) for line in figure.axes[0].get_lines()}) == 4


def test_pass_at_k_has_a_panel_per_reward_and_points_per_k(tmp_path: Path) -> None:
    entries = [{f"eval_pass@{k}/a": k / 16 + step / 8 for k in (1, 8, 16)} | {"step": step} for step in (0, 4)]
    run = a_run(tmp_path, *(entry | {"eval_pass@8/b": 0.25} for entry in entries))
    found = panels(drawn([run], "pass_at_k"))
    assert [*found] == ["a: pass@k", "b: pass@k"]
    labels = [str(line.get_label()) for line in found["a: pass@k"].get_lines()]
    assert labels == [f"pass@{k} (held out)" for k in (1, 8, 16)]
    assert points(found["a: pass@k"], labels[2]) == [(0, 1.0), (4, 1.5)]


def test_the_svg_obeys_a_strict_page_and_takes_its_colours(shown: dict[str, str | None]) -> None:
    ids: list[str] = []
    for svg in filter(None, shown.values()):
        assert INK not in svg
        root = ElementTree.fromstring(svg)
        texts = list(root.iter(f"{SVG}text"))
        assert "optimizer step" in {element.text for element in texts}  # text is text
        assert {element.get("fill") for element in texts} == {"currentColor"}
        assert root.get("viewBox")
        assert root.get("width") is None
        for element in root.iter():
            assert "style" not in element.attrib
            assert element.tag.removeprefix(SVG) not in ("style", "script", "a", "image", "foreignObject", "metadata")
        ids += [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
        targets = re.findall(r"url\(#([^)]*)\)|href=\"#([^\"]*)\"", svg)
        assert targets
        assert {one or other for one, other in targets} <= set(ids)
        assert svg.count('fill="#ffffff"') == svg.count('fill="white"') == 0  # no background
    assert len(ids) == len(set(ids))


def test_findings_are_shown_by_figures_and_filters_that_exist() -> None:
    listed = PAGE.read_text(encoding="utf-8").partition("| finding | ")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in listed.splitlines()[1:]]
    named = re.findall(r"`(\w+)`", " ".join(cells))
    assert [*FINDINGS] == named
    filters = set(re.findall(r'<option value="([\w-]+)">', (TEMPLATES / "browser.html.jinja").read_text()))
    for figure, shown in FINDINGS.values():
        assert figure in {plot.name for plot in PLOTS}
        assert shown in filters
