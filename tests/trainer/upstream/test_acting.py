"""What is done to TRL while it runs: its head of the loss in smaller tiles computes the same."""

from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from trl.kernels import chunked_logprob

from trl_grpo_ext.trainer.upstream import acting


def test_head_in_tiles_is_the_same() -> None:
    class Products(TorchDispatchMode):
        rows: ClassVar[list[int]] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.rows += [args[0].size(0)] if "mm.out" in str(function) else []
            return function(*args, **(kwargs or {}))

    head, generator = chunked_logprob.ChunkedLogProbFunction, torch.manual_seed(0)
    states, weight = torch.randn(500, 8, generator=generator), torch.randn(30, 8, generator=generator)
    found = []
    for device, tokens in (("meta", [500, 500]), ("cpu", [240, 240, 20] * 2)):
        leaves = states.clone().requires_grad_(), weight.clone().requires_grad_()
        with acting.small_head_tiles(torch.device(device)), Products() as products:
            products.rows = []
            head.apply(*leaves, None, torch.arange(500) % 30, 1.0, 32_768)[0].square().sum().backward()
        assert products.rows == tokens  # forward and backward
        found.append([leaf.grad for leaf in leaves])
    for one, other in zip(*found, strict=True):  # sums in another order: rounding is relative to the largest
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-6 * float(other.abs().max()))
