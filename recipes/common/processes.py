"""The end of a run of several processes."""

import gc
import time
from typing import Any

GRACE = 0.2
"""Seconds; gloo's threads need microseconds, or more on a busy machine."""


def leave(trainer: Any) -> None:
    """End the trackers and leave the process group; the last line of a recipe, on every rank.

    vLLM in this process goes first: at the interpreter's exit it would ask for process groups that are gone by then.

    The ranks leave together, because a launcher ends all once one has failed. They also give gloo's threads a moment.
    If a model was wrapped for DDP, these survive `destroy_process_group`, and one that still has to release a Python
    tensor while the interpreter shuts down aborts the process ("terminate called without an active exception", PyTorch
    2.13).
    """
    accelerator = trainer.accelerator
    accelerator.wait_for_everyone()
    if (llm := getattr(getattr(trainer, "vllm_generation", None), "llm", None)) is not None:
        llm.llm_engine.engine_core.shutdown()
    accelerator.end_training()
    gc.freeze()  # else the interpreter looks through all modules for cycles before it exits, which takes seconds
    if accelerator.num_processes > 1:
        time.sleep(GRACE)  # without the interpreter's lock, for which they wait
