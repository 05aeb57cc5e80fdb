"""Its old place."""

from .returns import PrefixTree  # noqa: F401
