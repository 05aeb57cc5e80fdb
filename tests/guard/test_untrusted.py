"""Settings files and texts that somebody else wrote: hostile ones are one sentence, honest ones are read."""

import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.guard.untrusted import MOST_BYTES, as_json, one_line, parse_yaml, printable, read_settings


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x00\x01\xff\xfe", "cannot be read"),
        (b"a: " + b"x" * MOST_BYTES, "too many for settings"),
        (b"[" * 200_000, "cannot be read"),
        (b"", "holds None, not settings"),
        (b"a: !!python/object/apply:os.system ['touch hacked']", "cannot be read"),
        (b"beta: 0.1\nlearning_rate: 1\nbeta: 0.0\n", r"the key 'beta' twice \(line 3\): keep one"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_hostile_or_wrong_file_is_one_sentence(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=words) as refusal:
        read_settings(file)
    assert len(str(refusal.value)) < 600
    assert not (tmp_path / "hacked").exists()


def test_json_and_paths_are_held_to_the_same(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "gone", "a\0b"):
        with pytest.raises(ConfigurationError):
            read_settings(path)
    file = tmp_path / "ds.json"
    for content in ("[" * 100_000, '{"a": 1, "a": 2}'):
        file.write_text(content)
        with pytest.raises(ConfigurationError, match=r"ds\.json"):
            read_settings(file)


def test_honest_settings_are_read_as_yaml_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("base: &base {a: 1, b: [x, 2.5]}\nother:\n  <<: *base\n  a: 2\nrate: 1e-3\n1: one\n")
    assert read_settings(file) == {
        "base": {"a": 1, "b": ["x", 2.5]},
        "other": {"a": 2, "b": ["x", 2.5]},
        "rate": "1e-3",
        "1": "one",
    }
    assert parse_yaml("{rate: 1e-3, n: 2E+1}", "it", exponents=True) == {"rate": 0.001, "n": 20.0}


def test_text_for_a_terminal() -> None:
    assert printable("a\tb\nc\x1b[31m\ud800\u200e") == "a\\tb\nc\\x1b[31m\\ud800\\u200e"
    assert one_line("a\x1b[31mb\u202ec\nd\te") == "a\\x1b[31mb\\u202ec d e"
    assert len(one_line("x" * 10_000_000, 300)) == 300


def test_values_as_json() -> None:
    mixed = {1: (Fraction(1, 2), torch.tensor(2.0), math.nan), "s": {"x"}, "n": None, "b": True, "o": torch.float32}
    assert as_json(mixed) == {"1": [0.5, 2.0, None], "s": ["x"], "n": None, "b": True, "o": "torch.float32"}
