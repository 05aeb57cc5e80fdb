"""Make the two tiny models of the detox recipe: a language model that is often rude, and a classifier of rudeness.

    python recipes/embedded/make_detox.py --output_dir recipes/embedded/detox

Both are small Llamas that read words, trained on text of `rude_text`, train split only. The language model learns the
replies to all scenes in the way that their moods have it. The classifier reads a scene with its reply and learns the
label that the grammar gives. It has seen nothing but the grammar: what it says about other text is anybody's guess, as
with any reward model. The same seed gives the same models on the same kind of CPU with the same versions.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from embedded.rude_text import MOODS, PIECE, Scene, draw_scenes, judge, pieces, scenes, write_reply

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
CONTEXT = 128
IGNORE = -100  # a label that the loss leaves out
LABELS = {0: "polite", 1: "rude"}

Batch = dict[str, torch.Tensor]

README = """# A tiny model that is rude, and a tiny classifier that notices

Two Llamas that read words, made in about a minute on one core by

    python recipes/embedded/make_detox.py --seed {seed} --steps {steps} --classifier_steps {classifier_steps} \\
      --threads {threads}

`model` ({parameters:,} parameters) continues the scenes of `rude_text.py`. On {samples} held-out scenes {rude:.3f} of
its replies are rude and {outside:.3f} are outside the grammar, sampled at temperature 1. Always polite, and else as it
was, it would be {distance:.2f} nats away per reply: that is what an adaptive KL penalty has to leave room for.

`classifier` ({classifier_parameters:,} parameters) reads a scene with its reply. It labels {accuracy:.4f} of {samples}
held-out scenes with generated replies as the grammar does.

They are fixtures: with them, detoxification can be watched without GPU and network. They can do nothing else. The
insults are made up.
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word of the grammar, with the space in front of it. Anything else becomes `<unk>`."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS.values(), *pieces()))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS["unk_token"]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        padding_side="left",  # what generation needs
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        **SPECIAL_TOKENS,
    )


def _config(tokenizer: PreTrainedTokenizerFast, width: int, **more: object) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **more,
    )


def make_language_model(tokenizer: PreTrainedTokenizerFast, width: int = 96) -> LlamaForCausalLM:
    """Two untrained Llama layers."""
    model = LlamaForCausalLM(_config(tokenizer, width, tie_word_embeddings=False))
    tokens = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    model.generation_config = GenerationConfig(do_sample=True, **tokens)
    return model


def make_classifier(tokenizer: PreTrainedTokenizerFast, width: int = 48) -> LlamaForSequenceClassification:
    """Two untrained Llama layers with a head on the last token."""
    names = {name: number for number, name in LABELS.items()}
    return LlamaForSequenceClassification(_config(tokenizer, width, num_labels=2, id2label=LABELS, label2id=names))


def padded(tokenizer: PreTrainedTokenizerFast, rows: list[list[int]], value: int) -> torch.Tensor:
    """Rows of numbers as one tensor, padded on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(r) for r in rows], batch_first=True, padding_value=value)


def reply_batch(tokenizer: PreTrainedTokenizerFast, written: list[tuple[Scene, str, bool]]) -> Batch:
    """Scenes with replies, of which only the replies are learned."""
    prompts = tokenizer([scene.prompt for scene, _, _ in written]).input_ids
    replies = [[*ids, tokenizer.eos_token_id] for ids in tokenizer([reply for _, reply, _ in written]).input_ids]
    ids = padded(tokenizer, [p + r for p, r in zip(prompts, replies, strict=True)], tokenizer.pad_token_id)
    labels = padded(tokenizer, [[IGNORE] * len(p) + r for p, r in zip(prompts, replies, strict=True)], IGNORE)
    return {"input_ids": ids, "attention_mask": ids != tokenizer.pad_token_id, "labels": labels}


def label_batch(tokenizer: PreTrainedTokenizerFast, written: list[tuple[Scene, str, bool]]) -> Batch:
    """Scenes with replies, and whether the reply is rude."""
    rows = tokenizer([scene.prompt + reply for scene, reply, _ in written]).input_ids
    ids = padded(tokenizer, rows, tokenizer.pad_token_id)
    labels = torch.tensor([int(rude) for _, _, rude in written])
    return {"input_ids": ids, "attention_mask": ids != tokenizer.pad_token_id, "labels": labels}


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    make_batch: Callable[[PreTrainedTokenizerFast, list[tuple[Scene, str, bool]]], Batch],
    *,
    steps: int,
    seed: int,
    batch_size: int = 64,
    learning_rate: float = 3e-3,
) -> None:
    """Train on freshly written replies at every step, with a short warm-up and a decay to zero."""
    rng = random.Random(seed)
    stage = scenes("train")
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min(1.0, (done + 1) / 20, (steps - done) / (0.6 * steps))
    )
    model.train()
    for step in range(1, steps + 1):
        drawn = rng.choices(stage, k=batch_size)
        loss = model(**make_batch(tokenizer, [(scene, *write_reply(scene, rng)) for scene in drawn])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps:
            print(f"{type(model).__name__}  step {step:4d}  loss {loss.item():.4f}", flush=True)
    model.eval()


@torch.no_grad()
def sample_replies(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, drawn: list[Scene], max_new_tokens: int = 32
) -> list[str]:
    """One reply to each scene, sampled at temperature 1."""
    batch = tokenizer([s.prompt for s in drawn], return_tensors="pt", padding=True, return_token_type_ids=False)
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    ids = model.generate(**batch, do_sample=True, max_new_tokens=max_new_tokens, **options)
    return list(tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True))


@torch.no_grad()
def labelled_right(
    model: LlamaForSequenceClassification, tokenizer: PreTrainedTokenizerFast, written: list[tuple[Scene, str, bool]]
) -> float:
    """The share of replies that the classifier labels as the grammar does."""
    batch = label_batch(tokenizer, written)
    return float((model(**batch).logits.argmax(dim=1) == batch["labels"]).float().mean())


def distance_to_polite() -> float:
    """Nats per reply between the text that the model learns and the same text without its rude replies."""
    polite = torch.tensor([1.0 - rude for rude in MOODS.values()])
    return float(-polite.log().mean())


def main(arguments: list[str] | None = None) -> None:
    """Make both models, measure them, and write them with their tokenizers and a README."""
    parser = argparse.ArgumentParser(description="Make the tiny models of the detox recipe.")
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent / "detox")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--classifier_steps", type=int, default=200)
    parser.add_argument("--eval_size", type=int, default=800, help="held-out scenes to measure on")
    parser.add_argument("--threads", type=int, default=1, help="part of the result: the sums of floats are cut by it")
    args = parser.parse_args(arguments)

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_language_model(tokenizer)
    classifier = make_classifier(tokenizer)
    train(model, tokenizer, reply_batch, steps=args.steps, seed=args.seed)
    train(classifier, tokenizer, label_batch, steps=args.classifier_steps, seed=args.seed + 1)

    drawn = draw_scenes("heldout", args.eval_size, args.seed)
    rng = random.Random(args.seed)
    replies = sample_replies(model, tokenizer, drawn)
    verdicts = [judge(reply) for reply in replies]
    numbers = {
        "parameters": model.num_parameters(),
        "classifier_parameters": classifier.num_parameters(),
        "rude": verdicts.count(True) / args.eval_size,
        "outside": verdicts.count(None) / args.eval_size,
        "accuracy": labelled_right(classifier, tokenizer, [(s, *write_reply(s, rng)) for s in drawn]),
        "distance": distance_to_polite(),
        "samples": args.eval_size,
    }
    # Running processes have the old weights mapped into memory: put new files in their place, never write into them.
    for folder, what in (("model", model), ("classifier", classifier)):
        (args.output_dir / folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=args.output_dir) as name:
            what.save_pretrained(name)
            tokenizer.save_pretrained(name)
            for file in Path(name).iterdir():
                file.replace(args.output_dir / folder / file.name)
    shown = {name: getattr(args, name) for name in ("seed", "steps", "classifier_steps", "threads")}
    (args.output_dir / "README.md").write_text(README.format(**shown, **numbers), encoding="utf-8")
    for reply in replies[:10]:
        print(repr(reply))
    print("  ".join(f"{name} {value:.4g}" for name, value in numbers.items()))


if __name__ == "__main__":
    main()
