"""Facts about a machine: versions, devices, disk and variables that silently change the engine."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from packaging.version import InvalidVersion, Version

from ...guard.untrusted import one_line
from ...plugins.metadata import installed_version

PACKAGES = ("trl", "deepspeed", "vllm", "flash-attn", "liger-kernel")
VARIABLES = (
    *("ACCELERATE_USE_CPU", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "CUDA_VISIBLE_DEVICES"),
    *("WORLD_SIZE", "RANK", "LOCAL_RANK"),
)
"""Variables that change what runs."""


@dataclass(frozen=True)
class Environment:
    """The machine that a run will use."""

    versions: Mapping[str, str | None] = field(default_factory=dict)  # of `PACKAGES`; None if it is not installed
    devices: tuple[int, ...] = ()  # bytes of each GPU
    elsewhere: bool = False  # another machine's GPUs are described; versions are this machine's
    torch_build: str = "cpu"
    disk_free: int | None = None  # bytes where checkpoints go
    output_dir: str = ""
    output_problem: str | None = None  # why nothing can be written there
    variables: Mapping[str, str] = field(default_factory=dict)

    def version(self, name: str) -> Version | None:
        """The version of an installed distribution."""
        try:
            return None if (version := self.versions.get(name)) is None else Version(version)
        except InvalidVersion:
            return None

    def is_on(self, *names: str) -> list[str]:
        """Which of these variables are set to true."""
        return [n for n in names if self.variables.get(n, "").lower() in ("1", "true", "yes", "y", "on", "t")]

    @property
    def device_memory(self) -> int | None:
        """Bytes of the smallest GPU."""
        return min(self.devices, default=None)


def inspect_machine(
    *,
    output_dir: str = "trainer_output",
    gpu_memory: float | None = None,
    gpus: int = 1,
) -> Environment:
    """Collect the facts, of another machine with `gpu_memory` (GiB of each GPU); nothing but libraries is loaded."""
    devices = _devices() if gpu_memory is None else (int(gpu_memory * 1024**3),) * gpus
    free, output_problem = _disk(output_dir)
    return Environment(
        versions={name: installed_version(name) for name in PACKAGES},
        devices=devices,
        elsewhere=gpu_memory is not None,
        torch_build=f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm" if torch.version.hip else "cpu",
        disk_free=free,
        output_dir=output_dir,
        output_problem=output_problem,
        variables={name: one_line(os.environ[name], 100) for name in VARIABLES if name in os.environ},
    )


def _devices() -> tuple[int, ...]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(int(torch.cuda.get_device_properties(index).total_memory) for index in range(count))


def _disk(output_dir: str) -> tuple[int | None, str | None]:
    """Free bytes at the nearest existing folder, and why nothing can be written there."""
    try:
        place = Path(output_dir).expanduser().absolute()
        while not place.is_dir():
            if place.is_file():
                return None, f"{one_line(place, 300)} is a file, not a folder"
            place = place.parent
        problem = None if os.access(place, os.W_OK | os.X_OK) else f"{one_line(place, 300)} may not be written to"
        return shutil.disk_usage(place).free, problem
    except (OSError, ValueError) as error:  # ValueError: a null character
        return None, one_line(error, 300)
