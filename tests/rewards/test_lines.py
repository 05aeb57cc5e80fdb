"""`Lines`: which lines count, where they stand, what pays for stopping, and texts that are made to slow it down."""

import time
from typing import Any

import pytest

from tests.rewards.test_json_fields import said
from trl_grpo_ext.rewards.lines import Lines
from trl_grpo_ext.types import END


def scored(text: Any, expected: Any, **parameters: Any) -> Any:
    (score,) = Lines(**parameters)(completions=[text], lines=[expected])
    return score


def test_lines_are_parts_in_order() -> None:
    text = "\n  Rome \r\n\n\t18.0\nmore"
    score = scored([{"role": "assistant", "content": text}], ["Rome", 18, "yes", "no"])
    assert score == 0.5
    found = [(1.0, ["Rome"]), (1.0, ["18.0"]), (0.0, ["more"]), (0.0, [])]
    assert said(score, text) == {f"line_{number}": line for number, line in enumerate(found, 1)}
    assert score.parts[0].places == ((3, 7, None),)


def test_numbered_items_are_found_by_their_numbers() -> None:
    text = "Answers:\n 2) 18\n1. Rome\n3: \n4.yes\n5. a\n5. a\n99. x\n3"
    score = scored(text, ["Rome", 18, "x", "yes", "a"], form="numbered")
    assert score == pytest.approx(3 / 5)
    found = [(1.0, ["Rome"]), (1.0, ["18"]), (0.0, []), (1.0, ["yes"]), (0.0, ["a", "a"])]  # 3 has no answer
    assert said(score, text) == {f"line_{number}": line for number, line in enumerate(found, 1)}


def test_decimals_and_times_are_items_only_where_nothing_else_is() -> None:
    items = "1. Rome\n2. 18\n3. yes"
    for text, value in (
        *((f"{items}\n\n2.5 million live there.", 1.0), (f"2:30 now\n{items}", 1.0), (f"{items}\n2. 5", 2 / 3)),
        *(("1.Rome\n2.18\n3.yes", 1.0), ("1)Rome\n2)18\n3)yes", 1.0), ("3:yes\n2:18\n1:Rome", 1.0)),
        *(("1. Rome\n2.18\n3. yes", 1.0), ("1. Rome\n2.18\n2.17\n3. yes", 2 / 3)),
    ):
        assert scored(text, ["Rome", 18, "yes"], form="numbered") == pytest.approx(value), text
    last = scored("2.18\n1. Rome", ["Rome", 18], form="numbered", stop=1.0).parts[-1]
    assert last.score == 1.0


@pytest.mark.parametrize(("text", "stopped"), [("a\nb \n\n", 1.0), ("a\nb\nc", 0.0), ("a", 0.0), ("a\n\nc", 1.0)])
def test_stopping_is_paid_at_the_end(text: str, stopped: float) -> None:
    score = scored(text, ["a", "b"], stop=0.5)
    *answers, stop = score.parts
    assert stop == ("stop", stopped, 0.5, (END,))
    assert score == pytest.approx((sum(part.score for part in answers) + 0.5 * stopped) / 2.5)


RIGHT: list[tuple[str, Any, dict[str, Any]]] = [
    *(("1,200.0", 1200, {}), ("+1.2e3", 1200, {}), (".5", 0.5, {}), ("1.01", 1, {"absolute": 0.01})),
    ("ROME  it", " Rome it", {"ignore_case": True, "ignore_space": True}),
]
WRONG: list[tuple[str, Any, dict[str, Any]]] = [
    *((line, 12, {}) for line in ("12 eggs", "$12", "1_2", "NaN", "१२", "1,2", "12.0.0", "e", ".", "-", "9" * 5000)),
    *(("1.011", 1, {"absolute": 0.01}), ("1e9999", 12, {"relative": 1.0}), ("Rome.", "Rome", {})),
    *(("12.0", "12", {}), ("ROME  it", "Rome it", {"ignore_case": True})),
]


def test_lines_that_count_as_right() -> None:
    for rows, value in ((RIGHT, 1.0), (WRONG, 0.0)):
        for line, wanted, options in rows:
            assert said(scored(line, [wanted], **options), line) == {"line_1": (value, [line])}, (line, wanted)
    assert [part.score for part in scored("a\nb\nc", ["a", None, "x"]).parts] == [1.0, None, 0.0]


def test_outcomes_of_lines_are_told_apart() -> None:
    reward = Lines(max_characters=10, outcomes={"no_answer": -1.0}, stop=0.5)
    texts = ["", " \n\t", "x" * 11, "a"]
    judged = reward.judge(texts, lines=[["a", "b"]] * 4)
    assert [one.outcome.value for one in judged] == ["no_answer", "no_answer", "refused", "scored"]
    assert reward.judge(["a"], lines=[["a"]])[0].outcome.value == "right"
    scores: list[Any] = reward(completions=texts, lines=[["a", "b"]] * 4)
    assert scores == [-1.0, -1.0, 0.0, 0.4]
    assert [part.score for part in scores[0].parts] == [-1.0, -1.0, -1.0]


@pytest.mark.parametrize(
    "expected", [None, "a", [], [None], [""], [True], [["a"]], [float("nan")], {"a": 1}, ["a\nb"], 3], ids=repr
)
def test_expected_lines_that_cannot_be_read_give_none(expected: Any) -> None:
    with pytest.warns(UserWarning, match="row 1"):
        assert Lines()(completions=["a"] * 2, lines=[["a"], expected]) == [1.0, None]


def test_hostile_texts_take_linear_time() -> None:
    texts = [" " * 99_999, "\n" * 99_999, "1." * 49_999, "1. \n" * 24_999, "1" * 99_999, "1. a" + " " * 99_990]
    start = time.process_time()
    for form in ("plain", "numbered"):
        Lines(form=form, stop=1)(completions=texts, lines=[["a", 1]] * len(texts))
    assert time.process_time() - start < 2.0
