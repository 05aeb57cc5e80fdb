"""Settings that no run can have are named with their value, before anything loads."""

import dataclasses
from typing import Any

import pytest

from trl_grpo_ext import GRPOExtConfig
from trl_grpo_ext.launch.ranges import wrong_values

WRONG = [
    ("num_generations", 0, "num_generations is 0, and must be 1 or more, and finite"),
    ("per_device_train_batch_size", "-8", "is -8, and must be 1 or more, and finite"),
    ("num_generations", 0.5, "is 0.5, and must be 1 or more, and finite"),
    ("learning_rate", float("nan"), "is nan, and must be 0 or more, and finite"),
    ("learning_rate", "inf", "is inf, and must be 0 or more, and finite"),
    ("seed", -1, "seed is -1, and must be between 0 and 4294967295"),
    ("temperature", 0, "temperature is 0, and must be above 0, and finite"),
    ("top_p", 1.5, "top_p is 1.5, and must be between 0 and 1"),
]


@pytest.mark.parametrize(("name", "value", "why"), WRONG, ids=lambda one: repr(one)[:30])
def test_a_value_that_cannot_be_is_named(name: str, value: Any, why: str) -> None:
    [said] = wrong_values({name: value})
    assert said.endswith(why)


def test_ranges_take_what_is_possible() -> None:
    fine = {"num_generations": 8, "learning_rate": "1e-6", "seed": 0, "temperature": 0.7, "run_name": "nan"}
    fine |= {"max_steps": -1, "data_seed": None, "bf16": True, "rewards": ["x"], "report_to": "none", "save_steps": 0.5}
    assert wrong_values(fine) == []
    defaults = {field.name: field.default for field in dataclasses.fields(GRPOExtConfig)}
    assert wrong_values(defaults) == []
