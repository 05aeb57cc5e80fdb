"""How often prompts were solved, as written by a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import length_reward, train
from tests.trainer.launch import launch
from tests.trainer.process_worker import run_job
from trl_grpo_ext.records.prompt_rates import (
    RATES_FILE,
    shares_of,
    solved_groups,
)

NAN = math.nan


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / RATES_FILE).read_text(encoding="utf-8").splitlines()]


def test_a_completion_solves_its_prompt_at_every_threshold() -> None:
    rewards = torch.tensor([[1, 0.5], [1, 0.4], [NAN, 1], [0.9, 1], [1, 1], [1, 1], [NAN, 1], [1, NAN]])
    thresholds = {(0, "a"): 0.9, (1, "b"): 0.5}
    assert solved_groups(rewards, thresholds, 4) == [(2, 3), (2, 2)]
    assert solved_groups(rewards, {(1, "b"): 0.5}, 2) == [(1, 2), (2, 2), (2, 2), (1, 1)]
    assert shares_of([(2, 3), (2, 2), (0, 4), (0, 0)]) == {"groups/all_solved": 1 / 3, "groups/none_solved": 1 / 3}
    assert shares_of([(0, 0)]) == {}


class Asked:
    """A reward that keeps the prompts that it saw; all solve the first, none the second, some the others."""

    __name__ = "asked"

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def __call__(self, prompts: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        self.prompts += prompts
        other = length_reward(completion_ids)
        return [{"a": 2.0, "b": -2.0}.get(p[0], value) for p, value in zip(prompts, other, strict=True)]


def test_what_a_run_writes(tiny_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 4, "prompt_count": 4, "pass_thresholds": {"asked": 0.3}}
    first = train(tiny_model, tmp_path / "1", reward_funcs=Asked(), prompt_rates=True, **settings)
    lines = lines_of(tmp_path / "1")
    assert [line["step"] for line in lines] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [line["prompt"][0] for line in lines] == [*"abcdabcd"]
    assert [line["rate"] for line in lines[:2]] == [1.0, 0.0]
    for line in lines:
        assert line["rate"] == line["solved"] / line["sampled"]
        assert line["sampled"] == 4
    assert 0 < lines[2]["rate"] < 1
    logged = [log["groups/all_solved"] for log in first.logs if "groups/all_solved" in log]
    assert logged[::2] == [0.5, 0.5]


def test_a_resumed_run_ends_with_the_file_of_an_uninterrupted_one(tiny_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"reward_funcs": Asked(), "prompt_rates": True, "max_steps": 4, "save_steps": 2}
    run = train(tiny_model, tmp_path, save_strategy="steps", **settings)
    whole = (tmp_path / RATES_FILE).read_text(encoding="utf-8")
    with (tmp_path / RATES_FILE).open("a", encoding="utf-8") as file:
        file.write('{"step": 3, "prom')
    run.trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert (tmp_path / RATES_FILE).read_text(encoding="utf-8") == whole
    assert len(whole.splitlines()) == 8


@pytest.mark.slow
def test_two_processes_write_the_same_also_where_groups_are_split(tiny_model: Path, tmp_path: Path) -> None:
    job = {"per_device_train_batch_size": 6, "prompt_count": 6, "prompt_rates": True, "max_steps": 2}
    job["pass_thresholds"] = {"length_reward": 0.9}
    two, other = launch({"rates": dict(job)}, tiny_model, tmp_path / "two")
    run_job(tiny_model, tmp_path / "one", {**job, "per_device_train_batch_size": 12})
    (file,) = (tmp_path / "two").rglob(RATES_FILE)
    found = lines_of(file.parent)
    assert found == lines_of(tmp_path / "one")
    assert {line["rate"] for line in found} - {0.0, 1.0}
    assert len(found) == 6
    for rank in (two, other):
        assert all("groups/none_solved" in log for log in rank["rates"]["logs"][:2])
