"""What the recipes share: settings, problems, progress, and results. The recipes themselves read top to bottom."""

import logging
import warnings

# Said at import time, about nothing that a person running a recipe can act upon.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
