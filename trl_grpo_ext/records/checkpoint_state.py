"""Tell complete checkpoints from broken ones: `last_complete_checkpoint` skips what a killed save left.

Read are names, sizes, headers, `trainer_state.json`, and the checksums of what `torch.save` wrote (of files above
`MOST_BYTES` only where a run resumes from them). The weights are not read, so a changed byte in them is not found, nor
the end of a file in PyTorch's format from before 1.6, which DeepSpeed still writes.
"""

from __future__ import annotations

import json
import logging
import os
import re
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError

UNFINISHED = "_unfinished_checkpoint"
"""The folder in `output_dir` in which checkpoints lie while they are written."""

REPLACED = "replaced"
"""In it, a checkpoint that another one of the same step is about to replace."""

STATE = "trainer_state.json"
MOST_BYTES = 50_000_000
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SHARDED = ("pytorch_model_fsdp", "optimizer")
"""Beginnings of the folders that FSDP with `SHARDED_STATE_DICT` writes, each with a `.metadata`."""
_READ = (".safetensors", ".bin", ".pt", ".pth", ".distcp", ".json")
_CHECKPOINT = re.compile(r"^checkpoint-(\d+)$")
_RNG_STATE = re.compile(r"^rng_state_(\d+)\.pth$")

logger = logging.getLogger(__name__)


class _BrokenError(Exception):
    """Why a checkpoint is not whole; never leaves this module."""


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
    """The newest checkpoint in a folder that is whole, also where plain transformers wrote it.

    Those passed over are logged as warnings, each with the reason. It reads this machine's disk alone: where machines
    don't share one, `SafeCheckpoints.train(resume_from_checkpoint=True)` lets them agree. Not for a folder in which a
    run is saving at this moment.

    Args:
        output_dir: The run's `output_dir`; need not exist.

    Returns:
        The path of `checkpoint-N`, for `resume_from_checkpoint`; None if there is no whole one.

    Raises:
        CheckpointError: The folder cannot be listed.
    """
    try:
        put_back(Path(output_dir))
        steps = checkpoint_steps(output_dir)
    except OSError as error:
        raise CheckpointError(f"Cannot look for checkpoints in {output_dir}: {error}. Check the path.") from error
    for step in steps:
        folder = Path(output_dir) / f"checkpoint-{step}"
        problem = checkpoint_problem(folder)
        if problem is None:
            return str(folder)
        logger.warning("%s is skipped: %s", folder, problem)
    return None


def checkpoint_problem(folder: str | os.PathLike[str], *, all_checksums: bool = False) -> str | None:
    """Say in half a sentence why a checkpoint is incomplete or damaged; None if it is neither.

    One without any training state (`save_only_model`) is complete: see `missing_state`.

    Args:
        folder: `checkpoint-N`.
        all_checksums: Also read optimizer files above 50 MB.
    """
    folder = Path(folder)
    try:
        _check_state(folder)
        _check_weights(folder)
        _check_training_state(folder)
        for file in folder.rglob("*"):
            if file.suffix in _READ and file.is_file():
                _check_file(file, all_checksums)
    except _BrokenError as broken:
        return str(broken)
    except OSError as error:
        return f"it cannot be read: {error}"
    return None


def missing_state(folder: Path, process: int, processes: int) -> str:
    """What transformers does not find for a process in a checkpoint and goes on without; empty if nothing."""
    optimizer, scheduler, random_states = _training_state(folder)
    random_state = f"rng_state_{process}.pth" if processes > 1 else "rng_state.pth"
    lacking = ["optimizer state"] * (not optimizer and not scheduler)
    return " and ".join([*lacking, *([random_state] if random_state not in random_states else [])])


def check_resumed(folder: Path, *, all_checksums: bool = False) -> None:
    """Refuse to resume from a damaged checkpoint; a folder of weights alone is not judged."""
    if not (folder / STATE).is_file() and not _CHECKPOINT.match(folder.name):
        return
    if problem := checkpoint_problem(folder, all_checksums=all_checksums):
        raise CheckpointError(
            f"Cannot resume from {folder}: {problem}. Name an earlier checkpoint; `last_complete_checkpoint` of "
            "trl_grpo_ext.launch.checkpoints finds the newest complete one."
        )


def _check_state(folder: Path) -> None:
    """Check the file that transformers writes last."""
    state = _read_json(folder / STATE)
    match, step = _CHECKPOINT.match(folder.name), state.get("global_step")
    if match and step != int(match[1]):
        raise _BrokenError(f"{STATE} speaks of step {step!r}")


def _check_weights(folder: Path) -> None:
    indexes = [folder / name for name in _INDEXES if (folder / name).exists()]
    for index in indexes:
        shards = _read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise _BrokenError(f"{index.name} names no shards")
        missing = sorted({str(shard) for shard in shards.values() if not (folder / str(shard)).is_file()})
        if missing:
            raise _BrokenError(f"{len(missing)} shard(s) of {index.name} are missing, the first is {missing[0]}")
    parts = [path.name for path in folder.iterdir() if path.is_dir() and path.name.startswith(_SHARDED)]
    if without := [name for name in parts if not (folder / name / ".metadata").is_file()]:
        raise _BrokenError(f"{without[0]}/.metadata is missing")
    files = any(next(folder.glob(pattern), None) for name in _WEIGHTS for pattern in (name, f"*/{name}"))
    sharded = any(name.startswith(_SHARDED[0]) for name in parts)
    if not (indexes or files or sharded or (folder / "latest").is_file()):
        raise _BrokenError("it has no weights")


def _training_state(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Names of what holds the optimizer, the scheduler and the random states."""
    names = sorted(path.name for path in folder.iterdir())
    optimizer = [name for name in names if name in ("latest", "optimizer.pt") or name.startswith("optimizer")]
    scheduler = [name for name in names if name == "scheduler.pt"]
    return optimizer, scheduler, [name for name in names if name == "rng_state.pth" or _RNG_STATE.match(name)]


def _check_training_state(folder: Path) -> None:
    """All of optimizer, scheduler and random states, or none: transformers silently goes on without what is missing."""
    optimizer, scheduler, random_states = _training_state(folder)
    deepspeed = folder / "latest"
    if not deepspeed.is_file() and next(folder.glob("global_step*"), None) is not None:
        raise _BrokenError("DeepSpeed's file `latest` is missing")
    if deepspeed.is_file():
        states = folder / deepspeed.read_text(errors="replace").strip()
        if states == folder or not states.is_dir():
            raise _BrokenError(f"DeepSpeed's folder {states.name!r} is missing")
        if next(states.glob("*model_states.pt"), None) is None:
            raise _BrokenError(f"DeepSpeed's folder {states.name!r} has no model states")
        scheduler = scheduler or ["DeepSpeed's own"]
    found = {"optimizer.pt": optimizer, "scheduler.pt": scheduler, "rng_state.pth": random_states}
    missing = [name for name, there in found.items() if not there]
    if 0 < len(missing) < len(found):
        has = next(there[0] for there in found.values() if there)
        raise _BrokenError(f"it has {has} and no {' and no '.join(missing)}")
    ranks = sorted(int(match[1]) for name in random_states if (match := _RNG_STATE.match(name)))
    if ranks and ranks != list(range(ranks[0], ranks[0] + len(ranks))):
        raise _BrokenError(f"it has the random states of ranks {ranks} and not of those between")
    parts = len(list(folder.glob("global_step*/*zero_pp_rank_*optim_states.pt")))
    if parts and len(ranks) > 1 and parts != len(ranks):
        raise _BrokenError(f"it has {parts} parts of the optimizer for {len(ranks)} ranks")


def _check_file(file: Path, all_checksums: bool) -> None:
    if (size := file.stat().st_size) == 0:
        raise _BrokenError(f"{file.name} is empty")
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, framework="pt"):  # reads the header and compares the file's size with it
                pass
        except SafetensorError as error:
            raise _BrokenError(f"{file.name} is cut short or damaged: {error}") from None
    elif file.suffix in (".bin", ".pt", ".pth"):
        _check_archive(file, file.suffix != ".bin" and (all_checksums or size <= MOST_BYTES))


def _check_archive(file: Path, checksums: bool) -> None:
    """`torch.save` writes a zip archive with its table of contents at the end; `torch.load` skips its checksums."""
    with file.open("rb") as stream:
        start = stream.read(4)
    if start != b"PK\x03\x04":
        if file.suffix != ".bin" and not start.startswith(b"\x80"):  # where the format before 1.6 begins
            raise _BrokenError(f"{file.name} is damaged")
        return
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip() if checksums else None
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError):
        raise _BrokenError(f"{file.name} is cut short or damaged") from None
    if damaged is not None:
        raise _BrokenError(f"{file.name} is damaged")


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise _BrokenError(f"{file.name} is missing")
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        raise _BrokenError(f"{file.name} is no JSON") from None
    if not isinstance(content, dict):
        raise _BrokenError(f"{file.name} holds no mapping")
    return content
