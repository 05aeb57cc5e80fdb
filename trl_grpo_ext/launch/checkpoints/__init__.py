"""Complete checkpoints or none, and signals that save one, for any `transformers.Trainer`."""

from ...records.checkpoint_state import checkpoint_problem, last_complete_checkpoint
from .safe import SafeCheckpoints
from .stop_signal import SaveOnSignal, exit_status

__all__ = ["SafeCheckpoints", "SaveOnSignal", "checkpoint_problem", "exit_status", "last_complete_checkpoint"]
