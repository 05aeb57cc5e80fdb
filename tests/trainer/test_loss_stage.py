"""What cannot be exact, or breaks its contract, stops with a sentence; a selected plugin is never silently left out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from tests.support import arguments, scripted_rollout, train, trl_metrics
from tests.trainer.support import mixed, on_top
from trl_grpo_ext.errors import ConfigurationError, SelfCheckError, UpstreamError
from trl_grpo_ext.trainer.own_loss import OwnLoss

AGGREGATION: dict[str, Any] = {"loss_aggregation": "token_mean", "max_steps": 1}
FORWARD_HOOK: dict[str, Any] = {"advantage_hooks": ["entropy_shaping"], "max_steps": 1}
COMPACT: dict[str, Any] = {"compact_updates": "exact", "max_steps": 1}


class Bypasses(GRPOTrainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        return model(input_ids=ids).logits.float().logsumexp(-1).mean()


class WithRegulariser(GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return super()._compute_loss(model, inputs) + 0.5


class Copies(GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return super()._compute_loss(model, {**inputs, "advantages": inputs["advantages"].clone()})


class OtherKL(GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        kept = inputs["ref_per_token_logps"]
        inputs["ref_per_token_logps"] = kept - 0.5
        loss = super()._compute_loss(model, inputs)
        inputs["ref_per_token_logps"] = kept
        return loss


class NoRewards(GRPOTrainer):
    def _generate_and_score_completions(self, inputs: Any) -> Any:
        ids = torch.ones(len(inputs), 2, dtype=torch.long)
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        return dict.fromkeys(names, ids) | {"advantages": torch.ones(len(inputs)), "num_items_in_batch": ids.sum()}


def slowly(*given: Any) -> Any:
    return pytest.param(*given, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("base", "settings", "error", "message"),
    [
        (mixed(Bypasses), AGGREGATION, UpstreamError, "bypasses"),
        slowly(on_top(Bypasses), FORWARD_HOOK, UpstreamError, "bypasses"),
        (on_top(Bypasses), COMPACT, UpstreamError, "bypasses"),
        (mixed(WithRegulariser), AGGREGATION, SelfCheckError, "its loss is"),
        slowly(mixed(Copies), AGGREGATION, SelfCheckError, "advantages"),
        slowly(mixed(Copies), FORWARD_HOOK, SelfCheckError, "advantages"),
        slowly(mixed(OtherKL), {**AGGREGATION, "beta": 0.04}, SelfCheckError, "gradient"),
        slowly(mixed(NoRewards), AGGREGATION, UpstreamError, "_calculate_rewards"),
    ],
)
def test_a_loss_or_batch_of_which_the_plugins_are_no_part(
    tiny_model: Path, tmp_path: Path, base: type, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        train(tiny_model, tmp_path, base, **settings)


def test_compact_updates_check_trls_divisor(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="'later'"):
        train(tiny_model, tmp_path, loss_type="later", **COMPACT)
    inherited = GRPOTrainer._compute_loss
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda self, model, inputs: 0.5 * inherited(self, model, inputs))
    with pytest.raises(SelfCheckError, match="weight of a token"):
        train(tiny_model, tmp_path, **COMPACT)


@pytest.mark.slow
@pytest.mark.parametrize("plugins", [AGGREGATION, FORWARD_HOOK], ids=["aggregation", "forward hook"])
def test_self_check_waits_for_a_live_token(tiny_model: Path, tmp_path: Path, plugins: dict[str, Any]) -> None:
    class Doubled(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            inputs = {**inputs, "advantages": inputs["advantages"].clone()} if "advantage_hooks" in plugins else inputs
            return super()._compute_loss(model, inputs) * 2

    def endless(prompts_: list[str], trainer: Any) -> dict[str, Any]:
        limit = trainer.max_completion_length
        written = {"completion_ids": [[5] * limit] * len(prompts_), "logprobs": [[-1.0] * limit] * len(prompts_)}
        return scripted_rollout(prompts_, trainer) | written

    # Every completion runs into the limit and is masked: nothing counts.
    settings = {"mask_truncated_completions": True, "rollout_func": endless, **plugins}
    says = "weight of a token" if "loss_aggregation" in plugins else "does not depend on the advantages"
    with pytest.raises(SelfCheckError, match=says):
        train(tiny_model, tmp_path / "wrong", mixed(Doubled), **settings)
    train(tiny_model, tmp_path / "right", **settings)


@pytest.mark.slow
def test_the_self_check_leaves_no_trace_in_the_metrics(tiny_model: Path, tmp_path: Path) -> None:
    theirs = train(tiny_model, tmp_path / "trl", GRPOTrainer, max_steps=1, use_adaptive_entropy=True)
    ours = train(tiny_model, tmp_path / "ext", use_adaptive_entropy=True, **AGGREGATION)
    assert trl_metrics(ours.logs[0]) == pytest.approx(theirs.logs[0], rel=1e-5, abs=1e-6)
    assert ours.trainer.entropy_coef == theirs.trainer.entropy_coef


def test_out_of_memory_says_nothing_about_a_loss() -> None:
    def full(batch: dict[str, Any], forward_pass: Any) -> torch.Tensor:
        logps_B_T, *_ = forward_pass()
        if batch["advantages"].dim() == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return -(logps_B_T * batch["advantages"].unsqueeze(1)).sum()

    rows = {"completion_ids": torch.ones(2, 3), "completion_mask": torch.ones(2, 3), "advantages": torch.ones(2)}
    plugins: Any = None
    own_loss = OwnLoss([], plugins)
    with pytest.raises(torch.OutOfMemoryError):
        own_loss.try_out(rows, full, full)


def test_what_is_given_twice(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="token_mean"):
        train(tiny_model, tmp_path, trainer_arguments={"loss_aggregation": "token_mean"}, loss_aggregation="token_mean")
    with pytest.raises(ConfigurationError):
        arguments(tmp_path, rewards=[{"name": "think_format", "weight": 0.5}], reward_weights=[1.0])
