"""Watching a training while it runs: lines on the console, bars for slow rewards, and a log that can be read at once.

`ConsoleSummary`, `LiveLog` and `use_console_summary` go with any trainer of transformers that trains as TRL's does.
`GRPOExtTrainer` brings the log along, and the summary where `summary_steps` is set.
"""

from __future__ import annotations

from ...records.log import LOG_FILE, LiveLog
from .summary import ConsoleSummary, use_console_summary

__all__ = ["LOG_FILE", "ConsoleSummary", "LiveLog", "use_console_summary"]
