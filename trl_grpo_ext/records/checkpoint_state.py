"""Tell complete checkpoints from broken ones: `last_complete_checkpoint` skips what a killed save left.

Read are names, sizes, headers, `trainer_state.json`, and the checksums of what `torch.save` wrote (of files above
`MOST_BYTES` only where a run resumes from them). The weights are not read, so a changed byte in them is not found, nor
the end of a file in PyTorch's format from before 1.6, which DeepSpeed still writes.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError

UNFINISHED = "_unfinished_checkpoint"  # in `output_dir`: checkpoints lie there while they are written
REPLACED = "replaced"  # in it: a checkpoint that another one of the same step is about to replace
STATE = "trainer_state.json"
MOST_BYTES = 50_000_000
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SHARDED = ("pytorch_model_fsdp", "optimizer")  # beginnings of the folders that FSDP writes, each with a `.metadata`
_READ = (".safetensors", ".bin", ".pt", ".pth", ".distcp", ".json")
_CHECKPOINT = re.compile(r"^checkpoint-(\d+)$")
_RNG_STATE = re.compile(r"^rng_state_(\d+)\.pth$")

logger = logging.getLogger(__name__)


def put_back(run_dir: Path) -> None:
    """Give a checkpoint its name back if the process was killed while it was being replaced."""
    for replaced in [*(run_dir / UNFINISHED / REPLACED).glob("checkpoint-*")]:
        if not (run_dir / replaced.name).exists():
            with suppress(OSError):  # another process was quicker
                replaced.rename(run_dir / replaced.name)


def checkpoint_steps(output_dir: str | os.PathLike[str]) -> list[int]:
    """The steps of all folders `checkpoint-N` in a folder, newest first, whole or not."""
    try:
        matches = [_CHECKPOINT.match(entry.name) for entry in os.scandir(output_dir) if entry.is_dir()]
    except FileNotFoundError:
        return []
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def last_complete_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The path of the newest whole checkpoint in an `output_dir`, also where plain transformers wrote it, or None.

    One whose log goes on from another's is newer, whatever the times of copied files say; of others, such as several
    runs in a folder, it is the one that was saved last, with a warning. Those passed over are logged as warnings, each
    with the reason. It reads this machine's disk alone: `SafeCheckpoints.train(resume_from_checkpoint=True)` lets
    machines that don't share one agree. Not for a folder in which a run is saving at this moment.

    Raises:
        CheckpointError: The folder cannot be listed.
    """
    try:
        put_back(Path(output_dir))
        steps = checkpoint_steps(output_dir)
    except OSError as error:
        raise CheckpointError(f"Cannot look for checkpoints in {output_dir}: {error}. Check the path.") from error
    there = [_Saved.at(Path(output_dir) / f"checkpoint-{step}", step) for step in reversed(steps)]
    while there:
        newest = there[0]
        for one in there[1:]:
            if one.goes_on_from(newest) or one.time >= newest.time:
                newest = one
        there.remove(newest)
        if problem := checkpoint_problem(newest.folder):
            logger.warning("%s is skipped: %s", newest.folder, problem)
            continue
        others = [one for one in there if one.step > newest.step or (one.history and not newest.goes_on_from(one))]
        if others:
            text = "%s is taken, which was saved last. Others, perhaps of another training: %s. Name one to take it."
            logger.warning(text, newest.folder, ", ".join(one.folder.name for one in others))
        return str(newest.folder)
    return None


@dataclass(frozen=True)
class _Saved:
    """By what the newer of two checkpoints is found."""

    folder: Path
    step: int
    time: float  # when it was saved, or copied
    history: list[str]  # its log, which a resumed run goes on with

    @classmethod
    def at(cls, folder: Path, step: int) -> _Saved:
        try:
            history = (_json(folder / STATE) or {}).get("log_history") or []
            return cls(folder, step, (folder / STATE).stat().st_mtime, [json.dumps(entry) for entry in history])
        except OSError:
            return cls(folder, step, math.inf, [])  # no whole one: looked at first, and skipped

    def goes_on_from(self, earlier: _Saved) -> bool:
        return bool(earlier.history) and self.history[: len(earlier.history)] == earlier.history


def checkpoint_problem(folder: str | os.PathLike[str], *, all_checksums: bool = False) -> str | None:
    """Say in half a sentence why a folder `checkpoint-N` is incomplete or damaged; None if it is neither.

    One without any training state (`save_only_model`) is complete: see `missing_state`. With `all_checksums`, optimizer
    files above 50 MB are read too.
    """
    folder = Path(folder)
    files = (file for file in folder.rglob("*") if file.suffix in _READ and file.is_file())
    of_files = filter(None, (_of_file(file, all_checksums) for file in files))
    try:
        return next(chain(_of_state(folder), _of_weights(folder), _of_training_state(folder), of_files), None)
    except OSError as error:
        return f"it cannot be read: {error}"


def missing_state(folder: Path, process: int, processes: int) -> str:
    """What transformers does not find for a process in a checkpoint and goes on without; empty if nothing."""
    names = {path.name for path in folder.iterdir()}
    random_state = f"rng_state_{process}.pth" if processes > 1 else "rng_state.pth"
    optimizer = any(name.startswith(("optimizer", "scheduler.pt")) or name == "latest" for name in names)
    return " and ".join(["optimizer state"] * (not optimizer) + [random_state] * (random_state not in names))


def check_resumed(folder: Path, *, all_checksums: bool = False) -> None:
    """Refuse to resume from a damaged checkpoint; a folder of weights alone is not judged."""
    if not (folder / STATE).is_file() and not _CHECKPOINT.match(folder.name):
        return
    if problem := checkpoint_problem(folder, all_checksums=all_checksums):
        raise CheckpointError(f"Cannot resume from {folder}: {problem}. Name an earlier checkpoint.")


def _of_state(folder: Path) -> Iterator[str]:
    """What is wrong with the file that transformers writes last."""
    match = _CHECKPOINT.match(folder.name)
    if not (folder / STATE).is_file():
        yield f"{STATE} is missing"
    elif (state := _json(folder / STATE)) is None:
        yield f"{STATE} is no JSON"
    elif match and state.get("global_step") != int(match[1]):
        yield f"{STATE} speaks of step {state.get('global_step')!r}"


def _of_weights(folder: Path) -> Iterator[str]:
    indexes = [folder / name for name in _INDEXES if (folder / name).exists()]
    for index in indexes:
        shards = (_json(index) or {}).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            yield f"{index.name} names no shards"
        elif missing := sorted({str(shard) for shard in shards.values() if not (folder / str(shard)).is_file()}):
            yield f"{len(missing)} shard(s) of {index.name} are missing, the first is {missing[0]}"
    parts = [path.name for path in folder.iterdir() if path.is_dir() and path.name.startswith(_SHARDED)]
    yield from (f"{name}/.metadata is missing" for name in parts if not (folder / name / ".metadata").is_file())
    files = any(next(folder.glob(pattern), None) for name in _WEIGHTS for pattern in (name, f"*/{name}"))
    sharded = any(name.startswith(_SHARDED[0]) for name in parts)
    if not (indexes or files or sharded or (folder / "latest").is_file()):
        yield "it has no weights"


def _of_training_state(folder: Path) -> Iterator[str]:
    """All of optimizer, scheduler and random states, or none: transformers silently goes on without what is missing."""
    names = sorted(path.name for path in folder.iterdir())
    ranks = sorted(int(match[1]) for name in names if (match := _RNG_STATE.match(name)))
    found = {
        "optimizer.pt": [name for name in names if name == "latest" or name.startswith("optimizer")],
        "scheduler.pt": [name for name in names if name in ("scheduler.pt", "latest")],  # DeepSpeed has its own
        "rng_state.pth": [name for name in names if name == "rng_state.pth" or _RNG_STATE.match(name)],
    }
    if "latest" in names:
        states = folder / (folder / "latest").read_text(errors="replace").strip()
        if states == folder or not states.is_dir():
            yield f"DeepSpeed's folder {states.name!r} is missing"
        elif next(states.glob("*model_states.pt"), None) is None:
            yield f"DeepSpeed's folder {states.name!r} has no model states"
    elif next(folder.glob("global_step*"), None) is not None:
        yield "DeepSpeed's file `latest` is missing"
    missing = [name for name, there in found.items() if not there]
    if 0 < len(missing) < len(found):
        has = next(there[0] for there in found.values() if there)
        yield f"it has {has} and no {' and no '.join(missing)}"
    if ranks and ranks != list(range(ranks[0], ranks[0] + len(ranks))):
        yield f"it has the random states of ranks {ranks} and not of those between"
    parts = len(list(folder.glob("global_step*/*zero_pp_rank_*optim_states.pt")))
    if parts and len(ranks) > 1 and parts != len(ranks):
        yield f"it has {parts} parts of the optimizer for {len(ranks)} ranks"


def _of_file(file: Path, all_checksums: bool) -> str | None:
    """What is wrong with a file: `torch.save` writes a zip archive, whose checksums `torch.load` skips."""
    if (size := file.stat().st_size) == 0:
        return f"{file.name} is empty"
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt"):  # reads the header and compares the file's size with it
                return None
        if file.suffix not in (".bin", ".pt", ".pth"):
            return None
        with file.open("rb") as stream:
            start = stream.read(4)
        if start != b"PK\x03\x04":
            whole = file.suffix == ".bin" or start.startswith(b"\x80")  # where the format before 1.6 begins
            return None if whole else f"{file.name} is damaged"
        with zipfile.ZipFile(file) as archive:
            read = file.suffix != ".bin" and (all_checksums or size <= MOST_BYTES)
            return f"{file.name} is damaged" if read and archive.testzip() is not None else None
    except (SafetensorError, zipfile.BadZipFile, ValueError, NotImplementedError, EOFError):
        return f"{file.name} is cut short or damaged"


def _json(file: Path) -> dict[str, Any] | None:
    """The mapping in a file; None if it holds none."""
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
