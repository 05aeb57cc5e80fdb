"""What a model with 4-bit weights needs before training, beyond what TRL does."""

import torch


def keep_4_bit_trainable(model: torch.nn.Module) -> None:
    """Keep bitsandbytes from packing 4-bit weights for inference, which would cut the gradient.

    On a CPU with AVX512-BF16, a 4-bit layer repacks its weights at its first forward pass in evaluation mode, and from
    then on uses an operator without a backward pass, in training too (bitsandbytes 0.50, `Linear4bit.forward`).
    Everything below such a layer then gets no gradient, with one warning and no error. On other machines this changes
    nothing.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010 (it is a plain attribute, not a tensor)


def keep_adapters_in_float32(model: torch.nn.Module) -> None:
    """Undo TRL's cast of a quantised model's adapters to bfloat16, before there is an optimizer.

    In bfloat16 an entry of lora_A moves by at least 6e-5 or not at all, so half of an update at a learning rate of 2e-5
    is lost. Adapters of a model that is not quantised are in float32 anyway. DeepSpeed keeps copies in float32 of
    whatever it trains.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.float()
