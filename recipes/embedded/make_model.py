"""Make the tiny causal LM that the recipe falls back on: a Llama of 0.9M parameters that reads characters.

    python recipes/embedded/make_model.py --output_dir recipes/embedded/model

Pre-training is plain next-token prediction on the answers to generated word problems of the train split. In its first
half all answers are right; then about a quarter is, and the others are written in the ways of `other_formats`. So the
model can do the sums, but shows it only now and then: what reinforcement learning is for. The same seed gives the same
model on the same kind of CPU with the same versions; other CPUs round differently and give a slightly different one.

Needs torch 2.9 or later for its optimizer. Using the model does not.
"""

import argparse
import random
import string
import sys
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trl_grpo_ext.rewards.gsm8k_accuracy import gsm8k_accuracy

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from embedded.other_formats import right, write_solution
from embedded.word_problems import Problem, draw_problems

PROMPT = "Question: {question}\nAnswer:"
CHARACTERS = "\n" + "".join(sorted(set(string.printable) - set("\n\t\r\x0b\x0c")))
SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
CONTEXT = 512
IGNORE = -100  # a label that the loss leaves out
DRILL_SHARE = 0.35  # of a batch is lines of bare sums
DRILL_LENGTH = 15  # sums in such a line
RIGHT_PHASE = 0.5  # of the steps: only right answers, so that the sums are known before the other ways come in

Example = tuple[list[int], list[int]]
"""Token ids and labels."""

README = """# A tiny model that can do small sums

A character-level Llama of {parameters:,} parameters, made in two to three minutes on two cores by

    python recipes/embedded/make_model.py --seed {seed} --steps {steps} --batch_size {batch_size} \\
      --learning_rate {learning_rate}

It was pre-trained on lines of bare sums and on generated one-step word problems (train split only), whose answers are
all right in the first half of the steps and right about once in four in the second (`other_formats.py` has the rest).
On {samples} held-out problems {accuracy:.3f} of its answers are right when sampled at temperature 1, and {greedy:.3f}
with greedy decoding.

It is a fixture: with it, GRPO can be watched raising the first number without GPU and network. It can do nothing else.
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character: printable ASCII and the newline. Anything else becomes `<unk>`."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS.values(), *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS["unk_token"]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        padding_side="left",  # what generation needs
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        **SPECIAL_TOKENS,
    )


def make_untrained_model(tokenizer: PreTrainedTokenizerFast, **shape: int) -> LlamaForCausalLM:
    """Four Llama layers of width 128, or whatever the settings of `shape` say."""
    tokens = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    usual = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,  # untied weights keep sharded training simple, for 13k parameters more
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **{**usual, **shape}, **tokens))
    model.generation_config = GenerationConfig(do_sample=True, **tokens)
    return model


def encode_answer(tokenizer: PreTrainedTokenizerFast, problem: Problem, solution_text: str) -> Example:
    """A problem with an answer to it. Only the answer is learned."""
    prompt = tokenizer(PROMPT.format(question=problem.question)).input_ids
    solution = [*tokenizer(" " + solution_text).input_ids, tokenizer.eos_token_id]
    return prompt + solution, [IGNORE] * len(prompt) + solution


def encode_drill(tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> Example:
    """A line of bare sums, "7+5=12 9-4=5 ", of which only the results are learned: the sums, densely."""
    ids: list[int] = []
    labels: list[int] = []
    for problem in problems:
        task = tokenizer(f"{problem.a}{problem.template.operation}{problem.b}=").input_ids
        result = tokenizer(f"{problem.result} ").input_ids
        ids += task + result
        labels += [IGNORE] * len(task) + result
    return ids, labels


def collate(tokenizer: PreTrainedTokenizerFast, examples: list[Example]) -> dict[str, torch.Tensor]:
    """Pad examples to one batch, on the right."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([torch.tensor(i) for i, _ in examples], batch_first=True, padding_value=tokenizer.pad_token_id)
    labels = pad([torch.tensor(row) for _, row in examples], batch_first=True, padding_value=IGNORE)
    return {"input_ids": ids, "attention_mask": ids != tokenizer.pad_token_id, "labels": labels}


def pretrain(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
) -> None:
    """Train on freshly written answers at every step, with a short warm-up and a long decay to zero."""
    rng = random.Random(seed)
    problems = draw_problems("train", 100_000, seed)
    # Muon on the layers' matrices learns to copy and to add in about half of the steps that AdamW takes.
    matrices = [p for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2]
    others = [p for name, p in model.named_parameters() if not (".layers." in name and p.ndim == 2)]
    optimizers = [
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]

    def factor(done: int) -> float:
        return min(1.0, (done + 1) / 30, (steps - done) / (0.6 * steps))

    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, factor) for optimizer in optimizers]
    model.train()
    start = time.perf_counter()
    for step in range(1, steps + 1):
        drills = round(DRILL_SHARE * batch_size)
        write = right if step <= RIGHT_PHASE * steps else write_solution
        examples = [
            encode_answer(tokenizer, problem, write(problem, rng))
            for problem in rng.choices(problems, k=batch_size - drills)
        ]
        examples += [encode_drill(tokenizer, rng.choices(problems, k=DRILL_LENGTH)) for _ in range(drills)]
        loss = model(**collate(tokenizer, examples)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        model.zero_grad()
        if step % 50 == 0 or step == steps:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.perf_counter() - start:5.0f} s", flush=True)
    model.eval()


@torch.no_grad()
def answer(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[Problem],
    *,
    sample: bool,
    max_new_tokens: int = 64,
) -> list[str]:
    """One answer to each problem, sampled at temperature 1 or greedy."""
    prompts = [PROMPT.format(question=problem.question) for problem in problems]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {}
    ids = model.generate(**batch, do_sample=sample, max_new_tokens=max_new_tokens, **options)
    return list(tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True))


def rewards(completions: list[str], problems: list[Problem]) -> list[float | None]:
    """1.0 for each right answer, as the recipe's own reward reads it."""
    return gsm8k_accuracy(completions=completions, answer=[problem.solution() for problem in problems])


def accuracy(completions: list[str], problems: list[Problem]) -> float:
    """The share of right answers."""
    return rewards(completions, problems).count(1.0) / len(problems)


def main(arguments: list[str] | None = None) -> None:
    """Make the model, measure it, and write it with its tokenizer and a README."""
    parser = argparse.ArgumentParser(description="Make the tiny model of the GSM8K recipe.")
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--learning_rate", type=float, default=4e-3)
    parser.add_argument("--eval_size", type=int, default=1000, help="held-out problems to measure on")
    parser.add_argument("--threads", type=int, default=2, help="part of the result: the sums of floats are cut by it")
    args = parser.parse_args(arguments)

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_untrained_model(tokenizer)
    training = {name: getattr(args, name) for name in ("steps", "batch_size", "learning_rate", "seed")}
    pretrain(model, tokenizer, **training)

    problems = draw_problems("heldout", args.eval_size, args.seed)
    sampled = answer(model, tokenizer, problems, sample=True)
    numbers = {
        "parameters": model.num_parameters(),
        "accuracy": accuracy(sampled, problems),
        "greedy": accuracy(answer(model, tokenizer, problems, sample=False), problems),
        "samples": args.eval_size,
    }
    args.output_dir.mkdir(parents=True, exist_ok=True)
    # Running processes have the old weights mapped into memory: put new files in their place, never write into them.
    with tempfile.TemporaryDirectory(dir=args.output_dir) as name:
        fresh = Path(name)
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        (fresh / "README.md").write_text(README.format(**training, **numbers))
        for file in fresh.iterdir():
            file.replace(args.output_dir / file.name)
    for completion in sampled[:10]:
        print(repr(completion))
    print("  ".join(f"{name} {value:.4g}" for name, value in numbers.items()))


if __name__ == "__main__":
    main()
