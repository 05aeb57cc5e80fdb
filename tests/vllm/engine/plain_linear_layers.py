"""A plugin of vLLM, which on the CPU packs the weights of linear layers and drops them: TRL could not load new ones."""

from typing import Any


def register() -> None:
    """Multiply by the weights as they are."""
    import torch
    from vllm.model_executor.layers import utils

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = keep
