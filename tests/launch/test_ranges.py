"""Settings that no run can have are named with their value, before anything loads."""

import dataclasses
from typing import Any

import pytest

from trl_grpo_ext import GRPOExtConfig
from trl_grpo_ext.launch.ranges import wrong_values

WRONG = [
    ("num_generations", 0, "num_generations is 0, and must be 1 or more"),
    ("per_device_train_batch_size", "-8", "per_device_train_batch_size is -8, and must be 1 or more"),
    ("gradient_accumulation_steps", 0, "gradient_accumulation_steps is 0, and must be 1 or more"),
    ("num_generations", 0.5, "num_generations is 0.5, and must be 1 or more"),
    ("learning_rate", float("nan"), "learning_rate is nan, which is not a finite number"),
    ("learning_rate", "inf", "learning_rate is inf, which is not a finite number"),
    ("learning_rate", -1e-6, "learning_rate is -1e-06, and must be 0 or more"),
    ("seed", -1, "seed is -1, and must lie between 0 and 4294967295"),
    ("temperature", 0, "temperature is 0, and must be above 0"),
    ("top_p", 1.5, "top_p is 1.5, and must lie between 0 and 1"),
    ("beta", -0.1, "beta is -0.1, and must be 0 or more"),
    ("max_grad_norm", float("inf"), "max_grad_norm is inf, which is not a finite number"),
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
