"""The tasks of `bench.evidence`: K questions of one kind about a list of 24 facts, answered by line or as JSON.

    Mia has a red lamp. Tom has a gray key. ...
    Write the color of each, one a line: key, lamp, ...     Write the color of each as JSON with these keys: key, ...

    key: gray                                               {"key": "gray", "lamp": "red", ...}
    lamp: red

The answers are independent of each other, and each is a part of the reward, `lines` or `json_fields`. The start model
is SmolLM2-135M-Instruct after some supervised steps on right answers, first to short lists, then to whole ones: it
writes the form, and about half of the answers are right.
"""

import contextlib
import json
import os
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from trl_grpo_ext.trainer.compact.sampling import shared_prompts

FACTS = 24
NAMES = ["Mia", "Tom", "Ana", "Ben", "Zoe", "Sam", "Eva", "Max", "Lily", "Noah", "Ruth", "Omar", "Kai", "Amy", "Leo"]
NAMES += ["Ivy", "Dan", "Joe", "Meg", "Ron", "Sue", "Tim", "Una", "Vic"]
THINGS = ["lamp", "chair", "desk", "mug", "book", "pen", "clock", "bag", "hat", "plate", "shelf", "box", "ball", "coat"]
THINGS += ["key", "ring", "cup", "fork", "bell", "drum", "kite", "rope", "vase", "tent"]
COLORS = ["red", "blue", "green", "black", "white", "brown", "pink", "gray"]
TEMPERATURE = 0.9
Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """So many questions, answered in one form: "lines" or "json"."""

    parts: int
    form: str = "lines"

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> "Task":
        """The task of a line of the runs' file."""
        return cls(line["parts"], line["form"])

    def __str__(self) -> str:
        return f"{self.parts}" if self.form == "lines" else f"{self.parts}, JSON"

    @property
    def longest(self) -> int:
        """Tokens that a right answer needs, and a few more."""
        return 5 * self.parts + 6 if self.form == "lines" else 7 * self.parts + 8

    def problem(self, rng: random.Random, size: int = FACTS) -> Row:
        """A prompt with `size` facts, one with the asked facts alone, and the right answer."""
        names = rng.sample(NAMES, size)
        things = rng.sample(THINGS, size)
        colors = [rng.choice(COLORS) for _ in range(size)]
        facts = [f"{name} has a {color} {thing}." for name, color, thing in zip(names, colors, things, strict=True)]
        asked = rng.sample(range(size), self.parts)
        wanted = ", one a line" if self.form == "lines" else " as JSON with these keys"
        question = f"Write the color of each{wanted}: " + ", ".join(things[n] for n in asked)
        prompt = [{"role": "user", "content": " ".join(facts) + "\n" + question}]
        needed = " ".join(facts[n] for n in sorted(asked))
        hint = [{"role": "user", "content": needed + "\n" + question}]
        lines = [f"{things[n]}: {colors[n]}" for n in asked]
        fields = json.dumps({things[n]: colors[n] for n in asked})
        return {"prompt": prompt, "teacher_prompt": hint, "lines": lines, "fields": fields}

    def answer(self, row: Row) -> str:
        """The right answer."""
        return "\n".join(row["lines"]) if self.form == "lines" else str(row["fields"])

    def problems(self, split: str, size: int, seed: int) -> list[Row]:
        """Rows of a split; those of one size and seed are the beginning of those of a larger size."""
        rng = random.Random(f"{split}/{self.parts}/{seed}")
        return [self.problem(rng) for _ in range(size)]

    @torch.no_grad()
    def sampled(self, model: Any, tokenizer: Any, rows: Sequence[Row], each: int = 1) -> list[str]:
        """`each` completions of every row at `TEMPERATURE`; of several the prompt is read once."""
        texts: list[str] = []
        config = GenerationConfig(do_sample=True, temperature=TEMPERATURE, top_k=0, max_new_tokens=self.longest)
        for at in range(0, len(rows), 32):
            prompts = [prompt for prompt in asked(tokenizer, rows[at : at + 32]) for _ in range(each)]
            batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
            with shared_prompts(model) if each > 1 else contextlib.nullcontext():
                ids = model.generate(**batch, generation_config=config)
            texts += tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        return texts

    def said(self, text: str) -> list[str]:
        """The answers of a completion as lines, in the order of the completion; none of a text in no form."""
        if self.form == "lines":
            return [line.strip() for line in text.strip().split("\n") if line.strip()]
        try:
            found = json.loads(text)
        except ValueError:
            return []
        return [f"{key}: {value}" for key, value in found.items()] if isinstance(found, dict) else []

    def answered(self, text: str, row: Row) -> list[tuple[str, str]]:
        """What a completion says beside what is right: line by line, or key by key."""
        said = self.said(text)
        if self.form == "lines":
            return list(zip(said, row["lines"], strict=False))
        by_key = {line.partition(": ")[0]: line for line in said}
        return [(by_key.get(wanted.partition(": ")[0], ""), wanted) for wanted in row["lines"]]

    def right(self, texts: Sequence[str], rows: Sequence[Row]) -> float:
        """The share of right answers."""
        found = [
            sum(said == wanted for said, wanted in self.answered(text, row)) / len(row["lines"])
            for text, row in zip(texts, rows, strict=True)
        ]
        return sum(found) / len(found)

    def in_form(self, texts: Sequence[str], rows: Sequence[Row]) -> float:
        """The share of completions with one answer to every question, each with a color; of lines, in order."""

        def is_fine(said: str, wanted: str) -> bool:
            thing, _, color = said.partition(": ")
            return thing == wanted.partition(": ")[0] and color in COLORS

        fine = [
            len(self.said(text)) == len(row["lines"]) and all(is_fine(*pair) for pair in self.answered(text, row))
            for text, row in zip(texts, rows, strict=True)
        ]
        return sum(fine) / len(fine)


def asked(tokenizer: Any, rows: Sequence[Row]) -> list[str]:
    return [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]


def make_start(source: str, folder: Path, tasks: Sequence[Task], steps: int, size: int | None) -> None:
    """Supervised steps on right answers to each task in turn, with so many facts; None: as many as questions."""
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
        task = tasks[step % len(tasks)]
        rows = [task.problem(rng, size or task.parts) for _ in range(8)]
        loss = supervised_loss(model.base_model.model, tokenizer, task, rows)
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


def supervised_loss(model: Any, tokenizer: Any, task: Task, rows: Sequence[Row]) -> torch.Tensor:
    """The mean loss of the answers' tokens; the head sees no others."""
    examples = []
    for text, row in zip(asked(tokenizer, rows), rows, strict=True):
        prompt = tokenizer(text, add_special_tokens=False).input_ids
        answer = tokenizer(task.answer(row), add_special_tokens=False).input_ids
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
