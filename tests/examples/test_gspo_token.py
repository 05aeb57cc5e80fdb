"""The example hook `gspo_token` against TRL's own sequence ratios, in real trainings."""

from pathlib import Path
from typing import Any

import pytest
from trl import GRPOTrainer

from tests.support import relative_gap, train

SOURCE = Path(__file__).parents[2] / "docs" / "examples" / "grpo-gspo-token" / "src"


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_with_equal_advantages_it_is_trls_sequence_ratio(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss_type: str
) -> None:
    monkeypatch.syspath_prepend(SOURCE)
    from grpo_gspo_token import GSPOToken

    low = 0.01
    high = 0.02
    shared: dict[str, Any] = {"num_iterations": 3, "max_steps": 3, "learning_rate": 0.1, "loss_type": loss_type}
    level = "importance_sampling_level"
    of_sequences = {level: "sequence", "epsilon": low, "epsilon_high": high}
    theirs = train(tiny_model, tmp_path / "trl", GRPOTrainer, **of_sequences, **shared)
    hooked = {"trainer_arguments": {"advantage_hooks": [GSPOToken(low=low, high=high)]}}
    of_tokens = {level: "token", "epsilon": 1.0, "epsilon_high": 1e6}
    ours = train(tiny_model, tmp_path / "ours", **hooked, **of_tokens, **shared)
    for one, other in zip(theirs.gradients, ours.gradients, strict=True):
        assert relative_gap(one, other) < 1e-4
