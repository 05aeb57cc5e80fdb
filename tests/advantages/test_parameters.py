"""Parameters of the hooks: what is refused, with the value, what is at the ends of the ranges, and what is missing."""

from __future__ import annotations

import math
import pickle
import re
from typing import Any

import pytest

from tests.advantages.token_batches import after_rollout, hook
from tests.contexts import make_rollout, padded
from trl_grpo_ext import load_advantage_hooks
from trl_grpo_ext.errors import ConfigurationError, PluginParameterError

NOT_A_NUMBER: tuple[Any, ...] = (math.nan, math.inf, -math.inf, "1", True, [1.0], None)
NOT_POSITIVE: tuple[Any, ...] = (*NOT_A_NUMBER, 0, -1.0)
NOT_A_SHARE: tuple[Any, ...] = (*NOT_A_NUMBER, -0.1, 1.1)
NEGATIVE: tuple[Any, ...] = (*NOT_A_NUMBER, -0.1)
NO_TEXT: tuple[Any, ...] = ("", 5, True)
REFUSED: dict[tuple[str, str], tuple[Any, ...]] = {
    ("normalised", "epsilon"): NOT_POSITIVE,
    ("normalised", "std_floor"): NEGATIVE,
    ("normalised", "std"): ("unbiased", "", None, 1),
    ("constant_baseline", "baseline"): NOT_A_NUMBER,
    ("quantile_baseline", "quantile"): (*NOT_A_SHARE, 0, 1),
    ("quantile_baseline", "scale"): ("yes", 1, None),
    ("quantile_baseline", "epsilon"): NOT_POSITIVE,
    ("best_margin", "scale"): ("yes", 1, None),
    ("best_margin", "epsilon"): NOT_POSITIVE,
    ("whiten", "over"): ("batch", "", None, True),
    ("clip_advantages", "low"): (*NOT_A_NUMBER, 0.1),
    ("clip_advantages", "high"): (*NOT_A_NUMBER, -0.1),
    ("outcome_filter", "keep"): ("positive", "", None, True),
    ("outcome_filter", "threshold"): NOT_A_NUMBER,
    ("entropy_weighted", "base"): NEGATIVE,
    ("entropy_weighted", "share"): NOT_POSITIVE,
    ("entropy_weighted", "level"): ("group", "", None),
    ("batch_whitening", "std_floor"): NOT_POSITIVE,
    ("batch_whitening", "baseline"): ("prompt", "", True, None, ["group"]),
    ("pass_at_k", "k"): (0, -1, 2.0, 2.5, True, "2", None, math.nan),
    ("pass_at_k", "threshold"): NOT_A_NUMBER,
    ("sign_scaling", "positive"): NEGATIVE,
    ("sign_scaling", "negative"): NEGATIVE,
    ("entropy_shaping", "alpha"): NOT_POSITIVE,
    ("entropy_shaping", "kappa"): (*NOT_A_NUMBER, 1.0, -2.0),
    **{("segment_weights", weight): NEGATIVE for weight in ("think", "answer", "tags", "other")},
    ("segment_weights", "open"): NO_TEXT,
    ("segment_weights", "close"): (*NO_TEXT, None, "<think>"),  # which opens
    ("span_credit", "normalise"): ("yes", 1, None),
    ("span_credit", "without_spans"): ("some", None),
    ("span_credit", "patterns"): (["a"], {"r0": 5}, {5: "a"}, {"r0": "(unclosed"}),
    ("process_rewards", "reward"): NO_TEXT,
    ("process_rewards", "separator"): NO_TEXT,
    ("process_rewards", "form"): ("max", None),
    ("process_rewards", "baseline"): ("batch", None),
    ("process_rewards", "mode"): ("multiply", None),
    ("process_rewards", "temperature"): NOT_POSITIVE,
    ("process_rewards", "gamma"): NOT_A_SHARE,
    ("process_rewards", "coefficient"): NOT_A_NUMBER,
    ("kl_in_reward", "coefficient"): NOT_POSITIVE,
    ("kl_in_reward", "gamma"): (*NOT_A_SHARE, 0),
    ("kl_in_reward", "estimator"): ("k4", "K1", "", None, 1, ["k1"]),
    ("kl_in_reward", "target"): tuple(value for value in NOT_POSITIVE if value is not None),
    ("kl_in_reward", "horizon"): NOT_POSITIVE,
    ("kl_in_reward", "form"): ("sum", "", None),
    ("group_mean_gae", "gamma"): (*NOT_A_SHARE, 0),
    ("group_mean_gae", "gae_lambda"): NOT_A_SHARE,
    ("group_mean_gae", "length_alpha"): tuple(value for value in NOT_POSITIVE if value is not None),
    ("teacher_log_ratio", "teacher"): ("", "  ", None, 3, ["reference"]),
    ("teacher_log_ratio", "coefficient"): NOT_POSITIVE,
    ("teacher_log_ratio", "mode"): ("multiply", "", None, True),
    ("prefix_tree", "mode"): ("multiply", "", None, True),
    ("repetition_penalty", "ngram"): (0, -1, 1.5, 40.0, "40", True, None),
    ("repetition_penalty", "penalty"): NOT_POSITIVE,
    ("truncation_masking", "keep"): ("positive", "", None, True),
    ("zero_variance_credit", "alpha"): NOT_POSITIVE,
    ("zero_variance_credit", "correct_above"): NOT_A_NUMBER,
    ("low_probability", "alpha"): NOT_A_SHARE,
    ("future_kl", "half_life"): NOT_POSITIVE,
    ("future_kl", "epsilon_low"): NOT_A_SHARE,
    ("future_kl", "epsilon_high"): (*NOT_A_NUMBER, -0.1, 0),  # 0 because epsilon_low is 0 too
    ("future_kl", "ratio_cap"): (*NOT_A_NUMBER, 1.0, 0.5),
    ("future_kl", "safety_threshold"): tuple(value for value in NOT_POSITIVE if value is not None),
    ("covariance_clip", "low"): (*NOT_A_NUMBER, 5.0, 6.0),  # high is 5
    ("covariance_clip", "high"): (*NOT_A_NUMBER, 1.0, 0.5),  # low is 1
    ("covariance_clip", "ratio"): (*NOT_A_SHARE, 0),
}
CASES = [(name, parameter, value) for (name, parameter), values in REFUSED.items() for value in values]


@pytest.mark.parametrize(("name", "parameter", "value"), CASES, ids=repr)
def test_refused_with_name_and_value(name: str, parameter: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        hook(name, **{parameter: value})
    message = str(caught.value)
    assert f"{name}: " in message
    assert re.search(r" must (not )?(be|have) ", message)
    assert re.search(rf"\b{parameter}\b", message)
    assert (repr(value) if not isinstance(value, dict) else repr(next(iter(value.values())))) in message


@pytest.mark.parametrize("zero", [0, 0.0])
def test_sign_scaling_must_leave_something_to_learn(zero: float) -> None:
    with pytest.raises(ConfigurationError, match="nothing would be learnt"):
        hook("sign_scaling", positive=zero, negative=zero)


WITHOUT = ("raw_reward", "centred", "max_only", "leave_one_out", "optimal_baseline", "mean_relative")


@pytest.mark.parametrize("name", WITHOUT)
def test_those_without_parameters_take_none(name: str) -> None:
    with pytest.raises(PluginParameterError):
        load_advantage_hooks([{"name": name, "epsilon": 1}])


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("kl_in_reward", {"gamma": 1, "target": 6, "horizon": 1}),
        ("group_mean_gae", {"gamma": 1, "gae_lambda": 0}),
        ("repetition_penalty", {"ngram": 1}),
        ("zero_variance_credit", {"correct_above": -1}),
        ("low_probability", {"alpha": 0}),
        ("future_kl", {"epsilon_low": 1, "epsilon_high": 0, "safety_threshold": None}),
        ("covariance_clip", {"low": -1, "high": 0, "ratio": 1}),
    ],
)
def test_the_ends_of_the_ranges_are_allowed(name: str, parameters: dict[str, Any]) -> None:
    copied = pickle.loads(pickle.dumps(hook(name, **parameters)))
    assert {key: getattr(copied, key) for key in parameters} == parameters


def test_an_adapted_coefficient_survives_pickling() -> None:
    adaptive = hook("kl_in_reward", target=6.0)
    adaptive.load_state_dict({"coefficient": 0.7})
    assert pickle.loads(pickle.dumps(adaptive)).state_dict() == {"coefficient": 0.7}


@pytest.mark.parametrize("name", ["kl_in_reward", "teacher_log_ratio"])
@pytest.mark.parametrize("missing", ["old_logps_B_T", "ref_logps_B_T"])
def test_what_is_needed_and_missing_is_named(name: str, missing: str) -> None:
    logps = {"old_logps_B_T": padded([[-1.0]]), "ref_logps_B_T": padded([[-2.0]])}
    with pytest.raises(ConfigurationError, match=f"{name}: rollout.{missing}"):
        after_rollout(make_rollout([1], **{**logps, missing: None}), [1.0], name)
