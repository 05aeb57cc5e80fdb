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
from pathlib import Path

import torch
import torch.distributed as dist
from packaging.version import InvalidVersion, Version

from ...guard.untrusted import one_line
from ...plugins.discovery import ENVIRONMENT_VARIABLE
from ...plugins.metadata import installed_version

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
_PROBE = """
from bitsandbytes import cextension
name = type(cextension.lib).__name__
if "ErrorHandler" in name:
    raise SystemExit("native library: " + str(getattr(cextension.lib, "error_msg", name)))
from bitsandbytes.functional import has_avx512bf16
print("avx512bf16" if has_avx512bf16() else "ok")
"""


@dataclass(frozen=True)
class Device:
    """A GPU: its name, memory in bytes, and compute capability where it is known."""

    name: str
    memory: int
    capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class Environment:
    """The machine that a run will use."""

    versions: Mapping[str, str | None] = field(default_factory=dict)  # of `PACKAGES`; None if it is not installed
    devices: tuple[Device, ...] = ()
    elsewhere: bool = False  # another machine's GPUs are described; versions are this machine's
    python: str = ""
    torch_build: str = "cpu"
    bitsandbytes_error: str | None = None  # why its native library does not load
    avx512bf16: bool = False  # bitsandbytes would repack 4-bit weights on this CPU
    has_nccl: bool = False
    lacks_to_build: tuple[str, ...] = ()  # tools for compiling extensions
    disk_free: int | None = None  # bytes where checkpoints go
    output_dir: str = ""
    output_problem: str | None = None  # why nothing can be written there
    model: str | None = None
    model_here: bool | None = None  # its weights are in a folder or in the cache
    chat_template: bool | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    checkpoint_here: bool | None = None  # the one to resume from

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
    """Collect the facts, of another machine with `gpu_memory` (GiB of each GPU); nothing but libraries is loaded."""
    devices = _devices() if gpu_memory is None else (Device("as described", int(gpu_memory * 1024**3)),) * gpus
    error, avx512 = _probe_bitsandbytes() if needs_bitsandbytes else (None, False)
    free, output_problem = _disk(output_dir)
    here, template = _model(model)
    lacking = [] if shutil.which("ninja") or importlib.util.find_spec("ninja") else ["ninja"]
    lacking += [] if shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") else ["a C++ compiler"]
    return Environment(
        versions={name: installed_version(name) for name in PACKAGES},
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
    command = [sys.executable, "-c", _PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return None, False  # the machine is busy, which says nothing about the library
    except OSError as error:
        return one_line(error, 300), False
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return one_line(lines[-1] if lines else f"it ended with status {done.returncode}", 300), False
    return None, "avx512bf16" in done.stdout


def _disk(output_dir: str) -> tuple[int | None, str | None]:
    """Free bytes at the nearest existing folder, and why nothing can be written there."""
    if "\0" in output_dir:
        return None, "it has a null character"
    try:
        place = Path(output_dir).expanduser().absolute()
        while not place.is_dir():
            if place.is_file():
                return None, f"{one_line(place, 300)} is a file, not a folder"
            place = place.parent
        problem = None if os.access(place, os.W_OK | os.X_OK) else f"{one_line(place, 300)} may not be written to"
        return shutil.disk_usage(place).free, problem
    except OSError as error:
        return None, one_line(error, 300)


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
