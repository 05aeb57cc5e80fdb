"""Record which collectives of torch.distributed a plugin calls on each of two simulated ranks.

Nothing is sent: torch's own fake process group answers at once with the rank's own data. So a plugin that would hang
the other rank returns, and the lists differ.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

_MENTIONS = re.compile(r"\b(distributed|all_reduce|all_gather|accelerate|PartialState|Accelerator)\b")


def mentions_collectives(plugin: Any) -> bool:
    """Whether the source of a plugin's package mentions torch.distributed or accelerate."""
    own = plugin if hasattr(plugin, "__qualname__") else type(plugin)
    package = str(getattr(own, "__module__", "")).partition(".")[0]
    if "torch" not in sys.modules or package in ("", "builtins", __name__.partition(".")[0]):
        return False
    modules = [module for name, module in [*sys.modules.items()] if name == package or name.startswith(f"{package}.")]
    return any(_MENTIONS.search(_source(module)) for module in modules)


def _source(module: Any) -> str:
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):  # compiled, or made by hand
        return ""


def collectives_of_ranks(call: Callable[[int], Any], ranks: int = 2) -> list[list[str]]:
    """The names of the collectives that `call(rank)` calls, by rank.

    Empty if this process already has a process group, since none can be simulated then.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode

    called: list[str] = []

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own __init_subclass__
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace in ("c10d", "_c10d_functional"):
                called.append(func.__name__.partition(".")[0].strip("_"))
            return func(*args, **(kwargs or {}))

    if not dist.is_available() or dist.is_initialized():
        return []
    of_ranks = []
    for rank in range(ranks):
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        try:
            with Recorder():  # type: ignore[no-untyped-call]
                call(rank)
            of_ranks.append([*called])
        finally:
            called.clear()
            dist.destroy_process_group()
    return of_ranks


def describe_difference(of_ranks: list[list[str]]) -> str:
    """How these lists differ, in words; empty if they don't."""
    if len({tuple(called) for called in of_ranks}) < 2:
        return ""
    said = " and ".join(f"{', '.join(called) or 'nothing'} on rank {rank}" for rank, called in enumerate(of_ranks))
    return f"it calls {said}: every rank must call the same in the same order, never under a condition on its own rows"
