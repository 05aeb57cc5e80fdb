"""Cheaper updates with the same gradient."""
