"""Selecting, finding, building and loading plugins."""
