"""Where the time of an optimizer step goes: seconds in generation, in rewards and in the update.

| metric | seconds of an optimizer step on the main process |
| --- | --- |
| `time/generation` | preparing its micro-batches but for rewards: generating, log-probabilities, hooks, weights |
| `time/rewards` | in the reward functions, including the wait for other ranks |
| `time/update` | all the rest: the loss, its gradient |

A GPU works asynchronously, so the clock waits for the device twice in an optimizer step: before the first phase, when
the optimizer's own step may still run (it counts as none of the three), and after the last. On the CPU the three add up
to TRL's `step_time`; on a GPU to more, since TRL does not wait.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PHASES = ("generation", "rewards", "update")


class PhaseClock:
    """Assigns the time of training steps on a device to phases. The update encloses the other two."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.get_device_module(device)
        self._phase: str | None = None
        self._since = 0.0
        self._seconds: dict[str, float] = {}

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count the time inside as this phase, not the enclosing one; outside of training steps as none."""
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
        """Wait for the device and return the seconds since the last call, by metric."""
        with self.during("update"):
            self._device.synchronize()
        seconds, self._seconds = self._seconds, {}
        return {f"time/{phase}": seconds.get(phase, 0.0) for phase in PHASES}

    def _turn_to(self, phase: str | None) -> None:
        now = time.perf_counter()
        if self._phase is not None:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now
