"""Shapers in real trainings: TRL's own estimator takes the shaped rewards as if a reward function had given them.

The oracle is TRL's trainer with one reward function more, which returns what the shaper adds, or with the weights of
the schedule. To the bit.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from tests.support import Run, length_reward, prompts, relative_gap, train
from tests.trainer.support import WatchBoth, mixed
from trl_grpo_ext import Rollout
from trl_grpo_ext.errors import ConfigurationError, UpstreamError
from trl_grpo_ext.types import HookDeclaration


def weight_of(ids: list[int]) -> float:
    """Any number that differs from completion to completion."""
    return (sum(ids) % 5) / 4.0 - 0.3


class ByTokens:
    """Adds to each completion what a reward function could have given."""

    __name__ = "by_tokens"
    declares = HookDeclaration(role="shaper")

    def __init__(self) -> None:
        self.rollouts: list[Rollout] = []

    def on_rewards(self, rollout: Rollout) -> torch.Tensor:
        self.rollouts.append(rollout)
        rows = zip(rollout.completion_ids_B_T, rollout.completion_mask_B_T, strict=True)
        return rollout.rewards_B.new_tensor([weight_of(row[live > 0].tolist()) for row, live in rows])


def by_tokens(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [weight_of(ids) for ids in completion_ids]


def sometimes(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    return [None if len(ids) % 3 == 1 else length_reward([ids])[0] for ids in completion_ids]


def by_tokens_where_scored(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    return [None if len(ids) % 3 == 1 else weight_of(ids) for ids in completion_ids]


def same_training(ours: Run, theirs: Run) -> None:
    assert len(ours.gradients) == len(theirs.gradients) > 0
    for our_step, their_step in zip(ours.gradients, theirs.gradients, strict=True):
        assert any(bool(gradient.any()) for gradient in their_step.values())
        assert all(torch.equal(our_step[name], their_step[name]) for name in their_step)
    assert list(ours.trainer._logs["advantages"]) == list(theirs.trainer._logs["advantages"])
    tables = [list(run.trainer._logs["rewards"]["by_tokens"]) for run in (ours, theirs)]
    assert tables[0] == pytest.approx(tables[1], nan_ok=True)
    for our_log, their_log in zip(ours.logs, theirs.logs, strict=True):
        mine = {name: value for name, value in our_log.items() if "raw_reward" not in name}
        assert mine == pytest.approx({name.replace("_where_scored", ""): v for name, v in their_log.items()})


ESTIMATORS = [{"scale_rewards": scale} for scale in ("group", "none", "batch")]


@pytest.mark.slow
@pytest.mark.parametrize("settings", ESTIMATORS, ids=lambda settings: "-".join(settings.values()))
def test_trls_estimator_takes_the_shaped_rewards(tiny_model: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    common: dict[str, Any] = {"prompt_count": 8, "gradient_accumulation_steps": 2, "num_iterations": 2, **settings}
    common |= {"eval_dataset": prompts(2), "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
    rewards = {"reward_funcs": [length_reward, by_tokens], "reward_weights": [0.7, 1.0]}
    theirs = train(tiny_model, tmp_path / "trl", GRPOTrainer, **{**common, **rewards})
    ours = train(tiny_model, tmp_path / "ext", hooks=[ByTokens()], reward_weights=[0.7], **common)
    same_training(ours, theirs)
    for prefix in ("", "eval_"):  # beside the shaped ones
        log = next(log for log in ours.logs if f"{prefix}reward" in log)
        assert log[f"{prefix}raw_reward"] == pytest.approx(0.7 * log[f"{prefix}rewards/length_reward/mean"])
        assert log[f"{prefix}reward"] != pytest.approx(log[f"{prefix}raw_reward"])
    # The trainer is as it was.
    assert ours.trainer.reward_func_names == ["length_reward"]
    assert len(ours.trainer.reward_funcs) == len(ours.trainer.reward_weights) == 1


@pytest.mark.slow
@pytest.mark.parametrize("weight", [0.0, 0.9, 1.1])
@pytest.mark.parametrize("how", ["sum_then_normalize", "normalize_then_sum", "decoupled_normalisation"])
def test_scheduled_weights_are_trls(tiny_model: Path, tmp_path: Path, weight: float, how: str) -> None:
    hooks: list[Any] = [{"name": "reward_schedule", "weights": {"by_tokens": [[0, weight]]}}]
    hooks += [how] * how.startswith("decoupled")
    common: dict[str, Any] = {"reward_funcs": [length_reward, by_tokens], "prompt_count": 8}
    common["multi_objective_aggregation"] = "normalize_then_sum" if len(hooks) > 1 else how
    theirs = train(tiny_model, tmp_path / "trl", GRPOTrainer, reward_weights=[0.7, weight], **common)
    ours = train(tiny_model, tmp_path / "ext", hooks=hooks, reward_weights=[0.7, 0.5], **common)
    for our_step, their_step in zip(ours.gradients, theirs.gradients, strict=True):
        assert relative_gap(our_step, their_step) < 1e-5  # what TRL rounds to is taken for 0 here
    for our_log, their_log in zip(ours.logs, theirs.logs, strict=True):
        of_trl = {name: value for name, value in their_log.items() if "reward" in name}
        assert {name: our_log[name] for name in of_trl} == pytest.approx(of_trl)


class Scaled:
    __name__ = "scaled"
    scale = 1.0

    def __call__(self, completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [self.scale * weight_of(ids) for ids in completion_ids]


class Adapts(GRPOTrainer):
    """Changes a reward function and the weights of all as the training goes on."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        self.reward_weights = torch.tensor([1.0, 2.0 + self.state.global_step])
        return batch

    def _calculate_rewards(self, *arguments: Any) -> Any:
        self.reward_funcs[1].scale = 1.0 + self.state.global_step
        for function in self.reward_funcs:
            self._metrics["train"][f"calls/{function.__name__}"].append(1.0)
        return super()._calculate_rewards(*arguments)


class AdaptsInPlace(GRPOTrainer):
    """Halves the weights that it finds, where they are."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        self.reward_weights *= 0.5
        return batch


class Halves(GRPOTrainer):
    """The same in a new tensor."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        self.reward_weights = self.reward_weights * 0.5
        return batch


@pytest.mark.slow
def test_reward_weights_changed_in_place_count_from_the_next_batch(tiny_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"reward_funcs": [length_reward, Scaled()], "max_steps": 3, "scale_rewards": "none"}
    theirs = train(tiny_model, tmp_path, Halves, **settings)
    for base in (Halves, AdaptsInPlace):
        watch = WatchBoth()
        ours = train(tiny_model, tmp_path, mixed(base), hooks=[watch], **settings)
        assert relative_gap(ours.weights, theirs.weights) <= 1e-6
        assert [rollout.reward_weights_K.tolist()[0] for rollout in watch.rollouts] == [1.0, 0.5, 0.25]
    for base in (Halves, AdaptsInPlace):  # they see the shaper's weight too
        with pytest.raises(ConfigurationError, match="by_tokens"):
            train(tiny_model, tmp_path, mixed(base), hooks=[ByTokens()], **settings)


@pytest.mark.slow
def test_rewards_that_a_users_class_changes(tiny_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"prompt_count": 8, "max_steps": 3}
    theirs = train(tiny_model, tmp_path / "trl", Adapts, reward_funcs=[length_reward, Scaled()], **settings)
    assert "calls/scaled" in theirs.logs[0]
    watch = WatchBoth()
    for name, hooks in (("none", None), ("watch", [watch])):
        rewards = [length_reward, Scaled()]
        ours = train(tiny_model, tmp_path / name, mixed(Adapts), reward_funcs=rewards, hooks=hooks, **settings)
        assert relative_gap(ours.weights, theirs.weights) <= (0.0 if hooks is None else 1e-6)
        for our_log, their_log in zip(ours.logs, theirs.logs, strict=True):
            assert {key: our_log[key] for key in their_log} == pytest.approx(their_log, rel=1e-4, abs=1e-6)
    seen = [float(rollout.rewards_B.mean()) for rollout in watch.rollouts]
    assert seen == pytest.approx([log["reward"] for log in theirs.logs[:3]], rel=1e-4)


def test_a_shaper_that_trl_would_normalise_by_itself_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"multi_objective_aggregation": "normalize_then_sum", "max_steps": 1}
    with pytest.raises(ConfigurationError, match=r"'by_tokens' adds .*normalize_then_sum"):
        train(tiny_model, tmp_path, hooks=[ByTokens()], **settings)
    train(tiny_model, tmp_path, hooks=[ByTokens(), "centred"], **settings)  # which sees the total


@pytest.mark.slow
def test_completions_that_no_function_scored_stay_so(tiny_model: Path, tmp_path: Path) -> None:
    settings = {"scale_rewards": "batch"}
    both = [sometimes, by_tokens_where_scored]
    theirs = train(tiny_model, tmp_path / "trl", GRPOTrainer, reward_funcs=both, **settings)
    watch = WatchBoth()
    ours = train(tiny_model, tmp_path / "ext", hooks=[watch, ByTokens()], reward_funcs=sometimes, **settings)
    for our_step, their_step in zip(ours.gradients, theirs.gradients, strict=True):
        assert relative_gap(our_step, their_step) < 1e-5  # advantages are (B, T) here, because of the watching hook
    advantages_B_T, rollout = watch.seen[0]
    unscored_B = torch.isnan(rollout.rewards_B)
    assert unscored_B.any()
    assert torch.equal(unscored_B, torch.isnan(rollout.raw_rewards_B))
    assert torch.equal(unscored_B, torch.isnan(rollout.rewards_B_K[:, 1]))
    assert not advantages_B_T[unscored_B].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"mask_truncated_completions": True, "pad_to_multiple_of": 8},  # TRL computes no log-probabilities
        {"num_iterations": 2, "beta": 0.04},  # the old policy's and the reference's
        {"beta": 0.04},  # the reference's alone
    ],
    ids=["none", "both", "reference"],
)
def test_shaper_sees_the_batchs_tensors(tiny_model: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    needs = ("old_logps", "ref_logps") if settings.get("beta") else ("old_logps",)
    watch, shaper, passes = WatchBoth(*needs), ByTokens(), []
    shaper.declares = HookDeclaration(role="shaper", needs=needs)

    class Counts(GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *arguments: Any, **keywords: Any) -> Any:
            passes.append(1)
            return super()._get_per_token_logps_and_entropies(*arguments, **keywords)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            batches.append((len(passes), dict(batch)))
            return batch

    batches: list[tuple[int, dict[str, Any]]] = []
    train(tiny_model, tmp_path, mixed(Counts), hooks=[shaper, watch], max_steps=1, **settings)
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


@pytest.mark.slow
def test_shaper_refuses_a_changed_batch(tiny_model: Path, tmp_path: Path) -> None:
    class Cuts(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            return {**batch, "completion_mask": batch["completion_mask"] * 0}

    with pytest.raises(UpstreamError, match="'completion_mask'"):
        train(tiny_model, tmp_path, mixed(Cuts), hooks=[ByTokens()], max_steps=1)
