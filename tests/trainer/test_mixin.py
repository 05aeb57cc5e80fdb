"""The mixin among other classes: its place, constructors of their own, and what is asked before a model loads."""

from pathlib import Path
from typing import Any

import pytest
from trl import GRPOTrainer

from tests.support import arguments, length_reward, prompts
from tests.trainer.support import mixed, on_top
from trl_grpo_ext import GRPOExtMixin, GRPOExtTrainer, load_rewards
from trl_grpo_ext.errors import ConfigurationError, UpstreamError


class Particular(GRPOTrainer):
    """Takes keywords alone, fewer than TRL, one of its own; and puts its own reward in front."""

    def __init__(self, *, model: Any, reward_funcs: Any, args: Any, train_dataset: Any, strength: float, **more: Any):
        self.strength = strength
        assert not {"eval_dataset", "processing_class"} & more.keys()

        def own(completions: list[Any], **columns: Any) -> list[float]:
            return [strength] * len(completions)

        super().__init__(model, [own, *reward_funcs], args, train_dataset, **more)


def test_mixin_behind_trls_trainer_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Wrong\(Particular, GRPOExtMixin\)"):

        class Wrong(Particular, GRPOExtMixin):
            pass

    class MoreOfOurs(GRPOExtMixin):  # a mixin of mixins is no trainer yet
        pass

    assert issubclass(on_top(Particular), GRPOExtTrainer)


def test_a_constructor_of_its_own_and_a_reward_in_front(tiny_model: Path, tmp_path: Path) -> None:
    rewards = load_rewards([{"name": "think_format", "weight": 0.25}, {"name": "tag_format", "weight": 0.5}])
    more = [{"name": "soft_overlong", "max_completion_length": 8, "cache": 4, "weight": 3.0}]
    given: dict[str, Any] = {"model": str(tiny_model), "args": arguments(tmp_path, rewards=more)}
    trainer = mixed(Particular)(reward_funcs=rewards, train_dataset=prompts(), strength=2.0, **given)
    assert trainer.strength == 2.0
    assert trainer.reward_func_names == ["own", "think_format", "tag_format", "soft_overlong"]
    assert trainer.reward_weights.tolist() == [1.0, 0.25, 0.5, 3.0]


def test_the_trainer_asks_before_it_loads_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(GRPOTrainer, "_calculate_rewards")
    with pytest.raises(UpstreamError, match="_calculate_rewards"):
        GRPOExtTrainer(str(tmp_path / "no model"), length_reward, arguments(tmp_path), train_dataset=prompts())
