"""Shapers in real trainings: TRL's own estimator takes the shaped rewards as if a reward function had given them.

The oracle is TRL's trainer with one reward function more, which returns what the shaper adds. To the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from tests.support import Run, length_reward, prompts, relative_gap, train
from tests.trainer.pipelines.page import mixed
from tests.trainer.watch import WatchBoth
from trl_grpo_ext import GRPOExtTrainer, Rollout
from trl_grpo_ext.errors import ConfigurationError, PluginOutputError, UpstreamError
from trl_grpo_ext.trainer.contexts import Sampling, ScoredBatch
from trl_grpo_ext.trainer.shaping import refuse_images


def weight_of(ids: list[int]) -> float:
    """Any number that differs from completion to completion."""
    return (sum(ids) % 5) / 4.0 - 0.3


class ByTokens:
    """Adds to each completion what a reward function could have given."""

    __name__ = "by_tokens"
    role = "shaper"

    def __init__(self) -> None:
        self.rollouts: list[Rollout] = []

    def on_rewards(self, rollout: Rollout) -> torch.Tensor:
        self.rollouts.append(rollout)
        ids = [row[live > 0].tolist() for row, live in _rows(rollout)]
        return rollout.rewards_B.new_tensor([weight_of(row) for row in ids])


class PerToken(ByTokens):
    """The same numbers, each laid on the first token of its completion, garbage off the mask."""

    def on_rewards(self, rollout: Rollout) -> torch.Tensor:
        added_B_T = torch.full_like(rollout.mask_B_T, torch.nan)
        added_B_T = torch.where(rollout.mask_B_T > 0, 0.0, added_B_T)
        added_B_T[:, 0] = super().on_rewards(rollout)
        return added_B_T


def _rows(rollout: Rollout) -> Any:
    return zip(rollout.completion_ids_B_T, rollout.completion_mask_B_T, strict=True)


def by_tokens(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [weight_of(ids) for ids in completion_ids]


def sometimes(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    return [None if len(ids) % 3 == 1 else length_reward([ids])[0] for ids in completion_ids]


def by_tokens_where_scored(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    return [None if len(ids) % 3 == 1 else weight_of(ids) for ids in completion_ids]


def shaped(model: Path, folder: Path, *hooks: Any, trainer_class: type = GRPOExtTrainer, **settings: Any) -> Run:
    trainer_arguments = {"advantage_hooks": list(hooks), **settings.pop("trainer_arguments", {})}
    return train(model, folder, trainer_class, trainer_arguments=trainer_arguments, **settings)


def same_training(ours: Run, theirs: Run) -> None:
    assert len(ours.gradients) == len(theirs.gradients) > 0
    for our_step, their_step in zip(ours.gradients, theirs.gradients, strict=True):
        assert any(bool(gradient.any()) for gradient in their_step.values())
        assert all(torch.equal(our_step[name], their_step[name]) for name in their_step)
    assert list(ours.trainer._logs["advantages"]) == list(theirs.trainer._logs["advantages"])
    assert list(ours.trainer._logs["rewards"]["by_tokens"]) == pytest.approx(
        list(theirs.trainer._logs["rewards"]["by_tokens"]), nan_ok=True
    )
    for our_log, their_log in zip(ours.logs, theirs.logs, strict=True):
        mine = {name: value for name, value in our_log.items() if "raw_reward" not in name}
        assert mine == pytest.approx({name.replace("_where_scored", ""): v for name, v in their_log.items()})


ESTIMATORS = [
    *({"scale_rewards": scale, "multi_objective_aggregation": "sum_then_normalize"} for scale in ("group", "none")),
    {"scale_rewards": "batch"},
    {"multi_objective_aggregation": "normalize_then_sum"},
]


@pytest.mark.parametrize("settings", ESTIMATORS, ids=lambda settings: "-".join(settings.values()))
def test_trls_estimator_takes_the_shaped_rewards(tiny_model: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    common: dict[str, Any] = {
        "prompt_count": 8,
        "gradient_accumulation_steps": 2,
        "num_iterations": 2,
        "max_steps": 2,
        **settings,
        "trainer_arguments": {"eval_dataset": prompts(2)},
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 8,
    }
    rewards = {"reward_funcs": [length_reward, by_tokens], "reward_weights": [0.7, 1.0]}
    theirs = train(tiny_model, tmp_path / "trl", GRPOTrainer, **{**common, **rewards})
    ours = shaped(tiny_model, tmp_path / "ext", ByTokens(), reward_weights=[0.7], **common)
    same_training(ours, theirs)
    for prefix in ("", "eval_"):  # beside the shaped ones
        log = next(log for log in ours.logs if f"{prefix}reward" in log)
        assert log[f"{prefix}raw_reward"] == pytest.approx(0.7 * log[f"{prefix}rewards/length_reward/mean"])
        assert log[f"{prefix}reward"] != pytest.approx(log[f"{prefix}raw_reward"])
    # The trainer is as it was.
    assert ours.trainer.reward_func_names == ["length_reward"]
    assert len(ours.trainer.reward_funcs) == len(ours.trainer.reward_weights) == 1


@pytest.mark.parametrize("settings", [{}, {"multi_objective_aggregation": "normalize_then_sum"}], ids=str)
def test_completions_that_no_function_scored_stay_so(
    tiny_model: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    theirs = train(
        tiny_model, tmp_path / "trl", GRPOTrainer, reward_funcs=[sometimes, by_tokens_where_scored], **settings
    )
    watch = WatchBoth()
    ours = shaped(tiny_model, tmp_path / "ext", watch, ByTokens(), reward_funcs=sometimes, **settings)
    for our_step, their_step in zip(ours.gradients, theirs.gradients, strict=True):
        assert relative_gap(our_step, their_step) < 1e-5  # advantages are (B, T) here, because of the watching hook
    advantages_B_T, rollout = watch.seen[0]
    unscored_B = torch.isnan(rollout.rewards_B)
    assert unscored_B.any()
    assert torch.equal(unscored_B, torch.isnan(rollout.raw_rewards_B))
    assert torch.equal(unscored_B, torch.isnan(rollout.rewards_B_K[:, 1]))
    assert not advantages_B_T[unscored_B].any()


def test_what_the_hooks_behind_it_see(tiny_model: Path, tmp_path: Path) -> None:
    watch, tokens, completions = WatchBoth(), PerToken(), ByTokens()
    settings: dict[str, Any] = {"max_steps": 1, "reward_weights": [0.5], "loss_aggregation": "token_mean"}
    shaped(tiny_model, tmp_path, watch, "centred", tokens, completions, **settings)
    (first,), (second,), ((advantages_B_T, last),) = tokens.rollouts, completions.rollouts, watch.seen
    added_B = torch.tensor([weight_of(ids) for ids in _ids(last)])
    raw_B = 0.5 * torch.tensor(length_reward(_ids(last)))
    assert first.advantages_B_T is second.advantages_B_T is None
    assert [rollout.reward_names for rollout in (first, second, last)] == [
        ("length_reward",),
        ("length_reward", "by_tokens"),
        ("length_reward", "by_tokens", "by_tokens_2"),
    ]
    for rollout, times in ((first, 0), (second, 1), (last, 2)):
        torch.testing.assert_close(rollout.raw_rewards_B, raw_B)
        torch.testing.assert_close(rollout.rewards_B, raw_B + times * added_B)
        means_B = (raw_B + times * added_B).view(2, 4).mean(1).repeat_interleave(4)
        torch.testing.assert_close(rollout.group_baselines_B, means_B)
        torch.testing.assert_close((rollout.rewards_B_K * rollout.reward_weights_K).sum(1), rollout.rewards_B)
    assert first.token_rewards_B_T is None
    assert last.token_rewards_B_T is not None
    torch.testing.assert_close(last.token_rewards_B_T.sum(1), added_B)
    assert torch.equal(last.token_rewards_B_T, last.token_rewards_B_T * last.mask_B_T)
    # The estimator has taken the shaped rewards, whatever the order of the selection.
    expected_B = raw_B + 2 * added_B
    expected_B = expected_B - expected_B.view(2, 4).mean(1).repeat_interleave(4)
    torch.testing.assert_close(advantages_B_T, expected_B.unsqueeze(1) * last.mask_B_T)
    # And the row's own numbers have come along to the loss.
    ((_, forward),) = watch.forwards
    for row, ids in enumerate(forward.completion_ids_B_T):
        place = next(i for i, other in enumerate(last.completion_ids_B_T) if torch.equal(ids, other))
        assert forward.rewards_B[row] == last.rewards_B[place]
        assert forward.raw_rewards_B[row] == last.raw_rewards_B[place]


def _ids(rollout: Rollout) -> list[list[int]]:
    return [row[live > 0].tolist() for row, live in _rows(rollout)]


@pytest.mark.parametrize(
    "settings",
    [
        {},  # TRL computes neither
        {"num_iterations": 2, "beta": 0.04},  # both
        {"beta": 0.04},  # the reference alone
        {"num_iterations": 2, "mask_truncated_completions": True, "pad_to_multiple_of": 8},
    ],
    ids=str,
)
def test_a_shaper_has_the_tensors_of_the_batch_before_there_is_one(
    tiny_model: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    needs = ("old_logps", "ref_logps") if settings.get("beta") else ("old_logps",)
    watch, shaper, passes = WatchBoth(*needs), ByTokens(), []
    shaper.needs = needs  # type: ignore[attr-defined]

    class Counts(GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *arguments: Any, **keywords: Any) -> Any:
            passes.append(1)
            return super()._get_per_token_logps_and_entropies(*arguments, **keywords)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            batches.append((len(passes), dict(batch)))
            return batch

    batches: list[tuple[int, dict[str, Any]]] = []
    shaped(tiny_model, tmp_path, shaper, watch, trainer_class=mixed(Counts), max_steps=1, **settings)
    ((count, batch),), (seen,), ((_, after),) = batches, shaper.rollouts, watch.seen
    assert count == len(needs)  # each pass once, TRL's or ours
    pairs = {
        "prompt_ids_B_P": batch["prompt_ids"],
        "prompt_mask_B_P": batch["prompt_mask"].float(),
        "completion_ids_B_T": batch["completion_ids"],
        "mask_B_T": batch["completion_mask"].float(),
        "sampling_logps_B_T": batch["sampling_per_token_logps"],
        "old_logps_B_T": batch.get("old_per_token_logps", after.old_logps_B_T),
        "ref_logps_B_T": batch.get("ref_per_token_logps", after.ref_logps_B_T),
    }
    for name, tensor in pairs.items():
        for rollout in (seen, after):
            value = getattr(rollout, name)
            assert (value is None and tensor is None) or torch.equal(value, tensor), name
    assert seen.old_logps_B_T is not None
    assert seen.totals == after.totals
    assert seen.totals.tokens == int(batch["num_items_in_batch"])


def test_a_penalised_reward_is_compared_in_its_group_and_then_in_the_batch(tiny_model: Path, tmp_path: Path) -> None:
    watch = WatchBoth()
    penalty = {"name": "kl_in_reward", "form": "completion", "coefficient": 0.3, "reference": str(tiny_model)}
    # Listed in any order, they act by their roles.
    hooks = ["whiten", watch, {"name": "normalised", "std_floor": 0.1, "epsilon": 1e-8}, penalty]
    run = train(tiny_model, tmp_path, trainer_arguments={"advantage_hooks": hooks}, max_steps=2)
    (_, first), (advantages_B_T, second) = watch.seen
    assert torch.equal(first.rewards_B, first.raw_rewards_B)  # the policy is its reference yet
    assert second.old_logps_B_T is not None
    moved_B_T = (second.old_logps_B_T - second.teacher_logps_B_T[str(tiny_model)]) * second.mask_B_T
    raw = second.raw_rewards_B.tolist()
    rewards = [reward - 0.3 * kl for reward, kl in zip(raw, moved_B_T.sum(dim=1).tolist(), strict=True)]
    assert second.rewards_B.tolist() == pytest.approx(rewards, abs=1e-5)
    assert rewards != pytest.approx(raw, abs=1e-2)
    compared: list[float] = []
    for group in (rewards[:4], rewards[4:]):
        compared += [(r - sum(group) / 4) / (max(stdev(group), 0.1) + 1e-8) for r in group]
    mean, sigma = sum(compared) / 8, stdev(compared)
    assert advantages_B_T[:, 0].tolist() == pytest.approx([(a - mean) / (sigma + 1e-8) for a in compared], abs=1e-4)
    assert run.logs[1]["raw_reward"] == pytest.approx(sum(raw) / 8, abs=1e-5)
    assert run.logs[1]["reward"] == pytest.approx(sum(rewards) / 8, abs=1e-5)


# ---------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda rollout: None, "'Odd': on_rewards: expected a tensor of shape"),
        (lambda rollout: rollout.rewards_B[:-1], r"\(completions,\) or \(completions, tokens\), got \(7,\)"),
        (lambda rollout: rollout.rewards_B * torch.inf, "on_rewards must return finite rewards; got -?inf at row 0"),
        (lambda rollout: rollout.mask_B_T / 0, "on_rewards must return finite rewards; got inf at row 0, token 0"),
        (lambda rollout: rollout.group_ids_B, "expected a floating point tensor"),
    ],
)
def test_what_a_shaper_may_not_return(
    tiny_model: Path, tmp_path: Path, returned: Callable[[Rollout], Any], message: str
) -> None:
    class Odd:
        def on_rewards(self, rollout: Rollout) -> Any:
            return returned(rollout)

    with pytest.raises(PluginOutputError, match=message):
        shaped(tiny_model, tmp_path, Odd(), max_steps=1)


def test_a_base_class_that_changes_the_batch_afterwards_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    class Cuts(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            return {**batch, "completion_mask": batch["completion_mask"] * 0}

    with pytest.raises(UpstreamError, match=r"saw a different 'completion_mask' than .*MineCuts made"):
        shaped(tiny_model, tmp_path, ByTokens(), trainer_class=mixed(Cuts), max_steps=1)


def test_rewards_outside_of_a_generation_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    run = shaped(tiny_model, tmp_path, ByTokens(), max_steps=1)
    with pytest.raises(UpstreamError, match=r"calls _calculate_rewards outside of _generate_and_score_completions"):
        run.trainer._calculate_rewards([{"prompt": "a"}], ["a"], ["b"], [[3]])


def test_log_probabilities_that_only_a_pass_with_images_could_give_are_refused(
    tiny_model: Path, tmp_path: Path
) -> None:
    shaper = ByTokens()
    shaper.needs = ("old_logps",)  # type: ignore[attr-defined]
    run = shaped(tiny_model, tmp_path, shaper, max_steps=1)
    ours, unseen = run.trainer._trl_grpo_ext, torch.zeros(0)

    def refuse(row: dict[str, Any], missing: list[str], images: Any = None) -> None:
        scored = ScoredBatch([row], ["a"], ["b"], [[3]], unseen)
        refuse_images(Sampling("Mine", [*[None] * 6, images], scored=scored), missing)

    with_image = {"prompt": "a", "image": "a picture"}
    refuse({"prompt": "a"}, ["old_logps"])
    refuse({"prompt": "a", "image": None}, ["old_logps"])
    refuse(with_image, ours.scorer.missing({"old_per_token_logps": 0}))
    with pytest.raises(ConfigurationError, match=r"with images it needs old_logps, .*num_iterations above 1"):
        refuse(with_image, ours.scorer.missing({}))
    with pytest.raises(ConfigurationError, match="For a batch with images it needs old_logps"):
        refuse({"prompt": "a"}, ["old_logps"], ["a picture of a tool"])
