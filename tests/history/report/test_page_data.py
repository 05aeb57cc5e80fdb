"""The data of a page by itself: which completions it has, their numbers and places, and the one to open."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.history.report.make_big_run import write_big_run
from tests.history.report.test_page import Page, slow_utf16, unpack
from trl_grpo_ext.history.report import load_run
from trl_grpo_ext.history.report.page import page
from trl_grpo_ext.history.report.page_data import (
    PageData,
    _add_to_index,
    live_credit,
    page_data,
    place_to_open,
    plain_text,
    read_rows,
    utf16_spans,
)


def test_numbers_that_json_lacks_keep_their_meaning(small: Path) -> None:
    run = load_run(small / "first")
    (row, *_) = read_rows(run, run.records[0])
    row.values["logp"] = numpy.resize([1.234567, numpy.nan, numpy.inf, -numpy.inf], len(row.tokens or ()))
    data = PageData()
    part, *_ = unpack(data.chunks[_add_to_index(data, run.records[0], [row])["numbers"]])
    assert part["logp"][:4] == [1.2346, None, math.inf, -math.inf]


@given(st.text(), st.data())
def test_places_in_a_text_are_counted_as_browsers_do(text: str, data: st.DataObject) -> None:
    place = st.integers(0, len(text))
    starts, ends = (numpy.array(data.draw(st.lists(place, min_size=4, max_size=4))) for _ in range(2))
    encodable = "".join("?" if 0xD800 <= ord(c) < 0xE000 else c for c in text)
    assert utf16_spans(text, starts, ends).tolist() == [
        [slow_utf16(encodable, start), slow_utf16(encodable, end)] for start, end in zip(starts, ends, strict=True)
    ]


def test_a_limit_takes_whole_groups_spread_over_the_steps(tmp_path: Path) -> None:
    run = write_big_run(tmp_path / "run", steps=6, groups=2, size=3, tokens=8)
    data = page_data([load_run(run)], 12)
    steps = data.index["runs"][0]["steps"]
    assert [step["step"] for step in steps] == [20, 60, 80, 120]
    assert [step["member"] for step in steps] == [[0, 1, 2]] * 4
    assert "of the 24 completions saved at 4 steps 12 are on this page, and 2 more steps were saved." in data.notes[0]
    without, _ = page([load_run(run)], 0)
    assert Page(without).index == {"runs": []}
    assert "No completions are on this page." in without
    everything = page_data([load_run(run)], 1000)
    assert everything.notes == []
    assert sum(len(step["group"]) for step in everything.index["runs"][0]["steps"]) == 36


def test_live_credit_by_hand(small: Path) -> None:
    run = load_run(small / "first")
    (row, *_) = read_rows(run, run.records[0])
    row.columns["live"] = [1, 1, 0]
    row.stages[-1] = ("last", numpy.float32([0.5, -0.25, 9]))
    row.values |= {"advantage": numpy.float32([1, 2, 9]), "weight": numpy.float32([0.25, 0, 9])}
    assert live_credit(row).tolist() == [0.25, 0]
    row.trained = False
    assert live_credit(row).tolist() == [0.25, -0.125]


def test_place_to_open_has_signal(small: Path) -> None:
    run = load_run(small / "first")
    assert [tuple(shown["opens"]) for shown in page_data([run], 1000).index["runs"]] == [(1, 0)]
    up = dataclasses.replace(read_rows(run, run.records[0])[0], group=7, has_signal=True)
    silent = dataclasses.replace(up, group=0, has_signal=False)
    assert place_to_open([[up], [silent, up]]) == (1, 1)
    assert place_to_open([[silent, silent, up], [silent]]) == (0, 1)  # the second group of the first step
    assert place_to_open([[silent], [silent]]) == (1, 0)
    assert place_to_open([]) == (0, 0)


def test_without_token_records_trls_tables_are_shown(small: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(small / "first", run, ignore=shutil.ignore_patterns("token_records"))
    index = page_data([load_run(run)], 1000).index["runs"][0]
    assert index["rewards"] == ["right_answer", "think_format", "language"]
    for step in index["steps"]:
        table = pyarrow.parquet.read_table(run / "completions" / f"completions_{step['step']:05d}.parquet").to_pandas()
        assert step["numbers"] is None
        assert step["group"] == [0] * 4 + [1] * 4 + [2] * 4
        assert step["member"] == [0, 1, 2, 3] * 3
        right = [numpy.nan if value is None else value for value in step["rewards"]["right_answer"]]
        assert right == pytest.approx(table["right_answer"].tolist(), nan_ok=True)
        assert step["credit"] == pytest.approx(table["advantage"].tolist())


def test_messages_become_text_with_their_roles() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}]
    assert plain_text(messages) == plain_text(json.dumps(messages)) == "[user]\nhi\n\n[assistant]\nyes"
    assert plain_text('[{"broken') == '[{"broken'
    assert plain_text(None) == ""
