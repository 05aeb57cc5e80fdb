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

from tests.support import SIZES

LABELS = ("harmless", "toxic", "rude")


def save_tiny_classifier(
    folder: Path, tiny_model: Path, *, kind: Literal["bert", "llama"] = "bert", labels: int = 3, **config: Any
) -> Path:
    """Save a classifier whose wide weights tell texts and labels apart, with the tiny model's character tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    names = dict(enumerate(LABELS[:labels])) if labels <= len(LABELS) else {i: f"label {i}" for i in range(labels)}
    labelled = {"id2label": names, "label2id": {name: index for index, name in names.items()}}
    settings = {**SIZES, "max_position_embeddings": 64, "vocab_size": len(tokenizer), **labelled, **config}
    torch.manual_seed(0)
    if kind == "bert":
        BertForSequenceClassification(BertConfig(**settings)).save_pretrained(folder)
    else:
        LlamaForSequenceClassification(LlamaConfig(**settings)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
