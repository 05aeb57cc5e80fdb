"""Which characters of a completion's text did each token write?

A tokenizer decodes all tokens at once, and encoding the text again need not give the tokens that the model sampled. So
nothing is encoded here. Instead, the steps of the tokenizer's own decoder run again on the sampled tokens, and every
character remembers the tokens it came from; the result must equal the tokenizer's text exactly. If the decoder is not
one of those known here (a tokenizer written in Python, say), prefixes of the tokens are decoded, a few at a time.
Prefixes alone would not do: some decoders (Llama 2, Mistral, Gemma) replace a whole run of byte tokens if one of them
is invalid and so change earlier text; more than half of all random completions then have no alignment
(`bench/text_alignment.py` counts them).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import AlignmentError
from .decoder_steps import REPLACEMENT, offsets_by_decoder

_CONTEXT, _BLOCK, _STRETCH = 8, 16, 64  # tokens: decoded along, decoded again, and how far to look for a safe cut
_PROBE = "Hé, 1 234.5 + x_1!\n\n\t  naïve ﷽ 你好 שלום 👩‍👩‍👧 e\u0301 <think>don't</think> \\frac{1}{2} "


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
    return offsets_by_prefixes(tokenizer, tokens, text) if offsets is None else offsets


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


def offsets_by_prefixes(tokenizer: Any, ids: list[int], text: str) -> list[tuple[int, int]]:
    """Offsets from decoding longer and longer prefixes, in blocks that start a few tokens early."""
    silent = set(getattr(tokenizer, "all_special_ids", ()))
    offsets: list[tuple[int, int]] = []
    place = 0  # characters of the text that are settled, with the tokens that have offsets
    while len(offsets) < len(ids):
        early = max(0, len(offsets) - _CONTEXT)
        before = _decode(tokenizer, ids[early : len(offsets)])
        end, after = _block_end(tokenizer, ids, early, len(offsets), before, text, place, silent)
        shift = place - len(before)
        known, previous = len(before), before
        for token in range(len(offsets), end):
            so_far = _decode(tokenizer, ids[early : token + 1])
            common = _shared(so_far, after)
            if so_far[common:].strip(REPLACEMENT + " "):
                raise _unaligned(tokenizer, ids)
            start, known = known, max(known, common)
            cut = so_far[common : common + 1] == REPLACEMENT and known < len(after)
            if ids[token] in silent:
                offsets.append((start + shift, start + shift))
            elif so_far == previous and so_far.endswith(REPLACEMENT) and start == known and not cut:
                offsets.append((start - 1 + shift, start + shift))  # one more byte of what makes no character
            elif known + cut == start < len(after) and not after[start].isspace():
                # Some decoders leave unfinished characters out, and then only the later bytes seem to write them.
                without = _decode(tokenizer, [*ids[early:token], *ids[token + 1 : end]])
                offsets.append((start + shift, start + (without != after) + shift))
            else:
                offsets.append((start + shift, known + cut + shift))
            previous = so_far
        place += len(after) - len(before)
    reached = 0
    for start, end in offsets:
        if start > reached:
            raise _unaligned(tokenizer, ids)
        reached = max(reached, end)
    if reached != len(text):
        raise _unaligned(tokenizer, ids)
    return offsets


def _block_end(
    tokenizer: Any, ids: list[int], early: int, done: int, before: str, text: str, place: int, silent: set[int]
) -> tuple[int, str]:
    """Where a block of tokens may end: the text contains what it wrote, and no character is split."""
    for end in range(min(done + _BLOCK, len(ids)), min(done + _BLOCK + _STRETCH, len(ids)) + 1):
        after = _decode(tokenizer, ids[early:end])
        written = after[len(before) :]
        is_last = end == len(ids)
        if not after.startswith(before) or not text.startswith(written, place):
            continue
        if is_last and place + len(written) == len(text):
            return end, after
        last = next((token for token in range(end - 1, done - 1, -1) if ids[token] not in silent), None)
        pending = last is not None and (written.endswith(REPLACEMENT) or _decode(tokenizer, ids[early:last]) == after)
        if not is_last and not pending:
            return end, after
    raise _unaligned(tokenizer, ids)


def _shared(one: str, other: str) -> int:
    """The length of two texts' common prefix, in characters."""
    same = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(same) if a != b), min(len(one), len(other)))


def _unaligned(tokenizer: Any, ids: list[int]) -> AlignmentError:
    return AlignmentError(
        f"Which of the {len(ids)} tokens wrote which characters cannot be found with {type(tokenizer).__name__}. Use a "
        "fast tokenizer of the tokenizers library (use_fast=True) with clean_up_tokenization_spaces=False, or leave "
        "out the hooks that need offsets or spans."
    )
