"""Which characters of a completion's text did each token write?

A tokenizer decodes all tokens at once, and encoding the text again need not give the tokens that the model sampled. So
nothing is encoded here. Instead, the steps of the tokenizer's own decoder run again on the sampled tokens, and every
character remembers the tokens it came from; the result must equal the tokenizer's text exactly.
"""

from collections.abc import Sequence
from typing import Any

from ..errors import AlignmentError
from .decoder_steps import offsets_by_decoder

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
