"""Where the time of an optimizer step goes: seconds in generation, in rewards and in the update.

| metric | seconds of an optimizer step on the main process |
| --- | --- |
| `time/generation` | preparing its micro-batches but for rewards: generating, log-probabilities, hooks, weights |
| `time/rewards` | in the reward functions, waiting for the other ranks' included |
| `time/update` | all the rest: the loss, its gradient |

A GPU works on what it was given while Python goes on. So the clock waits for the device twice in an optimizer step:
before the first phase begins, when the optimizer's own step may still be running, and after the last one has ended.
What it waits for at the end is the gradient, and counts as update; the optimizer's step counts as none of the three.
Between the phases it does not wait. Generation and rewards end in numbers that Python reads, so the device has nothing
left to do there; what hooks give it last may count as update.

On the CPU the three add up to TRL's `step_time`, up to microseconds. On a GPU they are more: TRL does not wait. In a
step that trains on completions of an earlier one, the first two are almost nothing. TRL's own `profiling/...` times
go to some trackers alone and are not in the history. Logged where something of this package is selected; a run of
TRL's keeps TRL's metrics.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PHASES = ("generation", "rewards", "update")


class PhaseClock:
    """Gives the time of training steps to phases. The update is around the other two.

    Args:
        device: Where the training runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = torch.get_device_module(device)
        self._phase: str | None = None
        self._since = 0.0
        self._seconds: dict[str, float] = {}

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Give the time within to a phase, and not to the one around it; outside of training steps to none."""
        outer = self._phase
        if outer is None and phase != "update":
            yield
            return
        if outer is None and not self._seconds:  # an optimizer step begins
            self._device.synchronize()
        self._turn_to(phase)
        try:
            yield
        finally:
            self._turn_to(outer)

    def take(self) -> dict[str, float]:
        """The seconds since the last call, by metric, once the device has done its work."""
        with self.during("update"):
            self._device.synchronize()
        seconds, self._seconds = self._seconds, {}
        return {f"time/{phase}": seconds.get(phase, 0.0) for phase in PHASES}

    def _turn_to(self, phase: str | None) -> None:
        now = time.perf_counter()
        if self._phase is not None:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now
