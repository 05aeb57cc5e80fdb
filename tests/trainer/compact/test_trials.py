"""Trainings whose adapters, positions, hooks or noise forbid something are those of plain TRL, and the log says why."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import HunYuanDenseV1Config, LlamaConfig, TrainerCallback

from tests.support import SIZES, Run, length_reward, scripted_rollout
from tests.trainer.compact.test_updates import Seen, compact_logs, gaps, pair, saved
from tests.trainer.process_worker import endless_at_first
from trl_grpo_ext import GRPOExtTrainer
from trl_grpo_ext.trainer.compact import trials
from trl_grpo_ext.trainer.compact.updates import CompactUpdates

pytestmark = pytest.mark.slow

EXACT = 5e-5
SPACE = 3 + 36
"""The token at the end of every prompt."""

LORA: dict[str, Any] = {"r": 2, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora on the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "dora on the embedding": {"target_modules": ["embed_tokens", "v_proj"], "use_dora": True},
    "trainable tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [5, SPACE]},
    "the embedding whole": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "alora": {"target_modules": ["q_proj"], "alora_invocation_tokens": [SPACE]},
}


def packed(run: Run) -> bool:
    return any(metrics["computed_tokens"] < metrics["live_tokens"] for metrics in compact_logs(run) if metrics)


def shared_pair(model: Path, folder: Path, **overrides: Any) -> tuple[Run, Run]:
    settings: dict[str, Any] = {"dtype": "float32", "max_steps": 2, "share_prompts": True, **overrides}
    return pair(model, folder, GRPOExtTrainer, **settings)


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_in_trials(tiny_model: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    adapter = LoraConfig(**LORA, **ADAPTERS[name])
    ours, theirs = shared_pair(tiny_model, tmp_path, peft_config=adapter, seed=3)
    assert all(gradient.any() for gradient in ours.gradients[1].values())
    assert max(gaps(ours, theirs)) < EXACT
    assert packed(ours) == (name != "alora") == ("prompts are not shared" not in caplog.text)


class Reads(TrainerCallback):
    """A hook of a user's, in front of the whole model: where a prompt has an `a`, all of its row is made louder."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **keywords: Any) -> None:
        def read(module: Any, arguments: Any, given: dict[str, Any]) -> None:
            self.loud = 1.0 + 0.1 * (given["input_ids"] == 3).any(dim=1).float()

        def change(module: Any, arguments: Any, output: Any) -> Any:
            return output * self.loud.view(-1, 1, 1)

        model.register_forward_pre_hook(read, with_kwargs=True)
        model.get_input_embeddings().register_forward_hook(change)


def test_hook_that_reads_tokens(tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = shared_pair(tiny_model, tmp_path, trainer_arguments={"callbacks": [Reads()]})
    assert max(gaps(ours, theirs)) < EXACT
    assert not packed(ours)
    assert "prompts are not shared: log-probabilities differ by" in caplog.text


FACTORS: dict[str, Any] = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 5.0, 9.0]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, **FACTORS}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LENGTHS: dict[str, Any] = {
    "longrope, longer": {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 12}},
    "dynamic, shorter": {"rope_parameters": DYNAMIC, "max_position_embeddings": 32},
}


@pytest.mark.parametrize("name", LENGTHS)
def test_positions_by_length(tiny_model: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    config = LlamaConfig(**{**SIZES, "vocab_size": 42, **LENGTHS[name]})
    model = saved(config, tiny_model, tmp_path / "model")
    ours, theirs = shared_pair(model, tmp_path, beta=0.04, num_iterations=2, max_steps=4)
    assert max(gaps(ours, theirs)) < EXACT
    assert packed(ours) == name.endswith("shorter")
    assert ("depends on the length" in caplog.text) == name.endswith("longer")


def test_later_lengths_are_tried(tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def growing(prompts_: list[str], trainer: Any) -> dict[str, Any]:
        longest = 5 if trainer.state.global_step < 2 else 14
        ids = [[3 + (row * 7 + place * 5) % 30 for place in range(2 + row % longest)] for row in range(len(prompts_))]
        return scripted_rollout(prompts_, trainer) | {"completion_ids": ids}

    rope = {**LONGROPE, "original_max_position_embeddings": 12}
    model = saved(LlamaConfig(**SIZES, vocab_size=42, rope_parameters=rope), tiny_model, tmp_path / "model")
    given = {"rollout_func": growing, "max_completion_length": 16, "max_steps": 4, "reward_funcs": length_reward}
    ours, theirs = shared_pair(model, tmp_path, **given)
    assert max(gaps(ours, theirs)) < EXACT
    found = [metrics["computed_tokens"] < metrics["live_tokens"] for metrics in compact_logs(ours)]
    assert found == [True, True, False, False]
    assert caplog.text.count("depends on the length") == 1


def test_positions_that_no_config_names(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of positions that is added to the embeddings, small beside them."""

    class Added(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **keywords: Any) -> None:
            table = 0.02 * torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
            model.get_input_embeddings().register_forward_hook(
                lambda module, arguments, output: output + table[: output.size(1)]
            )

    given = {"trainer_arguments": {"callbacks": [Added()]}}
    ours, theirs = shared_pair(tiny_model, tmp_path, **given)
    assert max(gaps(ours, theirs)) < EXACT
    assert not packed(ours)
    assert "prompts are not shared: the model's positions are absolute" in caplog.text
    monkeypatch.setattr(trials, "TIMES", 1e9)
    lifted, _ = shared_pair(tiny_model, tmp_path / "lifted", **given)
    assert max(gaps(lifted, theirs)) > 1e-3


@pytest.mark.parametrize(("change", "differs"), [(2.7e-5, False), (2e-3, True)])
def test_gradients_of_few_tokens(change: float, differs: bool) -> None:
    """One more rounding happened to change SmolLM2's gradient by 2.1e-6, and another place by 2.7e-5."""
    expected = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    excess, gap = trials._worst(expected * (1 + change), expected, expected * (1 + 2.1e-6))
    assert (excess > 1.0) == differs
    assert gap == pytest.approx(change)


def test_noise_that_depends_on_the_width(tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = pair(tiny_model, tmp_path, Seen, max_steps=1, neftune_noise_alpha=5.0, share_prompts=True)
    widths = [{seen["computed"] / seen["rows"] for seen in run.trainer.seen} for run in (ours, theirs)]
    assert widths[0] == widths[1]
    assert "prompts are not shared: NEFTune's noise depends on the length of a pass" in caplog.text


def test_a_trial_leaves_nothing_behind(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[bool] = []
    plan = CompactUpdates.plan

    def watched(updates: CompactUpdates, *arguments: Any, **keywords: Any) -> Any:
        model = updates.policy()[1]
        before = torch.get_rng_state()
        planned = plan(updates, *arguments, **keywords)
        left.append(not torch.equal(before, torch.get_rng_state()))
        left.append(len(left) < 3 and any(parameter.grad is not None for parameter in model.parameters()))
        left.append(not all(module.training for module in model.modules()))
        return planned

    monkeypatch.setattr(CompactUpdates, "plan", watched)
    ours, _ = pair(tiny_model, tmp_path, GRPOExtTrainer, dtype="float32", max_steps=1)
    assert left
    assert not any(left)
    assert ours.trainer._trl_grpo_ext.losses.updates._trials.exact.packed


def test_weights_that_are_buffers_are_not_copied() -> None:
    module = torch.nn.BatchNorm1d(3)
    weights = torch.ones(trials.SMALL + 1, dtype=torch.int32)
    module.register_buffer("weights", weights)
    with trials._same_state(module):
        module(torch.rand(4, 3))
        module.running_var = torch.zeros(3)
        weights.add_(1)
    assert (module.running_mean.tolist(), module.running_var.tolist()) == ([0.0] * 3, [1.0] * 3)
    assert module.weights is weights
    assert weights[0] == 2  # which no model does


def test_positions_in_the_gradient(tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """HunYuan scales queries and keys after the rotation, at first by 1."""
    model = saved(HunYuanDenseV1Config(**SIZES, vocab_size=42), tiny_model, tmp_path / "model")
    ours, theirs = shared_pair(model, tmp_path)
    assert max(gaps(ours, theirs)) < EXACT
    assert not packed(ours)
    assert "positions are absolute: at other places of rows gradients" in caplog.text


def test_a_first_batch_in_which_no_row_runs(tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="trl_grpo_ext.trainer.compact"):
        ours, _ = shared_pair(tiny_model, tmp_path, max_steps=1, reward_funcs=lambda prompts, **_: [0.5] * len(prompts))
    assert compact_logs(ours)[0]["rows_dropped"] == 1.0
    assert "no two rows" not in caplog.text


def test_a_first_batch_in_which_no_token_counts(tiny_model: Path, tmp_path: Path) -> None:
    given = {"rollout_func": endless_at_first, "mask_truncated_completions": True, "loss_type": "grpo"}
    ours, theirs = shared_pair(tiny_model, tmp_path, **given)
    assert max(gaps(ours, theirs)[1:]) < EXACT  # the first is of nothing
    assert packed(ours)
