"""A tiny model that calls a tool: it really generates, with biases that make it write one of a few scripts.

Generation is TRL's own. `sequence_bias`, a setting of transformers' generation, raises the score of a script's next
character wherever the characters before it are there; where scripts part, the model chooses (at a temperature at
which its preferences are weak).
"""

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.support import SIZES

START, END, CALL, CALLED = "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.get('tool_calls') or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": CALL,
            "close": CALLED,
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": END, "content": "text"},
    },
}


def save_tool_model(folder: Path) -> Path:
    """Save a Llama and a tokenizer of single characters with a chat template that has tools."""
    special = ["<pad>", START, END]
    vocabulary = {token: number for number, token in enumerate([*special, CALL, CALLED, *string.printable, "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in (CALL, CALLED)])

    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token=END, unk_token="<unk>", padding_side="left"
    )
    fast.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "vocab_size": len(vocabulary), "max_position_embeddings": 512, "eos_token_id": 2})
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def biases(tokenizer: Any, scripts: Mapping[str, Sequence[str]]) -> list[list[Any]]:
    """A `sequence_bias` under which the model writes one of the texts behind each context."""
    found: dict[tuple[int, ...], float] = {}
    for context, texts in scripts.items():
        before = tokenizer(context)["input_ids"]
        for text in texts:
            ids = tokenizer(text + END)["input_ids"]
            for place in range(len(ids)):
                found[(*before, *ids[: place + 1])] = 600.0
    return [[list(ids), bias] for ids, bias in found.items()]
