"""When a value that a model wrote counts as the expected one."""

from __future__ import annotations

from ...guard.parameters import checked_flag, checked_number
from .json_text import Located, is_near, read_number, read_plain_number


class Sameness:
    """Equality with a tolerance for numbers, and normalisation for texts.

    Args:
        reward: The reward's name, for messages.
        absolute: How far a number may be away from the right one.
        relative: The same, as a share of the right one. The larger of the two counts.
        ignore_case: Compare texts without regard to case.
        ignore_space: Compare texts without white space at their ends, and with each run of it inside as one space.
    """

    def __init__(self, reward: str, absolute: float, relative: float, ignore_case: bool, ignore_space: bool) -> None:
        self.absolute = checked_number(f"{reward}: absolute", absolute, "0 or more", lambda x: x >= 0)
        self.relative = checked_number(f"{reward}: relative", relative, "0 or more", lambda x: x >= 0)
        self.ignore_case = checked_flag(f"{reward}: ignore_case", ignore_case)
        self.ignore_space = checked_flag(f"{reward}: ignore_space", ignore_space)

    def values(self, said: Located, right: Located) -> bool:
        """Whether two JSON values are the same: of one type, and equal. Objects and arrays must be empty."""
        if said.kind != right.kind or said.members or right.members:
            return False
        if right.kind == "number":
            return is_near(said.value, right.value, self.absolute, self.relative)
        if right.kind == "string":
            return self.texts(said.value, right.value)
        return bool(said.value == right.value)

    def texts(self, said: str, right: str) -> bool:
        """Whether two texts are the same."""
        return self._normalised(said) == self._normalised(right)

    def numbers(self, said: str, right: float) -> bool:
        """Whether a text is a number and the right one."""
        number = read_plain_number(said)
        return number is not None and is_near(number, read_number(repr(right)), self.absolute, self.relative)

    def _normalised(self, text: str) -> str:
        text = " ".join(text.split()) if self.ignore_space else text
        return text.casefold() if self.ignore_case else text
