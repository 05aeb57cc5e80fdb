"""Trainings with `compact_updates: exact`, with shared prompts or without, are those of `off`, and what they log."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainerCallback
from trl import GRPOTrainer

from tests.support import Run, flat, length_reward, prompts, relative_gap, train
from tests.trainer import parity_grid
from tests.trainer.process_worker import Float64ExtTrainer, Float64Trainer, uneven_rollout
from trl_grpo_ext import GRPOExtMixin, GRPOExtTrainer
from trl_grpo_ext.trainer.compact.updates import Freedom
from trl_grpo_ext.types import HookDeclaration

pytestmark = pytest.mark.slow

EXACT = {"float64": 1e-9, "float32": 1e-5}
DIFFERENT = 1e-3
LOGGED = 1e-6
"""Relative; transformers adds the losses of a step up in float32."""


class Seen(Float64ExtTrainer):
    """Keeps the shapes that the loss is computed on, and what counts there."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.seen: list[dict[str, Any]] = []
        super().__init__(*arguments, **keywords)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        if self.model.training:
            lengths = zip(inputs["prompt_mask"].sum(1).tolist(), inputs["completion_mask"].sum(1).tolist(), strict=True)
            live = [sum(both) for both, a in zip(lengths, inputs["advantages"], strict=True) if a.any()]
            computed = inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()
            seen = {"step": self.state.global_step, "computed": computed, "lengths": live}
            self.seen.append(seen | {"rows": len(inputs["prompt_ids"])})
        return super()._compute_loss(model, inputs)


COMMON: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "prompt_count": 8}
COMMON |= {"reward_funcs": flat("aceg"), "learning_rate": 0.02}
"""Sixteen completions of four prompts for each optimizer step; two of the prompts have no signal."""


def pair(model: Path, folder: Path, trainer_class: type = Float64ExtTrainer, **overrides: Any) -> tuple[Run, Run]:
    """A training with `compact_updates: exact`, and the same with `off`."""
    found = {"dtype": "float64", "rollout_func": uneven_rollout, **COMMON, **overrides}
    exact = train(model, folder / "exact", trainer_class, **found, compact_updates="exact")
    found.pop("share_prompts", None)
    return exact, train(model, folder / "off", trainer_class, **found)


def gaps(ours: Run, theirs: Run) -> list[float]:
    assert len(theirs.gradients) >= 1
    assert parity_grid.loss_gap(ours, theirs) < LOGGED
    steps = [relative_gap(*step) for step in zip(ours.gradients, theirs.gradients, strict=True)]
    return [*steps, relative_gap(ours.weights, theirs.weights)]


def compact_logs(run: Run) -> list[dict[str, float]]:
    """The metrics of compact updates at each step; no metric at all may be undefined."""
    assert not [name for log in run.logs for name, value in log.items() if math.isnan(value)]
    steps = [log for log in run.logs if "loss" in log]
    return [{name[8:]: value for name, value in log.items() if name.startswith("compact/")} for log in steps]


FREE = Freedom(sort=True, drop=True, any_count=True)
SORTED = replace(FREE, drop=False, any_count=False)


class Bonus:
    """A forward hook that is not homogeneous in the advantages and gives rows without any one."""

    declares = HookDeclaration(independent=True)

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Any) -> torch.Tensor:
        return advantages_B_T + torch.minimum(0.1 * forward.entropies_B_T, 0.5 + advantages_B_T.abs())


class Whitened(Bonus):
    """A forward hook that looks at its whole micro-batch."""

    declares = HookDeclaration()

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Any) -> torch.Tensor:
        mean: torch.Tensor = (advantages_B_T * forward.mask_B_T).sum() / forward.mask_B_T.sum().clamp(min=1.0)
        return advantages_B_T - mean


REENTRANT: dict[str, Any] = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
EVALUATION: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8, "beta": 0.04}
TRAININGS: dict[str, dict[str, Any]] = {
    "two iterations": {"num_iterations": 2, "loss_type": "bnpo", "max_steps": 4, "reward_funcs": length_reward},
    "two steps for a generation batch": {"steps_per_generation": 8, "loss_type": "grpo"},
    "two generation batches for a step": {"steps_per_generation": 2, "loss_type": "bnpo"},
    "windows across generation batches and iterations": {"steps_per_generation": 6, "num_iterations": 2, "beta": 0.04},
    "windows across generation batches": {"steps_per_generation": 6, "loss_type": "luspo"},
    "no window in common": {"steps_per_generation": 3, "loss_type": "grpo", "num_iterations": 2},
    "one long micro-batch": {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1},
    "padded": {"pad_to_multiple_of": 16, "loss_type": "grpo"},
    "clipped and adam": {"optim": "adamw_torch", "max_grad_norm": 0.1, "learning_rate": 1e-3},
    "a reduction of a micro-batch": {"loss_aggregation": "token_mean_step", "beta": 0.04},
    "hooks": {"hooks": ["leave_one_out", "entropy_shaping", Bonus()]},
    "a hook of whole micro-batches": {"hooks": [Whitened()], "loss_type": "grpo"},
    "reentrant checkpointing": {"gradient_checkpointing": True, **REENTRANT},
    "checkpointing": {"gradient_checkpointing": True},
    "evaluation": {**EVALUATION, "eval_dataset": prompts(8).select(range(4, 8))},
}


def marked(number: int, name: str, share: bool) -> Any:
    marks = [pytest.mark.nightly] * (share != bool(number % 2))
    return pytest.param(TRAININGS[name], share, id=f"{name}, shared" if share else name, marks=marks)


@pytest.mark.parametrize(
    ("overrides", "share"), [marked(n, name, share) for n, name in enumerate(TRAININGS) for share in (False, True)]
)
def test_updates_of_three_steps(tiny_model: Path, tmp_path: Path, overrides: dict[str, Any], share: bool) -> None:
    ours, theirs = pair(tiny_model, tmp_path, Seen, **{"max_steps": 3, "share_prompts": share, **overrides})
    assert len(ours.gradients) == len(theirs.gradients) >= 3
    assert max(gaps(ours, theirs)) < EXACT["float64"]
    evaluated = [[log for log in run.logs if "eval_loss" in log] for run in (ours, theirs)]
    for our_log, their_log in zip(*evaluated, strict=True):
        assert our_log == pytest.approx(their_log, rel=1e-6, abs=1e-9)
    found = [metrics for metrics in compact_logs(ours) if metrics]
    assert found
    assert not any(compact_logs(theirs))
    # Where rows stay in their micro-batches, or are alone, few of a prompt meet.
    if share and ours.trainer._trl_grpo_ext.losses.updates.freedom().sort:
        assert any(metrics["computed_tokens"] < metrics["live_tokens"] for metrics in found)
    for metrics in found:
        least = metrics["distinct_tokens"] if share else metrics["live_tokens"]
        assert least <= min(metrics["live_tokens"], metrics["computed_tokens"])


def test_the_metrics_by_hand(tiny_model: Path, tmp_path: Path) -> None:
    ours, theirs = pair(tiny_model, tmp_path, Seen, max_steps=3)
    for step, metrics in enumerate(compact_logs(ours)):
        forwards = [seen for seen in ours.trainer.seen if seen["step"] == step]
        without = [seen for seen in theirs.trainer.seen if seen["step"] == step]
        live = [length for seen in without for length in seen["lengths"]]
        assert len(live) == 8  # of sixteen; in every other group all rewards are equal
        assert sorted(length for seen in forwards for length in seen["lengths"]) == sorted(live)
        assert metrics["live_tokens"] == sum(live)
        assert metrics["computed_tokens"] == sum(seen["computed"] for seen in forwards)
        assert metrics["computed_tokens"] < 0.6 * sum(seen["computed"] for seen in without)
        assert metrics["computed_to_live"] == pytest.approx(metrics["computed_tokens"] / metrics["live_tokens"])
        assert (metrics["rows_dropped"], metrics["micro_steps_skipped"]) == (0.5, 0)


class One:
    """Advantages of one completion alone, or of none."""

    declares = HookDeclaration(role="transform")

    def __init__(self, row: int) -> None:
        self.row = row

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return advantages_B_T * (torch.arange(len(advantages_B_T)) == self.row).unsqueeze(1)


@pytest.mark.parametrize(("row", "dropped", "skipped"), [(5, 15 / 16, 3), (-1, 1.0, 4)])
def test_micro_steps_of_placeholders(tiny_model: Path, tmp_path: Path, row: int, dropped: float, skipped: int) -> None:
    hooks = {"hooks": [One(row)], "reward_funcs": length_reward}
    ours, theirs = pair(tiny_model, tmp_path, Seen, loss_type="grpo", **hooks)
    if row < 0:
        assert all(not gradient.any() for run in (ours, theirs) for step in run.gradients for gradient in step.values())
    else:
        assert max(gaps(ours, theirs)) < EXACT["float64"]
    for step, metrics in enumerate(compact_logs(ours)):
        assert (metrics["rows_dropped"], metrics["micro_steps_skipped"]) == (dropped, skipped)
        ran = [seen for seen in ours.trainer.seen if seen["step"] == step]
        assert len(ran) == (2 if row >= 0 else 1)  # the last one always, placeholders or not
        assert metrics["computed_tokens"] == sum(seen["computed"] for seen in ran if any(seen["lengths"]))
    # Micro-steps without a row are in no mean of TRL's metrics.
    assert all(log["entropy"] > 1.0 for log in ours.logs if "entropy" in log) or row < 0


def saved(config: Any, tiny_model: Path, folder: Path) -> Path:
    """A model with the tiny model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_updates_with_auxiliary_loss(tiny_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # float32: torch has no grouped product of doubles.
    overrides: dict[str, Any] = {"dtype": "float32", "max_steps": 1, "router_aux_loss_coef": 0.5}
    ours, theirs = pair(tiny_moe, tmp_path, GRPOExtTrainer, **overrides)
    assert max(gaps(ours, theirs)) < EXACT["float32"]
    monkeypatch.setattr("trl_grpo_ext.trainer.mixin.freedom_of", lambda *_, **__: SORTED)
    lifted, _ = pair(tiny_moe, tmp_path, GRPOExtTrainer, **overrides)
    assert relative_gap(lifted.gradients[0], theirs.gradients[0]) > DIFFERENT


class Reweighted(GRPOTrainer):
    """The advantages of a micro-batch depend on all of its rows, and none stays 0."""

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = dict(super()._prepare_inputs(generation_batch))
        length_B = inputs["completion_mask"].sum(1)
        bonus_B = length_B / length_B.sum()
        advantages = inputs["advantages"].double()
        inputs["advantages"] = advantages + (bonus_B if advantages.dim() == 1 else bonus_B.unsqueeze(1))
        return inputs


class DoubledInPlace(GRPOTrainer):
    """Changes TRL's own micro-batch, once."""

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = super()._prepare_inputs(generation_batch)
        if "doubled" not in inputs:
            inputs["advantages"] *= 2.0
            inputs["doubled"] = True
        return inputs


@pytest.mark.parametrize("base", [Reweighted, DoubledInPlace])
@pytest.mark.parametrize("acts", ["first", "last"])
@pytest.mark.parametrize("plugins", [{"compact_updates": "exact"}, {"loss_aggregation": "token_mean_local"}])
def test_micro_batches_of_a_users_class(
    tiny_model: Path, tmp_path: Path, base: type, acts: str, plugins: dict[str, str]
) -> None:
    settings = {"dtype": "float64", "rollout_func": uneven_rollout, "loss_type": "bnpo", "max_steps": 3, **COMMON}
    bases = (GRPOExtMixin, base) if acts == "first" else (base, GRPOExtMixin)
    mine = type("Mine", (*bases, Float64Trainer), {})
    ours = train(tiny_model, tmp_path / "ours", mine, **settings, **plugins)
    plain = train(tiny_model, tmp_path / "plain", type("Theirs", (base, Float64Trainer), {}), **settings)
    assert max(gaps(ours, plain)) < EXACT["float64"]
    without = train(tiny_model, tmp_path / "without", Float64Trainer, **{**settings, "max_steps": 1})
    assert relative_gap(without.gradients[0], plain.gradients[0]) > DIFFERENT


class WarmsUp(TrainerCallback):
    """Turns the KL penalty on after the first step."""

    trainer: Any

    def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self.trainer.beta = 0.5 if state.global_step else 0.0


def test_a_callback_turns_the_kl_penalty_on(tiny_model: Path, tmp_path: Path) -> None:
    adapter = LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    found: dict[str, Any] = {"dtype": "float64", "rollout_func": uneven_rollout, **COMMON, "peft_config": adapter}
    ours = train(tiny_model, tmp_path / "a", Float64ExtTrainer, callbacks=[WarmsUp()], compact_updates="exact", **found)
    plain = train(tiny_model, tmp_path / "b", Float64Trainer, callbacks=[WarmsUp()], **found)
    assert "kl" in plain.logs[1]
    assert max(gaps(ours, plain)) < EXACT["float32"]
    assert [metrics["rows_dropped"] for metrics in compact_logs(ours)] == [0.5, 0.0]


class AdaptersInFloat32(TrainerCallback):
    """TRL rounds the adapters of a quantised model to bfloat16, in which nothing is the same to 1e-5."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **keywords: Any) -> None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()


def test_weights_in_4_bits(tiny_model: Path, tmp_path: Path) -> None:
    quantised = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")}
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    given: dict[str, Any] = {"peft_config": lora, "callbacks": [AdaptersInFloat32()], "share_prompts": True, "seed": 3}
    given |= {"dtype": "float32", "beta": 0.04, "max_steps": 3, "model_init_kwargs": quantised}
    runs = pair(tiny_model, tmp_path, GRPOExtTrainer, **given)
    assert any(type(module) is Linear4bit for module in runs[0].trainer.model.modules())
    assert max(gaps(*runs)) < EXACT["float32"]
    assert any(metrics["computed_tokens"] < metrics["live_tokens"] for metrics in compact_logs(runs[0]))
