"""Chat templates with tools, a tokenizer for each, and how a model writes in each of them."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import add_response_schema

SHIPPED = Path(trl.__file__).parent / "chat_templates"
CHATML = ["<|im_start|>", "<|im_end|>"]
LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
MISTRAL = (
    "<s>{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.role == 'tool' %}"
    '[TOOL_RESULTS]{"content": {{ m.content | tojson }}}[/TOOL_RESULTS]'
    "{% elif m.tool_calls %}{{ m.content }}[TOOL_CALLS][{% for c in m.tool_calls %}{{ c.function | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}]</s>{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
MISTRAL_RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"\[/INST\]|\[/TOOL_RESULTS\]",
    "fields": {
        "tool_calls": {
            "open": "[TOOL_CALLS]",
            "close": "</s>",
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
            "transform_each": True,
        },
        "content": {"close": "</s>", "content": "text"},
    },
}
# A template of our own in the manner of Qwen3: what an earlier message thought is not rendered once another follows it.
FORGETFUL = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>tool\n{{ m.content }}<|im_end|>\n{% else %}"
    "<|im_start|>{{ m.role }}\n{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def as_json(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def hermes_calls(said: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    return said + "".join(f"\n<tool_call>\n{as_json(*call)}\n</tool_call>" for call in calls)


def llama_calls(said: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    return said + "".join(as_json(*call, key="parameters") for call in calls)


def mistral_calls(said: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    return said + ("[TOOL_CALLS][" + ", ".join(as_json(*call) for call in calls) + "]" if calls else "")


@dataclass(frozen=True)
class Family:
    """A chat template and the way in which its models write."""

    template: str  # a file of TRL's, or the template itself
    end: str  # the token that ends a turn
    special: list[str]  # its other special tokens
    write: Callable[[str, list[tuple[str, dict[str, Any]]]], str]  # some text and some calls, without the end
    plain: list[str] = field(default_factory=list)  # added tokens that are not special
    response: dict[str, Any] | None = None  # the response template, where TRL has none
    broken: str = '<tool_call>\n{"name": "add", "arg'  # a call that cannot be read
    parallel: bool = True  # whether several calls of one turn can be written


TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
FAMILIES = {
    "qwen2_5": Family("qwen2_5.jinja", "<|im_end|>", CHATML[:1], hermes_calls, TAGS[:2]),
    "qwen3": Family("qwen3.jinja", "<|im_end|>", CHATML[:1], hermes_calls, TAGS),
    "llama3_1": Family("llama3_1.jinja", "<|eot_id|>", LLAMA, llama_calls, parallel=False),
    "mistral": Family(
        MISTRAL,
        "</s>",
        ["<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
        mistral_calls,
        response=MISTRAL_RESPONSE,
        broken='[TOOL_CALLS][{"name": ',
    ),
    "forgetful": Family(FORGETFUL, "<|im_end|>", CHATML[:1], hermes_calls, TAGS),
}


def tokenizer_of(family: Family) -> Any:
    """A byte-level tokenizer with the family's special tokens, its chat template and its response template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|pad|>", family.end, *family.special]
    merges = [("Ġ", "t"), ("i", "n"), ("{", '"'), ('"', ":"), ("Ġ", "Ġ"), ("}", "}")]
    vocabulary = {letter: i for i, letter in enumerate(dict.fromkeys([*letters, *(a + b for a, b in merges)]))}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.plain])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|pad|>", eos_token=family.end, padding_side="left"
    )
    shipped = family.template.endswith(".jinja")
    tokenizer.chat_template = (SHIPPED / family.template).read_text() if shipped else family.template
    if family.response is not None:
        tokenizer.response_template = family.response
    elif shipped:
        add_response_schema(tokenizer)
    else:
        tokenizer.response_template = trl.chat_template_utils.qwen3_template
    return tokenizer
