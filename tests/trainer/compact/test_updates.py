"""What `Freedom` forbids would give another gradient, and what compact updates refuse or leave alone."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import arguments, length_reward, prompts, relative_gap
from tests.trainer.compact.runs import ALL_ROWS_RUN, DIFFERENT, EXACT, FREE, SORTED, Bonus, Whitened, gaps, pair
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.trainer.compact.updates import CompactUpdates, Freedom, _warn_once
from trl_grpo_ext.trainer.extension import Extension

MODULE = "trl_grpo_ext.trainer"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("configured", "lifted"),
    [
        ({"entropy_coef": 0.1}, SORTED),
        ({"top_entropy_quantile": 0.5}, SORTED),
        ({"loss_type": "grpo", "loss_aggregation": "token_mean_local"}, SORTED),
        ({"trainer_arguments": {"advantage_hooks": [Whitened()]}}, SORTED),
        ({"loss_type": "bnpo", "beta": 0.1}, SORTED),
        ({"beta": 0.1}, FREE),
        ({"loss_type": "grpo", "beta": 0.1}, ALL_ROWS_RUN),
        ({"loss_type": "luspo", "beta": 0.1}, ALL_ROWS_RUN),
        ({"trainer_arguments": {"advantage_hooks": [Bonus()]}}, FREE),
        ({"loss_type": "grpo", "trainer_arguments": {"advantage_hooks": [Bonus()]}}, ALL_ROWS_RUN),
        ({"loss_type": "bnpo", "trainer_arguments": {"advantage_hooks": [Bonus()]}}, SORTED),
    ],
)
def test_more_freedom_would_give_another_gradient(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configured: dict[str, Any], lifted: Freedom
) -> None:
    settings = {"max_steps": 2, "num_iterations": 2, **configured}  # at the second step the policy is off its reference
    ours, theirs = pair(tiny_model, tmp_path, **settings)
    assert max(gaps(ours, theirs)) < EXACT["float64"]
    monkeypatch.setattr(f"{MODULE}.extension.freedom_of", lambda *_: lifted)
    other, _ = pair(tiny_model, tmp_path / "lifted", **settings)
    steps = zip(other.gradients, theirs.gradients, strict=True)
    assert max(relative_gap(*step) for step in steps) > DIFFERENT


# ------------------------------------------------------------------------------------------- what is refused


def test_multimodal_batches_run_as_trl_deals_them(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments(tmp_path, compact_updates="exact")
    trainer: Any = GRPOExtTrainer(str(tiny_model), length_reward, args, train_dataset=prompts(8))
    compact: CompactUpdates = trainer._trl_grpo_ext.compact
    dealt = [{"completion_ids": torch.ones(2, 3), "pixel_values": torch.zeros(2, 3), "num_images": [1, 1]}]
    _warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger=f"{MODULE}.compact.updates"):
        assert compact.plan(dealt, torch.float32) is compact.plan(dealt, torch.float32) is dealt
    said = [record.getMessage() for record in caplog.records if record.name == f"{MODULE}.compact.updates"]
    assert said == ["compact_updates: multimodal inputs (num_images, pixel_values) run as TRL deals them."]


def test_a_liger_loss_is_refused() -> None:
    stand_in = SimpleNamespace(_trainer=None, settings=None, _args=SimpleNamespace(use_liger_kernel=True))
    with pytest.raises(ConfigurationError, match="does not work with use_liger_kernel"):
        Extension._make_compact_updates(stand_in, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"compact_updates": "on"}, "compact_updates must be off or exact, got 'on'"),
        ({"share_prompts": True}, "share_prompts needs compact_updates: exact"),
    ],
)
def test_settings_are_checked(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        GRPOExtConfig(output_dir=str(tmp_path), use_cpu=True, **overrides)
    of_yaml: Any = {"compact_updates": False}  # which reads `off` so
    assert GRPOExtConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **of_yaml).compact_updates == "off"
