"""What paying each part by itself is worth, by the number of independent parts: the figure of docs/evidence.md.

    python -m bench.parts gradients [--parts 1 2 4 8 16] [--prompts 160] [--docs docs/evidence.md]
    python -m bench.parts training [--parts 1 8] [--seeds 1 2 3] [--rates 2.5e-4 5e-4]
    python -m bench.parts speed

A prompt is K pairs of digits, and the answer the larger digit of each, one character per pair. The start is a tiny
model that can do it but has for each pair of digits a habit, a wrong answer that it gives six times in ten. So the K
answers are right or wrong independently, and all have something to learn.

`gradients` samples at the start, 4 completions of each prompt, and measures how many times more completions the share
of right answers needs for a gradient of the same signal-to-noise ratio as `part_credit` (an answer is a part); and the
same with each part at another's place. `training` trains with both and counts the completions up to a share of 0.75
right answers on held-out prompts. `speed` times parts of 512 completions on their way to tokens.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

from bench.tables import machine, show, versions
from recipes.embedded.make_model import IGNORE, collate, make_tokenizer, make_untrained_model
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer, Parts
from trl_grpo_ext.credit.parts import with_parts
from trl_grpo_ext.history.compare import compare, load_policy
from trl_grpo_ext.testing import make_rollout

DIGITS = "0123456789"
COUNTS = (1, 2, 4, 8, 16)
GROUP, PROMPTS = 4, 4  # completions of a prompt, prompts of a step
TARGET = 0.75
_DRAW = random.Random(5)
HABITS = {
    pair: _DRAW.choice([digit for digit in DIGITS if digit != max(pair)])
    for pair in [a + b for a in DIGITS for b in DIGITS]
}
Row = dict[str, str]


# ------------------------------------------------------------------------------------------------- task and start


def problem(rng: random.Random, count: int) -> Row:
    pairs = [rng.choice(DIGITS) + rng.choice(DIGITS) for _ in range(count)]
    return {"prompt": ",".join(pairs) + ",>", "answer": "".join(map(max, pairs))}


def problems(split: str, size: int, count: int, seed: int) -> list[Row]:
    rng = random.Random(f"{split}/{count}/{seed}")
    return [problem(rng, count) for _ in range(size)]


def share(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """The share of right answers."""
    return [float(score) for score in answers(completions, answer)]


def answers(completions: Sequence[str], answer: Sequence[str], shift: int = 0, **columns: Any) -> list[Parts]:
    """The same number, each answer a part at its character, or at that of another answer."""

    def place(text: str, at: int) -> tuple[int, int] | None:
        return (at, at + 1) if at < len(text) else None

    return [
        Parts(
            {
                f"answer {n + 1}": (float(text[n : n + 1] == digit), place(text, (n + shift) % len(right)))
                for n, digit in enumerate(right)
            }
        )
        for text, right in zip(completions, answer, strict=True)
    ]


def make_start(folder: Path) -> Path:
    """The start model: first right answers, then slips, then habits."""
    if (folder / "config.json").is_file():
        return folder
    torch.manual_seed(0)
    rng, tokenizer = random.Random(0), make_tokenizer()
    model = make_untrained_model(
        tokenizer, hidden_size=96, intermediate_size=256, num_hidden_layers=2, max_position_embeddings=128
    )

    def slip(pair: str) -> str:
        return rng.choice(DIGITS) if rng.random() < 0.5 else max(pair)

    def habit(pair: str) -> str:
        return HABITS[pair] if rng.random() < 0.6 else max(pair)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for steps, rate, write in ((600, 1e-3, max), (300, 1e-3, slip), (150, 1e-3, habit), (70, 2e-4, habit)):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for step in range(steps):
            examples = [written(tokenizer, problem(rng, rng.choice(COUNTS)), write) for _ in range(48)]
            loss = model(**collate(tokenizer, examples)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == steps - 1:
                print(f"start: loss {float(loss):.3f} after {steps} steps", flush=True)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def written(tokenizer: Any, row: Row, write: Callable[[str], str]) -> tuple[list[int], list[int]]:
    """A prompt with an answer to learn."""
    prompt = tokenizer(row["prompt"]).input_ids
    said = "".join(write(pair) for pair in row["prompt"].removesuffix(",>").split(","))
    ids = [*tokenizer(said).input_ids, tokenizer.eos_token_id]
    return prompt + ids, [IGNORE] * len(prompt) + ids


@torch.no_grad()
def sampled(model: Any, tokenizer: Any, rows: Sequence[Row], count: int, each: int = 1) -> list[str]:
    """`each` completions of every prompt."""
    batch = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True, return_token_type_ids=False)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "num_return_sequences": each}
    ids = model.generate(**batch, **options, max_new_tokens=count + 2)
    return list(tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True))


# ------------------------------------------------------------------------------------------------------ gradients


def measure(start: Path, folder: Path, count: int, size: int) -> list[str]:
    """A row of the table: the worth of each selection at this number of parts."""
    tokenizer, model = AutoTokenizer.from_pretrained(start), AutoModelForCausalLM.from_pretrained(start)
    torch.manual_seed(77)
    rows = problems("gradients", size, count, 77)
    said = sampled(model, tokenizer, rows, count, GROUP)
    file = folder / f"completions_{count}.jsonl"
    lines = [
        {
            **rows[n // GROUP],
            "completion": text,
            "group": n // GROUP,
            "step": n // (GROUP * PROMPTS),
            "truncated": False,
        }
        for n, text in enumerate(said)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def parted(**more: Any) -> dict[str, Any]:
        reward = partial(answers, **more) if more else answers
        return {"rewards": [reward], "advantage_hooks": [{"name": "part_credit", "normalise": True}]}

    selections = {"share": {"rewards": [share]}, "part_credit": parted()}
    if count > 1:
        selections["places shuffled"] = parted(shift=1)
    policy = load_policy(str(start), dtype="float32")
    found = compare(file, selections, model=policy, tokenizer=str(start), dimensions=2048).gradients
    assert found is not None
    by_name = {one.name: one for one in found.selections}
    right = statistics.mean(share(said, [row["answer"] for row in rows for _ in range(GROUP)]))
    plain, parts = by_name["share"], by_name["part_credit"]
    shuffled = by_name.get("places shuffled")
    return [
        str(count),
        f"{right:.2f}",
        plain.ratio.text(3),
        parts.ratio.text(3),
        parts.worth.text(2),
        parts.to_plain.text(2),
        "" if shuffled is None else shuffled.ratio.text(3),
    ]


def gradients(options: argparse.Namespace, start: Path) -> None:
    rows = []
    for count in options.parts:
        rows.append(measure(start, options.output, count, options.prompts))
        print(rows[-1], flush=True)
    show(
        "part credit by the number of parts",
        ["parts", "right", "signal to noise, share", "`part_credit`", "worth", "cosine to share", "places shuffled"],
        rows,
        f"{options.prompts} prompts of {GROUP} completions, before training; worth is how many times more completions "
        f"the share of right answers needs for the same ratio. In brackets 95 % intervals. "
        f"{versions('trl', 'torch')}; {machine()}.",
        options.docs,
    )


# ------------------------------------------------------------------------------------------------------- training


class Held(TrainerCallback):
    """The share of right answers on held-out prompts, every few steps."""

    def __init__(self, count: int, every: int) -> None:
        self.count, self.every = count, every
        self.rows = problems("heldout", max(128, 1024 // count), count, 0)
        self.curve: list[tuple[int, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if state.global_step % self.every:
            return
        model, tokenizer = keywords["model"], keywords["processing_class"]
        model.eval()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            said = sampled(model, tokenizer, self.rows, self.count)
        model.train()
        found = statistics.mean(share(said, [row["answer"] for row in self.rows]))
        self.curve.append((state.global_step, found))


def train(start: Path, count: int, parted: bool, rate: float, seed: int, steps: int) -> float | None:
    """Completions up to the target; None if it is not met."""
    held = Held(count, 5)
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOExtConfig(
            output_dir=folder,
            seed=seed,
            learning_rate=rate,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=3,
            max_steps=steps,
            per_device_train_batch_size=PROMPTS * GROUP,
            gradient_accumulation_steps=1,
            num_generations=GROUP,
            max_completion_length=count + 2,
            loss_type="dapo",
            beta=0.0,
            temperature=1.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            advantage_hooks=[{"name": "part_credit", "normalise": True}] if parted else None,
        )
        rows = problems("train", steps * PROMPTS + 8, count, seed)
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            reward = answers if parted else share
            trainer = GRPOExtTrainer(str(start), reward, args, train_dataset=Dataset.from_list(rows), callbacks=[held])
            trainer.remove_callback(PrinterCallback)
            trainer.train()
    return next((float(step * PROMPTS * GROUP) for step, right in held.curve if right >= TARGET), None)


def training(options: argparse.Namespace, start: Path) -> None:
    rows = []
    for count in options.parts:
        for seed in options.seeds:
            best: dict[bool, float | None] = {}
            for parted in (False, True):
                found = [train(start, count, parted, rate, seed, options.steps) for rate in options.rates]
                best[parted] = min((one for one in found if one is not None), default=None)
            cells = ["not met" if one is None else f"{one:,.0f}" for one in (best[False], best[True])]
            both = best[False] is not None and best[True] is not None
            rows.append([str(count), str(seed), *cells, f"{best[False] / best[True]:.2f}" if both else ""])
            print(rows[-1], flush=True)
    show(
        "completions to 75 % right answers",
        ["parts", "seed", "share", "`part_credit`", "ratio"],
        rows,
        f"{PROMPTS} prompts of {GROUP} completions a step, at most {options.steps} steps; the better of the rates "
        f"{', '.join(map(str, options.rates))}. {versions('trl', 'torch')}; {machine()}.",
        options.docs,
    )


# ---------------------------------------------------------------------------------------------------------- speed


def speed(options: argparse.Namespace) -> None:
    """Scores of 512 completions of 16 parts, as tensors and as tokens; what each token wrote is known already."""
    rows, count, words = 512, 16, 64
    texts = [" ".join(f"{row + n:05d}" for n in range(words)) for row in range(rows)]
    offsets = [[(6 * n - (n > 0), 6 * n + 5) for n in range(words)] for _ in range(rows)]
    rollout = make_rollout([words] * rows, texts=texts, completions=texts, offsets=lambda row: offsets[row])
    took = []
    for _ in range(9):
        begun = time.process_time()
        scores = [
            Parts({f"part {n}": (float((row + n) % 3), (24 * n, 24 * n + 5)) for n in range(count)})
            for row in range(rows)
        ]
        scored = time.process_time()
        table = with_parts(rollout, {"r": scores}).parts["r"]
        tokens = sum(int(table.tokens(part).sum()) for part in range(count))
        took.append((scored - begun, time.process_time() - scored))
        assert tokens == rows * count
    scoring, mapping = (1e3 * min(one) for one in zip(*took, strict=True))
    said = f"{rows} completions of {count} parts and {words} tokens: {scoring:.1f} ms of CPU time to make the scores, "
    print(f"{said}{mapping:.1f} ms to the tokens of each part. {machine()}.")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("gradients", "training", "speed"))
    parser.add_argument("--output", type=Path, default=Path("outputs/parts"))
    parser.add_argument("--parts", nargs="+", type=int, default=list(COUNTS))
    parser.add_argument("--prompts", type=int, default=160)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--rates", nargs="+", type=float, default=[2.5e-4, 5e-4])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--docs", type=Path, help="a page whose table is replaced")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    if options.what == "speed":
        speed(options)
        return
    options.output.mkdir(parents=True, exist_ok=True)
    start = make_start(options.output / "start")
    {"gradients": gradients, "training": training}[options.what](options, start)


if __name__ == "__main__":
    main()
