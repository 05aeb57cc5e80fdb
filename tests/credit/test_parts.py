"""The tokens that wrote each part of a reward, and what is logged of parts."""

import itertools
import math
import random
from typing import Any

import pytest
import torch

from tests.contexts import Ranks, cut, make_rollout
from trl_grpo_ext.credit.parts import agreed_names, label, names_of, part_metrics
from trl_grpo_ext.errors import PluginOutputError
from trl_grpo_ext.types import END, WHOLE, Part, Parts, Place, Rollout, Span


def texts_and_offsets(texts: list[str], offsets: list[list[tuple[int, int]]], **settings: Any) -> Rollout:
    return make_rollout(
        [len(row) for row in offsets], texts=texts, completions=texts, offsets=lambda row: offsets[row], **settings
    )


def of_row_1(row: int) -> list[tuple[int, int]]:
    """Offsets that nobody may ask for of another row."""
    assert row == 1
    return [(0, 1), (1, 2)]


class TestTokens:
    def test_by_hand(self) -> None:
        # "ab", "", "c", "cd" (the c is cut over two tokens), "e": a special token writes nothing.
        offsets = [[(0, 2), (2, 2), (2, 3), (2, 4), (4, 5)]]
        for place, tokens in {
            (0, 5): [1, 0, 1, 1, 1, 0],
            (1, 2): [1, 0, 0, 0, 0, 0],
            (2, 3): [0, 0, 1, 1, 0, 0],
            (3, 4): [0, 0, 0, 1, 0, 0],
            (2, 2): [0] * 6,
            (5, 5): [0] * 6,
            END: [0, 0, 0, 0, 1, 0],
            WHOLE: [0] * 6,  # it has no tokens of its own
            Place(turn=0): [1, 1, 1, 1, 1, 0],
        }.items():
            table = texts_and_offsets(["abcde"], offsets, width=6, parts={"r": [Parts({"a": (1.0, place)})]}).parts["r"]
            # The end of the text is of one token's characters and the range of a place is without holes.
            expected = [1, 1, 1, 1, 1, 0] if place == (0, 5) else tokens
            assert table.tokens(0).int().tolist() == [expected], place
            assert table.whole_B_M.tolist() == [[place == WHOLE]]

    def test_tables_by_hand(self) -> None:
        first = Parts([Part("a", 1.0, 2.0, (0, 1)), Part("b", None), Part("c", 0.5, places=Place(turn=0))])
        second = Parts({"d": 0.0, "a": (0.25, None)})
        rollout = make_rollout([2, 2, 2, 2], parts={"r": [first, second, None, 3.0]})
        table = rollout.parts["r"]
        assert list(rollout.parts) == ["r"]
        assert table.names == ("a", "b", "c", "d")
        nan = [math.nan] * 4
        expected = torch.tensor([[1.0, math.nan, 0.5, math.nan], [0.25, math.nan, math.nan, 0.0], nan, nan])
        assert torch.equal(table.scores_B_M.float().nan_to_num(nan=-9.0), expected.nan_to_num(nan=-9.0))
        assert table.weights_B_M.tolist() == [[2, 0, 1, 0], [1, 0, 0, 1], [0] * 4, [0] * 4]
        assert table.whole_B_M.int().tolist() == [[0] * 4, [0, 0, 0, 1], [0] * 4, [0] * 4]
        assert table.turns_B_M.tolist() == [[-1, -1, 0, -1], *[[-1] * 4] * 3]

    def test_against_a_loop_over_random_texts(self) -> None:
        draw = random.Random(3)
        for _ in range(20):
            offsets, rows = [], []
            for _ in range(3):
                ends = [0]
                for _ in range(draw.randrange(8)):
                    ends.append(ends[-1] + draw.choice([0, 0, 1, 2, 3]))
                offsets.append(list(itertools.pairwise(ends)))
                pairs = [sorted(draw.choices(range(ends[-1] + 1), k=2)) for _ in range(4)]
                places: list[Any] = [[tuple(pair) for pair in pairs[:2]], tuple(pairs[2]), None, tuple(pairs[3])]
                rows.append(Parts({name: (1.0, place) for name, place in zip("abcd", places, strict=True)}))
            texts = ["x" * (row[-1][1] if row else 0) for row in offsets]
            table = texts_and_offsets(texts, offsets, parts={"r": rows}).parts["r"]
            for part in range(4):
                for row, score in enumerate(rows):
                    wrote = set()
                    for start, end, _ in score.parts[part].places:  # type: ignore[misc, union-attr]
                        characters = range(start, end)
                        spans = [t for t, (s, e) in enumerate(offsets[row]) if {*range(s, e)} & {*characters}]
                        wrote |= set(range(spans[0], spans[-1] + 1)) if spans else set()
                    found = table.tokens(part)[row].nonzero().flatten().tolist()
                    assert found == sorted(wrote)

    def test_rows_without_places_of_characters_are_not_aligned(self) -> None:
        rows = [Parts({"a": (1.0, Place(turn=0))}), Parts({"a": (1.0, (1, 2))}), Parts({"a": 1.0})]
        texts = ["xx", "xy", "zz"]
        table = make_rollout([2, 2, 2], texts=texts, completions=texts, offsets=of_row_1, parts={"r": rows})
        assert table.parts["r"].tokens(0).int().tolist() == [[1, 1], [0, 1], [0, 0]]

    def test_a_place_that_cannot_be_found_stops_only_who_reads_places(self) -> None:
        unaligned = Rollout.__dataclass_fields__["offsets"].default
        table = make_rollout([2], offsets=unaligned, parts={"r": [Parts({"a": (0.5, (0, 1))})]}).parts["r"]
        assert table.scores_B_M.tolist() == [[0.5]]
        with pytest.raises(PluginOutputError, match="offsets"):
            table.tokens(0)
        outside = make_rollout([2, 2], parts={"r": [None, Parts({"a": (1.0, (1, 3))})]}).parts["r"]
        with pytest.raises(PluginOutputError, match=r"'r' .* 1 to 3 of row 1"):
            outside.tokens(0)

    def test_some_rows(self) -> None:
        rows = [Parts({"a": (float(n), (n, n + 1)), "b": 1.0}) for n in range(3)]
        table = make_rollout([3, 3, 3], parts={"r": rows}).parts["r"].rows(slice(1, 3))
        assert table.scores_B_M[:, 0].tolist() == [1, 2]
        assert table.tokens(0).int().tolist() == [[0, 1, 0], [0, 0, 1]]


RANKS: list[dict[str, list[Any]]] = [
    {"r": [Parts({"a": 1.0, "b": (0.5, None)}).parts, ()]},
    {},
    {"s": [Parts({"é\ud800\n": 2.0}).parts, ()], "r": [Parts({"c": (0.0, (0, 1)), "b": None}).parts, ()]},
]


def on_ranks(call: Any) -> list[Any]:
    """Run on three ranks of two completions with a gather as the trainer's."""
    ranks = Ranks(cut(make_rollout([1] * 6), [2, 2, 2]))
    return ranks.run(lambda rollout: call(RANKS[(rollout.local_rows.start or 0) // 2], rollout.gather))


def test_names_are_agreed_on_by_all_ranks() -> None:
    first, *others = on_ranks(agreed_names)
    assert first == {"r": ("a", "b", "c"), "s": ("é\ud800\n",)}
    assert all(other == first for other in others)
    assert names_of(RANKS[0]["r"]) == ("a", "b")


def test_metrics_by_hand() -> None:
    first, *others = on_ranks(lambda rows, gather: part_metrics(rows, agreed_names(rows, gather), gather))
    assert all(other == first for other in others)
    by_hand = {"r/a": (1.0, 1.0), "r/b": (0.5, 0.0), "r/c": (0.0, 1.0), "s/é??": (2.0, 1.0)}
    assert {name: (first.pop(f"parts/{name}/mean"), first.pop(f"parts/{name}/present")) for name in by_hand} == by_hand
    assert not first
    assert label("x" * 99) == "x" * 60
    assert part_metrics({}, {}, lambda tensor: pytest.fail("it gathered")) == {}


def test_parts_after_the_first_32_have_one_metric() -> None:
    rows = [Parts({f"p{n}": (float(n == 40), None if n == 39 else (0, 1)) for n in range(42)}).parts]
    metrics = part_metrics({"r": rows}, {"r": names_of(rows)}, lambda tensor: tensor)
    assert len(metrics) == 2 * 33
    assert metrics["parts/r/others/mean"] == 0.1
    assert metrics["parts/r/others/present"] == 0.9


class TestSpanValues:
    def test_by_hand(self) -> None:
        # "ab", "", "c", "cd" (the c is cut over two tokens), "e": a special token writes nothing.
        rollout = texts_and_offsets(["abcde"], [[(0, 2), (2, 2), (2, 3), (2, 4), (4, 5)]], width=6)
        assert rollout.span_values([[(0, 3, 1.0), (2, 5, -0.5)]]).tolist() == [[1, 0, 0.5, 0.5, -0.5, 0]]
        assert rollout.span_values([[(2, 2, 9.0), (5, 5, 9.0), (0, 0, 9.0)]]).tolist() == [[0] * 6]
        assert rollout.span_values([None]).tolist() == rollout.span_values([[]]).tolist() == [[0] * 6]

    def test_rows_keep_to_themselves_and_empty_ones_are_not_asked(self) -> None:
        rollout = make_rollout([0, 2, 2], texts=["", "xy", "zz"], offsets=of_row_1)
        assert rollout.span_values([None, [(1, 2, 1.0)], []]).tolist() == [[0, 0], [0, 1], [0, 0]]

    @pytest.mark.parametrize(
        "span", [(-1, 1, 1.0), (0, 3, 1.0), (2, 1, 1.0), (0, 1, math.nan), (0, 1, math.inf), (3, 3, 1.0)]
    )
    def test_a_span_that_cannot_be_is_refused_with_its_row(self, span: Span) -> None:
        with pytest.raises(PluginOutputError, match=r"row 1 .* 2 characters"):
            make_rollout([2, 2]).span_values([None, [span]])
