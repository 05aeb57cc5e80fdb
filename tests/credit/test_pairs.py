"""Every two built-in hooks together: refused, or each changes the advantages beside the other, in whatever order."""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from docs.site.hook_pairs import PAGE, VARIANTS, Hook, hooks, refusal, renewed
from trl_grpo_ext import Forward, Rollout, available, load_advantage_hooks
from trl_grpo_ext.credit.chain import HookChain
from trl_grpo_ext.credit.signal import signal_table, zero_variance_of
from trl_grpo_ext.errors import PluginOutputError
from trl_grpo_ext.history.compare.running import group_advantages
from trl_grpo_ext.testing.builders import make_forward, make_rollout
from trl_grpo_ext.types import Parts, Place, ToolCall, Turn

G, T, VOCABULARY = 4, 10, 12

PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    "batch_whitening": {"std_floor": 1.0},  # or there would be nothing left to whiten
    "clip_advantages": {"low": -0.3, "high": 0.3},
    "decoupled_normalisation": {"epsilon": 0.3},  # or with one reward it is TRL's own, up to a factor
    "divergence_mask": {"low": 0.01, "high": 0.01},
    "sequence_rejection": {"low": 0.9, "high": 1.04},
    "future_kl": {"epsilon_low": 0.2},
    "kl_in_reward": {"coefficient": 1.0},
    "outcome_filter": {"keep": "failures", "threshold": 0.95},  # the best of one group is one
    "pass_at_k": {"k": 2},
    "process_rewards": {"coefficient": 5.0},
    "ratio_bounds": {"high": 1.01},
    "repetition_penalty": {"ngram": 1, "penalty": 0.05},
    "turn_rewards": {"gamma": 0.5},  # or the first turns would have what the whole completion has
}
"""What lets a hook act on this batch, where its defaults do not."""

STOPPED = {"kl_in_reward (form: completion)", "mean_relative"}
"""Accepted, and stopped by a sentence as soon as a reward less its penalty is negative."""

MAKER = "zero_variance_credit"
PUSHING = ("kl_in_reward", "kl_in_reward (form: completion)", "teacher_log_ratio", "teacher_log_ratio (mode: add)")
OVERRULED = [{MAKER, name} for name in PUSHING]
"""Beside hooks that push every group of equal rewards it does nothing, as the run says after some steps."""

MIXED, RIGHT, WRONG = [1.0, 0.2, 0.6, 0.2], [1.0] * G, [0.2] * G
REWARDS = [*MIXED, 0.9, 0.3, 0.7, 0.2, *RIGHT, *WRONG, *[0.0] * G]
"""Of five groups: two mixed, one all right, two all wrong. None is negative, as `mean_relative` asks."""

CUT = {1, 4, 9, 13, 17}
"""Completions that ended at the limit: a wrong one, a right one, and one of either group without signal."""

LENGTHS = [T - row % 3 for row in range(len(REWARDS))]


def tables() -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Token ids, and by policy the log-probabilities and entropies of the tokens; the three policies are close."""
    generator = torch.Generator().manual_seed(3)
    drawn = functools.partial(torch.randn, (len(REWARDS), T), generator=generator, dtype=torch.float64)
    ids_B_T = torch.randint(1, VOCABULARY, (len(REWARDS), T), generator=generator)
    for group in range(0, len(REWARDS), G):  # two of each group begin alike, and every completion repeats a token
        ids_B_T[group + 1, :5] = ids_B_T[group, :5]
        ids_B_T[group + 2, :2] = ids_B_T[group, :2]
    ids_B_T[:, 5] = ids_B_T[:, 3]
    ids_B_T[-G:] = torch.stack([1 + torch.randperm(VOCABULARY - 1, generator=generator)[:T] for _ in range(G)])
    logps_B_T, entropies_B_T = -0.05 - drawn().abs(), 1.5 + 0.3 * drawn()
    policies = {"now": (logps_B_T, entropies_B_T)}
    for name in ("old", "ref"):
        policies[name] = (torch.minimum(logps_B_T + 0.1 * drawn(), torch.tensor(-0.01)), entropies_B_T + 0.1 * drawn())
    return ids_B_T, policies


IDS, LOGPS = tables()


def batch() -> Rollout:
    rewards_B = torch.tensor(REWARDS, dtype=torch.float64)
    rows = torch.arange(len(REWARDS))
    plain_B = torch.where(rows < 2 * G, 0.1 * (rows % 3), 0.0)  # or the groups of equal rewards would not be
    # Two turns each, the first of which is a call; where groups have signal, one in three fails, and turns earn.
    worth = [(row % 3) / 4 if row < 2 * G else reward / 4 for row, reward in enumerate(REWARDS)]

    def turns(row: int) -> list[Turn]:
        call = ToolCall(name="t", outcome="raised" if row < 2 * G and row % 3 == 2 else "returned")
        return [
            Turn(number=0, tokens=(0, 4), text="", characters=(0, 0), calls=[call]),
            Turn(number=1, tokens=(4, LENGTHS[row]), text="", characters=(0, 0)),
        ]

    return make_rollout(
        LENGTHS,
        REWARDS,
        [row // G for row in range(len(REWARDS))],
        limit=T,
        completion_ids_B_T=IDS,
        truncated_B=torch.tensor([row in CUT for row in range(len(REWARDS))]),
        rewards_B_K=torch.stack([rewards_B, plain_B], dim=1),
        reward_names=("points", "plain"),
        reward_weights_K=torch.tensor([1.0, 0.0], dtype=torch.float64),
        parts={
            "points": [
                Parts({"call": (one, Place(turn=0)), "answer": (reward - one, Place(turn=1))}, reward)
                for one, reward in zip(worth, REWARDS, strict=True)
            ]
        },
        turns_B_T=torch.tensor([[0] * 4 + [1] * (length - 4) + [-1] * (T - length) for length in LENGTHS]),
        turns=turns,
        num_generations=G,
        old_logps_B_T=LOGPS["old"][0],
        old_entropies_B_T=LOGPS["old"][1],
        ref_logps_B_T=LOGPS["ref"][0],
        teacher_logps_B_T={"policy given teacher_prompt": LOGPS["ref"][0]},
        sampling_logps_B_T=LOGPS["now"][0],
    )


BATCH = batch()


def forward_of(rollout: Rollout) -> Forward:
    logps_B_T, entropies_B_T = LOGPS["now"]
    return make_forward(
        logps_B_T,
        entropies_B_T,
        rollout.mask_B_T,
        old_logps_B_T=LOGPS["old"][0],
        ref_logps_B_T=LOGPS["ref"][0],
        completion_ids_B_T=rollout.completion_ids_B_T,
        rewards_B=rollout.rewards_B,
        raw_rewards_B=rollout.raw_rewards_B,
        group_baselines_B=rollout.group_baselines_B,
        zero_variance_B=zero_variance_of(signal_table(rollout)),
    )


def selection_of(hook: Hook) -> dict[str, Any]:
    return {**PARAMETERS.get(str(hook.selection["name"]), {}), **hook.selection}


def advantages(selections: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """What a run with these hooks, in this order, would train on."""
    return _played(tuple(json.dumps(selection) for selection in selections))


@functools.cache
def _played(selections: tuple[str, ...]) -> torch.Tensor:
    chain = HookChain(load_advantage_hooks([json.loads(selection) for selection in selections]))
    rollout = chain.on_rewards(BATCH)
    advantages_B_T, _ = chain.on_rollout(group_advantages(rollout, "group", "sum_then_normalize"), rollout)
    rollout = replace(rollout, advantages_B_T=advantages_B_T, uninformative_B=chain.uninformative(rollout))
    return chain.on_forward(advantages_B_T, forward_of(rollout), chain.allowed_signs(rollout))[0]


def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return float((one - other).norm()) > 1e-6 * float(torch.maximum(one.norm(), other.norm()))


def test_the_page_is_what_the_hooks_say() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert renewed(page) == page, "run: python -m docs.site.hook_pairs"


def test_every_hook_is_there() -> None:
    found = {str(hook.selection["name"]) for hook in hooks()}
    assert found == {info.name for info in available("advantage_hook") if info.builtin}
    assert VARIANTS.keys() <= found


@pytest.mark.parametrize("hook", hooks(), ids=lambda hook: hook.label)
def test_a_hook_changes_the_advantages_alone(hook: Hook) -> None:
    nothing = advantages([])
    assert differ(advantages([selection_of(hook)]), nothing) or hook.label == "normalised"  # which is TRL's own


@pytest.mark.parametrize("first", hooks(), ids=lambda hook: hook.label)
def test_both_hooks_of_a_pair_change_the_advantages(first: Hook) -> None:
    one = selection_of(first)
    for second in hooks():
        if second is first:
            continue
        other, sentence = selection_of(second), refusal(first, second)
        if {first.label, second.label} == STOPPED:
            with pytest.raises(PluginOutputError, match="mean_relative"):
                advantages([one, other])
            continue
        if sentence:
            assert refusal(second, first)
            assert all(repr(hook.selection["name"]) in sentence for hook in (first, second))
            continue
        both = advantages([one, other])
        if {first.label, second.label} in OVERRULED:
            assert torch.equal(both, advantages([one if second.label == MAKER else other]))
            continue
        for alone in (one, other):
            missing = other if alone is one else one
            without = [alone] if "normalised" not in (one["name"], other["name"]) else _beside_normalised(alone)
            assert differ(both, advantages(without)), f"{missing} does nothing beside {alone}"
        if first.role != second.role:
            assert torch.equal(both, advantages([other, one])), f"the order of {one} and {other} matters"


def _beside_normalised(alone: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """`normalised` is what TRL does without an estimator: beside it stands what another estimator would have made."""
    return [alone] if alone["name"] == "normalised" else [{"name": "centred"}, alone]
