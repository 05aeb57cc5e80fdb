"""Tokens and the characters they wrote: by hand, against byte counts, and for any tokens of any known decoder."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.trained_tokenizers import BUILDERS, CORPUS, SPECIAL, trained
from trl_grpo_ext.credit.alignment import check_alignment, token_offsets
from trl_grpo_ext.errors import AlignmentError

TEXTS = [
    *CORPUS[:3],
    "",
    " ",
    "  two spaces  inside and out  ",
    "\n\n\t\r\n",
    "\x00\x01\x7f\x85\u2028 control",
    "👩‍👩‍👧🏽‍👦 🇩🇪 ☺️ a\u0301\u0323\u0308 \ufeff zero\u200bwidth",
    "漢字かな交じり文。한국어 ไทย हिन्दी",
    "اَلْعَرَبِيَّةُ (123) עִבְרִית \u202eabc\u202c",
    "\U0010ffff\U00010000\uffff\ud7ff",
    "\ufffd a real replacement character \ufffd",
    "a . b , c ! d ? it 's we 've you 're do not ca n't I 'm ' x '",
    "▁ Ġ ## </w> <0x41> <0xE2>",
]
BYTE_OF = {letter: byte for byte, letter in bytes_to_unicode().items()}


def aligned(tokenizer: Any, ids: list[int]) -> tuple[str, list[tuple[int, int]]]:
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return text, token_offsets(tokenizer, ids, text)


def encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def wrote(tokenizer: Any, words: list[str]) -> list[str]:
    """The text that each token, given as it stands in the vocabulary, wrote."""
    ids = [tokenizer.get_vocab()[word] for word in words]
    text, offsets = aligned(tokenizer, ids)
    return [text[start:end] for start, end in offsets]


def assert_sound(tokenizer: Any, ids: list[int]) -> None:
    """Ranges in order that cover the text, silent special tokens, and agreement with what prefixes decode to."""
    text, offsets = aligned(tokenizer, ids)
    assert len(offsets) == len(ids)
    assert all(0 <= start <= end <= len(text) for start, end in offsets)
    assert [start for start, _ in offsets] == sorted(start for start, _ in offsets)
    spoken = [(start, end) for start, end in offsets if end > start]
    assert [end for _, end in spoken] == sorted(end for _, end in spoken)
    assert set().union(*(range(start, end) for start, end in spoken)) == set(range(len(text)))
    special = set(tokenizer.all_special_ids)
    assert all(start == end for token, (start, end) in zip(ids, offsets, strict=True) if token in special)
    # Byte tokens in a row are decoded together: one that makes no character spoils those before it.
    # So a cut inside such a run is no clean one; every other cut is looked at.
    words = [str(token) for token in tokenizer.convert_ids_to_tokens(ids)]
    heard = [place for place, token in enumerate(ids) if token not in special]
    joined = [(a, b) for a, b in itertools.pairwise(heard) if words[a][:3] == words[b][:3] == "<0x"]
    in_a_run = {count for a, b in joined for count in range(a + 1, b + 1)}
    for count in [count for count in range(len(ids)) if count not in in_a_run]:
        prefix = tokenizer.decode(ids[:count], skip_special_tokens=True)
        if text.startswith(prefix) and not prefix.endswith("\ufffd"):  # nothing pending: a clean cut
            assert max((end for _, end in offsets[:count]), default=0) <= len(prefix)
            assert min((start for start, end in offsets[count:] if end > start), default=len(text)) >= len(prefix)


def test_byte_level_by_hand() -> None:
    # "€" is E2 82 AC. The space is Ġ, and E2 82 AC are written â Ĥ ¬ in the vocabulary of bytes.
    tokenizer = trained("byte_level")
    assert wrote(tokenizer, ["a", "Ġ", "â", "Ĥ", "¬", "b"]) == ["a", " ", "€", "€", "€", "b"]
    assert wrote(tokenizer, ["â", "<eos>", "Ĥ", "<pad>", "¬"]) == ["€", "", "€", "", "€"]
    assert wrote(tokenizer, ["<think>", "Ċ", "né w", "</think>", "<eos>"]) == ["<think>", "\n", "né w", "</think>", ""]
    # An unfinished character is one U+FFFD, however many bytes of it there are; a stray byte is one of its own.
    assert wrote(tokenizer, ["â", "Ĥ", "a"]) == ["\ufffd", "\ufffd", "a"]
    assert wrote(tokenizer, ["Ĥ", "Ĥ", "â"]) == ["\ufffd", "\ufffd", "\ufffd"]
    assert aligned(tokenizer, [tokenizer.get_vocab()[c] for c in "ĤĤâ"])[1] == [(0, 1), (1, 2), (2, 3)]
    # A vocabulary's entry of its own characters is not bytes: what was pending before it stays unfinished.
    assert wrote(tokenizer, ["Ã", "né w"]) == ["\ufffd", "né w"]


def test_offsets_of_a_token_across_two_characters() -> None:
    # "é" is C3 A9 (Ã ©); a token of A9 C3 lies across two of them.
    vocabulary = {"a": 0, "Ã": 1, "©Ã": 2, "©b": 3, "©": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    text, offsets = aligned(fast, [0, 1, 2, 2, 3, 0])
    assert text == "aéééba"
    assert offsets == [(0, 1), (1, 2), (1, 3), (2, 4), (3, 5), (5, 6)]


def test_sentencepiece_by_hand() -> None:
    tokenizer = trained("llama_2")
    assert wrote(tokenizer, ["▁", "a", "▁", "b"]) == ["", "a", " ", "b"]  # the first space is stripped
    assert wrote(trained("gemma"), ["▁", "a", "▁", "b"]) == [" ", "a", " ", "b"]
    assert wrote(tokenizer, ["a", "<0xE2>", "<0x82>", "<eos>", "<0xAC>", "a"]) == ["a", "€", "€", "", "€", "a"]
    # This decoder gives a run of bytes that is not UTF-8 as a whole one U+FFFD for each byte.
    assert wrote(tokenizer, ["<0x41>", "<0xE2>", "<0x82>", "a"]) == ["\ufffd", "\ufffd", "\ufffd", "a"]
    assert wrote(tokenizer, ["<0x20>", "a"]) == ["", "a"]  # stripped as well
    assert wrote(tokenizer, ["<eos>", "▁", "▁", "<think>"]) == ["", "", " ", "<think>"]


def test_metaspace_and_joined_words_by_hand() -> None:
    assert wrote(trained("unigram"), ["▁", "e", "▁", "e"]) == ["", "e", " ", "e"]
    assert wrote(trained("unigram_never"), ["▁", "e", "▁", "e"]) == [" ", "e", " ", "e"]
    assert wrote(trained("characters_joined"), ["a", "<eos>", "b", "."]) == ["a", "", " b", " ."]
    assert wrote(trained("characters"), ["a", "<eos>", "b", "."]) == ["a", "", "b", "."]


def test_the_clean_up_of_transformers_by_hand() -> None:
    cleaned = trained("byte_level_cleaned")
    # "a ." is "a." and its space is nobody's; "a ' b" is "a'b"; "do n't" loses its space too.
    assert wrote(cleaned, ["a", "Ġ", "."]) == ["a", "", "."]
    assert wrote(cleaned, ["a", "Ġ", "'", "Ġ", "b"]) == ["a", "", "'", "", "b"]
    assert wrote(cleaned, ["d", "o", "Ġ", "n", "'", "t"]) == ["d", "o", "", "n", "'", "t"]
    asked = trained("byte_level_asked_to_clean")  # transformers does not do it to byte-level BPE
    assert wrote(asked, ["a", "Ġ", "."]) == ["a", " ", "."]


@pytest.mark.parametrize("name", BUILDERS)
def test_texts(name: str) -> None:
    tokenizer = trained(name)
    check_alignment(tokenizer)
    special = tokenizer.all_special_ids
    assert token_offsets(tokenizer, special, "") == [(0, 0)] * len(special)
    for text in TEXTS:
        ids = encoded(tokenizer, text)
        for tokens in (ids, ids[::-1]):
            assert_sound(tokenizer, tokens)
        if name == "byte_level":
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
            pieces = [bytes(BYTE_OF[letter] for letter in word) for word in tokenizer.convert_ids_to_tokens(ids)]
            assert aligned(tokenizer, ids)[1] == byte_ranges_oracle(pieces, text)


@pytest.mark.parametrize("name", BUILDERS)
@given(st.data())
@settings(max_examples=60)
def test_any_tokens(name: str, data: st.DataObject) -> None:
    tokenizer = trained(name)
    vocabulary = tokenizer.get_vocab()
    awkward = [vocabulary[w] for w in [*SPECIAL, "<think>", "né w", ".", "'", "▁", "Ġ", "â", "Ĥ"] if w in vocabulary]
    awkward += [vocabulary[w] for w in ["<0xE2>", "<0x82>", "<0xAC>", "<0x20>", "<0x41>"] if w in vocabulary]
    token = st.integers(0, len(tokenizer) - 1) | st.sampled_from(awkward)
    assert_sound(tokenizer, data.draw(st.lists(token, max_size=30)))


def byte_ranges_oracle(pieces: list[bytes], text: str) -> list[tuple[int, int]]:
    """Offsets by counting bytes, with no decoder at all: characters whose bytes meet the token's."""
    ends = [len(text[: i + 1].encode()) for i in range(len(text))]
    starts = [0, *ends][: len(text)]
    offsets, position = [], 0
    for piece in pieces:
        meets = [i for i in range(len(text)) if starts[i] < position + len(piece) and ends[i] > position]
        here = meets[0] if meets and piece else sum(end <= position for end in ends)
        offsets.append((here, meets[-1] + 1) if meets and piece else (here, here))
        position += len(piece)
    return offsets


class Shouts:
    """A decoder written in Python."""

    def decode_chain(self, tokens: list[str]) -> list[str]:
        return [token.upper() for token in tokens]


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence([decoders.CTC("-", "|", False), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace(Regex("-+"), "+"), decoders.Fuse()]),  # another dialect than Python's
        decoders.Decoder.custom(Shouts()),
    ],
    ids=["CTC", "regular expression", "in Python"],
)
def test_offsets_refuse_an_unknown_decoder(decoder: Any) -> None:
    backend = Tokenizer(models.WordLevel({"a-": 0, "b": 1, "-": 2}, unk_token="b"))
    fast = PreTrainedTokenizerFast(tokenizer_object=backend)
    fast.backend_tokenizer.decoder = decoder
    with pytest.raises(AlignmentError, match=r"with \w+: .*tokenizers"):
        check_alignment(fast)


def test_a_tokenizer_that_cannot_be_aligned_is_refused_by_name() -> None:
    with pytest.raises(AlignmentError, match="ByT5Tokenizer"):
        check_alignment(ByT5Tokenizer(extra_ids=0))
    with pytest.raises(AlignmentError, match="decodes"):
        token_offsets(trained("byte_level"), encoded(trained("byte_level"), "The answer is 18."), "The answer is 18")


def test_offsets_of_several_tokens_as_one_text() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="c"))
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "xyz")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    text = tokenizer.decode([2, 0, 1, 2])
    assert text == "cxyzc"
    assert token_offsets(tokenizer, [2, 0, 1, 2], text) == [(0, 1), (1, 4), (1, 4), (4, 5)]
