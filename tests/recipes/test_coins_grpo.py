"""`recipes/coins_grpo.py`: its environment and task, what `bench.coins` makes of them, and a short run."""

import json
import random
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from pyarrow import parquet

from bench import coins as bench
from tests.recipes.launching import RECIPES, options, trained
from trl_grpo_ext import Parts
from trl_grpo_ext.records.manifest import FILE
from trl_grpo_ext.rewards.environment import EnvironmentSteps, record_steps
from trl_grpo_ext.types import Place

task = bench.task
SCRIPT = RECIPES / "coins_grpo.py"


def test_a_game() -> None:
    game = record_steps(task.Coins)()
    game.reset(coins=[4, 7, 2, 9, 1, 8, 0, 3])
    assert [game.left(), game.right(), game.left()] == ["7 2 9 1 8 0 3", "7 2 9 1 8 0", "2 9 1 8 0"]
    for _ in range(3):
        game.right()
    with pytest.raises(ValueError, match="over"):
        game.left()
    assert game.step_rewards[:3] == [("left", 4.0), ("right", 3.0), ("left", 7.0)]
    assert [value for _, value in game.step_rewards[3:]] == [0.0, 8.0, 1.0, None]
    assert game.taken == 23.0
    assert task.of_best([game], [[4, 7, 2, 9, 1, 8, 0, 3]]) == [23 / task.value_of([4, 7, 2, 9, 1, 8, 0, 3], max)]


def test_splits_share_no_row_in_either_direction() -> None:
    train = {tuple(coins) for coins in task.draw_rows("train", 2000, random.Random(1))}
    held = {tuple(coins) for coins in task.draw_rows("heldout", 2000, random.Random(1))}
    assert not (train | {coins[::-1] for coins in train}) & held


def test_the_control_pays_each_turn_for_the_next() -> None:
    game = record_steps(task.Coins)()
    game.reset(coins=[4, 7, 2, 9, 1, 8, 0, 3])
    messages = []
    for side in ("left", "left", "right"):
        call = {"type": "function", "function": {"name": side, "arguments": {}}}
        answer = getattr(game, side)()
        messages += [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "name": side, "content": answer}]
    for reward, scores in ((EnvironmentSteps(), [4, 7, 3]), (bench.Shuffled(), [7, 3, 4])):
        (paid,) = reward(completions=[messages], environments=[game])
        assert isinstance(paid, Parts)
        assert float(paid) == 14.0
        by_turn = {part.places[0]: part.score for part in paid.parts}
        assert by_turn == {Place(turn=turn): score for turn, score in enumerate(scores)}


def test_the_page_says_what_the_raw_runs_say() -> None:
    page = (RECIPES.parent / "docs" / "recipes.md").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in bench.RUNS.read_text(encoding="utf-8").splitlines()]
    for arm in bench.HOOKS:
        scores = {line["seed"]: line["last"] for line in lines if (line["stage"], line["arm"]) == ("evaluation", arm)}
        assert len(scores) == 5
        assert not {*bench.TUNING_SEEDS} & {*scores}
        mean = f"{fmean(scores.values()):.3f} ({min(scores.values()):.3f} to {max(scores.values()):.3f})"
        assert f"| {arm} | {bench.tuned(lines, arm):g} | 5 | {mean} |" in page


def paid_by_answers(row: dict[str, Any]) -> list[float]:
    """What each turn took, from the coins that the environment's answers show, while a turn takes one of several."""
    left = [int(coin) for coin in json.loads(row["prompt"])[0]["content"].split()]
    paid = []
    for turn, tokens in groupby(zip(row["turns"], row["tokens"], strict=True), key=itemgetter(0)):
        if turn == -1:
            shown = [int(token) for _, token in tokens if token.strip().isdigit()]
            if len(left) < 3 or len(shown) != len(left) - 1:
                break
            paid.append(float(sum(left) - sum(shown)))
            left = shown
    return paid


@pytest.mark.slow
def test_a_short_run_leaves_what_its_siblings_leave(tmp_path: Path) -> None:
    words = options(supervised_steps=30, max_steps=2, per_device_eval_batch_size=16, eval_games=16, train_games=16)
    run = trained(SCRIPT, tmp_path, *words, *options(save_steps=2))
    for which in ("before", "after"):
        assert {"environment_steps", "of_best"} <= run.metrics[which].keys()
    assert run.metrics["run"]["recipe"]["credit"] == "turns"
    files = list((tmp_path / "output" / "token_records").glob("*.parquet"))
    rows = [row for file in files for row in parquet.read_table(file).to_pylist()]
    paid = [paid_by_answers(row) for row in rows]
    assert [row["part_scores"][: len(turns)] for row, turns in zip(rows, paid, strict=True)] == paid
    assert max(map(len, paid)) > 1
    assert "turn_rewards" in (tmp_path / "output" / FILE).read_text()
