"""The recorder: what a full disk costs, and the choice of groups after a resumption."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.contexts import make_rollout
from tests.support import train
from trl_grpo_ext.errors import AlignmentError
from trl_grpo_ext.records.token_records import TokenRecorder
from trl_grpo_ext.types import END, Part, Parts


def test_recorder_warns_once_when_it_cannot_write(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "token_records").write_text("a file in the folder's place")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = train(tiny_model, tmp_path, max_steps=3, token_records=4)
    assert len(run.losses) == 3
    assert sum("Token records cannot be written" in str(one.message) for one in caught) == 1


def test_recorder_samples_the_same_groups_resumed() -> None:
    def chosen(recorder: TokenRecorder, step: int) -> int:
        words = SimpleNamespace(convert_ids_to_tokens=lambda ids: ["a" for _ in ids])
        rollout = make_rollout([2] * 40, groups=[row // 4 for row in range(40)], step=step, tokenizer=words)
        recorder.start(rollout, torch.arange(40), [])
        (group,) = {one["group"] for one in recorder.records()}
        return int(group)

    whole, resumed = TokenRecorder(4, seed=0), TokenRecorder(4, seed=0)
    steps = [chosen(whole, step) for step in range(8)]
    assert len(set(steps)) > 2
    assert [chosen(resumed, step) for step in range(5, 8)] == steps[5:]


def test_recorder_numbers_members_of_a_group_whose_rows_are_apart() -> None:
    words = SimpleNamespace(convert_ids_to_tokens=lambda ids: ["a" for _ in ids])
    recorder = TokenRecorder(4, seed=0)
    recorder.start(make_rollout([2] * 4, groups=[0, 1, 0, 1], tokenizer=words), torch.arange(4), [])
    assert [(one["group"], one["member"]) for one in recorder.records()] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_parts_and_the_part_of_each_token() -> None:
    words = SimpleNamespace(convert_ids_to_tokens=lambda ids: ["a" for _ in ids])
    first = Parts([Part("x", 1.0, places=(0, 2)), Part("y", 0.5, places=(1, 3)), Part("tone", 0.25)])
    second = Parts({"y": (0.0, None), "x": None, "z\ud800": (1.0, END)})
    rollout = make_rollout([4, 3], parts={"r": [first, second]}, tokenizer=words)
    recorder = TokenRecorder(2, seed=0)
    recorder.start(rollout, torch.arange(2), [])
    one, other = recorder.records()
    assert one["parts"] == ["r/x", "r/y", "r/tone"]
    assert one["part_scores"] == [1.0, 0.5, 0.25]
    assert one["part_present"] == [True, True, True]
    assert one["token_part"] == [0, 1, 1, -1]
    assert (other["parts"], other["part_scores"]) == (["r/y", "r/z?"], [0.0, 1.0])
    assert (other["part_present"], other["token_part"]) == ([False, True], [-1, -1, 1])

    def unaligned(row: int) -> Any:
        raise AlignmentError("no")

    recorder.start(make_rollout([4], parts={"r": [first]}, tokenizer=words, offsets=unaligned), torch.arange(1), [])
    (lost,) = recorder.records()
    assert lost["token_part"] is None
    assert lost["part_scores"] == [1.0, 0.5, 0.25]
