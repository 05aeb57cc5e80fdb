"""`trl-grpo-ext gradients`: the command line of gradient quality. Heavy imports happen when the command runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track

from ..guard.untrusted import printable
from .console import messages, results
from .replay import AsJson, Dataset, Limit, NumGenerations, Step, print_notes, print_table, step_range

if TYPE_CHECKING:
    from ..history.gradients import GradientQuality


def gradients_command(
    completions: Annotated[
        Path, typer.Argument(help="A run's output_dir, or saved completions in a form that `replay` reads.")
    ],
    model: Annotated[
        str, typer.Option(help="The policy that sampled them: path or hub id of a model, or folder of an adapter.")
    ],
    with_: Annotated[
        list[str],
        typer.Option("--with", help="A YAML file with rewards, advantage_hooks, loss_aggregation. Repeat it."),
    ],
    temperature: Annotated[
        float, typer.Option(min=1e-6, help="Sampling temperature; the logits are divided by it.")
    ] = 1.0,
    tokenizer: Annotated[str | None, typer.Option(help="A tokenizer, path or hub id. Default: the model's.")] = None,
    dataset: Dataset = None,
    step: Step = None,
    limit: Limit = None,
    num_generations: NumGenerations = None,
    dimensions: Annotated[
        int, typer.Option(min=2, help="Dimensions of the gradient sketch; it is exact with one per trained parameter.")
    ] = 4096,
    rows: Annotated[int, typer.Option(min=1, help="Completions per micro-batch.")] = 8,
    dtype: Annotated[str, typer.Option(help="Data type of the weights, such as bfloat16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Device of the model. Default: the GPU, if there is one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how much of each selection's gradient is signal, and where it points, without training."""
    steps = step_range(step)
    from ..history.gradients import load_policy, measure_gradients  # slow to import

    found = measure_gradients(
        completions,
        with_,
        model=load_policy(model, dtype=dtype, device=device),
        tokenizer=tokenizer or model,
        dataset=dataset,
        steps=steps,
        limit=limit,
        num_generations=num_generations,
        temperature=temperature,
        dimensions=dimensions,
        rows=rows,
        progress=lambda items: track(items, "Gradients", console=messages(), transient=True),
    )
    print_notes(found.notes)
    if as_json:
        typer.echo(json.dumps(found.plain(), indent=2, allow_nan=False))
    else:
        _print(found, results())


def _print(found: GradientQuality, console: Console) -> None:
    error = "exact" if found.sketch_error == 0 else f"squared norms to {found.sketch_error:.1%}"
    console.print(
        printable(
            f"{found.source}: {found.completions:,} completions in {found.groups:,} groups of {found.prompts:,} "
            f"prompts, {found.tokens:,} tokens; {found.model}: {found.parameters:,} trained parameters in "
            f"{found.dimensions:,} dimensions ({error})"
        )
    )
    columns = (
        f"signal / noise of {found.batch_size} completions",
        "worth x completions",
        "cosine to plain TRL",
        "cosine to policy gradient",
    )
    lines = []
    for place, one in enumerate(found.selections):  # plain TRL and the policy gradient come first
        worth = "-" if place == 0 else one.worth.text(2)
        to_plain = "-" if place == 0 else one.to_plain.text(2)
        to_policy_gradient = "-" if place == 1 else one.to_policy_gradient.text(2)
        lines.append((one.name, [one.ratio.text(), worth, to_plain, to_policy_gradient]))
    print_table(console, "gradients, with 95 % intervals", columns, lines)
