"""What the lecture's choices make of a real training: the gradient of every objective, with every variant."""

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from sorting.choices import choose_objective, choose_plugins
from sorting.task import prompts, save_untrained_model
from transformers import TrainerCallback

from tests.support import arguments, relative_gap
from trl_grpo_ext import GRPOExtTrainer
from trl_grpo_ext.types import HookDeclaration, Rollout

GROUP = 4
EPSILON = 0.2


class Watch(TrainerCallback):
    """An advantage hook that keeps what was rolled out, and a callback that keeps weights and gradients."""

    __name__ = "watch"
    declares = HookDeclaration(role="transform")

    def __init__(self, objective: str, variant: str) -> None:
        self.objective = objective
        self.variant = variant
        self.rollouts: list[Rollout] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.expected: list[dict[str, torch.Tensor]] = []
        self.ratios: list[torch.Tensor] = []

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        self.rollouts.append(rollout)
        return advantages_B_T

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        parameters = dict(model.named_parameters())
        self.gradients.append({name: parameter.grad.detach().clone() for name, parameter in parameters.items()})
        loss, ratio_B_T = self._loss(model)
        self.ratios.append(ratio_B_T)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        self.expected.append(dict(zip(parameters, gradients, strict=True)))

    def _loss(self, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The objective as its definition has it, by loops over completions and tokens."""
        (rollout,) = self.rollouts
        ids_B_L = torch.cat([rollout.prompt_ids_B_P, rollout.completion_ids_B_T], dim=1)
        logps_B_L_V = torch.log_softmax(model(ids_B_L).logits.float(), dim=-1)
        first = rollout.prompt_ids_B_P.size(1)
        total = torch.zeros(())
        ratios_B_T = torch.ones_like(rollout.mask_B_T)
        assert rollout.old_logps_B_T is not None
        for row, advantage in enumerate(by_hand(self.variant, rollout.rewards_B.tolist())):
            for token in range(int(rollout.mask_B_T[row].sum())):
                logp = logps_B_L_V[row, first + token - 1, rollout.completion_ids_B_T[row, token]]
                ratio = torch.exp(logp - rollout.old_logps_B_T[row, token])
                ratios_B_T[row, token] = ratio.detach()
                if self.objective == "naive":
                    total = total - advantage * logp
                elif self.objective == "unclipped" or not clipped(ratio.item(), advantage):
                    total = total - advantage * ratio
        return total / rollout.mask_B_T.sum(), ratios_B_T


def clipped(ratio: float, advantage: float) -> bool:
    """Whether the ratio has already gone as far as it may in the direction that the advantage wants."""
    return ratio > 1 + EPSILON if advantage > 0 else ratio < 1 - EPSILON


def by_hand(variant: str, rewards: list[float]) -> list[float]:
    advantages: list[float] = []
    for first in range(0, len(rewards), GROUP):
        group = rewards[first : first + GROUP]
        mean = statistics.mean(group)
        advantages += {
            "raw": group,
            "centred": [reward - mean for reward in group],
            "normalised": [(reward - mean) / (statistics.stdev(group) + 1e-4) for reward in group],
            "max_only": [reward if reward == max(group) else 0.0 for reward in group],
        }[variant]
    return advantages


def trained(folder: Path, objective: str, variant: str) -> Watch:
    """Three optimizer steps on one rollout, with large steps."""
    save_untrained_model(folder, largest=9, seed=3, hidden_size=32, num_hidden_layers=1)
    sizes = {"per_device_train_batch_size": 32, "num_generations": GROUP, "max_completion_length": 4}
    steps = {"num_iterations": 3, "max_steps": 3, "learning_rate": 3.0, "seed": 5}
    args = arguments(folder / "out", epsilon=EPSILON, loss_type="dapo", **sizes, **steps)
    choose_plugins(args, "sort_inclusion", variant)
    choose_objective(args, objective, [])
    watch = Watch(objective, variant)
    hooks = [*args.advantage_hooks, watch]
    args.advantage_hooks = None
    rows = Dataset.from_list(prompts("train", 8, numbers=3, largest=9, seed=1))
    GRPOExtTrainer(str(folder), args=args, train_dataset=rows, callbacks=[watch], advantage_hooks=hooks).train()
    return watch


CHOICES = [pytest.param("naive", variant, marks=pytest.mark.slow) for variant in ("raw", "centred", "normalised")]
CHOICES += [pytest.param("unclipped", variant, marks=pytest.mark.slow) for variant in ("raw", "normalised", "max_only")]
CHOICES += [pytest.param("clipped", "centred"), pytest.param("clipped", "max_only", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("objective", "variant"), CHOICES)
def test_choices_give_the_objectives_gradient(tmp_path: Path, objective: str, variant: str) -> None:
    watch = trained(tmp_path, objective, variant)
    assert len(watch.gradients) == len(watch.expected) == 3
    for ours, theirs in zip(watch.gradients, watch.expected, strict=True):
        assert relative_gap(ours, theirs) < 1e-4
    assert (watch.ratios[0] - 1).abs().max() < 1e-5  # the first step is on-policy
    assert (watch.ratios[2] - 1).abs().max() > EPSILON  # or the three objectives would be one


@settings(max_examples=30)
@given(numbers=st.integers(2, 6), largest=st.integers(3, 40), seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)))
def test_held_out_answers_are_not_trained_on(numbers: int, largest: int, seeds: tuple[int, int]) -> None:
    train = prompts("train", 200, numbers=numbers, largest=largest, seed=seeds[0])
    held_out = prompts("held out", 200, numbers=numbers, largest=largest, seed=seeds[1])
    assert not {tuple(sorted(row["numbers"])) for row in train} & {tuple(sorted(row["numbers"])) for row in held_out}
    for rows in (train, held_out):
        assert len({row["prompt"] for row in rows}) == len(rows) <= 200
        for row in rows:
            assert row["prompt"] == " ".join(map(str, row["numbers"])) + " ="
            assert len(row["numbers"]) == numbers
            assert 0 <= min(row["numbers"]) <= max(row["numbers"]) <= largest
    assert prompts("train", 200, numbers=numbers, largest=largest, seed=seeds[0]) == train
