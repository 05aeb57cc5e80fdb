"""A quiet terminal: what a run prints is the summary of `trl_grpo_ext.trainer.live`, which the recipes switch on."""

from transformers.utils.logging import disable_progress_bar

SUMMARY = {"summary_steps": 1}
"""The recipes' default: a line for every log entry, in place of transformers' printed dictionaries."""


def quiet_libraries() -> None:
    """Leave the terminal to the recipe: no bars for reading and writing weights."""
    disable_progress_bar()
