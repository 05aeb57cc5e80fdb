"""Parameters of the hooks: what is refused, with the value, what is at the ends of the ranges, and what is missing."""

import math
from typing import Any

import pytest

from tests.advantages.token_batches import after_rollout, hook
from tests.contexts import make_rollout, padded
from trl_grpo_ext import available, load_advantage_hooks
from trl_grpo_ext.errors import ConfigurationError, PluginParameterError
from trl_grpo_ext.plugins.building import import_plugin

NAN, INF = math.nan, math.inf
REFUSED: dict[str, dict[str, tuple[Any, ...]]] = {
    "normalised": {"epsilon": (0, NAN), "std_floor": (-0.1,), "std": ("unbiased",)},
    "decoupled_normalisation": {"epsilon": (0, INF)},
    "running_baseline": {"decay": (-0.1, 1), "column": ("", 5)},
    "batch_whitening": {"std_floor": (0,), "baseline": ("prompt", ["group"])},
    "pass_at_k": {"k": (0, 2.5, True), "threshold": (NAN,)},
    "group_mean_gae": {"gamma": (0, 1.1), "gae_lambda": (-0.1,), "length_alpha": (0,)},
    "process_rewards": {
        "reward": ("",),
        "form": ("max",),
        "baseline": ("batch",),
        "mode": ("multiply",),
        "temperature": (0,),
        "gamma": (1.1,),
        "coefficient": (INF,),
    },
    "part_credit": {
        "normalise": (1,),
        "completeness": ("some",),
        "outside": ("rest",),
        "reach": ("after",),
        "baseline": ("none",),
    },
    "self_distilled": {"prompt": ("", 3), "teacher": ("",), "strength": (0, 1.1), "clip": (0, 2)},
    "teacher_log_ratio": {"prompt": ("", 3), "teacher": ("", 3), "coefficient": (0,), "mode": ("",)},
    "prefix_tree": {"mode": ("multiply",)},
    "turn_rewards": {"form": ("sum",), "gamma": (1.5,), "turn_weight": (-1.0,), "normalise": (1,)},
    "gigpo": {"step_weight": (-1,), "gamma": (2,), "normalise": (1,), "states": ("", 5)},
    "whiten": {"over": ("batch",)},
    "clip_advantages": {"low": (0.1,), "high": (-0.1,)},
    "outcome_filter": {"keep": ("positive",), "threshold": (INF,)},
    "sign_scaling": {"positive": (-0.1,), "negative": (NAN,)},
    "kl_in_reward": {
        "reference": ("",),
        "coefficient": (0,),
        "gamma": (0, 1.1),
        "estimator": ("k4", ["k1"]),
        "target": (0,),
        "horizon": (INF,),
        "form": ("sum",),
    },
    "reward_schedule": {"form": ("cubic",)},
    "repetition_penalty": {"ngram": (0, 1.5), "penalty": (0,)},
    "sequence_rejection": {"low": (-0.1, 1.0), "high": (1.0, NAN)},
    "truncation_masking": {"keep": ("positive",)},
    "tool_errors": {"penalty": (0,), "over": ("row",)},
    "masked_turns": {"pick": ("middle",)},
    "zero_variance_credit": {"alpha": (0,), "correct_above": (NAN,)},
    "entropy_shaping": {"alpha": (-1,), "kappa": (1.0,)},
    "low_probability": {"alpha": (1.1,)},
    "future_kl": {
        "half_life": (0,),
        "epsilon_low": (1.1,),
        "epsilon_high": (-0.1,),
        "ratio_cap": (1.0,),
        "safety_threshold": (0,),
    },
    "divergence_mask": {"low": (0,), "high": (-0.1, NAN), "divergence": ("js",)},
    "ratio_bounds": {"mode": ("mask",), "high": (1.0, NAN), "low": (-0.1, 1.0)},
}
REQUIRED: dict[str, dict[str, Any]] = {"reward_schedule": {"weights": {"right": [[0, 1.0]]}}}
TOGETHER: dict[str, dict[str, Any]] = {
    "turn_rewards": {"form": "turn_plus_outcome", "gamma": 0.5},
    "group_mean_gae": {"gae_lambda": 0.9, "length_alpha": 0.05},
    "kl_in_reward": {"form": "completion", "gamma": 0.9},
}


@pytest.mark.parametrize("info", [i for i in available("advantage_hook") if i.builtin], ids=lambda info: info.name)
def test_parameters_refuse_with_name_and_value(info: Any) -> None:
    exported = import_plugin(info)
    parameters = getattr(exported.__init__, "__kwdefaults__", None) or {}
    assert REFUSED.get(info.name, {}).keys() == parameters.keys()
    for parameter, values in REFUSED.get(info.name, {}).items():
        for value in values:
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
