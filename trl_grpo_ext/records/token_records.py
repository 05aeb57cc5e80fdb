"""What the loss used, token by token: sampled completions, in one parquet file per logging step.

The setting `token_records: n` turns it on. It samples at least `n` completions of every generation batch, in whole
groups, so that completions of one prompt can be compared. Each row of `token_records/step_00010.parquet` is one
completion; `SCHEMA` lists its columns. Values are taken where they were used: rewards and the advantages after each
rollout hook when the batch was scored, the rest at the row's last loss forward before the file was written.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import AlignmentError, PluginOutputError
from ..types import Rollout

if TYPE_CHECKING:
    import torch

FOLDER = "token_records"

COLUMNS: dict[str, str] = {
    "step": "optimizer steps done when the file was written",
    "group": "number of the prompt within the generation batch, over all ranks",
    "member": "number of the completion within its group",
    "prompt": "the prompt as text; JSON where it is a list of messages",
    "prompt_ids": "the prompt's tokens",
    "completion": "the completion's tokens as text, without special tokens",
    "truncated": "whether it ended at the limit",
    "rewards": "each function's reward, null where it gave None",
    "reward": "their weighted sum",
    "outcomes": "the verdict of rewards that judge by outcomes: right, wrong, no_answer, timeout, ...",
    "token_ids": "the completion's tokens",
    "tokens": "their names in the vocabulary",
    "starts": "where in the completion's text each token's characters begin; null if they cannot be matched",
    "ends": "where they end",
    "live": "whether the token counts in the loss",
    "turns": "number of the turn that wrote the token, from 0; -1 where a tool or an environment wrote it",
    "failed_turns": "numbers of the turns with a failed tool call; null if unknown",
    "stages": "the stages of the advantages: trl, then each hook",
    "advantages": "the advantage of every token after each stage",
    "advantage": "the advantage of every token that the loss used; null until the row has been trained on",
    "weight": "the token's weight in the loss of the optimizer step; null where there was none",
    "logp": "log-probability under the policy at that loss forward; null where there was none",
    "entropy": "entropy of the next-token distribution there, in nats; null where there was none",
}
"""The columns of a record: name, type and meaning."""


class TokenRecorder:
    """Keeps the records of this rank's sampled rows until they are written.

    Args:
        count: Completions to sample from each generation batch, over all ranks, in whole groups.
        seed: For the choice of groups, which must be the same on all ranks.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed
        self._generations = 0
        self._records: dict[int, dict[str, Any]] = {}

    def start(
        self,
        rollout: Rollout,
        places_B: torch.Tensor,
        stages: Sequence[tuple[str, torch.Tensor]],
        outcomes: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        """Begin the records of a generation batch; drop those of the one before.

        Args:
            rollout: The generation batch.
            places_B: The number that identifies each row at its loss forward.
            stages: Name of each stage of the advantages, and `(B, T)` after it.
            outcomes: By name of a reward, the outcome of each of the `B` completions.
        """
        self._generations += 1
        self._records = {}
        groups = min(-(-self._count // rollout.num_generations), rollout.totals.prompts)
        # Seeded by a string: the same on every rank and at every resumption, whatever else draws random numbers.
        chosen = random.Random(f"{self._seed}/{self._generations}").sample(range(rollout.totals.prompts), groups)
        first = rollout.local_rows.start or 0
        for row, group in enumerate(rollout.group_ids_B.tolist()):
            if group in chosen:
                record = _record(rollout, row)
                given = {name: values[row] for name, values in (outcomes or {}).items()}
                record["outcomes"] = [(name, str(value)) for name, value in given.items() if value is not None]
                record |= {"group": group, "member": (first + row) % rollout.num_generations}
                size = len(record["token_ids"])
                record["stages"] = [name for name, _ in stages]
                record["advantages"] = [values_B_T[row, :size].tolist() for _, values_B_T in stages]
                record["at_rollout"] = len(stages)
                self._records[int(places_B[row])] = record

    def wants(self, places_B: torch.Tensor) -> bool:
        """Whether any of these rows is recorded."""
        return any(place in self._records for place in places_B.tolist())

    def add_trained(
        self,
        places_B: torch.Tensor,
        stages: Sequence[tuple[str, torch.Tensor]],
        used: Mapping[str, torch.Tensor],
    ) -> None:
        """Add what a loss forward used.

        Args:
            places_B: The rows of the micro-batch.
            stages: Name of each forward hook and `(B, T)` after it.
            used: `advantage`, `weight`, `logp`, `entropy`, each `(B, T)`.
        """
        for row, place in enumerate(places_B.tolist()):
            record = self._records.get(place)
            if record is None:
                continue
            size = len(record["token_ids"])
            done = record["at_rollout"]  # later stages are from an earlier pass over the batch
            record["stages"][done:] = [name for name, _ in stages]
            record["advantages"][done:] = [_row(values_B_T, row, size) for _, values_B_T in stages]
            record |= {name: _row(values_B_T, row, size) for name, values_B_T in used.items()}

    def records(self) -> list[dict[str, Any]]:
        """This rank's records of the latest generation batch."""
        return list(self._records.values())


def _row(values_B_T: torch.Tensor, row: int, size: int) -> list[float]:
    """One row's values; a compact update cuts away columns in which nothing counts."""
    values: list[float] = values_B_T[row, :size].float().tolist()
    return values + [0.0] * (size - len(values))


def write_records(records: Sequence[dict[str, Any]], output_dir: str, step: int) -> Path | None:
    """Write the records of all ranks to one file, ordered by group and member; None if there are none."""
    import pyarrow
    import pyarrow.parquet

    if not records:
        return None
    rows = sorted(records, key=lambda record: (record["group"], record["member"]))
    path = Path(output_dir) / FOLDER / f"step_{step:05d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist([{**row, "step": step} for row in rows], schema=_schema())
    pyarrow.parquet.write_table(table, path)
    return path


def _schema() -> Any:
    import pyarrow as pa

    numbers, integers, strings = pa.list_(pa.float32()), pa.list_(pa.int64()), pa.list_(pa.string())
    types: dict[str, Any] = {
        **dict.fromkeys(("step", "group", "member"), pa.int64()),
        **dict.fromkeys(("prompt", "completion"), pa.string()),
        **dict.fromkeys(("prompt_ids", "token_ids", "starts", "ends", "turns", "failed_turns"), integers),
        **dict.fromkeys(("tokens", "stages"), strings),
        **dict.fromkeys(("advantage", "weight", "logp", "entropy"), numbers),
        "truncated": pa.bool_(),
        "rewards": pa.map_(pa.string(), pa.float64()),
        "reward": pa.float64(),
        "outcomes": pa.map_(pa.string(), pa.string()),
        "live": pa.list_(pa.bool_()),
        "advantages": pa.list_(numbers),
    }
    return pa.schema([(name, types[name]) for name in COLUMNS])


def _record(rollout: Rollout, row: int) -> dict[str, Any]:
    ids = rollout.completion_ids_B_T[row][rollout.completion_mask_B_T[row] > 0].tolist()
    try:
        offsets: Sequence[tuple[int, int]] | None = rollout.offsets(row)
    except AlignmentError:
        offsets = None
    prompt, rewards = rollout.prompts[row], rollout.rewards_B_K[row].tolist()
    if not isinstance(prompt, str):
        prompt = json.dumps(prompt, ensure_ascii=False, default=str)
    values = zip(rollout.reward_names, rewards, strict=True)
    has_template = getattr(rollout.tokenizer, "response_template", None) is not None
    turns = rollout.turns_B_T[row, : len(ids)].tolist()
    return {
        "prompt": encodable(prompt),
        "prompt_ids": rollout.prompt_ids_B_P[row][rollout.prompt_mask_B_P[row] > 0].tolist(),
        "completion": encodable(rollout.texts[row]),
        "truncated": bool(rollout.truncated_B[row]),
        "rewards": [(name, _number(value)) for name, value in values],
        "reward": _number(float(rollout.rewards_B[row])),
        "token_ids": ids,
        "tokens": [encodable(str(token)) for token in rollout.tokenizer.convert_ids_to_tokens(ids)],
        "starts": None if offsets is None else [start for start, _ in offsets],
        "ends": None if offsets is None else [end for _, end in offsets],
        "live": (rollout.mask_B_T[row, : len(ids)] > 0).tolist(),
        "turns": turns,
        "failed_turns": _failed_turns(rollout, row) if -1 in turns or has_template else [],
    }


def _failed_turns(rollout: Rollout, row: int) -> list[int] | None:
    try:
        return [turn.number for turn in rollout.turns(row) if turn.failed]
    except (AlignmentError, PluginOutputError):
        return None


def _number(value: float) -> float | None:
    return None if value != value else value


def encodable(text: str) -> str:
    """The text as UTF-8 can encode it: a lone surrogate, which a model may write, becomes `?`."""
    return text.encode("utf-8", errors="replace").decode("utf-8")
