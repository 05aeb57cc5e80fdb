"""The grid of parity: TRL's loss types times settings of its loss times what of ours is on, each cell two trainings.

In a cell TRL's trainer and ours, with something on that must not change TRL's gradient (`OURS`), train on the same
scripted rollouts, by plain SGD with a large step, so that from the second step on tokens are clipped. The 15 settings
are switched by an orthogonal array of strength 3: any three occur in all eight combinations, for every loss type.
"""

import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from trl import GRPOTrainer

from tests.support import OWN_AGGREGATION, Run, relative_gap, scripted_rollout, train
from trl_grpo_ext.trainer.mixin import GRPOExtMixin

TOLERANCE = 1e-6  # relative, of gradient and loss: TRL computes log-probabilities in float32 whatever the weights

SETTINGS: dict[str, Any] = {"prompt_count": 8, "dtype": "float64", "max_steps": 2, "entropy_target": 5.0}
"""Of every cell. The entropy of 40 tokens is below 5 nats, so the adaptive coefficient grows after the first step."""

SETTINGS_OF_LOSS_TYPE: dict[str, dict[str, Any]] = {"cispo": {"epsilon_high": 1.5}}
"""What a loss type needs for the grid to act on it: TRL's default would cut nearly every ratio of `cispo` to 0.2."""


TOOL_MASK = "tool mask"  # zeros inside completions, `env_mask` of a `rollout_func`
CORRECTION = "sampler correction"  # vLLM's, each of its modes in as many cells
TOKEN_ADVANTAGES = "token advantages"  # `(B, T)`, with changes of sign inside a completion

FACTORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "beta": ({"beta": 0.0}, {"beta": 0.04}),
    "importance_sampling_level": ({"importance_sampling_level": "token"}, {"importance_sampling_level": "sequence"}),
    "delta": ({"delta": None}, {"delta": 1.5}),
    "top_entropy_quantile": ({"top_entropy_quantile": 1.0}, {"top_entropy_quantile": 0.5}),
    "entropy_coef": ({"entropy_coef": 0.0}, {"entropy_coef": 0.05}),
    "use_adaptive_entropy": ({}, {"use_adaptive_entropy": True, "entropy_coef_delta": 0.05}),
    TOOL_MASK: ({}, {}),
    "off_policy_mask_threshold": ({"off_policy_mask_threshold": None}, {"off_policy_mask_threshold": 0.01}),
    "use_bias_correction_kl": ({"use_bias_correction_kl": False}, {"use_bias_correction_kl": True}),
    CORRECTION: ({}, {"vllm_importance_sampling_clip_max": 1.5}),
    "num_iterations": ({"num_iterations": 1}, {"num_iterations": 2}),
    TOKEN_ADVANTAGES: ({}, {}),
    "steps_per_generation": (  # one micro-batch and one optimizer step, or four and two
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "steps_per_generation": 1},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4},
    ),
    "mask_truncated_completions": ({"mask_truncated_completions": False}, {"mask_truncated_completions": True}),
    "scale_rewards": ({"scale_rewards": "group"}, {"scale_rewards": "none"}),
}
"""By name the settings of the two levels, off and on. What no argument of TRL's can switch, `_train` looks up."""

CORRECTION_MODES = ("token_truncate", "sequence_truncate", "token_mask", "sequence_mask")

OURS: dict[str, dict[str, Any]] = {
    "aggregation": {},
    "compact": {"compact_updates": "exact"},
    "compact aggregation": {"compact_updates": "exact"},
    "shared": {"compact_updates": "exact", "share_prompts": True},
}
"""Settings of ours, besides the aggregation that is TRL's own reduction where the name says so."""


@dataclass(frozen=True)
class Cell:
    """One loss type under the settings that are `on`; the others are off."""

    loss_type: str
    on: frozenset[str]
    correction_mode: str = CORRECTION_MODES[0]
    ours: str = "aggregation"

    @property
    def settings(self) -> dict[str, Any]:
        settings = {**SETTINGS, "loss_type": self.loss_type, "vllm_importance_sampling_mode": self.correction_mode}
        for name, (off, on) in FACTORS.items():
            settings |= on if name in self.on else off
        if {"num_iterations", "steps_per_generation"} <= self.on:
            settings["max_steps"] = 3  # the first pass over the generation batch takes two
        return settings | SETTINGS_OF_LOSS_TYPE.get(self.loss_type, {})


def orthogonal_array() -> list[tuple[int, ...]]:
    """32 rows of 15 levels: parities of shared bits, as a Hadamard matrix has them, and their opposite."""
    rows = [tuple((row & column).bit_count() % 2 for column in range(1, 16)) for row in range(16)]
    return rows + [tuple(1 - level for level in row) for row in rows]


def all_cells() -> list[Cell]:
    """The grid; modes of the correction and what is ours are dealt out to the 32 cells of each loss type."""
    cells = []
    for loss_type in OWN_AGGREGATION:
        # VESPO, whose ratio is the sequence's already, refuses the sequence modes.
        allowed = [mode for mode in CORRECTION_MODES if loss_type != "vespo" or mode.startswith("token")]
        modes = allowed * (16 // len(allowed))
        random.Random(loss_type).shuffle(modes)  # in turns, a mode would be tied to the level of another setting
        ours = list(OURS) * (32 // len(OURS))
        random.Random(f"ours {loss_type}").shuffle(ours)
        for levels in orthogonal_array():
            on = frozenset(name for name, level in zip(FACTORS, levels, strict=True) if level)
            cells.append(Cell(loss_type, on, modes.pop() if CORRECTION in on else allowed[0], ours.pop(0)))
    return cells


def interactions(cell: Cell, strength: int) -> Iterator[tuple[tuple[str, object], ...]]:
    """Every combination of `strength` of the cell's loss type and settings; a mode of the correction counts as two."""
    levels = [("loss type", cell.loss_type), ("ours", cell.ours), *((name, name in cell.on) for name in FACTORS)]
    yield from combinations(levels, strength)
    if CORRECTION in cell.on:
        mode = ("mode", cell.correction_mode)
        others = [level for level in levels if level[0] != CORRECTION]
        yield from ((*more, mode) for more in combinations(others, strength - 2))


def covering(cells: Sequence[Cell], strength: int) -> list[Cell]:
    """Some of the cells, in which every interaction of `strength` that is in any of them occurs, chosen greedily."""
    numbers: dict[object, int] = {}
    bits = {}
    for cell in cells:
        bits[cell] = sum(1 << numbers.setdefault(found, len(numbers)) for found in interactions(cell, strength))
    missing = (1 << len(numbers)) - 1
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: (bits[cell] & missing).bit_count())
        missing &= ~bits[best]
        chosen.append(best)
    return chosen


def train_trl(model: Path, folder: Path, cell: Cell, trainer: type = GRPOTrainer) -> Run:
    """TRL's trainer alone."""
    return _train(model, folder, cell, [trainer])


def train_ours(model: Path, folder: Path, cell: Cell, trainer: type = GRPOTrainer, **more: Any) -> Run:
    """Ours, with the aggregation that is TRL's own reduction, or with another one."""
    own = {"loss_aggregation": OWN_AGGREGATION[cell.loss_type]} if "aggregation" in cell.ours else {}
    return _train(model, folder, cell, [GRPOExtMixin, trainer], **{**OURS[cell.ours], **own, **more})


def gradient_gap(ours: Run, theirs: Run) -> float:
    assert len(theirs.gradients) >= 1
    return max(relative_gap(*steps) for steps in zip(ours.gradients, theirs.gradients, strict=True))


def loss_gap(ours: Run, theirs: Run) -> float:
    """Relative to the loss, or to 1 where it is smaller: it is a mean of terms of that size, which can cancel."""
    assert len(theirs.losses) >= 1
    return max(abs(a - b) / max(abs(b), 1.0) for a, b in zip(ours.losses, theirs.losses, strict=True))


def _train(model: Path, folder: Path, cell: Cell, bases: list[type], **more: Any) -> Run:
    extensions = {TOKEN_ADVANTAGES: _TokenAdvantages, CORRECTION: _SamplerCorrection}
    between = [extension for name, extension in extensions.items() if name in cell.on]
    trainer_class = type("Trainer", (*bases[:-1], *between, bases[-1]), {})
    rollout = masked_rollout if TOOL_MASK in cell.on else sampled_rollout
    return train(model, folder, trainer_class, rollout_func=rollout, **cell.settings, **more)


class _TokenAdvantages:
    """A subclass of TRL's trainer whose advantages are per token, which TRL's loss allows."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        pattern_T = torch.cos(1.7 * torch.arange(batch["completion_ids"].size(1))) + 0.3
        batch["advantages"] = batch["advantages"].unsqueeze(1) * pattern_T
        return batch


class _SamplerCorrection:
    """TRL's importance-sampling correction for an external sampler, switched on where vLLM cannot be installed."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.use_vllm = True
        self.vllm_generation = SimpleNamespace(sync_weights=lambda: None)  # the rollouts are scripted
        self._last_loaded_step = -1


def sampled_rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """`scripted_rollout` whose sampler reports the policy's log-probabilities, give or take some scripted noise."""
    output = scripted_rollout(prompts, trainer)
    rows = [[*p, *c] for p, c in zip(output["prompt_ids"], output["completion_ids"], strict=True)]
    longest = max(map(len, rows))
    ids_B_S = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    with torch.no_grad():  # padding on the right is behind what is looked at
        logps_B_S_V = trainer.model(input_ids=ids_B_S).logits.float().log_softmax(-1)
    logps_B_S = logps_B_S_V[:, :-1].gather(2, ids_B_S[:, 1:, None]).squeeze(2)
    output["logprobs"] = []
    for prompt, ids, logps_S in zip(output["prompt_ids"], output["completion_ids"], logps_B_S, strict=True):
        noise = 0.3 * torch.randn(len(ids), generator=torch.Generator().manual_seed(zlib.crc32(bytes(ids))))
        output["logprobs"].append((logps_S[len(prompt) - 1 :][: len(ids)] + noise).tolist())
    return output


def masked_rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """`sampled_rollout` where about every third token is an environment's; a short completion may be all of it."""
    output = sampled_rollout(prompts, trainer)
    masks = [[int((row + t) % 3 != 1) for t in range(len(ids))] for row, ids in enumerate(output["completion_ids"])]
    return {**output, "env_mask": masks}
