"""Somebody's subclass with a loss of its own: a term beside TRL's, or another loss in its place."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from tests.support import relative_gap, train
from tests.trainer.support import (
    EXACT,
    Doubled,
    DoubledForward,
    Falling,
    FallingForward,
    assert_gradient,
    constant,
    expected_gradient,
    falling,
    group_advantages,
    mixed,
    on_top,
    rows_of,
    sequence_means,
    theirs,
)
from trl_grpo_ext.errors import ConfigurationError, SelfCheckError
from trl_grpo_ext.trainer.batch import whole_rows


def decayed(gradient: dict[str, torch.Tensor], model: Path) -> dict[str, torch.Tensor]:
    """With the gradient of 0.01 Σ w²."""
    weights = dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters())
    return {name: value + 0.02 * weights[name].detach() for name, value in gradient.items()}


class DecayedInside(GRPOTrainer):
    """The term of `Decayed` in `_compute_loss`."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return super()._compute_loss(model, inputs) + 0.01 * sum(w.pow(2).sum() for w in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(("make", "at"), [(mixed, "compute_loss"), (on_top, "compute_loss"), (on_top, "_compute_loss")])
@pytest.mark.parametrize("hook", [Falling, FallingForward])
def test_a_term_adds_its_gradient_to_ours(tiny_model: Path, tmp_path: Path, make: Any, at: str, hook: Any) -> None:
    trainer_class = make(theirs("Decayed") if at == "compute_loss" else DecayedInside)
    settings: dict[str, Any] = {"loss_aggregation": "token_mean", "max_steps": 1, "loss_type": "grpo"}
    run = train(tiny_model, tmp_path, trainer_class, hooks=[hook()], **settings)
    rows = rows_of(tiny_model)
    tokens = sum(len(ids) for _, ids in rows)
    advantages = falling(group_advantages(rows).tolist(), rows)
    ours = expected_gradient(tiny_model, rows, advantages, constant([1.0 / tokens] * 8, rows))
    expected = decayed(ours, tiny_model)
    assert relative_gap(run.gradients[0], expected) < EXACT
    assert relative_gap(ours, expected) > 0.01


@pytest.mark.slow
def test_own_term_in_the_inner_loss(tiny_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 1, "loss_type": "grpo"}
    hooks = [Falling(), FallingForward()]
    run = train(tiny_model, tmp_path / "hooks", mixed(DecayedInside), hooks=hooks, **settings)
    rows = rows_of(tiny_model)
    twice = [[a / (1 + t) for t, a in enumerate(row)] for row in falling(group_advantages(rows).tolist(), rows)]
    ours = expected_gradient(tiny_model, rows, twice, sequence_means(rows))
    assert relative_gap(run.gradients[0], decayed(ours, tiny_model)) < EXACT
    with pytest.raises(SelfCheckError, match="MineDecayedInside"):
        train(tiny_model, tmp_path / "both", mixed(DecayedInside), loss_aggregation="token_mean", **settings)


@pytest.mark.slow
def test_an_override_that_only_looks_on_takes_everything(tiny_model: Path, tmp_path: Path) -> None:
    class Counts(GRPOTrainer):
        seen = 0

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            self.seen += 1
            return super()._compute_loss(model, inputs)

        def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
            return super().compute_loss(*arguments, **keywords)

    settings: dict[str, Any] = {"max_steps": 2, "compact_updates": "exact", "loss_aggregation": "token_mean"}
    settings["hooks"] = [Falling(), FallingForward()]
    ours = train(tiny_model, tmp_path / "counts", mixed(Counts), **settings)
    plain = train(tiny_model, tmp_path / "plain", **settings)
    assert ours.trainer.seen >= 2
    assert all(torch.equal(ours.weights[name], plain.weights[name]) for name in plain.weights)
    for our_log, plain_log in zip(ours.logs, plain.logs, strict=True):  # trying it out left nothing behind
        assert our_log == pytest.approx(plain_log)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [8, 4])
def test_a_loss_per_completion_gets_one_number_for_each(tiny_model: Path, tmp_path: Path, batch: int) -> None:
    settings: dict[str, Any] = {"max_steps": 1, "per_device_train_batch_size": batch}
    run = train(tiny_model, tmp_path, mixed(theirs("PerCompletion")), hooks=[Doubled(), DoubledForward()], **settings)
    rows = rows_of(tiny_model, batch // 4)
    advantages = constant((4.0 * group_advantages(rows)).tolist(), rows)
    assert_gradient(run, tiny_model, rows, advantages, sequence_means(rows))


@pytest.mark.slow
def test_own_loss_by_tokens_takes_an_aggregation(tiny_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 1, "loss_aggregation": "token_mean"}
    run = train(tiny_model, tmp_path / "grpo", mixed(theirs("PerToken")), loss_type="grpo", **settings)
    rows = rows_of(tiny_model)
    tokens = sum(len(ids) for _, ids in rows)
    advantages = constant(group_advantages(rows).tolist(), rows)
    assert_gradient(run, tiny_model, rows, advantages, constant([1.0 / tokens] * 8, rows))
    with pytest.raises(SelfCheckError):
        train(tiny_model, tmp_path / "dapo", mixed(theirs("PerToken")), loss_type="dapo", **settings)


@pytest.mark.slow
def test_own_loss_that_reads_too_early(tiny_model: Path, tmp_path: Path) -> None:
    class Early(theirs("PerCompletion")):  # type: ignore[misc]
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            return super()._compute_loss(model, {**inputs, "advantages": inputs["advantages"].clone()})

    assert train(tiny_model, tmp_path / "rollout", mixed(Early), hooks=[Doubled()], max_steps=1).gradients
    with pytest.raises(SelfCheckError):
        train(tiny_model, tmp_path / "forward", mixed(Early), hooks=[DoubledForward()], max_steps=1)


def test_a_loss_without_advantages_refuses_hooks(tiny_model: Path, tmp_path: Path) -> None:
    class WithoutAdvantages(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            return model(input_ids=inputs["completion_ids"]).logits.float().logsumexp(-1).mean()

    with pytest.raises(SelfCheckError, match="WithoutAdvantages"):
        train(tiny_model, tmp_path, mixed(WithoutAdvantages), hooks=["centred"], max_steps=1)


class Taught(GRPOTrainer):
    """Asks a teacher and the policy, also after other prompts; `weight` is that of a term towards the teacher."""

    weight = 0.0

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        if not hasattr(self, "teacher"):
            self.teacher = copy.deepcopy(self.model).requires_grad_(False)
            self.teacher.lm_head.weight.mul_(0.5)

        def ask(asked: Any, **other: Any) -> Any:
            given = (*whole_rows({**inputs, **other}), inputs["completion_ids"].size(1))
            return self._get_per_token_logps_and_entropies(asked, *given)[0]

        torch.no_grad()(ask)(model)
        ask(model, prompt_ids=inputs["prompt_ids"].clamp(max=5))
        gap = ask(functools.partial(self.teacher)) - ask(lambda **given: model(**given))
        cast = torch.nn.Module()
        cast.wrapped, cast.forward = model, model.forward
        loss = super()._compute_loss(cast, inputs)
        ask(self.teacher)
        return loss + self.weight * gap.square().mean() if self.weight else loss


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", [None, "token_mean"])
def test_other_forward_passes_inside_a_loss(tiny_model: Path, tmp_path: Path, aggregation: str | None) -> None:
    settings: dict[str, Any] = {"hooks": [DoubledForward()], "loss_aggregation": aggregation, "beta": 0.04}
    plain = train(tiny_model, tmp_path / "plain", **settings)
    run = train(tiny_model, tmp_path / "taught", mixed(Taught), **settings)
    assert all(relative_gap(*pair) < 1e-6 for pair in zip(run.gradients, plain.gradients, strict=True))
    ours, theirs = ([log["advantage/DoubledForward/mean"] for log in one.logs[:2]] for one in (run, plain))
    assert ours == pytest.approx(theirs)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [{"loss_aggregation": "token_mean"}, {"compact_updates": "exact"}])
def test_a_term_towards_a_teacher_is_seen(tiny_model: Path, tmp_path: Path, setting: dict[str, str]) -> None:
    trainer_class = mixed(type("Distilled", (Taught,), {"weight": 0.1}))
    with pytest.raises((SelfCheckError, ConfigurationError), match=r"Distilled|Taught"):
        train(tiny_model, tmp_path, trainer_class, max_steps=1, **setting)
