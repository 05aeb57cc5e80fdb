"""Plugins in TRL's `AsyncGRPOTrainer`, which samples and scores in a process of its own. Experimental."""
