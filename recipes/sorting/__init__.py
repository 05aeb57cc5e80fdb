"""The sorting task of `sort_grpo.py`: prompts, a tiny untrained model, and the naive policy gradient as a plugin."""
