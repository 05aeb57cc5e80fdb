"""Checks before a run: environment, launch, memory and batch arithmetic, known bad combinations."""
