"""A micro-step of several parts exchanges gradients once, and not at all where it only accumulates, under FSDP2 too."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from trl_grpo_ext.trainer.batch import BatchKeys
from trl_grpo_ext.trainer.compact.updates import loss_of_parts


class Accelerated(SimpleNamespace):
    """Accelerate's own `no_sync` and gradient state, on the CPU, where its FSDP2 does not start."""

    is_fsdp2, distributed_type = True, "FSDP"
    no_sync = Accelerator.no_sync

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]


@pytest.fixture
def sharded() -> Iterator[tuple[Any, list[int]]]:
    """A model that FSDP2 shards over one process, and what every exchange of gradients leaves in this list."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    exchanges: list[int] = []
    original = _fsdp_param_group.foreach_reduce  # with one process it sends nothing, and is called all the same

    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model: Any = fully_shard(torch.nn.Linear(4, 1, bias=False), mesh=mesh)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            exchanges.append(1)
            return original(*arguments, **keywords)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_fsdp_param_group, "foreach_reduce", counted)
            yield model, exchanges
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("last", "each", "times"), [(False, False, 0), (True, False, 1), (True, True, 3)])
def test_exchanges_of_a_micro_step_of_three_parts(
    sharded: tuple[Any, list[int]], last: bool, each: bool, times: int
) -> None:
    model, exchanges = sharded
    state = GradientState()
    accelerator: Any = Accelerated(gradient_state=state)
    rows = [torch.full((1, 4), float(number)) for number in range(1, 4)]
    batch = {"row": rows[0], BatchKeys.parts: [{"row": rows[1]}, {"row": rows[2]}]}

    def step() -> None:
        loss_of_parts(lambda part: model(part["row"]).sum(), model, batch, accelerator).backward()

    before = (state.sync_gradients, dict(state.plugin_kwargs))
    try:
        state._set_sync_gradients(last)
        state.plugin_kwargs = {"sync_each_batch": each}
        if last:
            step()
        else:
            with accelerator.no_sync(model):  # as the trainer does
                step()
    finally:
        state._set_sync_gradients(before[0])
        state.plugin_kwargs = before[1]
    assert len(exchanges) == times
    if last:
        assert model.weight.grad.full_tensor().tolist() == [[6.0] * 4]
