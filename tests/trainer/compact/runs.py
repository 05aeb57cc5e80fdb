"""Pairs of trainings with and without compact updates, and how far apart they are."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from tests.support import Run, relative_gap, train
from tests.trainer import parity_grid
from tests.trainer.process_worker import Float64CompactTrainer, reward_with_flat_groups, uneven_rollout
from trl_grpo_ext.trainer.batch import BatchKeys, counting_mask
from trl_grpo_ext.trainer.compact.updates import Freedom

EXACT = {"float64": 1e-9, "float32": 1e-5}
DIFFERENT = 1e-3
LOGGED = 1e-6
"""Relative; transformers adds the losses of a step up in float32."""


class Seen(Float64CompactTrainer):
    """Keeps the shapes that the loss is computed on, and what counts there."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.seen: list[dict[str, Any]] = []
        super().__init__(*arguments, **keywords)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        if self.model.training:
            lengths = zip(inputs["prompt_mask"].sum(1).tolist(), inputs["completion_mask"].sum(1).tolist(), strict=True)
            self.seen.append(
                {
                    "step": self.state.global_step,
                    "computed": inputs["prompt_ids"].numel() + inputs["completion_ids"].numel(),
                    "rows": len(inputs["prompt_ids"]),
                    "lengths": [sum(both) for both, a in zip(lengths, inputs["advantages"], strict=True) if a.any()],
                }
            )
        return super()._compute_loss(model, inputs)


COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "prompt_count": 8,
    "reward_funcs": reward_with_flat_groups,
    "learning_rate": 0.02,
}
"""Sixteen completions of four prompts for each optimizer step; two of the prompts have no signal."""


def pair(model: Path, folder: Path, trainer_class: type = Float64CompactTrainer, **overrides: Any) -> tuple[Run, Run]:
    """A training with `compact_updates: exact`, and the same with `off`."""
    found = {"dtype": "float64", **COMMON, **overrides}
    found["trainer_arguments"] = {"rollout_func": uneven_rollout, **found.get("trainer_arguments", {})}
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
    return [
        {name.removeprefix("compact/"): value for name, value in log.items() if name.startswith("compact/")}
        for log in run.logs
        if "loss" in log
    ]


FREE = Freedom(sort=True, drop=True, any_count=True, trim_left=True)
ALL_ROWS_RUN = replace(FREE, drop=False)
SORTED = replace(FREE, drop=False, any_count=False)


class Bonus:
    """A forward hook that is not homogeneous in the advantages and gives rows without any one."""

    per_completion = True

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Any) -> torch.Tensor:
        return advantages_B_T + torch.minimum(0.1 * forward.entropies_B_T, 0.5 + advantages_B_T.abs())


class Whitened(Bonus):
    """A forward hook that looks at its whole micro-batch."""

    per_completion = False

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Any) -> torch.Tensor:
        mean: torch.Tensor = (advantages_B_T * forward.mask_B_T).sum() / forward.mask_B_T.sum().clamp(min=1.0)
        return advantages_B_T - mean


# --------------------------------------------------------------------------------------------- made-up batches

ROW_ID, WEIGHTS = BatchKeys.row_id, BatchKeys.weights


@dataclass(frozen=True)
class Row:
    """One completion: its lengths, which of its tokens are the model's, and its advantages."""

    prompt: int
    live: tuple[bool, ...]
    advantages: tuple[float, ...]


@dataclass(frozen=True)
class Case:
    """A generation batch of one rank, and what TRL pads it to beyond its longest row."""

    rows: list[Row]
    micro_steps: int
    per_token: bool
    padding: tuple[int, int]
    tool_mask: bool
    sequence_ratio: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    micro_steps = draw(st.integers(1, 4))
    count = micro_steps * draw(st.integers(1, 3))
    values = st.sampled_from([-1.5, -0.25, 0.0, 0.0, 0.5, 2.0])
    rows = []
    for _ in range(count):
        live = tuple(draw(st.lists(st.sampled_from([True, True, False]), min_size=0, max_size=6)))
        silent = draw(st.booleans())
        advantages = [0.0] * 6 if silent else draw(st.lists(values, min_size=6, max_size=6))
        rows.append(Row(draw(st.integers(1, 4)), live, tuple(advantages)))
    return Case(
        rows,
        micro_steps,
        draw(st.booleans()),
        (draw(st.integers(0, 2)), draw(st.integers(0, 2))),
        draw(st.booleans()),
        draw(st.booleans()),
    )


def batches_of(case: Case) -> list[dict[str, Any]]:
    """TRL's micro-batches; every live token has values of its own, every other place has rubbish."""
    count, width = len(case.rows), max(1, *(len(row.live) for row in case.rows)) + case.padding[1]
    left = max(row.prompt for row in case.rows) + case.padding[0]
    number_B_T = torch.arange(count * width, dtype=torch.float64).view(count, width)
    batch: dict[str, Any] = {
        "prompt_ids": torch.arange(count * left).view(count, left) + 1000,
        "prompt_mask": torch.tensor([[0] * (left - row.prompt) + [1] * row.prompt for row in case.rows]),
        "completion_ids": torch.arange(count * width).view(count, width) + 5000,
        "completion_mask": torch.tensor([[1] * len(row.live) + [0] * (width - len(row.live)) for row in case.rows]),
        "old_per_token_logps": torch.sin(number_B_T),
        "ref_per_token_logps": torch.cos(number_B_T),
        "importance_sampling_ratio": torch.sin(number_B_T[:, :1] if case.sequence_ratio else number_B_T).abs(),
        WEIGHTS: torch.sin(3 + number_B_T).abs(),
        ROW_ID: torch.arange(count) + 40,
        "labels": [f"row {row}" for row in range(count)],
        "num_items_in_batch": torch.tensor(23.0),
        "nothing": None,
    }
    if case.tool_mask:
        batch["tool_mask"] = torch.tensor(
            [[*map(int, row.live), *[1] * (width - len(row.live))] for row in case.rows]
        ).view(count, width)
    batch[WEIGHTS] = batch[WEIGHTS] * counting_mask(batch)
    advantages_B_T = torch.tensor([[*row.advantages, *[0.0] * width][:width] for row in case.rows])
    batch["advantages"] = advantages_B_T if case.per_token else advantages_B_T[:, 0].clone()
    size = count // case.micro_steps
    return [
        {
            key: value
            if value is None or (isinstance(value, torch.Tensor) and value.dim() == 0)
            else value[at : at + size]
            for key, value in batch.items()
        }
        for at in range(0, count, size)
    ]
