"""Rewards that cannot hang, crash or lie: outcomes, validation, killable workers."""
