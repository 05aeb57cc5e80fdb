"""A report on a finished or running training: findings, curves, completions token by token, settings.

`trained_run` reads the folder, `figures` lists the figures, `page` writes the HTML page.
"""

from ...records.findings import Finding, findings_of
from .trained_run import Run, load_run, load_runs

__all__ = ["Finding", "Run", "findings_of", "load_run", "load_runs"]
