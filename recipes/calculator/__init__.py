"""The task of `tools_grpo.py`: word problems of two steps, a calculator to call, and a model that rarely calls it."""
