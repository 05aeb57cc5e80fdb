"""Its old place."""

from .transforms import RewardSchedule  # noqa: F401
