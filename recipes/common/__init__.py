"""What the recipes share: settings, problems, progress, and results. The recipes themselves read top to bottom.

They import this package before all that imports torch, which reads its environment once.
"""

import logging
import os
import sys
import warnings
from types import TracebackType

# A thread that waits for another one sleeps. By default it spins, and where other work has the cores nothing moves.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Say in a line that a run was interrupted; Python then exits with 130, as shells count it. The rest as always."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    elif os.environ.get("RANK", "0") == "0":
        print("\ninterrupted", file=sys.stderr, flush=True)


sys.excepthook = print_error

import torch  # noqa: E402

# Printed at import time, and nothing that a recipe's user can act upon.
if not torch.accelerator.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed prints that it found no other
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
