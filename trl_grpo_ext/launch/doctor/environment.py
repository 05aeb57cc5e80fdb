"""Facts about a machine: versions, devices, libraries, disk and variables that silently change the engine."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from ...guard.untrusted import one_line
from ...plugins.discovery import ENVIRONMENT_VARIABLE

PACKAGES = (
    *("trl", "transformers", "torch", "accelerate", "peft", "bitsandbytes", "math-verify", "deepspeed", "vllm"),
    *("flash-attn", "liger-kernel"),
)
VARIABLES = (
    *("ACCELERATE_USE_CPU", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION"),
    *("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE", "RANK", "LOCAL_RANK"),
    *("MASTER_ADDR", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "DS_ACCELERATOR", "SLURM_NODEID", ENVIRONMENT_VARIABLE),
)
"""Variables that change what runs, or what can be loaded."""
_PROBE_SECONDS = 120
_PROBE = """
from bitsandbytes import cextension
name = type(cextension.lib).__name__
if "ErrorHandler" in name:
    raise SystemExit("native library: " + str(getattr(cextension.lib, "error_msg", name)))
from bitsandbytes.functional import has_avx512bf16
print("avx512bf16" if has_avx512bf16() else "ok")
"""


@dataclass(frozen=True)
class Package:
    """A distribution, installed or missing.

    Attributes:
        name: Of the distribution.
        version: None if it is not installed.
        wanted: The range that this package's own metadata asks for; empty if there is none.
        required: Whether every run needs it.
    """

    name: str
    version: str | None = None
    wanted: str = ""
    required: bool = False

    @property
    def fits(self) -> bool:
        """Whether the installed version is in the range; a missing one is not."""
        if self.version is None:
            return False
        try:
            return Requirement(f"x{self.wanted}").specifier.contains(Version(self.version), prereleases=True)
        except (InvalidRequirement, InvalidVersion):
            return True  # a version that cannot be compared


@dataclass(frozen=True)
class Device:
    """A GPU: its name, memory in bytes, and compute capability where it is known."""

    name: str
    memory: int
    capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class Environment:
    """The machine that a run will use.

    Attributes:
        packages: By name.
        devices: GPUs that are visible.
        elsewhere: Whether another machine is described: devices are as described, versions are this machine's.
        python: Version of the interpreter.
        torch_build: "cpu", or "CUDA 12.8" and the like.
        bitsandbytes_error: Why its native library does not load; None if it does, or was not tried.
        avx512bf16: Whether bitsandbytes would repack 4-bit weights on this CPU.
        has_nccl: Whether this torch was built with it.
        lacks_to_build: Missing tools for compiling extensions.
        disk_free: Free bytes where checkpoints go; None if unknown.
        output_dir: That place.
        output_problem: Why nothing can be written there; None if it can.
        model: The model asked for.
        model_here: Whether its weights are in a local folder or in the cache.
        chat_template: Whether its tokenizer has a chat template; None if unknown.
        variables: Those of `VARIABLES` that are set.
        checkpoint_here: Whether the checkpoint to resume from exists; None if none is set.
    """

    packages: Mapping[str, Package] = field(default_factory=dict)
    devices: tuple[Device, ...] = ()
    elsewhere: bool = False
    python: str = ""
    torch_build: str = "cpu"
    bitsandbytes_error: str | None = None
    avx512bf16: bool = False
    has_nccl: bool = False
    lacks_to_build: tuple[str, ...] = ()
    disk_free: int | None = None
    output_dir: str = ""
    output_problem: str | None = None
    model: str | None = None
    model_here: bool | None = None
    chat_template: bool | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    checkpoint_here: bool | None = None

    def version(self, name: str) -> Version | None:
        """The version of an installed distribution."""
        package = self.packages.get(name)
        try:
            return None if package is None or package.version is None else Version(package.version)
        except InvalidVersion:
            return None

    def is_on(self, *names: str) -> list[str]:
        """Which of these variables are set to true."""
        return [n for n in names if self.variables.get(n, "").lower() in ("1", "true", "yes", "y", "on", "t")]

    @property
    def device_memory(self) -> int | None:
        """Bytes of the smallest GPU."""
        return min((device.memory for device in self.devices), default=None)


def inspect_machine(
    *,
    output_dir: str = "trainer_output",
    model: str | None = None,
    checkpoint: object = None,
    needs_bitsandbytes: bool = False,
    gpu_memory: float | None = None,
    gpus: int = 1,
) -> Environment:
    """Collect the facts; nothing is loaded but libraries.

    Args:
        output_dir: Where the run saves.
        model: Name or folder of the model.
        checkpoint: `resume_from_checkpoint`.
        needs_bitsandbytes: Whether to load its native library, in a process of its own.
        gpu_memory: GiB of each GPU of another machine; None means this machine.
        gpus: GPUs of that machine.
    """
    devices = _devices() if gpu_memory is None else (Device("as described", int(gpu_memory * 1024**3)),) * gpus
    error, avx512 = _probe_bitsandbytes() if needs_bitsandbytes else (None, False)
    free, output_problem = _disk(output_dir)
    here, template = _model(model)
    lacking = [] if shutil.which("ninja") or importlib.util.find_spec("ninja") else ["ninja"]
    lacking += [] if shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") else ["a C++ compiler"]
    return Environment(
        packages={name: Package(name, _version(name), *required_range(name)) for name in PACKAGES},
        devices=devices,
        elsewhere=gpu_memory is not None,
        python=".".join(map(str, sys.version_info[:3])),
        torch_build=f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm" if torch.version.hip else "cpu",
        bitsandbytes_error=error,
        avx512bf16=avx512,
        has_nccl=dist.is_available() and dist.is_nccl_available(),
        lacks_to_build=tuple(lacking),
        disk_free=free,
        output_dir=output_dir,
        output_problem=output_problem,
        model=model,
        model_here=here,
        chat_template=template,
        variables={name: one_line(os.environ[name], 100) for name in VARIABLES if name in os.environ},
        checkpoint_here=_checkpoint(checkpoint, output_dir),
    )


def required_range(name: str) -> tuple[str, bool]:
    """The version range in our metadata, and whether it is required in any case."""
    try:
        lines = metadata.requires("trl-grpo-ext") or []
    except metadata.PackageNotFoundError:  # a source tree on the path
        return "", False
    for line in lines:
        requirement = Requirement(line)
        if requirement.name == name:
            return str(requirement.specifier), requirement.marker is None
    return "", False


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> tuple[Device, ...]:
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts = torch.cuda.get_device_properties(index)
        found.append(Device(one_line(facts.name, 60), int(facts.total_memory), (facts.major, facts.minor)))
    return tuple(found)


@functools.cache
def _probe_bitsandbytes() -> tuple[str | None, bool]:
    """Load its native library in a separate process, since a broken one may crash the process."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return None, False  # reported elsewhere
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return one_line(error), False
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return one_line(lines[-1] if lines else f"it ended with status {done.returncode}"), False
    return None, "avx512bf16" in done.stdout


def _disk(output_dir: str) -> tuple[int | None, str | None]:
    """Free bytes at the nearest existing folder, and why nothing can be written there."""
    if "\0" in output_dir:
        return None, "it has a null character"
    try:
        place = Path(output_dir).expanduser().absolute()
        while not place.is_dir():
            if place.is_file():
                return None, f"{one_line(place)} is a file, not a folder"
            place = place.parent
        problem = None if os.access(place, os.W_OK | os.X_OK) else f"{one_line(place)} may not be written to"
        return shutil.disk_usage(place).free, problem
    except OSError as error:
        return None, one_line(error)


def _model(model: str | None) -> tuple[bool | None, bool | None]:
    """Whether its weights are here, and whether its tokenizer has a chat template."""
    if model is None:
        return None, None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        folder = Path(model)
        if not folder.is_dir():
            cached = try_to_load_from_cache(model, "config.json")
            if not isinstance(cached, str):
                return False, None
            folder = Path(cached).parent
        weights = any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))
        tokenizer = folder / "tokenizer_config.json"
        if not tokenizer.is_file():
            return weights, None
        names = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
        text = tokenizer.read_text(encoding="utf-8", errors="replace")
        return weights, '"chat_template"' in text or any((folder / name).exists() for name in names)
    except (OSError, ValueError, HFValidationError):
        return False, None


def _checkpoint(asked: object, output_dir: str) -> bool | None:
    if asked is None or str(asked).lower() == "false":
        return None
    if str(asked).lower() == "true":
        return any(Path(output_dir).glob("checkpoint-*/trainer_state.json"))
    return (Path(str(asked)) / "trainer_state.json").is_file()
