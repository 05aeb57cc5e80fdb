"""Breaking up what a chat template or a tokenizer would read as the mark of a turn, wherever it stands in a text.

Characters are compared as some tokenizers normalise them: full-width ones count as ASCII, invisible ones not at all.
"""

import importlib
import json
import re
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_SHAPES = re.compile(
    r"<(?=\|)|\|(?=>)"  # <|im_end|>, <turn|>
    r"|\[(?=\|[^\s|\[\]]{1,40}\|\])"  # [|endofturn|]
    r"|[\[\]](?=\w{0,2}[~!][\w~!]{0,4}[\[\]])"  # ]~b]user
    r"|\[(?=/?[A-Z][A-Z0-9_]{2,40}\])"  # [INST], [SYSTEM_PROMPT]
    r"|<(?=/?(?P<angle>[\w:.▁ -]{1,40})>)|\[(?=/?(?P<square>[\w:.▁ -]{1,40})\])"  # if one of these words stands in it
)
# fmt: off
_WORDS = frozenset({
    "s", "bos", "eos", "pad", "unk", "sep", "cls", "mask", "gmask", "eot", "eod", "eom", "eop", "sop", "eoh",
    "eoa", "eoc", "bot", "of", "end", "turn", "utterance", "im", "inst", "sys", "endoftext", "endofturn",
    "startofturn", "user", "assistant", "system", "human", "role", "tool", "special", "unused", "reserved",
    "extra", "fim", "ctrl", "control",
})
# fmt: on
"""Words of special tokens between `<>` or `[]`, where neither HTML nor prose has them."""
_BETWEEN_WORDS = re.compile(r"[_:.▁ -]+|(?<=[a-z])(?=[0-9])")
_INVISIBLE = frozenset("\u034f\u115f\u1160\u3164\uffa0" + "".join(map(chr, range(0xFE00, 0xFE10))))


def broken_up(text: str, special_tokens: Sequence[str] = ()) -> str:
    """The text with a space inside each of these tokens, and inside everything that looks like the mark of a turn."""
    plain, places = _plain(text)
    cuts = {match.start() for match in _SHAPES.finditer(plain) if _is_marker(match)}
    if special_tokens:
        known = "|".join(re.escape(_plain(token)[0]) for token in special_tokens)
        cuts |= {match.start() for match in re.finditer(f"(?={known})", plain)}
    parts = []
    done = 0
    for cut in sorted(places[cut] + 1 for cut in cuts):
        parts += [text[done:cut], " "]
        done = cut
    return "".join([*parts, text[done:]])


def _is_marker(match: re.Match[str]) -> bool:
    name = match["angle"] or match["square"]
    return name is None or not _WORDS.isdisjoint(_BETWEEN_WORDS.split(name.lower()))


def _plain(text: str) -> tuple[str, Sequence[int]]:
    """The text as the loosest tokenizer sees it, and the place of each of its characters in the text."""
    if text.isascii():
        return text, range(len(text))
    seen = [
        (form, place)
        for place, character in enumerate(text)
        if unicodedata.category(character) != "Cf" and character not in _INVISIBLE
        for form in unicodedata.normalize("NFKC", character)
    ]
    return "".join(form for form, _ in seen), [place for _, place in seen]


def special_tokens(model: str) -> list[str]:
    """The special tokens of a model's tokenizer, if its files are here: in this folder, or in the cache of the hub."""
    tokens: set[str] = set()
    for name, key in (("tokenizer.json", "added_tokens"), ("tokenizer_config.json", "added_tokens_decoder")):
        with suppress(ImportError, OSError, ValueError, AttributeError):  # not there, or no tokenizer's
            file = Path(model) / name
            if not Path(model).is_dir():  # the hub's package here, because most rewards do without
                file = Path(str(importlib.import_module("huggingface_hub").try_to_load_from_cache(model, name)))
            found = json.loads(file.read_text(encoding="utf-8")).get(key, ())
            for token in found.values() if isinstance(found, dict) else found:
                content = token.get("content")
                if token.get("special") and isinstance(content, str) and len(content) > 1 and not content.isalnum():
                    tokens.add(content)
    return sorted(tokens)
