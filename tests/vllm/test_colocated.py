"""vLLM in the trainer's process: `GRPOExtTrainer` against plain TRL, both sampling from the same engine.

The engine computes in bfloat16 and the trainer in float64, so the two never agree on a probability.
"""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from trl import GRPOTrainer

from tests.support import Run, prompts, relative_gap, train
from tests.vllm import COLOCATED, needs_vllm

needs_vllm()

from trl_grpo_ext import GRPOExtTrainer, Rollout  # noqa: E402
from trl_grpo_ext.types import HookDeclaration  # noqa: E402

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("engine")]

EXACT = 2e-6
KL: dict[str, Any] = {"num_iterations": 2, "gradient_accumulation_steps": 2, "beta": 0.04, "max_steps": 4}
EVALUATED: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "per_device_eval_batch_size": 8,
    "trainer_arguments": {"eval_dataset": prompts(2)},
}
LORA = {"trainer_arguments": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "down_proj"])}}


class Sampling:
    """Keeps what the engine gave and what the loss is computed on."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.sampled: list[dict[tuple[int, ...], list[float]]] = []
        self.seen: list[dict[str, Any]] = []
        self.answers: list[Any] = []
        generate = self.vllm_generation.generate

        def kept(*arguments: Any, **keywords: Any) -> Any:
            outputs = generate(*arguments, **keywords)
            self.answers.append(copy.deepcopy(outputs))  # TRL's loop of tools goes on in the same lists
            logps = [[token[0] for token in row] for row in outputs[2]]
            self.sampled.append({tuple(ids): row for ids, row in zip(outputs[1], logps, strict=True)})
            return outputs

        self.vllm_generation.generate = kept

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self.seen.append({key: v.clone() for key, v in inputs.items() if isinstance(v, torch.Tensor)})
        return super()._compute_loss(model, inputs)


class TheirTrainer(Sampling, GRPOTrainer): ...


class OurTrainer(Sampling, GRPOExtTrainer): ...


def run(model: Path, folder: Path, trainer_class: type = OurTrainer, **settings: Any) -> Run:
    given = {"dtype": "float64", "prompt_count": 8, **COLOCATED, **settings}
    return train(model, folder, trainer_class, scripted=False, **given)


def pair(model: Path, folder: Path, ours: dict[str, Any], **both: Any) -> tuple[Run, Run]:
    """A training with what is selected, and TRL's with the same settings otherwise."""
    theirs = run(model, folder / "trl", TheirTrainer, **both)
    selected = dict(ours)
    built = {**both.get("trainer_arguments", {}), **selected.pop("trainer_arguments", {})}
    return run(model, folder / "ours", **{**both, **selected, "trainer_arguments": built}), theirs


def gap(ours: Run, theirs: Run) -> float:
    """The largest relative difference of a gradient or of the weights; the completions are the same."""
    assert len(ours.gradients) == len(theirs.gradients) >= 2
    assert ours.trainer.sampled == theirs.trainer.sampled
    assert all(any(bool(gradient.any()) for gradient in step.values()) for step in theirs.gradients)
    steps = [relative_gap(*step) for step in zip(ours.gradients, theirs.gradients, strict=True)]
    return max(*steps, relative_gap(ours.weights, theirs.weights))


AS_TRL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {"max_steps": 3}),
    "two iterations, KL": ({}, KL),
    "evaluations with pass@k": ({"pass_at_k": [1, 3], "pass_thresholds": {"length_reward": 0.9}}, EVALUATED),
    "LoRA": ({}, LORA),
}


@pytest.mark.parametrize(("ours", "both"), AS_TRL.values(), ids=AS_TRL.keys())
def test_what_only_looks_changes_no_bit(
    model: Path, tmp_path: Path, ours: dict[str, Any], both: dict[str, Any]
) -> None:
    found, theirs = pair(model, tmp_path, ours, **both)
    assert gap(found, theirs) == 0.0
    for log, wanted in zip(found.logs, theirs.logs, strict=True):
        assert {name: log[name] for name in wanted} == wanted
    if "pass_at_k" in ours:
        for log in found.logs:
            assert "eval_loss" not in log or 0 <= log["eval_pass@1"] <= log["eval_pass@3"] <= 1


CORRECTIONS: dict[str, dict[str, Any]] = {
    "token_truncate": {"vllm_importance_sampling_clip_max": 1.0},
    "token_mask": {"vllm_importance_sampling_clip_min": 0.98, "vllm_importance_sampling_clip_max": 1.02},
    "sequence_truncate": {"vllm_importance_sampling_clip_max": 1.0},
    "sequence_mask": {"vllm_importance_sampling_clip_max": 1.0},
}
"""Bounds that the engine's bfloat16 crosses for many tokens."""
SELECTED: dict[str, dict[str, Any]] = {
    "aggregation": {"loss_aggregation": "token_mean"},
    "shared prompts": {"compact_updates": "exact", "share_prompts": True},
    "all of it": {"loss_aggregation": "token_mean", "compact_updates": "exact", "share_prompts": True},
}


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_each_correction_under_what_computes_the_loss_otherwise(model: Path, tmp_path: Path, mode: str) -> None:
    both = {"vllm_importance_sampling_mode": mode, **CORRECTIONS[mode], "loss_type": "dapo"}
    theirs = run(model, tmp_path / "trl", TheirTrainer, **both)
    ratios = torch.cat([batch["importance_sampling_ratio"].flatten() for batch in theirs.trainer.seen])
    at_bound = (ratios == 0 if mode.endswith("mask") else ratios == 1.0).double().mean()
    assert 0.05 < at_bound < 0.95
    for name, ours in SELECTED.items():
        found = run(model, tmp_path / name, **both, **ours)
        assert gap(found, theirs) < EXACT, name
        if "compact_updates" in ours:
            dropped = [log["compact/rows_dropped"] for log in found.logs if "loss" in log]
            assert dropped == [0.0, 0.0]  # a row is dropped for its advantages, never for its ratio
    found, theirs = pair(model, tmp_path / "kl", SELECTED["all of it"], **both, **KL)
    assert gap(found, theirs) < EXACT


class Truncated:
    """TRL's `token_truncate` as a hook: each token's advantage times its ratio, 1.01 at most."""

    declares = HookDeclaration(role="transform", needs=("sampling_logps", "old_logps"))

    def __init__(self) -> None:
        self.seen: list[Rollout] = []

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        self.seen.append(rollout)
        assert rollout.old_logps_B_T is not None
        assert rollout.sampling_logps_B_T is not None
        return advantages_B_T * (rollout.old_logps_B_T - rollout.sampling_logps_B_T).exp().clamp(max=1.01)


def test_a_hook_gets_the_engines_log_probabilities(model: Path, tmp_path: Path) -> None:
    truncated = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.01}
    theirs = run(model, tmp_path / "trl", TheirTrainer, **truncated)
    hook = Truncated()
    hooked = {"trainer_arguments": {"advantage_hooks": [hook]}}
    ours = run(model, tmp_path / "ours", vllm_importance_sampling_correction=False, **hooked)
    assert gap(ours, theirs) < EXACT
    for rollout, sampled in zip(hook.seen, ours.trainer.sampled, strict=True):
        masks_B_T = rollout.mask_B_T.bool()
        for ids, mask, logps in zip(rollout.completion_ids_B_T, masks_B_T, rollout.sampling_logps_B_T, strict=True):
            assert logps[mask].tolist() == pytest.approx(sampled[tuple(ids[mask].tolist())], abs=1e-6)


def first_is_even(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Often the same for a whole group."""
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


def resampled(model: Path, folder: Path, **settings: Any) -> Run:
    chosen = {"resample": {"filter": "signal"}, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, **settings}
    return run(model, folder, reward_funcs=first_is_even, **chosen)


def test_resample_draws_from_the_engine(model: Path, tmp_path: Path) -> None:
    found = resampled(model, tmp_path)
    rounds = [int(log["groups/rounds"]) for log in found.logs if "loss" in log]
    assert max(rounds) > 1
    assert sum(rounds) == len(found.trainer.sampled)
    drawn = iter(found.trainer.sampled)
    for count, batch in zip(rounds, found.trainer.seen, strict=True):
        sampled = {ids: logps for one in itertools.islice(drawn, count) for ids, logps in one.items()}
        for n, mask in enumerate(batch["completion_mask"].bool()):
            if mask.any():
                ids = tuple(batch["completion_ids"][n][mask].tolist())
                logps = batch["sampling_per_token_logps"][n][mask].tolist()
                assert logps == pytest.approx(sampled[ids], abs=1e-6)
                assert batch["advantages"][n].any()


def test_a_resumed_run_samples_what_the_whole_one_did(model: Path, tmp_path: Path) -> None:
    for name, settings in {"plain": {"resample": None}, "rounds": {}}.items():
        whole = resampled(model, tmp_path / name, **settings)
        again = resampled(model, tmp_path / name, **settings, resume=str(tmp_path / name / "checkpoint-2"))
        assert again.trainer.sampled == whole.trainer.sampled[-len(again.trainer.sampled) :]
        assert len(again.gradients) == 2
        assert relative_gap(again.weights, whole.weights) < EXACT
