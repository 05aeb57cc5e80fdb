"""SIGTERM, or another signal, ends the training after the optimizer step with a checkpoint, on all ranks together.

The handler only sets a flag. At the end of every optimizer step the ranks gather one integer each, so a signal to one
rank stops all at the same step; of our trainers, at the end of the generation batch, inside which no run can resume.
The evaluation of that step is left out. A signal after the last step goes to the earlier handler.

transformers' own `enable_jit_checkpoint` (read in 5.23) is refused: each rank acts on its own flag, so two may save at
different steps; and it saves weights without the step's gradients, while the data has moved on.
"""

import logging
import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather
from transformers import TrainerCallback

logger = logging.getLogger(__name__)


def exit_status(number: int) -> int:
    """The exit status of a script that a signal ended: 128 plus its number, as in shells, for it is not finished."""
    return 128 + number


class SaveOnSignal(TrainerCallback):
    """Saves a checkpoint and stops after one of the signals; works in any `transformers.Trainer`."""

    def __init__(self, signals: Sequence[signal.Signals | int] = (signal.SIGTERM,)) -> None:
        self.signals = [signal.Signals(number) for number in signals]
        self.stopped_by: signal.Signals | None = None
        self._earlier: dict[int, Any] = {}
        self._came: set[int] = set()
        self._process = os.getpid()
        self._limit: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Install the handlers. Only the main thread may; in others, warn and leave the handlers alone."""
        self.stopped_by = None
        if self._earlier or not self.signals:
            return
        if threading.current_thread() is not threading.main_thread():
            logger.warning("Training runs outside the main thread, so no signal will save a checkpoint.")
            return
        self._process = os.getpid()
        self._came.clear()
        for number in self.signals:
            self._earlier[number] = signal.signal(number, self._note)
            signal.siginterrupt(number, False)  # C code that does not expect interrupted calls must not get them

    def restore(self, *, deliver: bool = True) -> None:
        """Put the earlier handlers back, and give them what came after the last step if `deliver`."""
        late = [number for number in self._came if deliver and self.stopped_by is None]
        for number, earlier in self._earlier.items():
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
        self._earlier.clear()
        self._came.clear()
        for number in late:
            os.kill(os.getpid(), number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self._came.add(number)
        else:  # in a forked child, which has nothing to save
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Agree with the other ranks; save and stop if one of them has a signal."""
        if not self.signals:
            return
        mine = max(self._came, default=0)
        number = int(gather(torch.tensor([mine], device=PartialState().device)).max())
        if number:
            waits = getattr(state, "inside_a_batch", False) and not control.should_training_stop
            if PartialState().is_main_process:
                when = "at the end of the generation batch" if waits else f"at step {state.global_step}"
                logger.warning("%s: saving %s and stopping.", signal.Signals(number).name, when)
            if waits:
                return
            self.stopped_by = signal.Signals(number)
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """After a stop, cancel the second save and the evaluation that the default flow requests here."""
        if self.stopped_by is not None:
            control.should_save = control.should_evaluate = False
            # With save_total_limit 1 transformers would delete all but the best checkpoint, so also the one just saved.
            self._limit = args.save_total_limit
            args.save_total_limit = None

    def on_train_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if self.stopped_by is not None:
            args.save_total_limit = self._limit
        self.restore()
