"""A reward with a signal for models with random weights, which also marks the time and memory of a run.

Both sides of `launches_gpu` take it by its path, so both are measured by the same lines, inside their own process. A
mark is written when a batch was generated, and when the optimizer has stepped: PyTorch calls one function after the
step of every optimizer. Before each mark the device finishes what it was given, so the time between two marks is real.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

FILE = os.environ.get("LAUNCH_BENCH_MARKS")
"""Where the marks go; nowhere where it is not set."""
_steps = 0


def even_share(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The share of even token ids: nearly never the same in a whole group, however the tokens were drawn."""
    _mark("generated", rows=len(completion_ids), tokens=sum(map(len, completion_ids)))
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def _stepped(optimizer: torch.optim.Optimizer, *call: Any) -> None:
    global _steps
    _steps += 1
    facts = _what_is_trained(optimizer) if _steps == 1 else {}
    _mark("stepped", peak=_peak(), **facts)
    if _steps == 1 and torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()  # loading, and what the first step alone needs, are left out


def _what_is_trained(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    made = type(getattr(optimizer, "optimizer", optimizer))
    return {
        "trained": sum(parameter.numel() for parameter in trained),
        "trained_dtypes": sorted({str(parameter.dtype).removeprefix("torch.") for parameter in trained}),
        "device": trained[0].device.type,
        "layers_in_4_bits": _layers_in_4_bits(),
        "optimizer": f"{made.__module__}.{made.__name__}",
    }


def _layers_in_4_bits() -> int:
    bitsandbytes = sys.modules.get("bitsandbytes")
    if bitsandbytes is None:
        return 0
    return sum(issubclass(type(thing), bitsandbytes.nn.Linear4bit) for thing in gc.get_objects())


def _peak() -> int:
    """Bytes that torch's allocator held at most since the first step; on the CPU the process's largest resident set."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _mark(what: str, **facts: Any) -> None:
    if FILE is None:
        return
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    with open(FILE, "a", encoding="utf-8") as file:  # noqa: PTH123 (opened at every step: as little as possible)
        file.write(json.dumps({"what": what, "at": time.perf_counter(), **facts}) + "\n")


if FILE is not None:
    register_optimizer_step_post_hook(_stepped)
