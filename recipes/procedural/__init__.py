"""The problems of `reasoning_gym_grpo.py`, and the share of each task that is solved."""
