"""sign_scaling, repetition_penalty and truncation_masking: by hand, against loops, and at their edges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.advantages.token_batches import Rows, after_rollout, hook, live_places, rollouts
from tests.contexts import Ranks, cut, make_rollout, padded
from trl_grpo_ext.credit import flow
from trl_grpo_ext.types import Rollout


def test_sign_scaling_of_tokens_by_hand() -> None:
    rollout = make_rollout([3, 2], width=3)
    incoming = padded([[1.0, -2.0, 0.0], [-0.5, 4.0]], width=3)
    hooks = [hook("sign_scaling", positive=0.5, negative=2.0)]
    expected = [[0.5, -4, 0], [-1, 2, 0]]
    assert flow.apply_rollout_hooks(incoming, hooks, rollout).tolist() == expected


def test_weighted_reinforce() -> None:
    # The paper's method: rewards of 1 and -1, no baseline, successes at λ = 0.1.
    rollout = make_rollout([1] * 4, [1.0, -1.0, -1.0, 1.0])
    hooks = [hook("raw_reward"), hook("w_reinforce")]
    result = flow.apply_rollout_hooks(torch.zeros(4, dtype=torch.float64), hooks, rollout)
    assert result.squeeze(1).tolist() == [0.1, -1, -1, 0.1]


@given(
    st.lists(st.lists(st.floats(-50, 50), min_size=3, max_size=3), min_size=1, max_size=5),
    st.floats(0, 10),
    st.floats(0.01, 10),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_sign_scaling_equals_a_loop_on_any_number_of_ranks(
    rows: list[list[float]], positive: float, negative: float, data: st.DataObject
) -> None:
    lengths = [data.draw(st.integers(0, 3)) for _ in rows]
    first = data.draw(st.integers(0, len(rows)))
    incoming = torch.tensor(rows, dtype=torch.float64)
    hooks = [hook("sign_scaling", positive=positive, negative=negative)]
    expected = [
        [(positive if a > 0 else negative) * a if t < length else 0.0 for t, a in enumerate(row)]
        for row, length in zip(rows, lengths, strict=True)
    ]
    parts = Ranks(cut(make_rollout(lengths, width=3), [first, len(rows) - first])).run(
        lambda rollout: flow.apply_rollout_hooks(incoming[rollout.local_rows], hooks, rollout)
    )
    for values, wanted in zip(torch.cat(parts).tolist(), expected, strict=True):
        assert values == pytest.approx(wanted, rel=1e-12)


def punished(text: str, ngram: int) -> str:
    """The letters that get the penalty, dots for the others."""
    ids = torch.tensor([[ord(letter) for letter in text]])
    rollout = make_rollout([len(text)], completion_ids_B_T=ids)
    (row,) = after_rollout(rollout, [1.0], "repetition_penalty", ngram=ngram, penalty=0.25)
    assert set(row) <= {1.0, 0.75}
    return "".join(letter if value == 0.75 else "." for letter, value in zip(text, row, strict=True))


class TestRepetition:
    @pytest.mark.parametrize(
        ("text", "ngram", "expected"),
        [
            ("abcxabcy", 3, "....abc."),  # the first occurrence is not punished
            ("abcxabcy", 4, "........"),
            ("abcxabcy", 2, "....abc."),  # ab and bc
            ("abcabcabc", 3, "...abcabc"),  # bca, cab too
            ("aaaa", 3, ".aaa"),  # occurrences may overlap
            ("aaaa", 4, "...."),
            ("abab", 1, "..ab"),
            ("abxab", 2, "...ab"),  # at the very end
            ("ab", 3, ".."),  # shorter than an n-gram
            ("abcdeabcde", 5, ".....abcde"),  # not a power of two
        ],
    )
    def test_by_hand(self, text: str, ngram: int, expected: str) -> None:
        assert punished(text, ngram) == expected

    @given(rollouts(longest=12), st.integers(1, 7))
    @settings(max_examples=100, deadline=None)
    def test_equals_a_loop_with_a_set(self, rollout: Rollout, ngram: int) -> None:
        rows = after_rollout(rollout, [1.0] * len(rollout.prompts), "repetition_penalty", ngram=ngram, penalty=0.25)
        for row, values in enumerate(rows):
            length = int(rollout.completion_mask_B_T[row].sum())
            tokens = rollout.completion_ids_B_T[row].tolist()[:length]
            seen, bad = set(), set()
            for start in range(length - ngram + 1):
                gram = tuple(tokens[start : start + ngram])
                if gram in seen:
                    bad |= set(range(start, start + ngram))
                seen.add(gram)
            for place in live_places(rollout, row):
                assert values[place] == (0.75 if place in bad else 1.0)

    def test_the_default_looks_at_forty_tokens(self) -> None:
        ids = torch.cat([torch.arange(40), torch.tensor([99]), torch.arange(40)]).unsqueeze(0)
        (row,) = after_rollout(make_rollout([81], completion_ids_B_T=ids), [1.0], "repetition_penalty")
        assert row == pytest.approx([1.0] * 41 + [0.95] * 40)
        (row,) = after_rollout(make_rollout([80], completion_ids_B_T=ids[:, :80]), [1.0], "repetition_penalty")
        assert row == [1.0] * 80

    def test_large_vocabularies_and_long_batches_do_not_collide(self) -> None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 260_000, (16, 4000), generator=generator)
        ids[3, 3000:3040] = ids[3, 100:140]
        result = flow.apply_rollout_hooks(
            torch.ones(16), [hook("repetition_penalty")], make_rollout([4000] * 16, completion_ids_B_T=ids)
        )
        changed = (result != 1).nonzero().tolist()
        assert changed == [[3, place] for place in range(3000, 3040)]


def masked(advantages: list[float], truncated: list[bool], **parameters: str) -> Rows:
    rollout = make_rollout([2] * len(advantages), truncated_B=torch.tensor(truncated))
    return after_rollout(rollout, advantages, "truncation_masking", **parameters)


class TestTruncation:
    def test_by_hand(self) -> None:
        truncated = [True, True, False, False]
        assert masked([1.0, -1.0, 1.0, -1.0], truncated) == [[0, 0], [0, 0], [1, 1], [-1, -1]]
        assert masked([1.0, -1.0, 1.0, -1.0], truncated, keep="negative") == [[0, 0], [-1, -1], [1, 1], [-1, -1]]

    def test_keep_looks_at_each_token(self) -> None:
        rollout = make_rollout([3], truncated_B=torch.tensor([True]))
        incoming = torch.tensor([[1.0, -2.0, 3.0]])
        result = flow.apply_rollout_hooks(incoming, [hook("truncation_masking", keep="negative")], rollout)
        assert result.tolist() == [[0, -2, 0]]

    @given(rollouts(), st.booleans())
    @settings(max_examples=60, deadline=None)
    def test_equals_a_loop(self, rollout: Rollout, keep: bool) -> None:
        advantages = [1.5 - row for row in range(len(rollout.prompts))]
        parameters = {"keep": "negative"} if keep else {}
        rows = after_rollout(rollout, advantages, "truncation_masking", **parameters)
        for row, advantage in enumerate(advantages):
            if rollout.truncated_B[row]:
                advantage = min(advantage, 0.0) if keep else 0.0
            live = live_places(rollout, row)
            assert rows[row] == [advantage if place in live else 0.0 for place in range(len(rows[row]))]
