"""The tokens of saved completions, as padded tensors: saved ones, a tokenizer's, or words if there is neither."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...credit.alignment import token_offsets
from ...errors import AlignmentError, ConfigurationError
from ...records.token_records import encodable
from ..run_files import Columns, reason_of

_WORD = re.compile(r"\w+|[^\w\s]")
MOST_CELLS = 200_000_000
"""Most completions times longest completion; a larger batch would take many gigabytes."""

Offsets = Callable[[int], Sequence[tuple[int, int]]]


@dataclass(frozen=True)
class Tokens:
    """The tokens of one batch, `(B, T)`, padded on the right; log-probabilities only if every completion has some."""

    ids_B_T: torch.Tensor
    completion_mask_B_T: torch.Tensor
    mask_B_T: torch.Tensor
    offsets: Offsets
    logps_B_T: torch.Tensor | None = None
    entropies_B_T: torch.Tensor | None = None

    @functools.cached_property
    def id_rows(self) -> list[list[int]]:
        """The token numbers of each completion, without padding."""
        lengths = self.completion_mask_B_T.sum(dim=1).long().tolist()
        return [row[:length] for row, length in zip(self.ids_B_T.tolist(), lengths, strict=True)]


def text_tokens(
    texts: Sequence[str], truncated: Sequence[bool], where: str, tokenizer: Any, words: dict[str, int]
) -> Tokens:
    """The tokens of texts, or their words, numbered in `words`; with one that ends each text that is not truncated."""
    texts = [encodable(text) for text in texts]
    spans = [[match.span() for match in _WORD.finditer(text)] for text in texts]
    if tokenizer is None:
        pieces = [[text[start:end] for start, end in row] for text, row in zip(texts, spans, strict=True)]
        ids = [[words.setdefault(piece, len(words)) for piece in row] for row in pieces]
        end = words.setdefault("", len(words))
    else:
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        end = tokenizer.eos_token_id
    ids = [row if end is None or is_cut else [*row, end] for row, is_cut in zip(ids, truncated, strict=True)]

    def offsets_of(row: int) -> Sequence[tuple[int, int]]:
        if tokenizer is not None:
            return token_offsets(tokenizer, ids[row], texts[row])
        return [*spans[row], (len(texts[row]), len(texts[row]))][: len(ids[row])]

    mask_B_T = _mask(ids, where)
    return Tokens(_padded(ids, torch.long), mask_B_T, mask_B_T, offsets_of)


def loaded_or_refused(option: str, name: str, load: Callable[[], Any]) -> Any:
    """What `load` makes of a path or hub id that an option gives."""
    try:
        return load()
    except (RuntimeError, MemoryError):  # out of memory, or a device that fails, says nothing about the name
        raise
    except Exception as error:  # the hub's, the file system's and the parsers' errors have no common root
        raise ConfigurationError(f"{option} {name!r} cannot be loaded: {reason_of(error)}") from error


def load_tokenizer(name: str) -> Any:
    """A tokenizer by its path or hub id."""
    from transformers import AutoTokenizer

    return loaded_or_refused("--tokenizer", name, lambda: AutoTokenizer.from_pretrained(name))


def recorded_tokens(records: Columns, where: str) -> Tokens:
    """The tokens in the columns of token records."""
    ids, starts, ends = records["token_ids"], records["starts"], records["ends"]
    if bad := [row for row, live in enumerate(records["live"]) if live is None or len(live) != len(ids[row])]:
        raise ConfigurationError(f"{where}: row {bad[0]} does not have one entry in `live` per token.")

    def numbers(name: str) -> torch.Tensor | None:
        values = records.get(name, [None] * len(ids))
        if any(row is None or len(row) != len(of) for row, of in zip(values, ids, strict=True)):
            return None
        return _padded(values, torch.float32)

    def offsets_of(row: int) -> Sequence[tuple[int, int]]:
        if starts[row] is None or ends[row] is None:
            raise AlignmentError(
                f"{where}, row {row}: the record has no offsets, because the tokens could not be matched with "
                "the text. Hooks that need offsets or spans cannot run on it."
            )
        return [(int(start), int(end)) for start, end in zip(starts[row], ends[row], strict=True)]

    return Tokens(
        ids_B_T=_padded(ids, torch.long),
        completion_mask_B_T=_mask(ids, where),
        mask_B_T=_padded(records["live"], torch.float32),
        offsets=offsets_of,
        logps_B_T=numbers("logp"),
        entropies_B_T=numbers("entropy"),
    )


def _mask(rows: Sequence[Any], where: str) -> torch.Tensor:
    longest = max(map(len, rows))
    if len(rows) * longest > MOST_CELLS:
        raise ConfigurationError(
            f"{where}: {len(rows):,} completions of up to {longest:,} tokens are too many for one batch. Add a "
            f"column `step` that says which were sampled together, or use fewer with --limit."
        )
    return _padded([[1.0] * len(row) for row in rows], torch.float32)


def _padded(rows: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    """Rows of numbers, `(B, T)`, padded with zeros on the right to one column at least."""
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    return torch.nn.utils.rnn.pad_sequence([*tensors, torch.zeros(1, dtype=dtype)], batch_first=True)[:-1]
