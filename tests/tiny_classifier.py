"""A real sequence classifier on disk, small enough to be built by a test: a BERT or a Llama, with random weights."""

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

LABELS = ("harmless", "toxic", "rude")


def save_tiny_classifier(
    folder: Path, tiny_model: Path, *, kind: Literal["bert", "llama"] = "bert", labels: int = 3, **config: Any
) -> Path:
    """Save a classifier with the character tokenizer of `tests.support.save_tiny_model`.

    Weights are drawn wide, so that texts and labels differ in their scores. A "bert" counts positions absolutely and
    reads the first token, a "llama" reads the last one.
    """
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    names = dict(enumerate(LABELS[:labels])) if labels <= len(LABELS) else {i: f"label {i}" for i in range(labels)}
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.3,
        "id2label": names,
        "label2id": {name: index for index, name in names.items()},
        **config,
    }
    torch.manual_seed(0)
    if kind == "bert":
        BertForSequenceClassification(BertConfig(**settings)).save_pretrained(folder)
    else:
        LlamaForSequenceClassification(LlamaConfig(num_key_value_heads=2, **settings)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
