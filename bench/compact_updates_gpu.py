"""How much faster an update is with `compact_updates: exact` than plain TRL's on the same rollouts, on a CUDA device.

    python -m bench.compact_updates_gpu [--minutes 9.5] [--markdown FILE]
    python -m bench.compact_updates_gpu --models 0.5B --trainings full
    python -m bench.compact_updates_gpu --tiny --device cpu

Models of Qwen2.5's shapes with random weights, made here: nothing is downloaded. They run in bfloat16 with
FlashAttention 2 where `flash_attn` is installed and PyTorch's own attention otherwise. Trained are all weights, or
adapters on 4-bit weights (QLoRA, needs bitsandbytes). See `compact_cells` for what is measured and how.

Each model has its part of `--minutes`, and runs its cells in order of importance until that is used up; cells that were
left out are named. Two trainings are in memory at a time, so 1.5B in full takes about 40 GB; 0.5B about 20 GB. Gradient
checkpointing is on, as in TRL's defaults. `--tiny --device cpu` runs all of it in a minute, to see that it works.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig, Qwen2Config, Qwen2ForCausalLM

from bench.compact_cells import Match, Meter, Result, print_page, sentence
from bench.compact_rollouts import PROFILES, SHARES, Cell, Size
from tests.support import save_tiny_model

SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
}
TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TRAININGS = ("full", "QLoRA")
SIZE, TINY_SIZE = Size(limit=1024), Size(groups=5, members=4, limit=48)
FIRST = (Cell(PROFILES[2], 40), Cell(PROFILES[0], 0), Cell(PROFILES[1], 40), Cell(PROFILES[2], 0))
"""The cells that say most; the others follow."""


def cells_in_order() -> list[Cell]:
    everything = [Cell(profile, share) for profile in PROFILES for share in SHARES]
    return [*FIRST, *(cell for cell in everything if cell not in FIRST)]


def config_of(name: str, tiny: bool) -> Qwen2Config:
    """Qwen2.5's shape of this size, or a tiny one."""
    return Qwen2Config(
        **{
            "vocab_size": 151_936,
            "max_position_embeddings": 32_768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 1,
            **SHAPES[name],
            **(TINY if tiny else {}),
        }
    )


def save_model(folder: Path, name: str, tiny: bool, device: str) -> Path:
    """Random weights in bfloat16, with the tests' character tokenizer."""
    save_tiny_model(folder)
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM._from_config(config_of(name, tiny), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    free()
    return folder


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def attention() -> str:
    """The attention kernel that this machine has."""
    ready = torch.cuda.is_available() and importlib.util.find_spec("flash_attn") is not None
    return "flash_attention_2" if ready else "sdpa"


def settings_of(training: str, device: str) -> dict[str, Any]:
    """Of the config, and the trainer's arguments."""
    loading: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": attention(), "device_map": device}
    more: Callable[[], dict[str, Any]] = dict
    if training == "QLoRA":
        loading["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )

        def more() -> dict[str, Any]:
            return {"peft_config": LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")}

    return {
        "model_init_kwargs": loading,
        "trainer_arguments": more,
        "bf16": True,
        "gradient_checkpointing": True,
    }


def compare(
    model: Path, folder: Path, training: str, size: Size, updates: int, device: str, until: float
) -> tuple[list[Result], list[Cell]]:
    """Measure cells until the time is over, at least one.

    Returns:
        What was measured, in the order of the table, and the cells that were left out.
    """
    match = Match(model, folder, size, device, **settings_of(training, device))
    results: list[Result] = []
    cells, longest = cells_in_order(), 0.0
    while cells and (not results or time.monotonic() + longest < until):
        started = time.monotonic()
        results.append(match.measure(cells.pop(0), updates))
        longest = max(longest, time.monotonic() - started)
    match.close()
    return sorted(results, key=lambda result: (PROFILES.index(result.cell.profile), result.cell.share)), cells


def why_not(device: str, trainings: Sequence[str]) -> str | None:
    """Why this cannot run here."""
    if device == "cuda" and not torch.cuda.is_available():
        return (
            "There is no CUDA device here. With --tiny --device cpu the script runs on the CPU, to see that it works."
        )
    if "QLoRA" in trainings and importlib.util.find_spec("bitsandbytes") is None:
        return "QLoRA needs bitsandbytes: pip install bitsandbytes, or choose --trainings full."
    return None


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--trainings", nargs="+", default=list(TRAININGS), choices=TRAININGS)
    parser.add_argument("--updates", type=int, default=3, help="of each arm in each cell, timed")
    parser.add_argument("--minutes", type=float, default=9.5, help="stop measuring when these are over")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to see that the script works")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    options = parser.parse_args(given)
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu needs --tiny")
    reason = why_not(options.device, options.trainings)
    if reason is not None:
        print(reason)
        return
    warnings.simplefilter("ignore")

    end = time.monotonic() + 60 * options.minutes
    size, updates = (TINY_SIZE, 1) if options.tiny else (SIZE, options.updates)
    machine = torch.cuda.get_device_name() if options.device == "cuda" else "CPU, tiny shapes"
    names = options.models[:1] if options.tiny else options.models  # tiny ones are all alike
    left = len(names) * len(options.trainings)
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            model = save_model(Path(folder) / "model", name, options.tiny, options.device)
            for training in options.trainings:
                until = time.monotonic() + (end - time.monotonic()) / left
                left -= 1
                results, missing = compare(
                    model, Path(folder) / training, training, size, updates, options.device, until
                )
                free()
                what = f"{machine}, Qwen2.5-{name} with random weights, bfloat16, {attention()}, gradient checkpointing"
                said = sentence(size, updates, Meter(options.device), what)
                if missing:
                    said += (
                        f" Not measured for want of time: {', '.join(f'{c.profile}, {c.share} %' for c in missing)}."
                    )
                print_page(f"compact updates, {name}, {training}", results, said, options.markdown)


if __name__ == "__main__":
    main()
