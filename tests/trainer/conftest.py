"""Fixtures of trainings: a mixture of experts, a model that calls tools."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.support import SIZES
from tests.trainer.support import save_tool_model


@pytest.fixture(scope="session")
def tiny_moe(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer mixture of four experts with the tiny model's tokenizer."""
    folder = tmp_path_factory.mktemp("tiny_moe")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    torch.manual_seed(0)
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    config = Qwen3MoeConfig(**SIZES, **experts, vocab_size=len(tokenizer))
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tool_model(tmp_path_factory.mktemp("tool_model"))
