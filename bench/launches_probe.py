"""A reward with a signal for models with random weights, which also marks the time and memory of a run.

Both sides of `launches_gpu` take it by its path, so both are measured by the same lines, inside their own process. A
mark is written when a batch was generated, and when the optimizer has stepped: PyTorch calls one function after the
step of every optimizer. Before each mark the device finishes what it was given, so the time between two marks is real.
"""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

FILE = os.environ.get("LAUNCH_BENCH_MARKS")
"""Where the marks go; nowhere where it is not set."""


def even_share(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The share of even token ids: nearly never the same in a whole group, however the tokens were drawn."""
    _mark("generated", rows=len(completion_ids), tokens=sum(map(len, completion_ids)))
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def _stepped(optimizer: torch.optim.Optimizer, *call: Any) -> None:
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in trained})
    _mark("stepped", peak=_peak(), trained=sum(p.numel() for p in trained), dtypes=dtypes)


def _peak() -> int:
    """Bytes that torch's allocator held at most since the last step; on the CPU the process's largest resident set."""
    if not torch.cuda.is_available():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


def _mark(what: str, **facts: Any) -> None:
    if FILE is None:
        return
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    with Path(FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"what": what, "at": time.perf_counter(), **facts}) + "\n")


if FILE is not None:
    register_optimizer_step_post_hook(_stepped)
