"""4-bit weights on the CPU."""

from __future__ import annotations

import torch


def keep_4_bit_trainable(model: torch.nn.Module) -> None:
    """Keep bitsandbytes from packing 4-bit weights for inference, which would cut the gradient.

    On a CPU with AVX512-BF16, a 4-bit layer repacks its weights at its first forward pass in evaluation mode, and from
    then on uses an operator without a backward pass, in training too (bitsandbytes 0.50, `Linear4bit.forward`). What is
    below such a layer then gets no gradient, with one warning and no error. Elsewhere this changes nothing.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010 (it is a plain attribute, not a tensor)
