"""Which characters of a completion's text did each token write?

Encoding the text again need not give the tokens that the model sampled. So the steps of the tokenizer's own decoder run
again on these, and every character remembers the tokens it came from; the result must be the tokenizer's text.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, groupby
from typing import Any

from ..errors import AlignmentError

_PROBE = "Hé, 1 234.5 + x_1!\n\n\t  naïve ﷽ 你好 שלום 👩‍👩‍👧 e\u0301 <think>don't</think> \\frac{1}{2} "
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CLEAN_UP = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
"""From what transformers removes the white space after decoding, if a tokenizer asks for it."""


def token_offsets(tokenizer: Any, ids: Sequence[int], text: str) -> list[tuple[int, int]]:
    """For each token `(start, end)`: it wrote `text[start:end]`, the text without special tokens. All cover the text.

    A character split over several tokens belongs to all of them, and so does the U+FFFD of invalid bytes. Tokens that
    wrote nothing, such as skipped special tokens, have `start == end`.
    """
    tokens = [int(token) for token in ids]
    if _decode(tokenizer, tokens) != text:
        raise AlignmentError(
            f"The text is not what {type(tokenizer).__name__} decodes the completion's {len(tokens)} tokens to. Hooks "
            "that need offsets or spans cannot be used where completions are rewritten after decoding."
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    offsets = None if backend is None else offsets_by_decoder(backend, tokens, text)
    if offsets is None:
        raise AlignmentError(
            f"Tokens cannot be matched with characters with {type(tokenizer).__name__}: it is no fast one of the "
            "tokenizers library, or its decoder is unknown. Leave out the hooks that need offsets or spans."
        )
    return offsets


def check_alignment(tokenizer: Any) -> None:
    """Try the alignment on hard cases: characters split into bytes, white space, and tokens out of order."""
    size = len(tokenizer)
    probes = [[index * 7919 % size for index in range(min(size, 256))]]
    with suppress(Exception):  # a vocabulary without these characters and without a token for unknown ones
        probes.append(list(tokenizer.encode(_PROBE, add_special_tokens=False)))
    for probe in [*probes, *(probe[::-1] for probe in probes)]:
        token_offsets(tokenizer, probe, _decode(tokenizer, probe))


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


_Piece = list[tuple[str, int, int]]
"""Text on its way through the decoder: each character with the first and the last of the tokens that it comes from."""
_Step = Mapping[str, Any]


def _text(piece: _Piece) -> str:
    return "".join(character for character, _, _ in piece)


def offsets_by_decoder(backend: Any, ids: list[int], text: str) -> list[tuple[int, int]] | None:
    """Offsets from the decoder's steps; None if a step is unknown or the result is not the text."""
    try:
        decoder = {"type": "Join"} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    except Exception:  # a decoder written in Python
        return None
    steps = _steps_of(decoder)
    if any(step["type"] not in _STEPS for step in steps):
        return None
    special = {added.content for added in backend.get_added_tokens_decoder().values() if added.special}
    words = {token: backend.id_to_token(token) for token in set(ids)}
    pieces = [
        [(character, index, index) for character in words[token]]
        for index, token in enumerate(ids)
        if words[token] and words[token] not in special
    ]
    with_text = {piece[0][1] for piece in pieces}
    for step in steps:
        pieces = _STEPS[step["type"]](pieces, step)
    whole = [*chain.from_iterable(pieces)]
    if _text(whole) != text:
        for pattern in _CLEAN_UP:
            whole = _replaced(whole, pattern, pattern.strip())
    return _ranges(whole, with_text, len(ids)) if _text(whole) == text else None


def _steps_of(step: _Step) -> list[_Step]:
    """A decoder's steps, of sequences in sequences as well."""
    if step["type"] != "Sequence":
        return [step]
    return [*chain.from_iterable(map(_steps_of, step["decoders"]))]


def _ranges(whole: _Piece, with_text: set[int], count: int) -> list[tuple[int, int]]:
    offsets = []
    start = 0
    end = 0
    for token in range(count):
        while start < len(whole) and whole[start][2] < token:
            start += 1
        while end < len(whole) and whole[end][1] <= token:
            end += 1
        # A token skipped between two that share a character is between its bytes, and has none of them.
        offsets.append((start, end) if token in with_text and end > start else (start, start))
    return offsets


def _replaced(piece: _Piece, pattern: str, content: str) -> _Piece:
    """Replace every `pattern`; what stands of it in `content` keeps its tokens, anything else has those of all."""
    text = _text(piece)
    position = 0
    kept = pattern.find(content)
    new: _Piece = []
    while (found := text.find(pattern, position)) >= 0:
        end = found + len(pattern)
        new += piece[position:found]
        if kept >= 0:
            new += piece[found + kept : found + kept + len(content)]
        else:
            new += [(character, piece[found][1], piece[end - 1][2]) for character in content]
        position = end
    return [*new, *piece[position:]]


def _replace(pieces: list[_Piece], step: _Step) -> list[_Piece]:
    pattern = step["pattern"].get("String")
    if not pattern:  # a regular expression, in another dialect than Python's: the text will not come out
        return pieces
    return [_replaced(piece, pattern, step["content"]) for piece in pieces]


def _strip(pieces: list[_Piece], step: _Step) -> list[_Piece]:
    stripped = []
    for piece in pieces:
        text = _text(piece)
        start = min(step["start"], len(text) - len(text.lstrip(step["content"])))
        end = len(text) - min(step["stop"], len(text[start:]) - len(text[start:].rstrip(step["content"])))
        stripped.append(piece[start:end])
    return stripped


def _metaspace(pieces: list[_Piece], step: _Step) -> list[_Piece]:
    mark = step["replacement"]
    strips = step.get("prepend_scheme", "always") != "never"
    return [_replaced(piece, mark, "" if strips and not index else " ") for index, piece in enumerate(pieces)]


def _byte_fallback(pieces: list[_Piece], step: _Step) -> list[_Piece]:
    """Decode runs of `<0xE2>` tokens as UTF-8; an invalid run becomes one U+FFFD per byte."""
    result: list[_Piece] = []
    for is_byte, run in groupby(pieces, lambda piece: _BYTE_TOKEN.fullmatch(_text(piece)) is not None):
        together = list(run)
        if not is_byte:
            result += together
            continue
        tokens = [(piece[0][1], piece[-1][2]) for piece in together]
        data = bytes(int(_text(piece)[3:5], 16) for piece in together)
        try:
            data.decode()
            result.append(_decoded(data, tokens))
        except UnicodeDecodeError:
            result += [[("\ufffd", *token)] for token in tokens]
    return result


def _byte_level(pieces: list[_Piece], step: _Step) -> list[_Piece]:
    """Every character stands for a byte; tokens with any other character stand for themselves."""
    data = bytearray()
    tokens = list[tuple[int, int]]()
    for piece in pieces:
        stands_for_bytes = all(character in _BYTE_OF for character, _, _ in piece)
        for character, first, last in piece:
            encoded = bytes([_BYTE_OF[character]]) if stands_for_bytes else character.encode()
            data += encoded
            tokens += [(first, last)] * len(encoded)
    return [_decoded(bytes(data), tokens)]


def _decoded(data: bytes, tokens: Sequence[tuple[int, int]]) -> _Piece:
    """UTF-8 to characters, by each byte's tokens; invalid bytes become U+FFFD, grouped as Rust and Python do."""
    piece: _Piece = []
    place = 0
    while place < len(data):
        try:
            valid = data[place:].decode()
            invalid = 0
        except UnicodeDecodeError as error:
            valid = data[place : place + error.start].decode()
            invalid = error.end - error.start
        widths = [(character, len(character.encode())) for character in valid]
        for character, width in [*widths, ("\ufffd", invalid)] if invalid else widths:
            piece.append((character, tokens[place][0], tokens[place + width - 1][1]))
            place += width
    return piece


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
    "Fuse": lambda pieces, step: [[*chain.from_iterable(pieces)]],
    "Join": lambda pieces, step: [*pieces[:1], *([(" ", piece[0][1], piece[0][1]), *piece] for piece in pieces[1:])],
    "Strip": _strip,
    "Metaspace": _metaspace,
}
