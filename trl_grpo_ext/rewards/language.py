"""Is the completion written in the requested language?"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..errors import ConfigurationError, RewardError
from ..guard.messages import completion_text
from ..guard.outcomes import shown
from ..guard.parameters import checked_flag, checked_text, checked_whole, column, optional_module

_PAIRS = (("```", "```"), ("~~~", "~~~"), ("$$", "$$"), (r"\[", r"\]"), (r"\(", r"\)"))
# Each alternative stops at the character it begins with, or at white space, so a scan is linear.
_NOT_LANGUAGE = re.compile(
    r"""`[^`\n]{1,300}`
    | \$(?=\S)[^$\n]{1,300}(?<=\S)\$(?![0-9])
    | (?:https?://|www\.)\S+
    | <[^<>\n]{1,200}>
    | \\(?:begin|end)\{[^{}\n]{1,40}\}
    | \\[A-Za-z]{1,40}""",
    re.VERBOSE,
)


class Language:
    """Score 1.0 where the completion's most probable language is the requested one, 0.0 where it is not.

    Use it against answers that drift into another language. The identifier is py3langid's naive Bayes model over byte
    n-grams (Lui and Baldwin, "langid.py: An Off-the-shelf Language Identification Tool", ACL 2012), which comes with
    that package and needs no network. Code, LaTeX, URLs and tags are removed first.

    Args:
        language: An ISO 639-1 code such as "en"; of "pt-BR" the first part counts. None means each row's own, from a
            column of the dataset.
        column: The column with the codes if `language` is None. An entry of None gives None.
        probability: Whether to score the language's probability instead of 1.0 or 0.0. It is the model's own, tempered
            by the text's length, not calibrated.
        min_characters: With fewer letters left the score is None: they show no language, as in an answer that is a
            formula.
        max_characters: How many characters of a completion are read, from its beginning.

    Raises:
        ConfigurationError: The model does not know the language, or py3langid is not installed.
    """

    __name__ = "language"
    conformance: ClassVar[Mapping[str, Any]] = {"parameters": {"language": "en"}}

    def __init__(
        self,
        language: str | None = None,
        *,
        column: str = "language",
        probability: bool = False,
        min_characters: int = 20,
        max_characters: int = 20_000,
    ) -> None:
        optional_module("language", "py3langid")
        self.language = language
        if language is not None:
            self.language = _code(language)
            if self.language is None:
                known = ", ".join(sorted(_labels()))
                hint = " In YAML, put 'no' in quotes: bare, it is false." if repr(language) == "False" else ""
                raise ConfigurationError(
                    f"language: language must be a code of py3langid's, got {language!r}.{hint} It knows: {known}."
                )
        self.column = checked_text("language: column", column)
        self.probability = checked_flag("language: probability", probability)
        self.min_characters = checked_whole("language: min_characters", min_characters, 1)
        self.max_characters = checked_whole("language: max_characters", max_characters, 1)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """`B` scores from 0.0 to 1.0; None where too few letters are left, or the language is None.

        Raises:
            RewardError: The column is missing, does not have one entry per completion, or has an unknown code.
        """
        wanted: Sequence[str | None] = [self.language] * len(completions)
        if self.language is None:
            advice = "Set the parameter language, or column to the name of the column with the codes."
            entries = column("language", self.column, columns, len(completions), advice)
            wanted = [self._entry(row, entry) for row, entry in enumerate(entries)]
        return [
            None if code is None else self._score(completion_text(completion)[: self.max_characters], code)
            for completion, code in zip(completions, wanted, strict=True)
        ]

    def _entry(self, row: int, entry: object) -> str | None:
        if entry is None or (code := _code(entry)) is not None:
            return None if entry is None else code
        raise RewardError(
            f"language: {self.column!r} at row {row} must be a code of py3langid's, such as 'en', got {shown(entry)}."
        )

    def _score(self, text: str, language: str) -> float | None:
        prose = prose_of(text)
        if sum(map(str.isalpha, prose)) < self.min_characters:
            return None
        ranked: list[tuple[str, float]] = _identifier().rank(prose)
        if self.probability:
            return min(float(dict(ranked)[language]), 1.0)
        return float(ranked[0][0] == language)


def prose_of(text: str) -> str:
    """A text without code, LaTeX, URLs, tags and lone surrogates. Linear in the text."""
    for opening, closing in _PAIRS:
        text = _without(text, opening, closing)
    text = _NOT_LANGUAGE.sub(" ", text)
    return text.encode("utf-8", "ignore").decode().replace("\0", " ")  # lone surrogates are no text


def _without(text: str, opening: str, closing: str) -> str:
    kept, position = [], 0
    while (start := text.find(opening, position)) >= 0:
        end = text.find(closing, start + len(opening))
        if end < 0:
            if opening == closing and opening in ("```", "~~~"):  # the rest is code that was cut off
                kept.append(text[position:start])
                position = len(text)
            break
        kept.append(text[position:start])
        position = end + len(closing)
    return " ".join([*kept, text[position:]])


def _code(language: object) -> str | None:
    """The model's label for a language, None if it has none."""
    if not isinstance(language, str):
        return None
    code = language.lower().replace("_", "-").partition("-")[0]
    return code if code in _labels() else None


@functools.cache
def _identifier() -> Any:
    langid = optional_module("language", "py3langid.langid")
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


@functools.cache
def _labels() -> frozenset[str]:
    return frozenset(_identifier().labels) - {"zxx"}  # no linguistic content
