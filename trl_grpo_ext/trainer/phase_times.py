"""Where the time of an optimizer step goes: seconds in generation, in rewards and in the update.

A GPU works asynchronously, so the clock waits for the device before the first phase of an optimizer step, when the
optimizer's own step may still run, and after the last.
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
