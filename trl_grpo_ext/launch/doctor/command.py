"""`trl-grpo-ext doctor`: the command line of the examination. Heavy imports happen when the command runs."""

import logging
import os
from typing import Annotated, Any

import typer
from rich.console import Console

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": False}
_LAUNCHERS = "As for `accelerate launch`."


def _option(name: str, text: str, **more: Any) -> Any:
    """An option that may be written with dashes, too."""
    return typer.Option(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), help=text, **more)


def doctor_command(
    context: typer.Context,
    config_file: Annotated[str | None, _option("config_file", "The launch file, as for `accelerate launch`.")] = None,
    config: Annotated[
        list[str] | None, _option("config", "The run's settings (YAML); later files override earlier ones.")
    ] = None,
    script: Annotated[
        str | None, _option("script", "The training script: settings that it names count as known. It is not run.")
    ] = None,
    gpu_memory: Annotated[
        float | None,
        _option(
            "gpu_memory", "Examine another machine: GiB of each of its GPUs, one GPU per process.", min=0.1, max=100_000
        ),
    ] = None,
    num_processes: Annotated[int | None, _option("num_processes", _LAUNCHERS, min=1, max=1_000_000)] = None,
    machine_rank: Annotated[int | None, _option("machine_rank", _LAUNCHERS, min=0)] = None,
    rdzv_backend: Annotated[str | None, _option("rdzv_backend", _LAUNCHERS)] = None,
    prompt_length: Annotated[
        int, _option("prompt_length", "Tokens in the longest prompt.", min=0, max=10_000_000)
    ] = 256,
) -> None:
    """Check a launch, a run and a machine before any weights load. Say what will fail and what to do.

    Words after `--` are settings of the run, which override its file: `trl-grpo-ext doctor --config_file zero3.yaml
    --config run.yaml -- --learning_rate 1e-6`. Exits with 1 if there is an error.
    """
    for name in ("TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY"):
        os.environ.setdefault(name, "error")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # libraries warn when they are imported, too
    try:
        from .examine import examine, render

        with Console(stderr=True).status("Looking around"):
            examination = examine(
                config_file,
                config or (),
                context.args,
                script=script,
                gpu_memory=gpu_memory,
                prompt_length=prompt_length,
                num_processes=num_processes,
                machine_rank=machine_rank,
                rdzv_backend=rdzv_backend,
            )
    finally:
        root.setLevel(level)
    render(examination, Console())
    raise typer.Exit(examination.exit_code)
