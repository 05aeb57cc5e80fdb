"""A pool of workers, and that nothing of it is left."""

import contextlib
import gc
from collections.abc import Iterator

import psutil
import pytest

from trl_grpo_ext.guard.workers import WorkerPool


@pytest.fixture
def no_process_is_left() -> Iterator[None]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    gc.collect()
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not left, "a zombie or a worker is left"


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    """Two workers that call what they are sent."""
    with contextlib.closing(WorkerPool(lambda job: job(), workers=2, memory_mb=256, name="trouble")) as made:
        yield made
