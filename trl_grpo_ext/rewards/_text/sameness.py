"""When a value that a model wrote counts as the expected one."""

from __future__ import annotations

from dataclasses import dataclass

from ...guard.parameters import amount, flag
from .._judged import Judged
from .json_text import Located, is_near, read_number, read_plain_number


@dataclass(kw_only=True, eq=False)
class Comparing(Judged):
    """A reward that compares with expected values: a tolerance for numbers, and normalisation for texts."""

    absolute: float = amount(0.0)
    relative: float = amount(0.0)
    ignore_case: bool = flag(False)
    ignore_space: bool = flag(False)

    def same_values(self, said: Located, right: Located) -> bool:
        """Whether two JSON values are the same: of one type, and equal. Objects and arrays must be empty."""
        if said.kind != right.kind or said.members or right.members:
            return False
        if right.kind == "number":
            return is_near(said.value, right.value, self.absolute, self.relative)
        if right.kind == "string":
            return self.same_texts(said.value, right.value)
        return bool(said.value == right.value)

    def same_texts(self, said: str, right: str) -> bool:
        """Whether two texts are the same."""
        return self._normalised(said) == self._normalised(right)

    def same_numbers(self, said: str, right: float) -> bool:
        """Whether a text is a number and the right one."""
        number = read_plain_number(said)
        return number is not None and is_near(number, read_number(repr(right)), self.absolute, self.relative)

    def _normalised(self, text: str) -> str:
        text = " ".join(text.split()) if self.ignore_space else text
        return text.casefold() if self.ignore_case else text
