"""What cannot be exact stops with a sentence; a selected plugin is never silently left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from tests.support import arguments, scripted_rollout, train, trl_metrics
from tests.trainer.pipelines.page import mixed
from trl_grpo_ext.errors import (
    ConfigurationError,
    SelfCheckError,
    UpstreamError,
)

AGGREGATION: dict[str, Any] = {"loss_aggregation": "token_mean", "max_steps": 1}


def test_a_compute_loss_that_bypasses_trls_loss(tiny_model: Path, tmp_path: Path) -> None:
    class OwnLoss(GRPOTrainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            return model(input_ids=ids).logits.float().logsumexp(-1).mean()

    assert train(tiny_model, tmp_path / "without", mixed(OwnLoss), max_steps=1).gradients
    with pytest.raises(UpstreamError, match="bypasses TRL's _compute_loss"):
        train(tiny_model, tmp_path / "with", mixed(OwnLoss), **AGGREGATION)


def test_a_term_of_a_users_own_in_the_loss(tiny_model: Path, tmp_path: Path) -> None:
    class WithRegulariser(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            return super()._compute_loss(model, inputs) + 0.5

    with pytest.raises(SelfCheckError, match=r"its loss is .* the pieces' is"):
        train(tiny_model, tmp_path, mixed(WithRegulariser), **AGGREGATION)


def test_a_loss_that_is_not_homogeneous_in_the_advantages(tiny_model: Path, tmp_path: Path) -> None:
    class Squared(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            loss = super()._compute_loss(model, inputs)
            # The slope at advantage 1 stays TRL's, so that only the second comparison can find it.
            advantages = inputs["advantages"]
            return loss + (0.01 * (advantages - 1) ** 2 * inputs["completion_mask"]).sum()

    with pytest.raises(SelfCheckError, match="loss"):
        train(tiny_model, tmp_path, mixed(Squared), **AGGREGATION)


@pytest.mark.parametrize("plugins", [{"loss_aggregation": "token_mean"}, {"advantage_hooks": ["entropy_shaping"]}])
def test_a_loss_that_reads_a_copy_of_the_advantages(tiny_model: Path, tmp_path: Path, plugins: dict[str, Any]) -> None:
    class Copies(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            return super()._compute_loss(model, {**inputs, "advantages": inputs["advantages"].clone()})

    with pytest.raises(SelfCheckError, match="does not depend on the advantages"):
        train(tiny_model, tmp_path, mixed(Copies), max_steps=1, **plugins)


@pytest.mark.parametrize("plugins", [{"loss_aggregation": "token_mean"}, {"advantage_hooks": ["entropy_shaping"]}])
def test_a_first_micro_batch_without_a_live_token_is_no_check_that_passes(
    tiny_model: Path, tmp_path: Path, plugins: dict[str, Any]
) -> None:
    class Doubled(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            inputs = {**inputs, "advantages": inputs["advantages"].clone()} if "advantage_hooks" in plugins else inputs
            return super()._compute_loss(model, inputs) * 2

    def endless(prompts_: list[str], trainer: Any) -> dict[str, Any]:
        output = scripted_rollout(prompts_, trainer)
        output["completion_ids"] = [[5] * trainer.max_completion_length for _ in prompts_]
        output["logprobs"] = [[-1.0] * trainer.max_completion_length for _ in prompts_]
        return output

    # Every completion runs into the limit and is masked: nothing counts.
    settings = {"mask_truncated_completions": True, "max_steps": 1, **plugins}
    says = "weight of a token" if "loss_aggregation" in plugins else "does not depend on the advantages"
    with pytest.raises(SelfCheckError, match=says):
        train(tiny_model, tmp_path / "wrong", mixed(Doubled), trainer_arguments={"rollout_func": endless}, **settings)
    train(tiny_model, tmp_path / "right", trainer_arguments={"rollout_func": endless}, **settings)


def test_another_kl_than_trls(tiny_model: Path, tmp_path: Path) -> None:
    class OtherKL(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            keep = inputs["ref_per_token_logps"]
            inputs["ref_per_token_logps"] = keep - 0.5
            loss = super()._compute_loss(model, inputs)
            inputs["ref_per_token_logps"] = keep
            return loss

    with pytest.raises(SelfCheckError, match="gradient"):
        train(tiny_model, tmp_path, mixed(OtherKL), beta=0.04, **AGGREGATION)


def test_the_self_check_leaves_no_trace_in_the_metrics(tiny_model: Path, tmp_path: Path) -> None:
    theirs = train(tiny_model, tmp_path / "trl", GRPOTrainer, max_steps=1, use_adaptive_entropy=True)
    ours = train(tiny_model, tmp_path / "ext", use_adaptive_entropy=True, **AGGREGATION)
    assert trl_metrics(ours.logs[0]) == pytest.approx(theirs.logs[0], rel=1e-5, abs=1e-6)
    assert ours.trainer.entropy_coef == theirs.trainer.entropy_coef


def test_rewards_that_are_never_computed_here(tiny_model: Path, tmp_path: Path) -> None:
    class Bypass(GRPOTrainer):
        def _calculate_rewards(self, *arguments: Any) -> Any:
            raise AssertionError("not reached")

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            ids = torch.ones(len(inputs), 2, dtype=torch.long)
            return {
                "prompt_ids": ids,
                "prompt_mask": ids,
                "completion_ids": ids,
                "completion_mask": ids,
                "advantages": torch.ones(len(inputs)),
                "num_items_in_batch": ids.sum(),
            }

    with pytest.raises(UpstreamError, match="rewards of this generation batch were never seen"):
        train(tiny_model, tmp_path, mixed(Bypass), **AGGREGATION)


def test_given_in_python_and_in_the_config(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="loss_aggregation is given twice: 'token_mean' to the trainer"):
        train(tiny_model, tmp_path, trainer_arguments={"loss_aggregation": "token_mean"}, loss_aggregation="token_mean")


def test_reward_weights_given_twice(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Reward weights are given twice"):
        arguments(tmp_path, rewards=[{"name": "think_format", "weight": 0.5}], reward_weights=[1.0])
