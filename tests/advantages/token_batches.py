"""What tests of single hooks share."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from trl_grpo_ext import load_advantage_hooks
from trl_grpo_ext.credit import flow
from trl_grpo_ext.types import Rollout

Rows = list[list[float]]


@cache
def _class_of(name: str) -> type:
    """Loading takes a look at every installed distribution: once is enough."""
    (loaded,) = load_advantage_hooks([name])
    return type(loaded)


def hook(name: str, **parameters: Any) -> Any:
    return _class_of(name)(**parameters)


def after_rollout(rollout: Rollout, advantages: Sequence[float], name: str, **parameters: Any) -> Rows:
    """The advantages `(B, T)` that a hook makes of one per completion."""
    incoming = torch.tensor(list(advantages), dtype=torch.float64)
    result: Rows = flow.apply_hooks(incoming, [hook(name, **parameters)], rollout).tolist()
    return result
