"""Watching a training while it runs: lines on the console, a log that is always up to date."""

from __future__ import annotations

from ...records.log import LOG_FILE, LiveLog
from .summary import ConsoleSummary, use_console_summary

__all__ = ["LOG_FILE", "ConsoleSummary", "LiveLog", "use_console_summary"]
