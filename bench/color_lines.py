"""The task of `bench.evidence`: K short questions of one kind about a list of 24 facts, answered line by line.

    Mia has a red lamp. Tom has a gray key. ...
    Write the color of each, one a line: key, lamp, ...

    key: gray
    lamp: red

The answers are independent of each other, and each is a part of the reward `lines`. The start model is
SmolLM2-135M-Instruct after some supervised steps on right answers, first to short lists, then to whole ones: it writes
the form, and about half of the answers are right.
"""

import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

FACTS = 24
NAMES = ["Mia", "Tom", "Ana", "Ben", "Zoe", "Sam", "Eva", "Max", "Lily", "Noah", "Ruth", "Omar", "Kai", "Amy", "Leo"]
NAMES += ["Ivy", "Dan", "Joe", "Meg", "Ron", "Sue", "Tim", "Una", "Vic"]
THINGS = ["lamp", "chair", "desk", "mug", "book", "pen", "clock", "bag", "hat", "plate", "shelf", "box", "ball", "coat"]
THINGS += ["key", "ring", "cup", "fork", "bell", "drum", "kite", "rope", "vase", "tent"]
COLORS = ["red", "blue", "green", "black", "white", "brown", "pink", "gray"]
TEMPERATURE = 0.9
Row = dict[str, Any]


def problem(rng: random.Random, count: int, size: int = FACTS) -> Row:
    """A prompt with `size` facts and `count` questions, one with the asked facts alone, and the right lines."""
    names = rng.sample(NAMES, size)
    things = rng.sample(THINGS, size)
    colors = [rng.choice(COLORS) for _ in range(size)]
    facts = [f"{name} has a {color} {thing}." for name, color, thing in zip(names, colors, things, strict=True)]
    asked = rng.sample(range(size), count)
    question = "Write the color of each, one a line: " + ", ".join(things[n] for n in asked)
    prompt = [{"role": "user", "content": " ".join(facts) + "\n" + question}]
    needed = " ".join(facts[n] for n in sorted(asked))
    hint = [{"role": "user", "content": needed + "\n" + question}]
    return {"prompt": prompt, "teacher_prompt": hint, "lines": [f"{things[n]}: {colors[n]}" for n in asked]}


def problems(split: str, size: int, count: int, seed: int) -> list[Row]:
    """Rows of a split; those of one size and seed are the beginning of those of a larger size."""
    rng = random.Random(f"{split}/{count}/{seed}")
    return [problem(rng, count) for _ in range(size)]


def longest(count: int) -> int:
    """Tokens that a right answer needs, and a few more."""
    return 5 * count + 6


def asked(tokenizer: Any, rows: Sequence[Row]) -> list[str]:
    return [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]


@torch.no_grad()
def sampled(model: Any, tokenizer: Any, rows: Sequence[Row], each: int = 1) -> list[str]:
    """`each` completions of every row at `TEMPERATURE`."""
    texts: list[str] = []
    for at in range(0, len(rows), 32):
        some = rows[at : at + 32]
        batch = tokenizer(asked(tokenizer, some), return_tensors="pt", padding=True, add_special_tokens=False)
        options = {
            "do_sample": True,
            "temperature": TEMPERATURE,
            "top_k": 0,
            "top_p": 1.0,
            "num_return_sequences": each,
        }
        ids = type(model).generate(model, **batch, **options, max_new_tokens=longest(len(rows[0]["lines"])))
        texts += tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def right(texts: Sequence[str], rows: Sequence[Row]) -> float:
    """The share of right answers."""
    found = [
        sum(a == b for a, b in zip(said(text), row["lines"], strict=False)) / len(row["lines"])
        for text, row in zip(texts, rows, strict=True)
    ]
    return sum(found) / len(found)


def in_form(texts: Sequence[str], rows: Sequence[Row]) -> float:
    """The share of completions with a line for every question, in order, each with a color."""

    def is_fine(line: str, wanted: str) -> bool:
        thing, _, color = line.partition(": ")
        return thing == wanted.partition(": ")[0] and color in COLORS

    fine = [
        len(said(text)) == len(row["lines"]) and all(map(is_fine, said(text), row["lines"]))
        for text, row in zip(texts, rows, strict=True)
    ]
    return sum(fine) / len(fine)


def said(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n") if line.strip()]


def make_start(source: str, folder: Path, counts: Sequence[int], steps: int, size: int | None) -> None:
    """Supervised steps on right answers, with so many questions and facts; None: as many facts as questions."""
    if (folder / "config.json").is_file():
        return
    begun = time.process_time()
    torch.manual_seed(0)
    rng = random.Random("start")
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = get_peft_model(plain, adapters)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 5)
        count = counts[step % len(counts)]
        rows = [problem(rng, count, size or count) for _ in range(8)]
        loss = supervised_loss(model.base_model.model, tokenizer, rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}, {time.process_time() - begun:.0f} s", flush=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "model"
        model.merge_and_unload().save_pretrained(made)
        tokenizer.save_pretrained(made)
        os.rename(made, folder)  # noqa: PTH104


def supervised_loss(model: Any, tokenizer: Any, rows: Sequence[Row]) -> torch.Tensor:
    """The mean loss of the answers' tokens; the head sees no others."""
    examples = []
    for text, row in zip(asked(tokenizer, rows), rows, strict=True):
        prompt = tokenizer(text, add_special_tokens=False).input_ids
        answer = tokenizer("\n".join(row["lines"]), add_special_tokens=False).input_ids
        examples.append((prompt, [*answer, tokenizer.eos_token_id]))
    width = max(len(prompt) + len(answer) for prompt, answer in examples)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    scored = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(examples):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        scored[row, len(prompt) : end] = True
    hidden = model.model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    logits = model.lm_head(hidden[:, :-1][scored[:, 1:]])
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:][scored[:, 1:]])
