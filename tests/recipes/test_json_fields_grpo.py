"""`recipes/json_fields_grpo.py`: its task, its rewards, and one step of the real model as a person starts it."""

import json
from pathlib import Path

import pytest
from json_fields import task

from tests.recipes.launching import RECIPES, trained
from trl_grpo_ext import load_rewards
from trl_grpo_ext.rewards.json_schema import JSONSchema

SCRIPT = RECIPES / "json_fields_grpo.py"


def test_held_out_answers_are_new_and_in_the_text() -> None:
    train, held_out = (task.make_problems(split, 300, 0) for split in ("train", "heldout"))
    assert train == task.make_problems("train", 300, 0) != task.make_problems("train", 300, 1)
    schema = JSONSchema(extract="whole")
    right = [row["fields"] for row in train]
    schemas = [row["schema"] for row in train]
    assert schema(right, schema=schemas) == [1.0] * 300
    (reward,) = load_rewards([task.REWARD])
    assert reward(completions=right, fields=right) == [1.0] * 300
    others = [*schemas[1:], schemas[0]]
    shared = [float(mine == other) for mine, other in zip(schemas, others, strict=True)]
    assert schema(right, schema=others) == shared
    for row in [*train, *held_out]:
        text = row["prompt"][-1]["content"].split("\n")[0].lower()
        for name, value in json.loads(row["fields"]).items():
            if not isinstance(value, bool):
                said = {f"{value:.2f}", f"{value:g}"} if isinstance(value, float) else {str(value).lower()}
                said |= {task.NUMBERS[value - 2]} if isinstance(value, int) and 2 <= value <= 12 else set()
                assert any(one in text for one in said), (name, row)
    words = [{word for name in (task.NAMES, task.THINGS, task.CITIES) for word in name[split]} for split in task.NAMES]
    assert not words[0] & words[1]
    assert not {one for kind in task.KINDS for one in kind.train} & {one for kind in task.KINDS for one in kind.heldout}


def test_each_field_is_right_or_wrong_at_its_place() -> None:
    wanted = '{"city": "Rome", "boxes": 3, "weight": 4.0, "fragile": true}'
    (reward,) = load_rewards([task.REWARD])
    for said, scores in (
        ('{"city": " rome", "boxes": 3, "weight": 4, "fragile": true}', [1, 1, 1, 1]),
        ('{"city": "Rome", "boxes": "3", "weight": 4.5, "fragile": 1}', [1, 0, 0, 0]),
        ('{"city": "Rome", "boxes": true, "weight": {"a": [4.0, "}"]}, "x": 1, "fragile": true}', [1, 0, 0, 1]),
        *((text, [0, 0, 0, 0]) for text in (f"It is {wanted}", wanted[:-1], "[" * 9999)),
    ):
        (score,) = reward(completions=[said], fields=[wanted])
        assert score == sum(scores) / 4, said
        assert [part.score for part in score.parts] == scores
        assert [part.name for part in score.parts] == list(json.loads(wanted))


@pytest.mark.real
@pytest.mark.slow
def test_one_step_of_the_real_model(smollm2: str, tmp_path: Path) -> None:
    words = "--max_steps 1 --per_device_train_batch_size 8 --num_generations 4 --per_device_eval_batch_size 4"
    words += f" --eval_problems 4 --train_problems 8 --max_completion_length 16 --model_name_or_path {smollm2}"
    metrics = trained(SCRIPT, tmp_path, *words.split()).metrics
    for which in ("before", "after"):
        assert {"json_fields", "json_schema"} <= metrics[which].keys()
