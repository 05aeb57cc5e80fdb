"""Where the time of an optimizer step goes: seconds in generation, in rewards and in the update.

| metric | seconds of an optimizer step on the main process |
| --- | --- |
| `time/generation` | preparing its micro-batches but for rewards: generating, log-probabilities, hooks, weights |
| `time/rewards` | in the reward functions, waiting for the other ranks' included |
| `time/update` | all the rest: the loss, its gradient |

The three add up to TRL's `step_time`, up to microseconds. In a step that trains on completions of an earlier one, the
first two are almost nothing. TRL's own `profiling/...` times go to some trackers alone and are not in the history.
Logged where something of this package is selected; a run of TRL's keeps TRL's metrics.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PHASES = ("generation", "rewards", "update")


class TimesPhases:
    """What `GRPOExtMixin` does to know its phases. `training_step` calls `_prepare_inputs`, and that the rest."""

    args: Any
    accelerator: Any
    _needs_rollout: Any
    _phase: str | None = None
    _phase_since = 0.0
    _phase_seconds: dict[str, float]

    @property
    def _times_phases(self) -> bool:
        selected = getattr(self.args, "rewards", None) or getattr(self.args, "compact_updates", "off") != "off"
        return bool(self._needs_rollout or selected)

    def training_step(self, *arguments: Any, **keywords: Any) -> Any:
        """Do TRL's step, and at the end of an optimizer step log the seconds of its phases."""
        if not self._times_phases:
            return super().training_step(*arguments, **keywords)  # type: ignore[misc]
        with self._in_phase("update"):
            output = super().training_step(*arguments, **keywords)  # type: ignore[misc]
        trl: Any = self
        if trl._step % trl.current_gradient_accumulation_steps == 0:  # as TRL's own `step_time`
            for name in PHASES:
                trl._metrics["train"][f"time/{name}"].append(self._phase_seconds.pop(name, 0.0))
        return output

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        with self._in_phase("generation"):
            return super()._prepare_inputs(generation_batch)  # type: ignore[misc]

    def _calculate_rewards(self, *arguments: Any, **keywords: Any) -> Any:
        with self._in_phase("rewards"):
            return super()._calculate_rewards(*arguments, **keywords)  # type: ignore[misc]

    @contextmanager
    def _in_phase(self, name: str) -> Iterator[None]:
        """Give the time within to a phase, and not to the one around it; outside of training steps to none."""
        outer = self._phase
        if outer is None and name != "update":
            yield
            return
        self._turn_to(name)
        try:
            yield
        finally:
            self._turn_to(outer)

    def _turn_to(self, name: str | None) -> None:
        now = time.perf_counter()
        if not hasattr(self, "_phase_seconds"):
            self._phase_seconds = {}
        if self._phase is not None:
            self._phase_seconds[self._phase] = self._phase_seconds.get(self._phase, 0.0) + now - self._phase_since
        self._phase, self._phase_since = name, now
