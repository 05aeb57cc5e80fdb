"""Judging answers of mathematics."""
