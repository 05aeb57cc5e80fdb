"""What the pipeline tests share: classes of docs/pipelines.md, and a gradient computed without any of the trainers."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support import Run, length_reward, prompts, relative_gap, scripted_completion
from trl_grpo_ext import GRPOExtMixin, GRPOExtTrainer
from trl_grpo_ext.types import HookDeclaration

PAGE = (Path(__file__).parents[3] / "docs" / "pipelines.md").read_text(encoding="utf-8")
EXACT = 2e-5  # relative, in float32
Row = tuple[list[int], list[int]]
"""Tokens of a prompt and of a completion."""


def theirs(name: str) -> Any:
    """A trainer of somebody else's, as the page has it; `PerToken` is `PerCompletion` with the page's edit."""
    names: dict[str, Any] = {}
    exec("import torch\nfrom trl import GRPOTrainer\n", names)
    of_page = "PerCompletion" if name == "PerToken" else name
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if f"class {of_page}(" in block]
    if name == "PerToken":
        ((before, after),) = re.findall(r"```diff\n-(.*)\n\+(.*)\n```", PAGE)
        assert code.count(before) == 1
        code = code.replace(before, after).replace(of_page, name)
    exec(code, names)
    return names[name]


def mixed(base: type) -> Any:
    return type(f"Mine{base.__name__}", (GRPOExtMixin, base), {})


def on_top(base: type) -> Any:
    return type(f"Mine{base.__name__}", (base, GRPOExtTrainer), {})


def rows_of(model: Path, count: int = 2, longest: int = 10) -> list[Row]:
    """The scripted generation batch of the first `count` prompts."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = prompts(count)["prompt"]
    return [(tokenizer(t)["input_ids"], scripted_completion(t, m, longest)) for t in texts for m in range(4)]


def group_advantages(rows: Sequence[Row]) -> torch.Tensor:
    """GRPO's, of `length_reward`."""
    rewards_Q_G = torch.tensor(length_reward([ids for _, ids in rows])).view(-1, 4)
    centred_Q_G = rewards_Q_G - rewards_Q_G.mean(1, keepdim=True)
    return (centred_Q_G / (rewards_Q_G.std(1, keepdim=True) + 1e-4)).flatten()


def expected_gradient(
    model: Path,
    rows: Sequence[Row],
    advantages: Sequence[Sequence[float]],
    weights: Sequence[Sequence[float]],
    temperature: float = 1.0,
) -> dict[str, torch.Tensor]:
    """The gradient of -Σ w·A·log π at ratio 1: row by row, without padding and without any trainer."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for (prompt, completion), row_advantages, row_weights in zip(rows, advantages, weights, strict=True):
        logits = policy(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
        logps = logits.log_softmax(-1)[torch.arange(len(completion)), completion]
        (-(torch.tensor(row_weights) * torch.tensor(row_advantages) * logps).sum()).backward()
    return {name: weight.grad for name, weight in policy.named_parameters() if weight.grad is not None}


def assert_gradient(run: Run, model: Path, rows: Sequence[Row], advantages: Any, weights: Any) -> None:
    """The first step's gradient is this one, as far as float32 goes."""
    assert relative_gap(run.gradients[0], expected_gradient(model, rows, advantages, weights)) < EXACT


def sequence_means(rows: Sequence[Row], sequences: int | None = None) -> list[list[float]]:
    """The weights of a mean over completions of token means."""
    return [[1.0 / len(ids) / (sequences or len(rows))] * len(ids) for _, ids in rows]


def falling(values: Sequence[float], rows: Sequence[Row]) -> list[list[float]]:
    """Advantages that `Falling` makes of one number per completion."""
    return [[float(value) / (1 + t) for t in range(len(ids))] for value, (_, ids) in zip(values, rows, strict=True)]


def constant(values: Sequence[float], rows: Sequence[Row]) -> list[list[float]]:
    return [[float(value)] * len(ids) for value, (_, ids) in zip(values, rows, strict=True)]


class Falling:
    """The first token of a completion gets all of the advantage, the second half of it, and so on."""

    declares = HookDeclaration(role="transform")

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.rollouts: list[Any] = []

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        self.seen.append(advantages_B_T.clone())
        self.rollouts.append(rollout)
        return advantages_B_T / torch.arange(1.0, 1.0 + advantages_B_T.size(1))


class FallingForward:
    """The same at the loss forward."""

    declares = HookDeclaration(independent=True)

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Any) -> torch.Tensor:
        return advantages_B_T / torch.arange(1.0, 1.0 + advantages_B_T.size(1))


class Doubled:
    """Twice the advantage, at the rollout."""

    declares = HookDeclaration(role="transform")

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return 2.0 * advantages_B_T


class DoubledForward:
    """Twice the advantage, at the loss forward."""

    declares = HookDeclaration(independent=True)

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Any) -> torch.Tensor:
        return 2.0 * advantages_B_T
