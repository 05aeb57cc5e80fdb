"""Watching a training while it runs: lines on the console, bars for slow rewards, and a log that is always up to date.

`ConsoleSummary`, `LiveLog` and `use_console_summary` work with TRL's trainers and similar subclasses of transformers'
`Trainer`. `GRPOExtTrainer` always writes the log, and prints the summary if `summary_steps` is set.
"""

from __future__ import annotations

from ...records.log import LOG_FILE, LiveLog
from .summary import ConsoleSummary, use_console_summary

__all__ = ["LOG_FILE", "ConsoleSummary", "LiveLog", "use_console_summary"]
