"""Which characters of a completion's text did each token write?

Encoding the text again need not give the tokens that the model sampled. So the steps of the tokenizer's own decoder run
again on these, and every character remembers the tokens it came from; the result must be the tokenizer's text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby
from typing import Any

from ..errors import AlignmentError

_PROBE = "Hé, 1 234.5 + x_1!\n\n\t  naïve ﷽ 你好 שלום 👩‍👩‍👧 e\u0301 <think>don't</think> \\frac{1}{2} "
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CLEAN_UP = (
    *((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'")),
    *((" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")),
)
"""What transformers replaces after decoding, if a tokenizer asks for it."""


def token_offsets(tokenizer: Any, ids: Sequence[int], text: str) -> list[tuple[int, int]]:
    """For each token `(start, end)`: it wrote `text[start:end]`, the text without special tokens. All cover the text.

    A character split over several tokens belongs to all of them, and so does the U+FFFD of invalid bytes. Tokens that
    wrote nothing, such as skipped special tokens, have `start == end`.
    """
    tokens = [int(token) for token in ids]
    if _decode(tokenizer, tokens) != text:
        raise AlignmentError(
            f"The text is not what {type(tokenizer).__name__} decodes the completion's {len(tokens)} tokens to without "
            "its special tokens, so it is unknown which token wrote which character. Hooks that need offsets or "
            "spans cannot be used where completions are rewritten after decoding."
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    offsets = None if backend is None else offsets_by_decoder(backend, tokens, text)
    if offsets is None:
        raise AlignmentError(
            f"Which token wrote which character cannot be found with {type(tokenizer).__name__}: it is not one of the "
            "tokenizers library, or its decoder is unknown. Use a fast tokenizer, or leave out the hooks that need "
            "offsets or spans."
        )
    return offsets


def check_alignment(tokenizer: Any) -> None:
    """Try the alignment on hard cases: characters split into bytes, white space, and tokens out of order."""
    try:
        probes = [list(tokenizer.encode(_PROBE, add_special_tokens=False))]
    except Exception:  # a vocabulary without these characters and without a token for unknown ones
        probes = []
    size = len(tokenizer)
    probes.append([index * 7919 % size for index in range(min(size, 256))])
    for probe in [*probes, *(probe[::-1] for probe in probes)]:
        try:
            text = _decode(tokenizer, probe)
        except Exception as error:
            raise AlignmentError(f"{type(tokenizer).__name__} cannot decode its own tokens: {error}") from error
        token_offsets(tokenizer, probe, text)


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


@dataclass(slots=True)
class _Piece:
    """Text on its way through the decoder; character `i` comes from the tokens `first[i]` to `last[i]`."""

    token: int
    text: str
    first: list[int]
    last: list[int]

    def part(self, start: int, end: int) -> _Piece:
        return _Piece(self.token, self.text[start:end], self.first[start:end], self.last[start:end])


_Step = Mapping[str, Any]


def offsets_by_decoder(backend: Any, ids: list[int], text: str) -> list[tuple[int, int]] | None:
    """Offsets from the decoder's steps; None if a step is unknown or the result is not the text."""
    steps = _steps_of(backend)
    if steps is None or any(step["type"] not in _STEPS for step in steps):
        return None
    special = {added.content for added in backend.get_added_tokens_decoder().values() if added.special}
    words = {token: backend.id_to_token(token) for token in set(ids)}
    pieces = []
    for index, token in enumerate(ids):
        word = words[token]
        if word is not None and word not in special:
            pieces.append(_Piece(index, word, [index] * len(word), [index] * len(word)))
    with_text = {piece.token for piece in pieces}
    for step in steps:
        pieces = _STEPS[step["type"]](pieces, step)
    whole = _fused(pieces)
    if whole.text != text:
        for pattern, content in _CLEAN_UP:
            whole = _replaced(whole, pattern, content)
    return _ranges(whole, with_text, len(ids)) if whole.text == text else None


def _steps_of(backend: Any) -> list[dict[str, Any]] | None:
    """The decoder as a flat list of steps; None if it is not one of the library's own."""
    if backend.decoder is None:
        return [{"type": "Join"}]
    try:
        waiting = [json.loads(backend.decoder.__getstate__())]
    except Exception:  # a decoder written in Python
        return None
    steps = []
    while waiting:
        step = waiting.pop(0)
        if step["type"] == "Sequence":
            waiting = [*step["decoders"], *waiting]
        else:
            steps.append(step)
    return steps


def _ranges(whole: _Piece, with_text: set[int], count: int) -> list[tuple[int, int]]:
    offsets, start, end = [], 0, 0
    for token in range(count):
        while start < len(whole.text) and whole.last[start] < token:
            start += 1
        while end < len(whole.text) and whole.first[end] <= token:
            end += 1
        # A token skipped between two that share a character is between its bytes, and has none of them.
        offsets.append((start, end) if token in with_text and end > start else (start, start))
    return offsets


def _fused(pieces: Sequence[_Piece]) -> _Piece:
    return _Piece(
        pieces[0].token if pieces else 0,
        "".join(piece.text for piece in pieces),
        list(chain.from_iterable(piece.first for piece in pieces)),
        list(chain.from_iterable(piece.last for piece in pieces)),
    )


def _replaced(piece: _Piece, pattern: str, content: str) -> _Piece:
    """Replace every `pattern`; what stands of it in `content` keeps its tokens, anything else has those of all."""
    if pattern not in piece.text:
        return piece
    parts, position = [], 0
    kept = pattern.find(content)
    while (found := piece.text.find(pattern, position)) >= 0:
        end = found + len(pattern)
        parts.append(piece.part(position, found))
        if kept >= 0:
            parts.append(piece.part(found + kept, found + kept + len(content)))
        else:
            first, last = piece.first[found], piece.last[end - 1]
            parts.append(_Piece(piece.token, content, [first] * len(content), [last] * len(content)))
        position = end
    whole = _fused([*parts, piece.part(position, len(piece.text))])
    return _Piece(piece.token, whole.text, whole.first, whole.last)


def _replace(pieces: list[_Piece], step: _Step) -> list[_Piece]:
    pattern = step["pattern"].get("String")
    if not pattern:  # a regular expression, in another dialect than Python's: the text will not come out
        return pieces
    return [_replaced(piece, pattern, step["content"]) for piece in pieces]


def _join(pieces: list[_Piece], step: _Step) -> list[_Piece]:
    return [*pieces[:1], *(_fused([_Piece(one.token, " ", [one.token], [one.token]), one]) for one in pieces[1:])]


def _strip(pieces: list[_Piece], step: _Step) -> list[_Piece]:
    stripped = []
    for piece in pieces:
        inner = piece.text
        start = min(step["start"], len(inner) - len(inner.lstrip(step["content"])))
        end = len(inner) - min(step["stop"], len(inner[start:]) - len(inner[start:].rstrip(step["content"])))
        stripped.append(piece.part(start, end))
    return stripped


def _metaspace(pieces: list[_Piece], step: _Step) -> list[_Piece]:
    mark, strips = step["replacement"], step.get("prepend_scheme", "always") != "never"
    return [_replaced(piece, mark, "" if strips and not index else " ") for index, piece in enumerate(pieces)]


def _byte_fallback(pieces: list[_Piece], step: _Step) -> list[_Piece]:
    """Decode runs of `<0xE2>` tokens as UTF-8; an invalid run becomes one U+FFFD per byte."""
    result: list[_Piece] = []
    for is_byte, run in groupby(pieces, lambda piece: _BYTE_TOKEN.fullmatch(piece.text) is not None):
        together = list(run)
        if not is_byte:
            result += together
            continue
        data = bytes(int(piece.text[3:5], 16) for piece in together)
        try:
            data.decode()
        except UnicodeDecodeError:
            result.extend(_Piece(piece.token, "\ufffd", piece.first[:1], piece.last[-1:]) for piece in together)
        else:
            result.append(
                _decoded(data, [piece.first[0] for piece in together], [piece.last[-1] for piece in together])
            )
    return result


def _byte_level(pieces: list[_Piece], step: _Step) -> list[_Piece]:
    """Every character stands for a byte; tokens with any other character stand for themselves."""
    data, first, last = bytearray(), [], []
    for piece in pieces:
        stands_for_bytes = all(character in _BYTE_OF for character in piece.text)
        for character, begin, end in zip(piece.text, piece.first, piece.last, strict=True):
            encoded = bytes([_BYTE_OF[character]]) if stands_for_bytes else character.encode()
            data += encoded
            first += [begin] * len(encoded)
            last += [end] * len(encoded)
    return [_decoded(bytes(data), first, last)]


def _decoded(data: bytes, first: list[int], last: list[int]) -> _Piece:
    """UTF-8 to characters; invalid bytes become U+FFFD, grouped as Rust and Python do."""
    widths: list[int] = []
    rest = data
    while rest:
        try:
            valid, invalid = rest.decode(), 0
        except UnicodeDecodeError as error:
            valid, invalid = rest[: error.start].decode(), error.end - error.start
        widths += [*(len(character.encode()) for character in valid), *([invalid] if invalid else [])]
        rest = rest[len(valid.encode()) + invalid :]
    ends = list(accumulate(widths))
    begins = [first[end - width] for end, width in zip(ends, widths, strict=True)]
    return _Piece(first[0] if first else 0, data.decode("utf-8", "replace"), begins, [last[end - 1] for end in ends])


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable characters of Latin-1 are their own byte, the others are U+0100 onwards, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_STEPS: dict[str, Callable[[list[_Piece], _Step], list[_Piece]]] = {
    "Replace": _replace,
    "ByteFallback": _byte_fallback,
    "ByteLevel": _byte_level,
    "Fuse": lambda pieces, step: [_fused(pieces)],
    "Join": _join,
    "Strip": _strip,
    "Metaspace": _metaspace,
}
