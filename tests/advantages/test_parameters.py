"""Parameters of the hooks: what is refused, with the value, and what is missing."""

import math
from typing import Any

import pytest

from tests.advantages.token_batches import after_rollout, hook
from tests.contexts import make_rollout, padded
from trl_grpo_ext import available, load_advantage_hooks
from trl_grpo_ext.errors import ConfigurationError, PluginParameterError
from trl_grpo_ext.plugins.building import import_plugin

REQUIRED: dict[str, dict[str, Any]] = {"reward_schedule": {"weights": {"right": [[0, 1.0]]}}}
BEYOND: dict[str, dict[str, Any]] = {
    "normalised": {"epsilon": 0, "std_floor": -0.1},
    "running_baseline": {"decay": 1},
    "batch_whitening": {"std_floor": 0},
    "pass_at_k": {"k": 0},
    "group_mean_gae": {"gamma": 1.1, "gae_lambda": -0.1, "length_alpha": 0},
    "process_rewards": {"temperature": 0, "gamma": 1.1},
    "self_distilled": {"strength": 1.1, "clip": 0},
    "turn_rewards": {"gamma": 1.5, "turn_weight": -1.0},
    "gigpo": {"step_weight": -1, "gamma": 2},
    "clip_advantages": {"low": 0.1, "high": -0.1},
    "sign_scaling": {"positive": -0.1},
    "kl_in_reward": {"coefficient": 0, "gamma": 0, "target": 0},
    "sequence_rejection": {"low": 1.0, "high": 1.0},
    "entropy_shaping": {"alpha": -1, "kappa": 1.0},
    "low_probability": {"alpha": 1.1},
    "future_kl": {"half_life": 0, "epsilon_low": 1.1, "epsilon_high": -0.1, "ratio_cap": 1.0, "safety_threshold": 0},
    "divergence_mask": {"low": 0, "high": -0.1},
    "ratio_bounds": {"high": 1.0, "low": 1.0},
}
"""Numbers just outside of their ranges."""
TOGETHER: dict[str, dict[str, Any]] = {
    "turn_rewards": {"form": "turn_plus_outcome", "gamma": 0.5},
    "group_mean_gae": {"gae_lambda": 0.9, "length_alpha": 0.05},
    "kl_in_reward": {"form": "completion", "gamma": 0.9},
}


@pytest.mark.parametrize("info", [i for i in available("advantage_hook") if i.builtin], ids=lambda info: info.name)
def test_parameters_refuse_with_name_and_value(info: Any) -> None:
    exported = import_plugin(info)
    parameters = getattr(exported.__init__, "__kwdefaults__", None) or {}
    wrong: list[tuple[str, Any]] = [(name, value) for name in parameters for value in (["nonsense"], math.nan)]
    for parameter, value in [*wrong, *BEYOND.get(info.name, {}).items()]:
        with pytest.raises(ConfigurationError, match=f"{info.name}: {parameter}") as caught:
            exported(**{**REQUIRED.get(info.name, {}), parameter: value})
        assert repr(value) in str(caught.value)
    if info.name in TOGETHER:
        with pytest.raises(ConfigurationError, match=f"{info.name}: "):
            hook(info.name, **TOGETHER[info.name])
    if not parameters:
        with pytest.raises(PluginParameterError):
            load_advantage_hooks([{"name": info.name, "alpha": 1.0}])


@pytest.mark.parametrize("name", ["kl_in_reward", "teacher_log_ratio"])
def test_what_is_needed_and_missing_is_named(name: str) -> None:
    with pytest.raises(ConfigurationError, match="no log-probabilities of 'reference'"):
        after_rollout(make_rollout([1], old_logps_B_T=padded([[-1.0]])), [1.0], name)
