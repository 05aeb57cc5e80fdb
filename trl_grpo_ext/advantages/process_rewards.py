"""Its old place."""

from .parts import ProcessRewards  # noqa: F401
