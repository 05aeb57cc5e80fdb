"""The task of `coins_grpo.py`: a game of several turns that pays at each, and a model that plays at random."""
