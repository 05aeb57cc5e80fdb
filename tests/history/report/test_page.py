"""The page without a browser: it parses, connects to nothing, holds exactly what was saved, and escapes all of it."""

import base64
import gzip
import hashlib
import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy
import pyarrow.parquet
import pytest

from tests.history.report.browsing import credit
from tests.history.report.make_big_run import HOSTILE, HOSTILE_NAMES, write_hostile_run
from tests.history.report.trained import write_history
from trl_grpo_ext.history.report import Run, load_run, load_runs
from trl_grpo_ext.history.report import page as page_module
from trl_grpo_ext.history.report.page import script_json, visible, write_page

VOID = {"meta", "link", "br", "wbr", "img", "input", "hr"}
KNOWN = (
    "html head meta title style body a header div h1 h2 h3 h4 p bdi b button kbd nav noscript main section table "
    "caption thead tbody tr th td ul li figure figcaption details summary form label select option span input ol em "
    "wbr dialog dl dt dd script svg defs path g use text clippath rect tspan desc"
)
"""The elements of a page."""


class Page(HTMLParser):
    """The elements of a page, with what stands in them; every element must be closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str | None, str] = {}
        self.styles: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            name = self.elements[-1][1].get("id")
            self.scripts[name] = self.scripts.get(name, "") + data
        elif self.open and self.open[-1] == "style":
            self.styles.append(data)
        else:
            self.text.append(data)

    @property
    def index(self) -> dict[str, Any]:
        return json.loads(self.scripts["index"])  # type: ignore[no-any-return]

    @property
    def policy(self) -> str:
        (found,) = [a["content"] for tag, a in self.elements if a.get("http-equiv") == "Content-Security-Policy"]
        return str(found)


def written(runs: list[Run], folder: Path) -> tuple[Path, list[str]]:
    """A page's file, and what is said of it."""
    return folder / "report.html", write_page(runs, folder / "report.html")


@pytest.fixture(scope="module")
def shown(small: Path) -> Page:
    return Page(written(load_runs([small / "first", small / "second"]), small)[0].read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("hostile")
    run = write_hostile_run(folder / "<script>window.pwned=10<!--")
    return run, written([load_run(run)], folder)[0].read_text(encoding="utf-8")


def test_nothing_on_the_page_points_outside_it(shown: Page) -> None:
    ids = [a["id"] for _, a in shown.elements if "id" in a]
    assert len(ids) == len(set(ids))
    for tag, attributes in shown.elements:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "image", "foreignobject"}
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name != "style", tag  # the policy would not apply it
            if name in ("href", "src", "xlink:href", "action", "srcset"):
                assert str(value).startswith("#"), (tag, name, value)
                assert str(value)[1:] in ids, (tag, name, value)
            for reference in re.findall(r"url\((.*?)\)", value or ""):
                assert reference.startswith("#")
    for text in [*shown.styles, shown.scripts[None]]:
        assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttpRequest|WebSocket|import\(", text)
    assert any(tag == "noscript" for tag, _ in shown.elements)
    assert "scripts are switched off" in " ".join(shown.text)
    assert "Findings" not in " ".join(shown.text)  # there are none


def test_the_policy_names_exactly_this_style_and_this_script(shown: Page) -> None:
    def hashed(text: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"

    directives = dict(part.strip().split(" ", 1) for part in shown.policy.split(";"))
    assert directives == {
        "default-src": "'none'",
        "script-src": hashed(shown.scripts[None]),
        "style-src": hashed("".join(shown.styles)),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    kinds = [attributes.get("type") for tag, attributes in shown.elements if tag == "script"]
    assert kinds.count(None) == 1
    assert set(kinds) == {None, "application/json", "application/gzip"}


def test_the_scripts_never_make_elements_of_text() -> None:
    made = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|DOMParser|setHTML|srcdoc"
    scripts = [file.read_text() for file in (Path(page_module.__file__).parent / "assets").glob("*.js")]
    assert scripts
    assert not re.search(made, "".join(scripts))


def unpack(text: str) -> Any:
    """What the page's script reads."""
    return json.loads(gzip.decompress(base64.b64decode(text)))


def slow_utf16(text: str, place: int) -> int:
    return len(text[:place].encode("utf-16-le")) // 2


def test_the_embedded_data_is_that_of_the_parquet_files(shown: Page, small: Path) -> None:
    seen = 0
    for run in shown.index["runs"]:
        for step in run["steps"]:
            file = small / run["name"] / "token_records" / f"step_{step['step']:05d}.parquet"
            rows = pyarrow.parquet.read_table(file).to_pylist()
            text = unpack(shown.scripts[step["text"]])
            numbers = unpack(shown.scripts[step["numbers"]])
            assert [row["group"] for row in rows] == step["group"]
            assert [row["member"] for row in rows] == step["member"]
            assert text["completions"] == [row["completion"] for row in rows]
            parts = [zip(row["parts"], row["part_scores"], strict=True) for row in rows]
            assert text["parts"] == [[[name, score] for name, score in of_row] for of_row in parts]
            assert [text["prompts"][place] for place in text["prompt"]] == [row["prompt"] for row in rows]
            assert step["reward"] == [row["reward"] for row in rows]
            assert step["truncated"] == [row["truncated"] for row in rows]
            for name in run["rewards"]:
                assert step["rewards"][name] == [dict(row["rewards"])[name] for row in rows]
            assert step["outcomes"] == [dict(row["outcomes"]) for row in rows]
            assert step["trained"] == [step["step"] == 20] * len(rows)
            for row, part, shown_credit in zip(rows, numbers, step["credit"], strict=True):
                seen += 1
                check_tokens(row, part, text)
                assert shown_credit == pytest.approx(credit(row), rel=1e-9, abs=1e-12)
    assert seen == 48


def check_tokens(row: dict[str, Any], part: dict[str, Any], text: dict[str, Any]) -> None:
    def same(found: list[float | None], wanted: list[float] | None) -> None:
        known = [numpy.nan if value is None else value for value in found]
        expected = numpy.full(len(row["tokens"]), numpy.nan) if wanted is None else numpy.float32(wanted)
        numpy.testing.assert_allclose(known, expected, rtol=1e-4, atol=0, equal_nan=True)

    assert [text["vocabulary"][place] for place in part["token"]] == row["tokens"]
    assert part["part"] == row["token_part"]
    assert {0, -1} == {*part["part"]}
    assert part["live"] == [int(value) for value in row["live"]]
    end = 0
    for place, (gap, size) in enumerate(zip(part["gap"], part["size"], strict=True)):
        start, end = end + gap, end + gap + size
        assert [start, end] == [slow_utf16(row["completion"], row[name][place]) for name in ("starts", "ends")]
    for place, name in enumerate(text["stages"]):
        assert place >= len(row["stages"]) or row["stages"][place] == name
        same(part["stage"][place], row["advantages"][place] if place < len(row["stages"]) else None)
    for name in ("advantage", "weight", "logp", "entropy"):
        same(part[name], row[name])


def test_hostile_texts_are_never_markup(hostile: tuple[Path, str]) -> None:
    run, text = hostile
    page = Page(text)
    assert {tag for tag, _ in page.elements} <= set(KNOWN.split())
    assert all(not name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert sum(tag == "script" and "type" not in attributes for tag, attributes in page.elements) == 1
    assert "window.pwned" not in page.scripts[None]
    assert visible(HOSTILE[1]) in page.text  # a setting, as text
    assert visible(HOSTILE[2]) in page.text
    assert run.name in "".join(page.text)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e\u2066\u2028]", text)
    assert page.index["runs"][0]["rewards"] == list(HOSTILE_NAMES)


def test_json_in_a_script_cannot_end_it() -> None:
    value = {"</script>": ["<!--<script>", "\u2028\u2029", "&amp;", "\ud800"]}
    text = str(script_json(value))
    assert re.fullmatch(r"[ -%'-;=?-~]*", text)  # printable ASCII without & < >
    assert json.loads(text) == value


def test_assets_cannot_end_their_element() -> None:
    assets = (Path(page_module.__file__).parent / "assets").iterdir()
    assert not [path.name for path in assets if "</" in path.read_text(encoding="utf-8")]


def test_what_is_hidden_in_a_text_is_made_visible() -> None:
    assert visible("a\x00\x1b[0m\x7f\x9b\u202eevil\u2028\U000e0041") == "a␀␛[0m␡⟨U+009B⟩⟨U+202E⟩evil⟨U+2028⟩⟨U+E0041⟩"
    kept = "a\tb\nc 👩‍👩‍👧 e\u0301 می‌خواهم ❤️"
    assert visible(kept) == kept


def test_page_tells_damaged_and_foreign_files(small: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    records = run / "token_records"
    records.mkdir(parents=True)
    good = (small / "first" / "token_records" / "step_00020.parquet").read_bytes()
    (records / "step_00020.parquet").write_bytes(good)
    (records / "step_00030.parquet").write_bytes(good[: len(good) // 2])
    damaged = bytearray(good)
    damaged[200:1200] = b"\xff" * 1000
    (records / "step_00040.parquet").write_bytes(bytes(damaged))
    pyarrow.parquet.write_table(pyarrow.table({"strange": [1]}), records / "step_00050.parquet")
    table = pyarrow.parquet.read_table(records / "step_00020.parquet")
    strange = table.set_column(table.column_names.index("stages"), "stages", pyarrow.array([5] * len(table)))
    pyarrow.parquet.write_table(strange, records / "step_00060.parquet")
    infinite = table.set_column(table.column_names.index("group"), "group", pyarrow.array([math.inf] * len(table)))
    pyarrow.parquet.write_table(infinite, records / "step_00070.parquet")
    path, notes = written([load_run(run)], tmp_path)
    page = Page(path.read_text(encoding="utf-8"))
    assert [step["step"] for step in page.index["runs"][0]["steps"]] == [20]
    for name in ("step_00030", "step_00040", "step_00050", "step_00060", "step_00070"):
        assert any(name in note for note in notes), name
        assert any(name in text for text in page.text), name


def test_page_shows_findings_first(small: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(small / "first", run)
    steps = range(1, 41)
    write_history(run, [{"step": n, "reward": n / 40, "eval_reward": 1 - n / 40, "entropy": 1.0} for n in steps])
    page = Page(written(load_runs([run, small / "second"]), tmp_path)[0].read_text("utf-8"))
    text = " ".join(" ".join(page.text).split())
    sentence = "Since step 8 the reward rises (0.113 to 0.912) while the held-out reward falls (0.887 to 0.0875)."
    assert sentence in text
    assert text.index("Findings (1)") < text.index(sentence) < text.index("Summary", text.index("Findings (1)") + 60)
    links = [attributes.get("href") for tag, attributes in page.elements if tag == "a"]
    assert {"#figure-reward_functions", "#figure-reward_total"} & {*links}
    (button,) = [attributes for tag, attributes in page.elements if tag == "button" and "data-run" in attributes]
    assert [button[f"data-{name}"] for name in ("run", "step", "filter")] == ["run", "40", "wrong-rewarded"]
    # Of two runs, the settings in which they differ stand first.
    lines = [attributes for tag, attributes in page.elements if tag == "tr" and attributes.get("class") == "differs"]
    assert len(lines) == 4  # beta, and the parameters of three rewards
    assert text.index("beta") < text.index("learning_rate")
