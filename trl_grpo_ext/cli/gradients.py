"""`trl-grpo-ext gradients`: the command line of gradient quality. Heavy imports happen when the command runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..guard.untrusted import escape, printable
from .console import messages, results
from .replay import AsJson, Dataset, Limit, NumGenerations, Step, print_table, progress_if_slow, step_range

if TYPE_CHECKING:
    from ..history.gradients import GradientQuality


def register(app: typer.Typer) -> None:
    """Add the command to an app."""
    app.command("gradients", short_help="Measure signal and noise of selections' gradients.")(gradients_command)


def gradients_command(
    completions: Annotated[
        Path,
        typer.Argument(
            help="A run's output_dir, or saved completions in a form that `replay` reads. With --prompts: the folder "
            "for the new completions."
        ),
    ],
    model: Annotated[
        str, typer.Option(help="The policy that sampled them: path or hub id of a model, or folder of an adapter.")
    ],
    with_: Annotated[
        list[str],
        typer.Option("--with", help="A YAML file with rewards, advantage_hooks, loss_aggregation. Repeat it."),
    ],
    prompts: Annotated[
        Path | None,
        typer.Option(help="A .jsonl or .parquet file with a column prompt; completions are sampled for these."),
    ] = None,
    samples: Annotated[int, typer.Option(min=2, help="Completions to sample for each prompt.")] = 8,
    max_completion_length: Annotated[
        int | None, typer.Option("--max_completion_length", min=1, help="Most tokens of a sampled completion.")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch_size",
            min=1,
            help="Batch size, in completions, to report the signal-to-noise ratio for. Default: as saved.",
        ),
    ] = None,
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
    resamples: Annotated[int, typer.Option(min=100, help="Bootstrap resamples.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sketch, the bootstrap and the sampling.")] = 0,
    shares: Annotated[
        bool, typer.Option(help="Also measure which tokens the gradient comes from, in a second pass.")
    ] = True,
    dtype: Annotated[str, typer.Option(help="Data type of the weights, such as bfloat16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Device of the model. Default: the GPU, if there is one.")] = None,
    load_in_4bit: Annotated[
        bool, typer.Option("--load_in_4bit", help="Load the weights below an adapter in 4 bits.")
    ] = False,
    keep: Annotated[
        Path | None, typer.Option(help="Folder for intermediate results. Default: gradients/ beside the completions.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write a page with the tables and the figure.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how much of each selection's gradient is signal, and where it points, without training.

    A stopped measurement resumes where it was. Another selection on the same completions runs the model only for what
    is new in it.
    """
    steps = step_range(step)
    from ..history.gradients import measure_gradients  # slow to import

    said = messages()
    found = measure_gradients(
        completions,
        with_,
        model=model,
        tokenizer=tokenizer,
        dataset=dataset,
        prompts=prompts,
        samples=samples,
        max_completion_length=max_completion_length,
        batch_size=batch_size,
        steps=steps,
        limit=limit,
        num_generations=num_generations,
        temperature=temperature,
        dimensions=dimensions,
        rows=rows,
        seed=seed,
        resamples=resamples,
        with_shares=shares,
        keep=keep,
        dtype=dtype,
        device=device,
        load_in_4bit=load_in_4bit,
        say=lambda sentence: said.print(printable(sentence), soft_wrap=not said.is_terminal),
        progress=lambda items, count, what: progress_if_slow(items, count, said, what),
    )
    if out is not None:
        from ..history.gradients.page import write_page

        write_page(found, out)
        said.print(escape(str(out)), soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(found.plain(), indent=2, allow_nan=False))
    else:
        _print(found, results())


def _print(found: GradientQuality, console: Console) -> None:
    from ..history.gradients.tables import head, main_table, share_tables

    for sentence in head(found):
        console.print(printable(sentence))
    for title, columns, lines in (main_table(found), *share_tables(found)):
        print_table(console, title, columns, lines)
