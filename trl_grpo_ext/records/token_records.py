"""What the loss used, token by token: sampled completions, in one parquet file per logging step.

`token_records: n` samples at least `n` completions of every generation batch, in whole groups, one in each row of
`token_records/step_00010.parquet`. Rewards and the advantages after each rollout hook are those at scoring, the rest is
of the row's last loss forward before the file was written.
"""

from __future__ import annotations

import io
import json
import random
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import AlignmentError, PluginOutputError
from ..types import Rollout
from .pictures import copies_of
from .writing import write_atomically

if TYPE_CHECKING:
    import torch

FOLDER = "token_records"

COLUMNS: dict[str, str] = {
    "step": "optimizer steps done when the file was written",
    "group": "number of the prompt within the generation batch, over all ranks",
    "member": "number of the completion within its group",
    "prompt": "the prompt as text; JSON where it is a list of messages",
    "prompt_ids": "the prompt's tokens",
    "images": "small copies of the prompt's first pictures, as JPEG",
    "completion": "the completion's tokens as text, without special tokens",
    "truncated": "whether it ended at the limit",
    "rewards": "each function's reward, null where it gave None",
    "reward": "their weighted sum",
    "parts": "the parts of its rewards that apply, as reward/part",
    "part_scores": "their scores",
    "part_present": "whether each has a place in the completion",
    "token_part": "for every token the part that it belongs to, by its number in `parts` (the last of several); -1 for "
    "none; null if they cannot be placed",
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
    """Keeps this rank's records of sampled rows: `count` of a generation batch, over all ranks, in whole groups."""

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed
        self._records: dict[int, dict[str, Any]] = {}
        self._warned = False

    def start(
        self,
        rollout: Rollout,
        row_ids_B: torch.Tensor,
        stages: Sequence[tuple[str, torch.Tensor]],
        outcomes: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        """Begin the records of a generation batch: each row's number, `(B, T)` after each stage, outcomes by reward."""
        self._records = {}
        groups = min(-(-self._count // rollout.num_generations), rollout.totals.prompts)
        # By the step, not by a count of batches: a resumed run samples as the run that went through.
        chosen = random.Random(f"{self._seed}/{rollout.step}").sample(range(rollout.totals.prompts), groups)
        before: Counter[int] = Counter()
        members_N = []
        for group in rollout.gather(rollout.group_ids_B).tolist():
            members_N.append(before[group])
            before[group] += 1
        members_B = members_N[rollout.local_rows]
        for row, group in enumerate(rollout.group_ids_B.tolist()):
            if group in chosen:
                record = _record(rollout, row)
                size = len(record["token_ids"])
                given = {name: values[row] for name, values in (outcomes or {}).items()}
                self._records[int(row_ids_B[row])] = record | {
                    "outcomes": [(name, str(value)) for name, value in given.items() if value is not None],
                    "group": group,
                    "member": members_B[row],
                    "stages": [name for name, _ in stages],
                    "advantages": [values_B_T[row, :size].tolist() for _, values_B_T in stages],
                    "at_rollout": len(stages),
                }

    def wants(self, row_ids_B: torch.Tensor) -> bool:
        """Whether any of these rows is recorded."""
        return any(row_id in self._records for row_id in row_ids_B.tolist())

    def add_trained(
        self, row_ids_B: torch.Tensor, stages: Sequence[tuple[str, torch.Tensor]], used: Mapping[str, torch.Tensor]
    ) -> None:
        """Add what a loss forward used: `(B, T)` after each forward hook, and `advantage`, `weight` and so on."""
        for row, row_id in enumerate(row_ids_B.tolist()):
            if (record := self._records.get(row_id)) is None:
                continue
            size = len(record["token_ids"])
            done = record["at_rollout"]  # later stages are from an earlier pass over the batch
            record["stages"][done:] = [name for name, _ in stages]
            record["advantages"][done:] = [_row(values_B_T, row, size) for _, values_B_T in stages]
            record |= {name: _row(values_B_T, row, size) for name, values_B_T in used.items()}

    def records(self) -> list[dict[str, Any]]:
        """This rank's records of the latest generation batch."""
        return list(self._records.values())

    def write(self, records: Sequence[dict[str, Any]], output_dir: str, step: int) -> None:
        """Write the records of all ranks; a full disk costs the file and one warning, not the run."""
        try:
            write_records(records, output_dir, step)
        except OSError as error:
            if not self._warned:
                warnings.warn(f"Token records cannot be written: {error}. Training goes on.", stacklevel=2)
            self._warned = True


def _row(values_B_T: torch.Tensor, row: int, size: int) -> list[float]:
    """One row's values; a compact update cuts away columns in which nothing counts."""
    values: list[float] = values_B_T[row, :size].float().tolist()
    return values + [0.0] * (size - len(values))


def write_records(records: Sequence[dict[str, Any]], output_dir: str, step: int) -> Path | None:
    """Write the records of all ranks to one file in one step, ordered by group and member; None if there are none."""
    import pyarrow
    import pyarrow.parquet

    if not records:
        return None
    rows = sorted(records, key=lambda record: (record["group"], record["member"]))
    content = io.BytesIO()
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{**row, "step": step} for row in rows], schema=_schema()), content
    )
    path = Path(output_dir) / FOLDER / f"step_{step:05d}.parquet"
    write_atomically(path, content.getvalue())
    return path


def _schema() -> Any:
    import pyarrow as pa

    numbers = pa.list_(pa.float32())
    flags = pa.list_(pa.bool_())
    strings = pa.list_(pa.string())
    types: dict[str, Any] = {
        **dict.fromkeys(("step", "group", "member"), pa.int64()),
        **dict.fromkeys(("prompt", "completion"), pa.string()),
        **dict.fromkeys(("parts", "tokens", "stages"), strings),
        **dict.fromkeys(("part_scores", "advantage", "weight", "logp", "entropy"), numbers),
        **dict.fromkeys(("part_present", "live"), flags),
        "images": pa.list_(pa.binary()),
        "truncated": pa.bool_(),
        "rewards": pa.map_(pa.string(), pa.float64()),
        "reward": pa.float64(),
        "outcomes": pa.map_(pa.string(), pa.string()),
        "advantages": pa.list_(numbers),
    }
    return pa.schema([(name, types.get(name, pa.list_(pa.int64()))) for name in COLUMNS])


def _record(rollout: Rollout, row: int) -> dict[str, Any]:
    ids = rollout.completion_ids_B_T[row][rollout.completion_mask_B_T[row] > 0].tolist()
    rewards = zip(rollout.reward_names, rollout.rewards_B_K[row].tolist(), strict=True)
    turns = rollout.turns_B_T[row, : len(ids)].tolist()
    failed: list[int] | None = []
    if -1 in turns:
        try:
            failed = [turn.number for turn in rollout.turns(row) if turn.failed]
        except (AlignmentError, PluginOutputError):
            failed = None
    prompt = rollout.prompts[row]
    if not isinstance(prompt, str):
        prompt = json.dumps(prompt, ensure_ascii=False, default=lambda value: f"<{type(value).__name__}>")
    try:
        spans: Sequence[tuple[int, int]] | None = rollout.offsets(row)
    except AlignmentError:
        spans = None
    return {
        "prompt": encodable(prompt),
        "prompt_ids": rollout.prompt_ids_B_P[row][rollout.prompt_mask_B_P[row] > 0].tolist(),
        "images": copies_of(rollout.prompts[row]),
        "completion": encodable(rollout.texts[row]),
        "truncated": bool(rollout.truncated_B[row]),
        "rewards": [(name, _number(value)) for name, value in rewards],
        "reward": _number(float(rollout.rewards_B[row])),
        **_parts(rollout, row, len(ids)),
        "token_ids": ids,
        "tokens": [encodable(str(token)) for token in rollout.tokenizer.convert_ids_to_tokens(ids)],
        "starts": None if spans is None else [start for start, _ in spans],
        "ends": None if spans is None else [end for _, end in spans],
        "live": (rollout.mask_B_T[row, : len(ids)] > 0).tolist(),
        "turns": turns,
        "failed_turns": failed,
    }


def _parts(rollout: Rollout, row: int, size: int) -> dict[str, Any]:
    """The columns of a record on its parts."""
    names: list[str] = []
    scores: list[float] = []
    present: list[bool] = []
    wrote: list[int] | None = [-1] * size
    for reward, table in rollout.parts.items():
        applies = [part for part, score in enumerate(table.scores_B_M[row].tolist()) if score == score]
        number_of = {part: len(names) + place for place, part in enumerate(applies)}
        names += [encodable(f"{reward}/{table.names[part]}") for part in applies]
        scores += table.scores_B_M[row, applies].tolist()
        present += table.present_B_M[row, applies].tolist()
        try:
            for _, part, first, end in table.ranges_R_4[table.ranges_R_4[:, 0] == row].tolist() if wrote else ():
                wrote[first:end] = [number_of[part]] * (end - first)  # type: ignore[index]
        except (AlignmentError, PluginOutputError):
            wrote = None
    return {"parts": names, "part_scores": scores, "part_present": present, "token_part": wrote}


def _number(value: float) -> float | None:
    return None if value != value else value


def encodable(text: str) -> str:
    """The text as UTF-8 can encode it: a lone surrogate, which a model may write, becomes `?`."""
    return text.encode("utf-8", errors="replace").decode("utf-8")
