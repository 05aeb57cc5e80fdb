"""The recipes' trainer: evaluations at a temperature of their own."""

from pathlib import Path
from typing import Any

from common.trainer import RecipeTrainer

import pytest
from datasets import Dataset

from tests.support import arguments


@pytest.mark.parametrize("temperature", [1e-4, None])
def test_evaluation_temperature(temperature: float | None, tiny_model: Path, tmp_path: Path) -> None:
    seen: list[list[int]] = []

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        seen.extend(completion_ids)
        return [float(len(ids)) for ids in completion_ids]

    rows = Dataset.from_list([{"prompt": "abc "}] * 16)
    args = arguments(tmp_path, max_steps=1, num_generations_eval=8, per_device_eval_batch_size=16)
    trainer = RecipeTrainer(str(tiny_model), reward, args, rows, rows)
    trainer.eval_temperature = temperature
    trainer.evaluate()
    evaluated = {tuple(ids) for ids in seen}
    assert len(evaluated) > 4 if temperature is None else len(evaluated) == 1
    seen.clear()
    trainer.train()
    assert len({tuple(ids) for ids in seen}) > 4
    assert trainer.generation_config.temperature == trainer.generation_kwargs["temperature"] == trainer.temperature
