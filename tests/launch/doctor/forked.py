"""The examination's two processes as forks, which have their imports already."""

import os
from collections.abc import Sequence
from pathlib import Path

from tests import forking
from trl_grpo_ext.launch.doctor.launch import Launch


def child(module: str, paths: Sequence[Path], launch: Launch) -> str:
    """In place of the command's own `_child`."""
    environment = {**os.environ, **launch.environment, "HF_HUB_OFFLINE": "1"}
    target = f"trl_grpo_ext.launch.doctor.{module}"
    done = forking.run(target, [*map(str, paths)], cwd=Path.cwd(), env=environment, timeout=400)
    return f"{done.stdout}{done.stderr}"[-1500:]
