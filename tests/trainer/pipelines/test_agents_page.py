"""The code of docs/pipelines.md, executed as it stands in trainings with tools and environments."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from tests.docs_site.blocks import ROOT, blocks_of
from tests.trainer.support import ASKED, TEMPERATURE, Watch, biases, call, result, talker
from trl_grpo_ext.advantages.turn_credit import rewards_of_turns


def block(part: str) -> str:
    (found,) = [one.text for one in blocks_of(ROOT / "docs" / "pipelines.md") if part in one.text]
    return found


def names_of_the_reader(model: Path, folder: Path, scripts: Any, **columns: Any) -> dict[str, Any]:
    tokenizer = talker(model)
    prompts = [[{"role": "user", "content": q}] for q in ("2*3?", "what is 2 by 3?")]
    settings = {"generation_kwargs": biases(tokenizer, scripts), "max_completion_length": 250, "token_records": 8}
    settings |= {"per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 1, "temperature": TEMPERATURE}
    settings |= {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
    names = {"model": str(model), "output_dir": str(folder), "settings": settings, "tokenizer": tokenizer}
    return {**names, "dataset": Dataset.from_dict({"prompt": prompts, **columns})}


def executed(source: str, names: dict[str, Any], watch: Watch) -> dict[str, Any]:
    source = source.replace("advantage_hooks=[", "advantage_hooks=[_watch, ")  # which acts behind the estimator
    names["_watch"] = watch
    exec(compile(source, "docs/pipelines.md", "exec"), names)
    return names


def test_tools(tool_model: Path, tmp_path: Path) -> None:
    scripts = {
        ASKED: [call("multiply", a=2, b=3), call("multiply", a=2), "it is 5"],
        result("6"): ["it is 6"],
        result("{'error': \"multiply() missing 1 required positional argument: 'b'\"}"): ["it is 6", "no idea"],
    }
    watch = Watch()
    names = executed(block("def multiply"), names_of_the_reader(tool_model, tmp_path, scripts, answer=[6, 6]), watch)
    ((_, rollout),) = watch.seen
    assert rollout.reward_names == ("right", "tool_use")
    outcomes = {tuple(c.outcome for turn in rollout.turns(row) for c in turn.calls) for row in range(8)}
    assert outcomes <= {("returned",), ("raised",), ()}
    assert len(outcomes) > 1
    for row in range(8):
        turns = rollout.turns(row)
        values = rollout.parts["tool_use"].scores_B_M[row, : len(turns)].tolist()
        expected = {"returned": 0.1, "raised": -0.1}
        assert values == pytest.approx([sum(expected[c.outcome] for c in turn.calls) for turn in turns])
    assert [type(hook).__name__ for hook in names["trainer"].advantage_hooks] == ["TurnRewards", "Watch", "ToolErrors"]


@pytest.mark.slow
def test_an_environment(tool_model: Path, tmp_path: Path) -> None:
    scripts = {
        ASKED: [call("increment", by=2), call("increment", by=9)],
        result("2"): [call("increment", by=2), "done"],
        result("9"): ["done"],
        result("4"): ["done"],
    }
    watch = Watch()
    executed(block("class Counter"), names_of_the_reader(tool_model, tmp_path, scripts, target=[4, 2]), watch)
    ((_, rollout),) = watch.seen
    expected = {  # by target and what was added: the steps, and 5 in the turn behind them where it was met
        (4, (2, 2)): [2, 2, 5],
        (4, (2,)): [2, 0],
        (4, (9,)): [-1, 0],
        (2, (2, 2)): [2, -2, 0],
        (2, (2,)): [2, 5],
        (2, (9,)): [-5, 0],
    }
    for row in range(8):
        added = tuple(c.arguments["by"] for turn in rollout.turns(row) for c in turn.calls)
        values = rollout.parts["Counter"].scores_B_M[row]
        assert values[~values.isnan()].tolist() == expected[rollout.columns["target"][row], added]
    table = rewards_of_turns(rollout)
    assert torch.allclose(table.turns_B_M.sum(1), rollout.rewards_B.float())
    assert not bool(table.outcome_B.any())


@pytest.mark.slow
def test_rewards_and_hooks_of_ones_own(tool_model: Path, tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(block("class NoSecondTime"), names)
    scripts = {ASKED: [call("multiply", a=2, b=3)], result("6"): [call("multiply", a=2, b=3), "it is 6"]}
    watch = Watch()
    reader = names_of_the_reader(tool_model, tmp_path, scripts, answer=[6, 6])
    reader["settings"]["max_tool_calling_iterations"] = 2
    source = block("def multiply").replace('{"name": "tool_errors", "penalty": 0.25}', "_mine, _behind")
    reader |= {"_mine": names["NoSecondTime"](), "_behind": (behind := Watch())}
    executed(source, reader, watch)
    ((before_B_T, rollout),), ((after_B_T, _),) = watch.seen, behind.seen
    for row in range(8):
        for turn in rollout.turns(row):
            part = slice(*turn.tokens)
            repeated = turn.number > 0 and bool(turn.calls)
            assert torch.equal(after_B_T[row, part], before_B_T[row, part] * (0.5 if repeated else 1.0))
    assert any(len(rollout.turns(row)) == 3 for row in range(8))
