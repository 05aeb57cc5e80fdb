"""Train the repository's tiny model to ask a database, with rewards from grpo-sql-rewards.

    python docs/examples/train_sql.py --output_dir outputs/sql --max_steps 20

The model knows word problems but no SQL. So it is first trained by next-token prediction on `people.jsonl`, with
answers of which a third are right. After that it learns from the rewards alone.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import TrlParser

from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[1] / "recipes" / "embedded" / "model"
WARM_UP_STEPS, WARM_UP_BATCH = 150, 16
DEFAULTS = {
    "output_dir": "outputs/sql",
    "rewards": ["sql_execution", {"name": "sql_match", "weight": 0.5}],
    "learning_rate": 1e-4,
    "max_steps": 20,
    "per_device_train_batch_size": 64,
    "num_generations": 8,
    "max_completion_length": 64,
    "logging_steps": 1,
    "report_to": "none",
    "log_completions": True,
    "num_completions_to_print": 4,
    "save_strategy": "no",
    "use_cpu": not torch.accelerator.is_available(),
    "bf16": False,
}


def main() -> None:
    """Warm up, train, save the log."""
    parser = TrlParser([GRPOExtConfig])
    parser.set_defaults_with_config(**DEFAULTS)
    (args,) = parser.parse_args_and_config(sys.argv[1:])
    set_seed(args.seed)
    rows = [json.loads(line) for line in (HERE / "people.jsonl").read_text(encoding="utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    warm_up(model, tokenizer, rows, random.Random(args.seed))
    trainer = GRPOExtTrainer(model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    history = json.dumps(trainer.state.log_history, indent=1)
    Path(args.output_dir, "history.json").write_text(history, encoding="utf-8")


def warm_up(model: Any, tokenizer: Any, rows: list[dict[str, str]], rng: random.Random) -> None:
    """Train by next-token prediction on answers of which a third are right."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(WARM_UP_STEPS):
        chosen = rng.choices(rows, k=WARM_UP_BATCH)
        texts = [row["prompt"] + " " + attempt(row["answer"], rng) + tokenizer.eos_token for row in chosen]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def attempt(answer: str, rng: random.Random) -> str:
    """The answer, or one of two corrupted versions of it."""
    return rng.choice(
        [answer, answer.replace("<", "=").replace(">", "=").replace("count(*)", "name"), answer.partition(" WHERE")[0]]
    )


if __name__ == "__main__":
    main()
