"""Token losses in the trainer: TRL's own loss as one, the same under every cut, what they declare, what is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from peft import LoraConfig
from trl import GRPOTrainer

from tests.credit.test_token_losses import Lies
from tests.support import Run, flat, relative_gap, train
from tests.trainer.process_worker import Float64ExtTrainer, Float64Trainer
from tests.trainer.support import mixed
from trl_grpo_ext.errors import ConfigurationError, PluginOutputError
from trl_grpo_ext.token_losses.losses import clipped
from trl_grpo_ext.types import LossTerms, Rollout, TokenLossDeclaration

COMMON: dict[str, Any] = {"max_steps": 4, "num_iterations": 2, "learning_rate": 0.5}
CUT: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 2}

ROUNDING = 1e-5
"""Sums in another order differ by 8e-8 at the first step in float32 weights, and the next step magnifies that."""


BONUS = {"entropy_coef": 0.01}


class TRLsClip:
    """TRL's own clipped loss, token by token."""

    __name__ = "trls_clip"
    declares = TokenLossDeclaration(replaces=True, independent=True, needs_advantage=True)

    def loss(self, terms: LossTerms) -> torch.Tensor:
        return clipped(terms, 0.2)


def gaps(ours: Run, theirs: Run) -> list[float]:
    return [relative_gap(*pair) for pair in zip(ours.gradients, theirs.gradients, strict=True)]


def trained(model: Path, folder: Path, losses: list[Any], trainer: type = Float64ExtTrainer, **settings: Any) -> Run:
    return train(model, folder, trainer, trainer_arguments={"token_losses": losses}, **{**COMMON, **settings})


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"loss_type": "grpo"}, {"loss_type": "bnpo", "beta": 0.1}, BONUS])
def test_trls_own_loss_as_a_token_loss_is_trls(tiny_model: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    settings = {**CUT, **settings}
    theirs = train(tiny_model, tmp_path / "plain", Float64Trainer, **{**COMMON, **settings})
    ours = trained(tiny_model, tmp_path / "ours", [TRLsClip()], **settings)
    assert max(log.get("clip_ratio/region_mean", 0.0) for log in theirs.logs) > 0.1
    first, second, *_ = gaps(ours, theirs)
    # Two terms reach the float32 weights by two ways, whose sum is rounded otherwise; later steps magnify that.
    assert max(first, second) < (1e-9 if "beta" not in settings and "entropy_coef" not in settings else 1e-6)


CATALOGUE: list[Any] = [
    [{"name": "squared_log_ratio", "coefficient": 2.0}],
    [{"name": "kl_cov", "share": 0.2}],
    ["smooth_clip", {"name": "squared_log_ratio", "coefficient": 1.0}],
    [{"name": "clip_cov", "share": 0.3, "low": 0.05}],  # at 0 rounding would decide about flat groups
    ["topr"],
]


@pytest.mark.slow
@pytest.mark.parametrize("losses", CATALOGUE, ids=lambda losses: str(losses[0]))
@pytest.mark.parametrize("reduced", ["dapo", "grpo", "seq_mean_token_mean"])
def test_token_loss_under_every_cut(tiny_model: Path, tmp_path: Path, losses: list[Any], reduced: str) -> None:
    settings = {"reward_funcs": flat("a"), "max_steps": 2, "dtype": "float64"}
    settings |= {"loss_aggregation": reduced} if "mean" in reduced else {"loss_type": reduced}
    whole = trained(tiny_model, tmp_path / "whole", losses, **settings)
    plain = trained(tiny_model, tmp_path / "plain", [], **settings)
    # Where it only acts on ratios, the first step on a batch is TRL's; the second differs.
    assert max(gaps(whole, plain)) > 1e-3
    cuts: list[dict[str, Any]] = [{}, {"compact_updates": "exact"}, {"compact_updates": "exact", "share_prompts": True}]
    for number, cut in enumerate(cuts):
        found = trained(tiny_model, tmp_path / str(number), losses, **settings, **CUT, **cut)
        assert max(gaps(found, whole)) < ROUNDING, cut
    assert all(f"token_loss/{loss.__name__}/mean" in whole.logs[0] for loss in whole.trainer.token_losses)


@pytest.mark.slow
def test_metrics_of_a_loss_that_is_not_trained_are_not_logged(tiny_model: Path, tmp_path: Path) -> None:
    added = trained(tiny_model, tmp_path / "added", ["squared_log_ratio"])
    replaced = trained(tiny_model, tmp_path / "replaced", [{"name": "clip_cov", "low": 0.0, "share": 0.2}])
    assert "clip_ratio/region_mean" in added.logs[0]
    assert not [name for log in replaced.logs for name in log if name.startswith(("clip_ratio", "policy_loss"))]
    assert 0.0 < max(log.get("token_loss/clip_cov/left_out", 0.0) for log in replaced.logs) <= 0.2
    assert "entropy" in replaced.logs[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "instead"),
    [
        (Lies("mixes", independent=True), "independent=False"),
        (Lies("always", needs_advantage=True), "needs_advantage="),
    ],
    ids=lambda value: value.what if isinstance(value, Lies) else value,
)
def test_false_declaration_is_found(tiny_model: Path, tmp_path: Path, loss: Lies, instead: str) -> None:
    with pytest.raises(PluginOutputError, match=f"lies.*{instead}"):
        trained(tiny_model, tmp_path, [loss])
    assert trained(tiny_model, tmp_path, [Lies(loss.what)], max_steps=1).gradients  # declared as what it is


class Carries:
    """Adds the completion's number in the batch, which only `on_rollout` knows."""

    __name__ = "carries"
    declares = TokenLossDeclaration(independent=True)
    seen: ClassVar[list[tuple[list[int], float]]] = []

    def on_rollout(self, rollout: Rollout) -> Mapping[str, torch.Tensor]:
        sums_B = rollout.completion_ids_B_T.sum(1, keepdim=True)
        return {"sum": sums_B.to(rollout.mask_B_T.dtype).expand_as(rollout.mask_B_T)}

    def loss(self, terms: LossTerms) -> torch.Tensor:
        for row in range(len(terms.mask_B_T)):
            self.seen.append((terms.completion_ids_B_T[row].tolist(), float(terms.carried_B_T["sum"][row, 0])))
        return 0.0 * terms.logps_B_T


@pytest.mark.parametrize("compact", [pytest.param("off", marks=pytest.mark.slow), "exact"])
def test_carried_values_stay_with_their_rows(tiny_model: Path, tmp_path: Path, compact: str) -> None:
    Carries.seen.clear()
    trained(tiny_model, tmp_path, [Carries()], compact_updates=compact, **CUT)
    found = [(ids, value) for ids, value in Carries.seen if value > 0]
    assert len(found) >= 16
    assert all(sum(ids) == value for ids, value in found)


class TowardsReference:
    """Reads what TRL computes in no run without a KL penalty."""

    __name__ = "towards_reference"
    declares = TokenLossDeclaration(independent=True, needs=("ref_logps",))

    def loss(self, terms: LossTerms) -> torch.Tensor:
        assert terms.ref_logps_B_T is not None
        return (terms.logps_B_T - terms.ref_logps_B_T).square()


@pytest.mark.slow
@pytest.mark.parametrize("compact", ["off", "exact"])
def test_what_a_token_loss_needs_is_computed(tiny_model: Path, tmp_path: Path, compact: str) -> None:
    # With one iteration TRL has no old policy.
    once: dict[str, Any] = {"num_iterations": 1, "max_steps": 2, "compact_updates": compact}
    assert trained(tiny_model, tmp_path / "old", ["clip_cov"], **once).gradients
    adapter = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    run = trained(tiny_model, tmp_path / "ref", [TowardsReference()], peft_config=adapter, **once)
    assert min(log["token_loss/towards_reference/mean"] for log in run.logs if "loss" in log) > 1e-4


@pytest.mark.parametrize("loss", [TowardsReference(), "squared_log_ratio"], ids=["ref_logps", "several_updates"])
def test_a_need_that_cannot_be_met_is_refused(tiny_model: Path, tmp_path: Path, loss: Any) -> None:
    with pytest.raises(ConfigurationError, match=getattr(loss, "__name__", "squared_log_ratio")):
        trained(tiny_model, tmp_path, [loss], num_iterations=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("losses", "setting", "value"),
    [
        (["smooth_clip", "topr"], "max_steps", 1),
        (["smooth_clip"], "delta", 2.0),
        (["topr"], "importance_sampling_level", "sequence"),
        (["topr"], "off_policy_mask_threshold", 0.5),
    ],
)
def test_losses_refused(tiny_model: Path, tmp_path: Path, losses: list[Any], setting: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=setting if len(losses) == 1 else "smooth_clip and topr"):
        trained(tiny_model, tmp_path, losses, **{setting: value})
    assert trained(tiny_model, tmp_path, ["squared_log_ratio"], **{"max_steps": 1, setting: value}).gradients


def test_a_loss_of_the_users_own_below_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    class Own(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            return 2.0 * super()._compute_loss(model, inputs)

    with pytest.raises(ConfigurationError, match="Own"):
        trained(tiny_model, tmp_path, ["smooth_clip"], mixed(Own))
