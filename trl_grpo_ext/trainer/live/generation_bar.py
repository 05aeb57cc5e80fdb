"""A bar for generation that takes long: how many tokens the longest completion has by now, of those that it may have.

A model that generates in this process computes its output layer once for each token, so the calls of that layer are
counted. Sampling by vLLM or with continuous batching goes on elsewhere; there the bar has the time alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .late_bar import late_bar


@contextmanager
def generation_bar(completions: int, limit: int, reward: float | None, output_layer: Any) -> Iterator[None]:
    """A `late_bar` for the block.

    Args:
        completions: How many are generated in this process.
        limit: Tokens that a completion may have.
        reward: Mean reward of the batch before, which is shown.
        output_layer: The module that makes logits; None where tokens cannot be counted.
    """
    label = "generating" if reward is None else f"generating (reward {reward:.3f} before)"
    if output_layer is None:
        with late_bar(label, completions, "completions"):
            yield
        return
    with late_bar(f"{label}, {completions} completions", limit, "tokens") as heard:
        done = 0

        def count(*_: Any) -> None:
            nonlocal done
            done += 1
            heard(done, limit)

        handle = output_layer.register_forward_pre_hook(count)
        try:
            yield
        finally:
            handle.remove()
