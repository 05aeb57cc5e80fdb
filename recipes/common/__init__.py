"""What the recipes share: settings, problems, progress, and results. The recipes themselves read top to bottom."""

import logging
import os
import warnings

import torch

# Printed at import time, and nothing that a recipe's user can act upon.
if not torch.accelerator.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed prints that it found no other
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
