"""Gradient quality of the study's methods at three points of plain TRL's training, beside the trainings' accuracies.

    python -m bench.gradients --output outputs/gradients [--tasks sorting] [--points 0 0.5 1]

Each point is plain TRL's training of the study (seed 1) up to a share of the token budget; there the model samples new
problems, and all methods are measured on these. Finished parts are kept, so a restart resumes. The table
of each task is printed, and written to `OUTPUT/TASK.md`.
"""

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from bench import study
from bench.tables import markdown
from trl_grpo_ext.history.compare import Gradients, compare, load_policy
from trl_grpo_ext.history.compare.gradients import PLAIN

SEED = 1
RATES = {"sorting": 2e-4, "word problems": 1e-4}
"""Plain TRL's tuned rates in the study."""


def train_to(task: str, share: float, folder: Path, start: Path) -> Path:
    """The folder of plain TRL's policy after a share of the task's token budget."""
    if share == 0:
        return start
    place = folder / f"{task.replace(' ', '_')}_{share:g}"
    if not (place / "config.json").is_file():
        study.train(
            study.Run(task, study.PLAIN, "tuning", RATES[task], SEED),
            start,
            task=replace(study.TASKS[task], token_budget=round(study.TASKS[task].token_budget * share)),
            save_to=place,
        )
    return place


def measure(task: str, share: float, folder: Path, groups: int, dimensions: int) -> Gradients:
    """All methods of a task at one point."""
    settings = study.TASKS[task]
    model = train_to(task, share, folder, study.model_of(task, folder))
    place = folder / f"{task.replace(' ', '_')}_{share:g}_rollout"
    methods = {
        name: {"rewards": [settings.reward], "max_completion_length": settings.max_completion_length}
        | study.METHODS[name]
        for name in settings.methods
        if name != study.PLAIN
    }
    prompts = place.with_suffix(".jsonl")
    done = place / "done"
    if not done.is_file():
        shutil.rmtree(place, ignore_errors=True)
        rows = study.problems(task, "train", groups, 1000 + SEED)
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        batch = settings.batch_size
        steps = groups * settings.num_generations // batch
        sampling = {"output_dir": str(place), "learning_rate": 0.0, "max_steps": steps, "token_records": batch}
        study.train_once(settings, rows, model, SEED, sampling)  # which samples, and moves nothing
        done.touch()
    found = compare(
        place,
        methods,
        model=load_policy(str(model), dtype="float32"),
        tokenizer=str(model),
        dataset=prompts,
        dimensions=dimensions,
    )
    assert found.gradients is not None
    return found.gradients


def table(points: dict[float, Gradients]) -> str:
    """Markdown: for each method its worth and its cosine to the policy gradient at each point."""
    titles = ["method"]
    for share in points:
        titles += [f"worth at {share:.0%}", "cosine"]
    lines = []
    first = next(iter(points.values()))
    for place, one in enumerate(first.selections):
        if place == 1:
            continue  # the policy gradient itself
        cells = [one.name if one.name == PLAIN else f"`{one.name}`"]
        for found in points.values():
            own = found.selections[place]
            worth = "1" if own.name == PLAIN else own.worth.text(2)
            cells += [worth, own.to_policy_gradient.text(2)]
        lines.append(cells)
    return markdown(titles, lines)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("outputs/gradients"))
    parser.add_argument("--tasks", nargs="+", choices=tuple(study.TASKS), default=tuple(study.TASKS))
    parser.add_argument("--points", nargs="+", type=float, default=[0.0, 0.5, 1.0])
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--dimensions", type=int, default=4096)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    options.output.mkdir(parents=True, exist_ok=True)
    for task in options.tasks:
        points = {}
        for share in options.points:
            points[share] = measure(task, share, options.output, options.groups, options.dimensions)
            print(task, share, [(one.name, one.ratio.text()) for one in points[share].selections[:2]], flush=True)
        text = table(points)
        (options.output / f"{task.replace(' ', '_')}.md").write_text(text + "\n")
        print(text, flush=True)


if __name__ == "__main__":
    main()
