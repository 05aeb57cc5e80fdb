"""A sequence-classification model as a reward: toxicity, sentiment, a topic, or a reward model with one output."""

import functools
import importlib
import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import Any
from unittest import mock

from ..errors import ConfigurationError, RewardError
from ..guard.messages import completion_text, content_text
from ..guard.parameters import Checked, checked_text, choice, column, number, whole
from ..guard.parameters import text as text_field

_LOADING = threading.Lock()


class Classifier(Checked, kw_only=False):
    """Score `sign` times a label's probability under a Hugging Face sequence classifier.

    For detoxification: `{name: classifier, model: unitary/toxic-bert, label: toxic, sign: -1.0}`. The model is loaded
    at the first call, once per process for all rewards that use it, and refused if its head is not trained.

    The probability is a sigmoid if the model's configuration says `multi_label_classification`, else a softmax over the
    labels. A model with one output (a regression, a reward model) has no labels: its score is the output itself.

    A text longer than `max_length` tokens, or than the model's limit, is cut: "completion" keeps its beginning,
    "prompt_and_completion" its end. A policy could hide what the classifier dislikes after the cut.

    Args:
        model: Name or path of the model.
        label: The label, by its name or index in the model's `id2label`. May be left out for a model of one output.
        score: "probability" or "logit".
        sign: Factor on the score.
        batch_size: Texts per forward pass; they are batched by length.
        device: Such as "cpu" or "cuda:1"; None means the GPU of this process (`LOCAL_RANK`), or the CPU without one.
        max_length: In tokens.
        text: "completion" or "prompt_and_completion". Prompts of messages go through the tokenizer's chat template, if
            it has one, together with the completion.
    """

    __name__ = "classifier"

    model: str | Path
    _: KW_ONLY
    label: str | int | None = None
    score: str = choice("probability", "logit")
    sign: float = number(1.0, "a finite number")
    batch_size: int = whole(32, lowest=1)
    device: str | None = text_field(None)
    max_length: int = whole(512, lowest=1)
    text: str = choice("completion", "prompt_and_completion")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model = checked_text("classifier: model", str(self.model) if isinstance(self.model, Path) else self.model)
        if isinstance(self.label, bool) or not isinstance(self.label, str | int | None):
            raise ConfigurationError(f"classifier: label must be a label's name or index, got {self.label!r}.")
        self._source = (self.model, self.device, "right" if self.text == "completion" else "left")

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """`B` scores; None where the tokenizer gives no tokens (some do for an empty text)."""
        if not completions:
            return []
        torch = importlib.import_module("torch")
        with _LOADING:
            model, tokenizer = _load(*self._source)
        texts = [completion_text(completion) for completion in completions]
        cut = slice(32 * self.max_length)  # in characters, before a megabyte is tokenised
        if self.text == "prompt_and_completion":
            prompts = column("classifier", "prompts", columns, len(completions))
            texts = [_after_prompt(prompt, said, tokenizer) for prompt, said in zip(prompts, texts, strict=True)]
            cut = slice(-cut.stop, None)
        texts = [text.encode("utf-8", "replace").decode()[cut] for text in texts]  # it takes no lone surrogates
        label = _label_index(str(self.model), self.label, model.config)
        positions = getattr(model.config, "max_position_embeddings", None) or self.max_length
        longest = min(self.max_length, tokenizer.model_max_length, positions)
        encoded = tokenizer(texts, truncation=True, max_length=longest, padding=False)
        rows = [row for row, ids in enumerate(encoded["input_ids"]) if ids]
        rows.sort(key=lambda row: -len(encoded["input_ids"][row]))  # the largest batch first: if it fits, all do
        scores: list[float | None] = [None] * len(texts)
        for start in range(0, len(rows), self.batch_size):
            batch = rows[start : start + self.batch_size]
            inputs = {name: [values[row] for row in batch] for name, values in encoded.items()}
            padded = tokenizer.pad(inputs, padding=True, return_tensors="pt").to(model.device)
            with torch.inference_mode():
                logits = model(**padded).logits.float()
            if self.score == "probability" and model.config.num_labels > 1:
                several = model.config.problem_type == "multi_label_classification"
                logits = logits.sigmoid() if several else logits.softmax(dim=-1)
            for row, value in zip(batch, logits[:, label].tolist(), strict=True):
                if not math.isfinite(value):
                    raise RewardError(f"classifier: the model {self.model!r} gives {value} at row {row}.")
                scores[row] = self.sign * value
        return scores


def _label_index(model: str, label: str | int | None, config: Any) -> int:
    names = {int(index): str(name) for index, name in config.id2label.items()}
    found = [index for index, name in names.items() if label in (index, name)]
    if len(found) == 1 or (label is None and len(names) == 1):
        return (found or [0])[0]
    raise ConfigurationError(f"classifier: the model {model!r} has no label {label!r}; its labels are {names}.")


def _after_prompt(prompt: Any, said: str, tokenizer: Any) -> str:
    if isinstance(prompt, str):
        return prompt + said
    messages = [
        {"role": str(message.get("role", "user")), "content": content_text(message.get("content"))}
        for message in [*prompt, {"role": "assistant", "content": said}]
        if isinstance(message, Mapping)
    ]
    if tokenizer.chat_template:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    return "\n".join(message["content"] for message in messages)


@functools.cache  # rewards with the same model share it
def _load(name: str, device: str | None, truncation_side: str) -> tuple[Any, Any]:
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    sides = {"truncation_side": truncation_side, "padding_side": "right"}  # absolute positions count from the left
    tokenizer = transformers.AutoTokenizer.from_pretrained(name, **sides)
    made = transformers.AutoModelForSequenceClassification
    deepspeed = importlib.import_module("transformers.integrations.deepspeed")
    # Without ZeRO-3, which would shard the model over ranks that then wait for each other.
    with mock.patch.object(deepspeed, "_hf_deepspeed_config_weak_ref", None):
        model, report = made.from_pretrained(name, dtype="auto", output_loading_info=True)
    untrained = sorted([*report["missing_keys"], *map(str, report.get("mismatched_keys", ()))])
    if untrained:
        raise RewardError(f"classifier: the model {name!r} has no trained weights for {untrained}.")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id  # where a decoder finds a text's last token
    rank = f"cuda:{int(os.environ.get('LOCAL_RANK', 0))}" if torch.cuda.is_available() else "cpu"
    return model.to(device or rank).eval().requires_grad_(False), tokenizer
