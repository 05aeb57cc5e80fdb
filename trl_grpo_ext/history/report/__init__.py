"""A report on a finished or running training: curves, completions token by token, settings.

`run` reads the folder, `files` its files, `figures` lists the figures, `page` writes the HTML page.
"""

from .run import Run, load_run, load_runs

__all__ = ["Run", "load_run", "load_runs"]
