"""A finished or running training, shown: its curves as figures, its completions token by token, its settings.

`run` reads the folder, `files` its files, `figures` lists the figures, `page` writes the HTML page.
"""

from .run import Run, load_run, load_runs

__all__ = ["Run", "load_run", "load_runs"]
