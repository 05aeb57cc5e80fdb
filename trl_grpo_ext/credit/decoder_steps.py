"""The steps of the tokenizers library's decoders, run so that every character remembers the tokens it came from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

REPLACEMENT = "\ufffd"
"""What invalid bytes are decoded to."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CLEAN_UP = ((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"))
_CLEAN_UP_ENDS = ((" 's", "'s"), (" 've", "'ve"), (" 're", "'re"))
_TRANSFORMERS_CLEAN_UP = (*_CLEAN_UP, *_CLEAN_UP_ENDS)
_WORDPIECE_CLEAN_UP = (*_CLEAN_UP, (" do not", " don't"), *_CLEAN_UP_ENDS)


@dataclass(slots=True)
class _Piece:
    """Text on its way through the decoder; character `i` comes from the tokens `first[i]` to `last[i]`."""

    token: int
    text: str
    first: list[int]
    last: list[int]

    def part(self, start: int, end: int) -> _Piece:
        return _Piece(self.token, self.text[start:end], self.first[start:end], self.last[start:end])

    def after_space(self) -> _Piece:
        return _Piece(self.token, " " + self.text, [self.token, *self.first], [self.token, *self.last])


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
    wrote = {piece.token for piece in pieces}
    for step in steps:
        pieces = _STEPS[step["type"]](pieces, step)
    whole = _fused(pieces)
    if whole.text != text:  # transformers may tidy up spaces after decoding
        whole = _replaced_all(whole, _TRANSFORMERS_CLEAN_UP)
    return _ranges(whole, wrote, len(ids)) if whole.text == text else None


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


def _ranges(whole: _Piece, wrote: set[int], count: int) -> list[tuple[int, int]]:
    offsets, start, end = [], 0, 0
    for token in range(count):
        while start < len(whole.text) and whole.last[start] < token:
            start += 1
        while end < len(whole.text) and whole.first[end] <= token:
            end += 1
        # A token skipped between two that share a character is between its bytes, and has none of them.
        offsets.append((start, end) if token in wrote and end > start else (start, start))
    return offsets


def _fused(pieces: list[_Piece]) -> _Piece:
    return _Piece(
        pieces[0].token if pieces else 0,
        "".join(piece.text for piece in pieces),
        list(chain.from_iterable(piece.first for piece in pieces)),
        list(chain.from_iterable(piece.last for piece in pieces)),
    )


def _replaced(piece: _Piece, pattern: str, content: str, most: int = -1) -> _Piece:
    if pattern not in piece.text:
        return piece
    parts, position = [], 0
    kept = pattern.find(content)
    while most and (found := piece.text.find(pattern, position)) >= 0:
        most -= 1
        end = found + len(pattern)
        parts.append(piece.part(position, found))
        if kept >= 0:
            parts.append(piece.part(found + kept, found + kept + len(content)))
        elif len(content) == len(pattern):
            parts.append(_Piece(piece.token, content, piece.first[found:end], piece.last[found:end]))
        else:
            first, last = piece.first[found], piece.last[end - 1]
            parts.append(_Piece(piece.token, content, [first] * len(content), [last] * len(content)))
        position = end
    whole = _fused([*parts, piece.part(position, len(piece.text))])
    return _Piece(piece.token, whole.text, whole.first, whole.last)


def _replaced_all(piece: _Piece, rules: Sequence[tuple[str, str]]) -> _Piece:
    for pattern, content in rules:
        piece = _replaced(piece, pattern, content)
    return piece


def _replace(pieces: list[_Piece], step: _Step) -> list[_Piece]:
    pattern = step["pattern"].get("String")
    if not pattern:  # a regular expression, in another dialect than Python's: the text will not come out
        return pieces
    return [_replaced(piece, pattern, step["content"]) for piece in pieces]


def _fuse(pieces: list[_Piece], step: _Step) -> list[_Piece]:
    return [_fused(pieces)]


def _join(pieces: list[_Piece], step: _Step) -> list[_Piece]:
    return [piece.after_space() if index else piece for index, piece in enumerate(pieces)]


def _strip(pieces: list[_Piece], step: _Step) -> list[_Piece]:
    stripped = []
    for piece in pieces:
        start, end = 0, len(piece.text)
        while start < min(step["start"], end) and piece.text[start] == step["content"]:
            start += 1
        while len(piece.text) - end < step["stop"] and end > start and piece.text[end - 1] == step["content"]:
            end -= 1
        stripped.append(piece.part(start, end))
    return stripped


def _metaspace(pieces: list[_Piece], step: _Step) -> list[_Piece]:
    mark, strips = step["replacement"], step.get("prepend_scheme", "always") != "never"
    return [_replaced(piece, mark, "" if strips and not index else " ") for index, piece in enumerate(pieces)]


def _wordpiece(pieces: list[_Piece], step: _Step) -> list[_Piece]:
    words = []
    for index, piece in enumerate(pieces):
        if index:
            inner = piece.text.startswith(step["prefix"])
            piece = piece.part(len(step["prefix"]), len(piece.text)) if inner else piece.after_space()
        words.append(_replaced_all(piece, _WORDPIECE_CLEAN_UP) if step["cleanup"] else piece)
    return words


def _word_ends(pieces: list[_Piece], step: _Step) -> list[_Piece]:
    last = len(pieces) - 1
    return [_replaced(piece, step["suffix"], " " if index < last else "") for index, piece in enumerate(pieces)]


def _byte_fallback(pieces: list[_Piece], step: _Step) -> list[_Piece]:
    """Decode runs of `<0xE2>` tokens as UTF-8; an invalid run becomes one U+FFFD per byte."""
    result: list[_Piece] = []
    run: list[tuple[int, _Piece]] = []

    def flush() -> None:
        if not run:
            return
        data = bytes(byte for byte, _ in run)
        try:
            data.decode()
        except UnicodeDecodeError:
            result.extend(_Piece(p.token, REPLACEMENT, p.first[:1], p.last[-1:]) for _, p in run)
        else:
            result.append(_decoded(data, [p.first[0] for _, p in run], [p.last[-1] for _, p in run]))
        run.clear()

    for piece in pieces:
        match = _BYTE_TOKEN.fullmatch(piece.text)
        if match:
            run.append((int(match[1], 16), piece))
        else:
            flush()
            result.append(piece)
    flush()
    return result


def _byte_level(pieces: list[_Piece], step: _Step) -> list[_Piece]:
    """Every character stands for a byte; tokens with any other character stand for themselves."""
    data, first, last = bytearray(), [], []
    for piece in pieces:
        if all(character in _BYTE_OF for character in piece.text):
            data += bytes(_BYTE_OF[character] for character in piece.text)
            first += piece.first
            last += piece.last
        else:
            for character, begin, end in zip(piece.text, piece.first, piece.last, strict=True):
                encoded = character.encode()
                data += encoded
                first += [begin] * len(encoded)
                last += [end] * len(encoded)
    return [_decoded(bytes(data), first, last)]


def _decoded(data: bytes, first: list[int], last: list[int]) -> _Piece:
    """UTF-8 to characters; invalid bytes become U+FFFD, grouped as Rust and Python do."""
    begins, ends, position = [], [], 0
    while position < len(data):
        begins.append(first[position])
        position += _character_width(data, position)
        ends.append(last[position - 1])
    return _Piece(begins[0] if begins else 0, data.decode("utf-8", "replace"), begins, ends)


def _character_width(data: bytes, position: int) -> int:
    """Bytes of the character at a position, or of one U+FFFD (the longest valid prefix of a character)."""
    lead = data[position]
    following = 0 if lead < 0xC2 or lead > 0xF4 else 1 if lead < 0xE0 else 2 if lead < 0xF0 else 3
    low = {0xE0: 0xA0, 0xF0: 0x90}.get(lead, 0x80)  # no overlong forms,
    high = {0xED: 0x9F, 0xF4: 0x8F}.get(lead, 0xBF)  # no surrogates, nothing beyond U+10FFFF
    width = 1
    for byte in data[position + 1 : position + 1 + following]:
        if not low <= byte <= high:
            break
        width, low, high = width + 1, 0x80, 0xBF
    return width


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
    "Fuse": _fuse,
    "Join": _join,
    "Strip": _strip,
    "Metaspace": _metaspace,
    "WordPiece": _wordpiece,
    "BPEDecoder": _word_ends,
}
