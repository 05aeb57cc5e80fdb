"""Beginnings of texts to be continued: from the embedded grammar, from a file, or from the hub."""

from collections.abc import Iterable
from typing import Any

from common.errors import RecipeError, one_line
from common.problems import Row, from_hub, json_lines

from embedded.rude_text import draw_scenes


def embedded_prompts(train: int, held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Scenes of the grammar; no held-out scene is ever a training scene."""
    try:
        drawn = draw_scenes("train", train, seed), draw_scenes("heldout", held_out, seed)
    except ValueError as error:
        raise RecipeError(f"{one_line(error)} (--train_prompts, --eval_prompts).") from error
    first, second = ([{"prompt": scene.prompt} for scene in scenes] for scenes in drawn)
    return first, second


def prompts_from_file(path: str, train: int, held_out: int) -> tuple[list[Row], list[Row]]:
    """Read a JSON Lines file with the column `prompt` and hold out its last rows, at most a fifth of it."""
    return _split([_prompt(row, where) for where, row in json_lines(path)], train, held_out, path)


def prompts_from_hub(name: str, train: int, held_out: int, least_toxicity: float) -> tuple[list[Row], list[Row]]:
    """Prompts of a data set's train split, its last ones held out.

    The column `prompt` holds text, or, as in allenai/real-toxicity-prompts, a mapping of `text` and scores. If there is
    a score `toxicity`, prompts below `least_toxicity` and those without a score are left out.
    """
    return _split(_chosen(from_hub(name, split="train"), name, least_toxicity), train, held_out, name)


def _chosen(rows: Iterable[Any], name: str, least_toxicity: float) -> list[Row]:
    chosen = []
    for number, row in enumerate(rows, start=1):
        prompt = row.get("prompt")
        if isinstance(prompt, dict):
            toxicity = prompt.get("toxicity", 1.0)
            if toxicity is None or toxicity < least_toxicity:
                continue
            prompt = prompt.get("text")
        chosen.append(_prompt({"prompt": prompt}, f"{name}, row {number}"))
    return chosen


def _prompt(row: Any, where: str) -> Row:
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise RecipeError(f"{where} is {str(row)[:60]}; expected an object with 'prompt', the text to be continued.")
    return {"prompt": prompt}


def _split(rows: list[Row], train: int, held_out: int, where: str) -> tuple[list[Row], list[Row]]:
    rows = [{"prompt": prompt} for prompt in dict.fromkeys(row["prompt"] for row in rows)]  # none on both sides
    if len(rows) < 2:
        raise RecipeError(f"{where} has {len(rows)} different prompt(s); at least 2 are needed, one to be held out.")
    last = min(held_out, max(len(rows) // 5, 1))
    return rows[:-last][:train], rows[-last:]
