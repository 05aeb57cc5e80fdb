"""What a hook remembers survives a checkpoint: a resumed run goes on as if it had never stopped."""

from pathlib import Path
from typing import Any

import pytest

from tests.support import arguments, length_reward, prompts, relative_gap, scripted_rollout, train
from trl_grpo_ext import GRPOExtTrainer
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.trainer.plugin_records import ManifestWarning

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


@pytest.mark.slow
def test_a_checkpoint_of_other_hooks_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    train(tiny_model, tmp_path, hooks=[ADAPTIVE], **SETTINGS)
    changed: dict[str, Any] = {"hooks": ["centred", ADAPTIVE], "plugin_changes": "warn", **SETTINGS}
    refused = pytest.raises(ConfigurationError, match=r"states of the advantage hooks \['kl_in_reward'\]")
    with pytest.warns(ManifestWarning), refused:
        train(tiny_model, tmp_path, resume=str(tmp_path / "checkpoint-3"), **changed)
