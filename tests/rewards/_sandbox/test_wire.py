"""The table of containers that two processes share: what nothing refers to any more leaves it, and nothing else."""

from typing import Any

from trl_grpo_ext.rewards._sandbox.wire import Codec


class Side(Codec):
    forgets = True


def test_codec_forgets_what_nothing_refers_to_and_keeps_the_rest() -> None:
    side, other = Side(0), Codec(1)
    kept: list[Any] = [1]
    ways_to_hold = {"key": kept}
    changed: list[Any] = []
    again = other.unpack(side.pack([kept, ways_to_hold, changed, [2], {3}, {"a": [4]}]))
    assert again == [[1], {"key": [1]}, [], [2], {3}, {"a": [4]}]
    changed.append(5)
    del ways_to_hold
    forgotten = []
    for _ in range(4):  # what a container held goes with the next message
        message = side.pack(None)
        forgotten += message[2]
        other.unpack(message)
    assert len(forgotten) == 6  # the list of all, the mapping, [2], {3}, {"a": [4]} and [4]
    assert again[2] == [5]
    assert other.unpack(side.pack([kept, changed])) == [[1], [5]]
