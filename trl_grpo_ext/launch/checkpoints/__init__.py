"""Checkpoints that are whole or not there, and a stop signal that waits for them."""
