"""How long it takes to find the characters that each token of a long completion wrote, and which tokenizers allow it.

    python bench/text_alignment.py TEXT.jsonl [--tokens 32768] [--repeats 3]

A byte-level BPE is trained on the texts of the file, and its tokens of that text are the completion: as they are, and
with every eighth token replaced by any other, which no encoding of a text would give. `decoder` runs the decoder's
steps with every character remembering its tokens; `prefixes` decodes ever longer prefixes in blocks, which asks
nothing of a tokenizer but that it decodes. Time is that of the processor.

Then, for small tokenizers of every usual algorithm: of 200 completions of any tokens, how many `prefixes` answers as
`decoder` does, otherwise, or not at all.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.tables import machine, versions
from tests.trained_tokenizers import BUILDERS, trained
from trl_grpo_ext.credit import alignment
from trl_grpo_ext.errors import AlignmentError


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("text", type=Path, help="lines of JSON objects; all their texts are used")
    options.add_argument("--tokens", type=int, default=32_768)
    options.add_argument("--vocabulary", type=int, default=32_000)
    options.add_argument("--repeats", type=int, default=3)
    asked = options.parse_args()
    print(f"{machine()}, load {os.getloadavg()[0]:.1f}, {versions('trl-grpo-ext', 'tokenizers', 'transformers')}")
    rows = asked.text.read_text(encoding="utf-8").splitlines()
    texts = ["\n".join(value for value in json.loads(row).values() if isinstance(value, str)) for row in rows]
    tokenizer = byte_level(texts, asked.vocabulary)
    ids = tokenizer.encode("\n\n".join(texts))[: asked.tokens]
    draw = random.Random(0)
    mixed = [draw.randrange(len(tokenizer)) if place % 8 == 0 else token for place, token in enumerate(ids)]
    print(f"\n{'completion':<16}  {'tokens':>7}  {'method':<9}  {'median':>7}  {'worst':>7}  CPU seconds")
    for name, tokens in (("as written", ids), ("every eighth any", mixed)):
        for count in (len(tokens) // 4, len(tokens)):
            time_methods(name, tokenizer, tokens[:count], asked.repeats)
    print(f"\n{'tokenizer':<26}  {'same':>5}  {'other':>5}  {'none':>5}")
    for name in BUILDERS:
        compare_methods(name, draw)


def byte_level(texts: list[str], vocabulary: int) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def methods(tokenizer: Any, ids: list[int]) -> dict[str, Callable[[], Any]]:
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return {
        "decoder": lambda: alignment.offsets_by_decoder(tokenizer.backend_tokenizer, ids, text),
        "prefixes": lambda: alignment.offsets_by_prefixes(tokenizer, ids, text),
    }


def time_methods(name: str, tokenizer: Any, ids: list[int], repeats: int) -> None:
    for method, run in methods(tokenizer, ids).items():
        seconds = []
        for _ in range(repeats):
            started = time.process_time()
            run()
            seconds.append(time.process_time() - started)
        print(f"{name:<16}  {len(ids):>7}  {method:<9}  {statistics.median(seconds):>7.3f}  {max(seconds):>7.3f}")


def compare_methods(name: str, draw: random.Random) -> None:
    tokenizer, counts = trained(name), {"same": 0, "other": 0, "none": 0}
    for _ in range(200):
        ways = methods(tokenizer, [draw.randrange(len(tokenizer)) for _ in range(draw.randrange(1, 30))])
        try:
            counts["same" if ways["prefixes"]() == ways["decoder"]() else "other"] += 1
        except AlignmentError:
            counts["none"] += 1
    print(f"{name:<26}  " + "  ".join(f"{count:>5}" for count in counts.values()))


if __name__ == "__main__":
    main()
