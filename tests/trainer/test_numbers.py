"""Numbers that a reader works out from a paper, a course or a blog, through the hooks and through TRL itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
import torch

from tests.support import Run, length_reward, train
from tests.trainer.watch import Watch


class Keeping:
    """Keeps the losses that TRL's `_compute_loss` returns, and the batch of the first."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.batch: dict[str, Any] = {}

    def around(self, trainer_class: type) -> type:
        keeping = self

        class Kept(trainer_class):  # type: ignore[misc]
            def _compute_loss(self, model: Any, inputs: Any) -> Any:
                loss = super()._compute_loss(model, inputs)
                if self._trl_grpo_ext._pass is None:  # no trial
                    keeping.losses.append(float(loss.detach()))
                    keeping.batch = keeping.batch or dict(inputs)
                return loss

        return Kept


@pytest.fixture(scope="module")
def one_update(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Run, Keeping]]:
    from trl_grpo_ext import GRPOExtTrainer

    def run(**settings: Any) -> tuple[Run, Keeping]:
        keeping = Keeping()
        folder = tmp_path_factory.mktemp("numbers")
        fixed = {"loss_type": "grpo", "max_steps": 1, "reward_funcs": length_reward, **settings}
        return train(tiny_model, folder, keeping.around(GRPOExtTrainer), **fixed), keeping

    return run


def size(gradient: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(values.double().square().sum()) for values in gradient.values()))


def loss_on(trainer: Any, batch: dict[str, Any], logps_B_T: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """TRL's loss of a batch under a policy that gives its tokens these log-probabilities."""
    output = (logps_B_T, torch.ones_like(logps_B_T), logps_B_T.new_zeros(()))
    trial = trainer._trl_grpo_ext.on_trial(trainer._compute_loss)
    loss: torch.Tensor = trial({**batch, "advantages": advantages}, lambda: output)
    return loss


def test_a_penalised_reward_is_compared_in_its_group_and_then_in_the_batch(tiny_model: Path, tmp_path: Path) -> None:
    watch = Watch()
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


# ---------------------------------------------------------------------------- signs of tokens in TRL's losses


def slopes(run: Run, batch: dict[str, Any], advantages_B_T: torch.Tensor, gap: float) -> torch.Tensor:
    """∂loss/∂log π where every token is `gap` more likely than when it was sampled."""
    old_B_T = torch.full(batch["completion_mask"].shape, -1.0)
    batch = {**batch, "completion_mask": torch.ones_like(batch["completion_mask"]), "old_per_token_logps": old_B_T}
    batch["sampling_per_token_logps"] = old_B_T
    leaf_B_T = (old_B_T + gap).requires_grad_()
    return torch.autograd.grad(loss_on(run.trainer, batch, leaf_B_T, advantages_B_T), leaf_B_T)[0]


def test_sapos_temperature_is_that_of_each_tokens_sign(one_update: Callable[..., tuple[Run, Keeping]]) -> None:
    run, keeping = one_update(loss_type="sapo", sapo_temperature_pos=1.0, sapo_temperature_neg=2.0)
    shape = keeping.batch["completion_mask"].shape
    signs_B_T = torch.ones(shape)
    signs_B_T[:, ::2] = -1.0
    both = slopes(run, keeping.batch, signs_B_T, 0.3)
    up, down = (slopes(run, keeping.batch, sign * torch.ones(shape), 0.3) for sign in (1.0, -1.0))
    torch.testing.assert_close(both, torch.where(signs_B_T > 0, up, down))
    assert not torch.allclose(up, -down)  # the two temperatures are two


def test_the_off_policy_mask_drops_the_negative_tokens_of_a_completion_and_keeps_the_others(
    one_update: Callable[..., tuple[Run, Keeping]],
) -> None:
    run, keeping = one_update(off_policy_mask_threshold=0.1)
    signs_B_T = torch.ones(keeping.batch["completion_mask"].shape)
    signs_B_T[:, ::2] = -1.0
    near, far = slopes(run, keeping.batch, signs_B_T, -0.05), slopes(run, keeping.batch, signs_B_T, -0.15)
    assert near.bool().all()  # a mean KL of .05 is below the threshold
    assert torch.equal(far.bool(), signs_B_T > 0)  # one of .15 is not
    # With one advantage per completion it is DeepSeek-V3.2's rule: all of the completion, or nothing.
    whole_B_T = torch.ones_like(signs_B_T)
    whole_B_T[::2] = -1.0
    assert torch.equal(slopes(run, keeping.batch, whole_B_T, -0.15).bool(), whole_B_T > 0)
