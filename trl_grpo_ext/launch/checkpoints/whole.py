"""Tell complete checkpoints from broken ones: `last_complete_checkpoint` skips what a killed save left.

The checks read names, sizes, headers and `trainer_state.json`, never the weights, so they take milliseconds whatever
the model's size. They detect missing and truncated files. They cannot detect a changed byte, nor the truncation of a
file in PyTorch's format from before 1.6, which DeepSpeed still writes by default; of those only empty files are
detected.
"""

from __future__ import annotations

import json
import logging
import os
import re
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ...errors import CheckpointError

UNFINISHED = "_unfinished_checkpoint"
"""The folder in `output_dir` in which checkpoints lie while they are written."""

REPLACED = "replaced"
"""In it, a checkpoint that another one of the same step is about to replace."""

STATE = "trainer_state.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SHARDED = ("pytorch_model_fsdp", "optimizer")
"""Beginnings of the folders that FSDP with `SHARDED_STATE_DICT` writes, each with a `.metadata`."""

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
        entries = [entry.name for entry in os.scandir(output_dir) if entry.is_dir()]
    except FileNotFoundError:
        return []
    matches = [_CHECKPOINT.match(name) for name in entries]
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def last_complete_checkpoint(output_dir: str | os.PathLike[str], at_most: int | None = None) -> str | None:
    """The newest checkpoint in a folder that is whole, also where plain transformers wrote it.

    Those passed over are logged as warnings, each with the reason. It reads this machine's disk alone: where machines
    don't share one, `SafeCheckpoints.train(resume_from_checkpoint=True)` lets them agree. Not for a folder in which a
    run is saving at this moment.

    Args:
        output_dir: The run's `output_dir`; need not exist.
        at_most: Steps above this one are not looked at.

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
        if at_most is not None and step > at_most:
            continue
        folder = Path(output_dir) / f"checkpoint-{step}"
        problem = checkpoint_problem(folder)
        if problem is None:
            return str(folder)
        logger.warning("%s is skipped: %s", folder, problem)
    return None


def checkpoint_problem(folder: str | os.PathLike[str]) -> str | None:
    """Say in half a sentence why a checkpoint is incomplete; None if it is complete."""
    folder = Path(folder)
    try:
        _check_state(folder)
        _check_weights(folder)
        _check_optimizer(folder)
        _check_ranks(folder)
        for file in folder.rglob("*"):
            _check_file(file)
    except _BrokenError as broken:
        return str(broken)
    except OSError as error:
        return f"it cannot be read: {error}"
    return None


def _check_state(folder: Path) -> None:
    """Check the file that transformers writes last."""
    state = _read_json(folder / STATE)
    match, step = _CHECKPOINT.match(folder.name), state.get("global_step")
    if match and step != int(match[1]):
        raise _BrokenError(f"{STATE} speaks of step {step!r}")


def _check_weights(folder: Path) -> None:
    indexes = [folder / name for name in INDEXES if (folder / name).exists()]
    for index in indexes:
        shards = _read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise _BrokenError(f"{index.name} names no shards")
        missing = sorted({str(shard) for shard in shards.values() if not (folder / str(shard)).is_file()})
        if missing:
            raise _BrokenError(f"{len(missing)} shard(s) of {index.name} are missing, the first is {missing[0]}")
    found = bool(indexes) or any(
        next(folder.glob(pattern), None) for name in WEIGHTS for pattern in (name, f"*/{name}")
    )
    for part in _folders(folder):
        if part.name.startswith(SHARDED) and not (part / ".metadata").is_file():
            raise _BrokenError(f"{part.name}/.metadata is missing")
    sharded = any(path.name.startswith(SHARDED[0]) for path in folder.iterdir())
    if not found and not sharded and not (folder / "latest").is_file():
        raise _BrokenError("it has no weights")


def _check_optimizer(folder: Path) -> None:
    """transformers loads the optimizer only if the scheduler is there too, and is silent otherwise."""
    if (folder / "optimizer.pt").exists() and not (folder / "scheduler.pt").exists():
        raise _BrokenError("it has optimizer.pt and no scheduler.pt")
    if not (latest := folder / "latest").is_file():
        if next(folder.glob("global_step*"), None) is not None:
            raise _BrokenError("DeepSpeed's file `latest` is missing")
        return
    states = folder / latest.read_text(errors="replace").strip()
    if states == folder or not states.is_dir():
        raise _BrokenError(f"DeepSpeed's folder {states.name!r} is missing")
    if next(states.glob("*model_states.pt"), None) is None:
        raise _BrokenError(f"DeepSpeed's folder {states.name!r} has no model states")


def _check_ranks(folder: Path) -> None:
    """Every rank of a machine writes its random numbers, and with ZeRO its part of the optimizer."""
    ranks = sorted(int(match[1]) for path in folder.iterdir() if (match := _RNG_STATE.match(path.name)))
    if ranks and ranks != list(range(ranks[0], ranks[0] + len(ranks))):
        raise _BrokenError(f"it has the random states of ranks {ranks} and not of those between")
    parts = len(list(folder.glob("global_step*/*zero_pp_rank_*optim_states.pt")))
    if parts and len(ranks) > 1 and parts != len(ranks):
        raise _BrokenError(f"it has {parts} parts of the optimizer for {len(ranks)} ranks")


def _check_file(file: Path) -> None:
    if file.suffix not in (".safetensors", ".bin", ".pt", ".pth", ".distcp", ".json") or not file.is_file():
        return
    if file.stat().st_size == 0:
        raise _BrokenError(f"{file.name} is empty")
    if file.suffix == ".safetensors":
        _check_safetensors(file)
    elif file.suffix in (".bin", ".pt", ".pth"):
        with file.open("rb") as stream:
            zipped = stream.read(4) == b"PK\x03\x04"
        if zipped:
            _check_zip(file)


def _check_safetensors(file: Path) -> None:
    """Opening a file reads its header and checks the file size against it."""
    try:
        with safe_open(file, framework="pt"):
            pass
    except SafetensorError as error:
        raise _BrokenError(f"{file.name} is cut short or damaged: {error}") from None


def _check_zip(file: Path) -> None:
    """`torch.save` writes a zip archive, whose table of contents is at the end."""
    try:
        with zipfile.ZipFile(file) as archive:
            archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        raise _BrokenError(f"{file.name} is cut short") from None


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


def _folders(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if path.is_dir())
