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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.parquet

from ..errors import AlignmentError, PluginOutputError
from ..guard.untrusted import as_json
from ..types import Rollout
from .pictures import copies_of
from .writing import write_atomically

if TYPE_CHECKING:
    import torch

FOLDER = "token_records"

_INTEGERS = pyarrow.list_(pyarrow.int64())
_NUMBERS = pyarrow.list_(pyarrow.float32())
_FLAGS = pyarrow.list_(pyarrow.bool_())
_STRINGS = pyarrow.list_(pyarrow.string())

SCHEMA = pyarrow.schema(
    {
        "step": pyarrow.int64(),  # optimizer steps done when the file was written
        "scored_step": pyarrow.int64(),  # optimizer steps done when the completion was scored
        "group": pyarrow.int64(),  # number of the prompt within the generation batch, over all ranks
        "member": pyarrow.int64(),  # number of the completion within its group
        "prompt": pyarrow.string(),  # the prompt as text; JSON where it is a list of messages
        "prompt_ids": _INTEGERS,  # the prompt's tokens
        "images": pyarrow.list_(pyarrow.binary()),  # small copies of the prompt's first pictures, as JPEG
        "completion": pyarrow.string(),  # the completion's tokens as text, without special tokens
        "truncated": pyarrow.bool_(),  # whether it ended at the limit
        "rewards": pyarrow.map_(pyarrow.string(), pyarrow.float64()),  # each function's, null where it gave None
        "reward": pyarrow.float64(),  # their weighted sum
        "parts": _STRINGS,  # the parts of its rewards that apply, as reward/part
        "part_scores": _NUMBERS,  # their scores
        "part_present": _FLAGS,  # whether each has a place in the completion
        # for every token its part, by the number in `parts` (the last of several); -1 for none; null if not placed
        "token_part": _INTEGERS,
        "outcomes": pyarrow.map_(pyarrow.string(), pyarrow.string()),  # right, wrong, timeout, ..., by reward
        "token_ids": _INTEGERS,  # the completion's tokens
        "tokens": _STRINGS,  # their names in the vocabulary
        "starts": _INTEGERS,  # where in the text each token's characters begin; null if they cannot be matched
        "ends": _INTEGERS,  # where they end
        "live": _FLAGS,  # whether the token counts in the loss
        "turns": _INTEGERS,  # the turn that wrote the token, from 0; -1 where a tool or an environment wrote it
        "failed_turns": _INTEGERS,  # numbers of the turns with a failed tool call; null if unknown
        "stages": _STRINGS,  # the stages of the advantages: trl, then each hook
        "advantages": pyarrow.list_(_NUMBERS),  # the advantage of every token after each stage
        "advantage": _NUMBERS,  # of every token that the loss used; null until the row has been trained on
        "weight": _NUMBERS,  # the token's weight in the loss of the optimizer step; null where there was none
        "logp": _NUMBERS,  # log-probability under the policy at that loss forward; null where there was none
        "entropy": _NUMBERS,  # entropy of the next-token distribution there, in nats; null where there was none
    }
)
"""The columns of a record."""


class TokenRecorder:
    """Keeps this rank's records of sampled rows: `count` of a generation batch, over all ranks, in whole groups."""

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._seed = seed
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
    if not records:
        return None
    rows = sorted(records, key=lambda record: (record["group"], record["member"]))
    content = io.BytesIO()
    table = pyarrow.Table.from_pylist([{**row, "step": step} for row in rows], schema=SCHEMA)
    pyarrow.parquet.write_table(table, content)
    path = Path(output_dir) / FOLDER / f"step_{step:05d}.parquet"
    write_atomically(path, content.getvalue())
    return path


def set_aside_records_after(step: int, output_dir: str) -> None:
    """Set aside the files of later steps, which an earlier run wrote, as `step_*.parquet.earlier`."""
    for path in (Path(output_dir) / FOLDER).glob("step_*.parquet"):
        digits = path.stem.removeprefix("step_")
        if digits.isdecimal() and int(digits) > step:
            path.replace(path.with_name(f"{path.name}.earlier"))


def _record(rollout: Rollout, row: int) -> dict[str, Any]:
    ids = rollout.completion_ids_B_T[row][rollout.completion_mask_B_T[row] > 0].tolist()
    turns = rollout.turns_B_T[row, : len(ids)].tolist()
    prompt = rollout.prompts[row]
    if not isinstance(prompt, str):
        prompt = json.dumps(prompt, ensure_ascii=False, default=lambda value: f"<{type(value).__name__}>")
    spans = _placed(lambda: rollout.offsets(row))
    failed = _placed(lambda: [turn.number for turn in rollout.turns(row) if turn.failed]) if -1 in turns else []
    return {
        "scored_step": rollout.step,
        "prompt": encodable(prompt),
        "prompt_ids": rollout.prompt_ids_B_P[row][rollout.prompt_mask_B_P[row] > 0].tolist(),
        "images": copies_of(rollout.prompts[row]),
        "completion": encodable(rollout.texts[row]),
        "truncated": bool(rollout.truncated_B[row]),
        "rewards": list(zip(rollout.reward_names, as_json(rollout.rewards_B_K[row].tolist()), strict=True)),
        "reward": as_json(float(rollout.rewards_B[row])),
        **_parts(rollout, row, len(ids)),
        "token_ids": ids,
        "tokens": [encodable(str(token)) for token in rollout.tokenizer.convert_ids_to_tokens(ids)],
        "starts": None if spans is None else [start for start, _ in spans],
        "ends": None if spans is None else [end for _, end in spans],
        "live": (rollout.mask_B_T[row, : len(ids)] > 0).tolist(),
        "turns": turns,
        "failed_turns": failed,
    }


def _placed(find: Callable[[], Any]) -> Any:
    """What is found in the text of a completion; None if its tokens cannot be matched with it."""
    try:
        return find()
    except (AlignmentError, PluginOutputError):
        return None


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


def encodable(text: str) -> str:
    """The text as UTF-8 can encode it: a lone surrogate, which a model may write, becomes `?`."""
    return text.encode("utf-8", errors="replace").decode("utf-8")
