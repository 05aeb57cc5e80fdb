"""Another machine's answers: GPUs that are not here, and one rank of a job whose other ranks are not started."""

import os
import sys
from types import SimpleNamespace
from typing import Any

_UNKNOWN_BYTES = 80 * 1024**3
_NOTHING = ("set_device", "init", "synchronize", "empty_cache", "manual_seed", "manual_seed_all")
_ZERO = ("current_device", "memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
_KERNELS = ("torch", "bitsandbytes", "triton", "deepspeed", "kernels", "flash_attn", "vllm", "xformers")
"""Who gets the true answers: they would go on to what is not compiled here."""
_NO_DEVICE = ("Torch not compiled with CUDA", "Found no NVIDIA driver", "No CUDA GPUs", "CUDA error", "CUDA driver")


def gpus(torch: Any, count: int, gpu_bytes: int | None) -> None:
    """Let `torch.cuda` answer questions as on a machine with `count` GPUs that can bf16; nothing can be put on them."""
    size = gpu_bytes or _UNKNOWN_BYTES
    properties = SimpleNamespace(name="GPU", major=8, minor=0, total_memory=size, multi_processor_count=108)
    there: dict[str, Any] = {"is_available": count > 0, "device_count": count}
    answers: dict[str, Any] = {
        **there,
        "is_bf16_supported": count > 0,
        "get_device_name": "GPU",
        "get_device_capability": (8, 0),
        "get_device_properties": properties,
        "mem_get_info": (size, size),
        **dict.fromkeys(_ZERO, 0),
        **dict.fromkeys(_NOTHING),
    }
    for module, of_module in ((torch.cuda, answers), (torch.accelerator, there)):
        for name, answer in of_module.items():
            _answer(module, name, answer)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed asks the driver itself
    move = torch.nn.Module.to

    def to(module: Any, *arguments: Any, **keywords: Any) -> Any:
        """Models without weights cannot be moved to a GPU that is not here; a script that does so goes on."""
        try:
            return move(module, *arguments, **keywords)
        except (AssertionError, RuntimeError, NotImplementedError) as error:
            if is_of_a_missing_gpu(error) or any(parameter.is_meta for parameter in module.parameters()):
                return module
            raise

    torch.nn.Module.to = to
    torch.nn.Module.cuda = lambda module, device=None: module


def _answer(module: Any, name: str, answer: Any) -> None:
    """Give an answer to everybody but `_KERNELS`."""
    truth = getattr(module, name)

    def answered(*arguments: Any, **keywords: Any) -> Any:
        if str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0] in _KERNELS:
            return truth(*arguments, **keywords)
        return answer

    setattr(module, name, answered)


def is_of_a_missing_gpu(error: BaseException) -> bool:
    """Whether a script asked for more of a GPU than answers."""
    return any(words in str(error) for words in _NO_DEVICE)


def first_of(torch: Any, processes: int) -> None:
    """Make this process rank 0 of so many: its process group is torch's fake one, which waits for nobody."""
    import torch.distributed as distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())
    distributed.init_process_group = lambda *_, **__: None  # a script's own call
