"""The table of containers that two processes share: what has not crossed for long leaves it, and nothing else."""

from typing import Any

from trl_grpo_ext.rewards._sandbox.wire import KEPT_FOR, MAX_TWINS, Codec


class Side(Codec):
    forgets = True


def test_codec_forgets_what_has_not_crossed_for_long() -> None:
    side, other = Side(0), Codec(1)
    kept, changed, old = [1], list[Any](), [[row] for row in range(MAX_TWINS)]
    there = other.unpack(side.pack([kept, changed, old]))
    for _ in range(KEPT_FOR):
        message = side.pack(kept)
        assert message[2] == []
        other.unpack(message)
    changed.append(5)
    message = side.pack(kept)
    other.unpack(message)
    assert len(message[2]) == len(old) + 2  # the rows, the list of them and the list of all
    assert there[1] == [5], "what has changed is sent before it is forgotten"
    assert other.unpack(side.pack([kept, changed, old[:2]])) == [[1], [5], [[0], [1]]]
    assert there[0] is other.unpack(side.pack(kept))
