"""What a hook remembers survives a checkpoint: a resumed run goes on as if it had never stopped."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import arguments, length_reward, prompts, relative_gap, scripted_rollout, train
from trl_grpo_ext import GRPOExtTrainer
from trl_grpo_ext.trainer.plugin_records import ManifestWarning
from trl_grpo_ext.types import HookDeclaration

ADAPTIVE = {"name": "kl_in_reward", "coefficient": 0.5, "target": 0.001, "horizon": 40}
SETTINGS: dict[str, Any] = {"beta": 0.001, "max_steps": 6, "save_strategy": "steps", "save_steps": 3, "optim": "sgd"}


def state_of(run: Any) -> Any:
    return run.trainer.advantage_hooks[0].state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("restore_callbacks", [False, True])
@pytest.mark.parametrize("selection", [ADAPTIVE, {**ADAPTIVE, "form": "completion"}], ids=["plain", "shaper"])
def test_resuming_is_exact(tiny_model: Path, tmp_path: Path, selection: Any, restore_callbacks: bool) -> None:
    settings = {**SETTINGS, "restore_callback_states_from_checkpoint": restore_callbacks}
    hooks = {"advantage_hooks": [selection]}
    whole = train(tiny_model, tmp_path, trainer_arguments=hooks, **settings)
    assert state_of(whole)["coefficient"] != pytest.approx(0.5, rel=1e-3)  # it has adapted

    data = {"train_dataset": prompts(), "rollout_func": scripted_rollout}
    resumed = GRPOExtTrainer(str(tiny_model), length_reward, arguments(tmp_path, **settings), **data, **hooks)
    resumed.evaluate(prompts())  # generates before training, so the state must not be taken as begun
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.advantage_hooks[0].state_dict() == state_of(whole)
    weights = {name: p.detach() for name, p in resumed.model.named_parameters()}
    assert relative_gap(weights, whole.weights) < 1e-6


class Counts:
    """Counts its batches over all of a run."""

    declares = HookDeclaration(role="transform")

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.count = 0

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        self.count += 1
        return advantages_B_T + 0.0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.count = state["count"]


class NoState:
    declares = HookDeclaration(role="transform")
    __name__ = "b"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return advantages_B_T + 0.0


def on_other_hooks(model: Path, folder: Path, steps: int, hooks: list[Any]) -> list[str]:
    """Train with these hooks up to a step, from the checkpoint before it, and return what was said of states."""
    settings: dict[str, Any] = {**SETTINGS, "max_steps": steps, "save_steps": 1, "plugin_changes": "warn"}
    resume = {"resume": str(folder / f"checkpoint-{steps - 1}")} if steps > 1 else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, folder, hooks=hooks, **settings, **resume)
    said = [str(one.message) for one in caught if one.category is ManifestWarning]
    return [sentence for sentence in said if " state" in sentence]


@pytest.mark.slow
def test_states_belong_to_hooks_of_their_name(tiny_model: Path, tmp_path: Path) -> None:
    assert on_other_hooks(tiny_model, tmp_path, 1, [Counts("a"), Counts("b")]) == []
    b, c = Counts("b"), Counts("c")
    new, unused = on_other_hooks(tiny_model, tmp_path, 2, [NoState(), c, b])
    assert (b.count, c.count) == (2, 1)
    assert "'c': it starts over" in new
    assert "of the advantage hook 'a'." in unused
    (unused,) = on_other_hooks(tiny_model, tmp_path, 3, ["sign_scaling"])
    assert "of advantage hooks" in unused
    (new,) = on_other_hooks(tiny_model, tmp_path, 4, [b := Counts("b")])  # not from what an older run has left
    assert b.count == 1
    assert "'b': it starts over" in new
