"""What is made and told of an error."""

import torch

from trl_grpo_ext.errors import PluginRunError, is_out_of_memory, reworded


def test_reworded_keeps_kind_and_notes() -> None:
    error = PluginRunError("raised")
    error.add_note("in row 3")
    other = reworded(error, "raised again")
    assert (type(other), str(other), other.__notes__) == (PluginRunError, "raised again", ["in row 3"])


def test_is_out_of_memory_by_kind_or_words() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(RuntimeError("The size of tensor a (3) must match the size of tensor b (2)"))
