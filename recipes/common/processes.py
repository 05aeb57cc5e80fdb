"""The end of a run of several processes."""

from __future__ import annotations

import time
from typing import Any

GRACE = 0.2
"""Seconds; gloo's threads need microseconds, and more on a machine that is busy."""


def leave(accelerator: Any) -> None:
    """End the trackers and leave the process group; the last line of a recipe, on every rank.

    The ranks leave together: a launcher ends all as soon as one has failed. And they leave gloo's threads a moment.
    After `destroy_process_group` these live on where a model was wrapped for DDP, and one that still has to give back
    a tensor of Python's while the interpreter shuts down aborts the process ("terminate called without an active
    exception", PyTorch 2.13).

    Args:
        accelerator: The trainer's.
    """
    accelerator.wait_for_everyone()
    accelerator.end_training()
    if accelerator.num_processes > 1:
        time.sleep(GRACE)  # without the interpreter's lock, for which they wait
