"""Small tokenizers of every usual algorithm, trained on the spot, so that no test needs a download."""

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The answer is 18 because 3 * 6 = 18. Don't panic, it's fine! We've done it, haven't we?",
    "<think>\nFirst, add 12 and 30.\n\nThen divide by 7.\n</think>\n<answer>6</answer>",
    "naïve café Übergröße \\frac{1}{2} 你好世界 שלום עולם 👩‍👩‍👧 e\u0301 ﷽ tab\there",
] * 4
SPECIAL = ["<pad>", "<eos>", "<unk>"]


def _wrapped(tokenizer: Tokenizer, **settings: Any) -> Any:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    texts = ("<think>", "</think>", "né w")  # not special: the decoder must leave them whole
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in texts])
    named = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{**named, **settings})


def byte_level(**settings: Any) -> Any:
    """GPT-2, Llama 3, Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _wrapped(tokenizer, **settings)


def sentencepiece_bpe(strip: bool = True, metaspace: bool = False) -> Any:
    """Llama 2 and Mistral; without the stripping, Gemma; with Metaspace, other conversions of SentencePiece."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    if metaspace:
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=SPECIAL, show_progress=False, limit_alphabet=60)
    tokenizer.train_from_iterator(CORPUS, trainer)
    state = json.loads(tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    return _wrapped(Tokenizer.from_str(json.dumps(state)))


def unigram(scheme: str = "always") -> Any:
    """T5, XLM-R."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    usual = {"special_tokens": SPECIAL, "unk_token": "<unk>", "show_progress": False}
    tokenizer.train_from_iterator(CORPUS, trainers.UnigramTrainer(vocab_size=150, max_piece_length=6, **usual))
    return _wrapped(tokenizer)


def characters(fuse: bool) -> Any:
    """One token for each character; without a decoder, the tokens are joined by spaces."""
    alphabet = sorted(set("".join(CORPUS)))
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate([*alphabet, "<unk>"])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if fuse:
        tokenizer.decoder = decoders.Fuse()
    return _wrapped(tokenizer)


BUILDERS = {
    "byte_level": byte_level,
    "byte_level_cleaned": lambda: byte_level(
        clean_up_tokenization_spaces=True, clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True
    ),
    "byte_level_asked_to_clean": lambda: byte_level(clean_up_tokenization_spaces=True),
    "llama_2": sentencepiece_bpe,
    "gemma": lambda: sentencepiece_bpe(strip=False),
    "byte_fallback_metaspace": lambda: sentencepiece_bpe(metaspace=True),
    "unigram": unigram,
    "unigram_first": lambda: unigram("first"),
    "unigram_never": lambda: unigram("never"),
    "characters": lambda: characters(fuse=True),
    "characters_joined": lambda: characters(fuse=False),
}


@cache
def trained(name: str) -> Any:
    return BUILDERS[name]()
