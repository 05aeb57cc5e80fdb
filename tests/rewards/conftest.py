"""What the tests of the rewards share: worker processes with math-verify, which take seconds to start."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from trl_grpo_ext.rewards.math_accuracy import MathAccuracy


@pytest.fixture(scope="session")
def with_math_workers() -> Iterator[Callable[..., Any]]:
    """Makes a `MathAccuracy` that uses running workers instead of its own."""
    owner = MathAccuracy()
    owner(completions=["\\boxed{x}"], solution=["$x$"])  # the first batch waits for the imports

    def make(**parameters: Any) -> MathAccuracy:
        reward = MathAccuracy(**parameters)
        reward._pool = owner._pool
        return reward

    yield make
    owner.close()
