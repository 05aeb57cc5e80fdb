"""How much faster an update is with `compact_updates: exact` than plain TRL's on the same rollouts, on the CPU.

    python -m bench.compact_updates [--updates 3] [--threads 1] [--markdown FILE]
    python -m bench.compact_updates --quick

Three profiles of lengths and three shares of rows without signal; see `compact_rollouts` for these, and `compact_cells`
for what is measured and how. All of it takes about a quarter of an hour. `--profiles` and `--shares` choose some cells,
and `--quick` runs all nine on a tiny model to see that the benchmark works: its ratios mean nothing. On a GPU:
`compact_updates_gpu`.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler says when it starts and stops

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.compact_cells import Match, Meter, Result, print_page, sentence
from bench.compact_rollouts import PROFILES, SHARES, Cell, Size
from tests.support import save_tiny_model

QUICK = Size(groups=5, members=4, limit=64)


def save_model(folder: Path) -> Path:
    """About five million parameters, with the tests' character tokenizer and a larger vocabulary than it needs."""
    save_tiny_model(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def run(cells: Sequence[Cell], size: Size, updates: int, folder: Path, *, tiny: bool = False) -> list[Result]:
    """Measure the cells one after the other."""
    model = (save_tiny_model if tiny else save_model)(folder / "model")
    match = Match(model, folder, size)
    results = [match.measure(cell, updates) for cell in cells]
    match.close()
    return results


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=3, help="of each arm in each cell, timed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--profiles",
        nargs="+",
        type=int,
        default=[0, 1, 2],
        choices=[0, 1, 2],
        help=", ".join(PROFILES).replace("%", "%%"),
    )
    parser.add_argument("--shares", nargs="+", type=int, default=SHARES, choices=SHARES, help="percent without signal")
    parser.add_argument("--quick", action="store_true", help="a tiny model and one update of each")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    options = parser.parse_args(given)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")

    size, updates = (QUICK, 1) if options.quick else (Size(), options.updates)
    cells = [Cell(PROFILES[profile], share) for profile in options.profiles for share in options.shares]
    with tempfile.TemporaryDirectory() as folder:
        results = run(cells, size, updates, Path(folder), tiny=options.quick)
        parameters = LlamaForCausalLM.from_pretrained(Path(folder) / "model").num_parameters()
    machine = f"Llama, {parameters / 1e6:.2g}M parameters, {options.threads} thread(s), {platform.machine()}"
    said = sentence(size, updates, Meter("cpu"), machine)
    print_page("compact updates on the CPU", results, said, options.markdown)


if __name__ == "__main__":
    main()
