"""The transforms: by hand, against loops, on several ranks, and at their edges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.advantages.token_batches import Rows, after_rollout, hook, live_places, on_ranks, rollouts
from tests.contexts import Ranks, cut, make_rollout, padded
from trl_grpo_ext.credit import flow
from trl_grpo_ext.errors import ConfigurationError
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
@settings(max_examples=60)
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
    @settings(max_examples=100)
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
    @settings(max_examples=60)
    def test_equals_a_loop(self, rollout: Rollout, keep: bool) -> None:
        advantages = [1.5 - row for row in range(len(rollout.prompts))]
        parameters = {"keep": "negative"} if keep else {}
        rows = after_rollout(rollout, advantages, "truncation_masking", **parameters)
        for row, advantage in enumerate(advantages):
            if rollout.truncated_B[row]:
                advantage = min(advantage, 0.0) if keep else 0.0
            live = live_places(rollout, row)
            assert rows[row] == [advantage if place in live else 0.0 for place in range(len(rows[row]))]


# ---------------------------------------------------------------------------------------------- whiten


def whitened(rollout: Rollout, incoming: Sequence[float], over: str) -> Rows:
    """From the definition: `incoming` is one advantage for each completion."""
    live = [len(live_places(rollout, row)) for row in range(len(incoming))]
    unscored = torch.isnan(rollout.rewards_B).tolist()
    counted = [row for row, a in enumerate(incoming) if live[row] and (a or not unscored[row])]
    entries = [incoming[row] for row in counted for _ in range(live[row] if over == "tokens" else 1)]
    table = [[0.0] * rollout.mask_B_T.size(1) for _ in incoming]
    for row in counted:
        sigma = stdev(entries) if len(entries) > 1 else 0.0
        for place in live_places(rollout, row):
            table[row][place] = (incoming[row] - mean(entries)) / (sigma + 1e-8)
    return table


class TestWhiten:
    def test_by_hand(self) -> None:
        # Completions: mean 1, deviations 0, -1, -1, 2, squares sum to 6, σ = √2. Tokens: 3 of 4, 1 of 0: mean 3, σ = 2.
        incoming = [1.0, 0.0, 0.0, 3.0]
        rows = after_rollout(make_rollout([1] * 4, incoming), incoming, "whiten")
        assert [row[0] for row in rows] == pytest.approx([0, -(0.5**0.5), -(0.5**0.5), 2**0.5])
        rows = after_rollout(make_rollout([3, 1], [1.0, 0.0]), [4.0, 0.0], "whiten", over="tokens")
        assert rows == [pytest.approx([0.5] * 3), pytest.approx([-1.5, 0, 0])]

    @given(rollouts(), st.sampled_from(["completions", "tokens"]), st.data())
    @settings(max_examples=80)
    def test_equals_the_definition_on_any_number_of_ranks(self, rollout: Rollout, over: str, data: Any) -> None:
        rows = len(rollout.prompts)
        incoming = data.draw(st.lists(st.sampled_from([0.0, 1.0, -1.5, 2.25]), min_size=rows, max_size=rows))
        expected = whitened(rollout, incoming, over)
        for values, wanted in zip(after_rollout(rollout, incoming, "whiten", over=over), expected, strict=True):
            assert values == pytest.approx(wanted, abs=1e-6)
        sizes = data.draw(st.sampled_from([[rows], *([first, rows - first] for first in range(1, rows))]))
        parts = on_ranks(rollout, sizes, incoming, [hook("whiten", over=over) for _ in sizes])
        for values, wanted in zip(parts, expected, strict=True):
            assert values == pytest.approx(wanted, abs=1e-6)

    def test_tokens_of_a_completion_may_differ(self) -> None:
        # Per completion: means 2 and 0, so mean 1 and σ = √2; a token is as far from 1 as it is.
        incoming = padded([[1.0, 3.0], [0.0]])
        result = flow.apply_rollout_hooks(incoming, [hook("whiten")], make_rollout([2, 1], [1.0, 0.0]))
        assert result.tolist() == [pytest.approx([0, 2**0.5]), pytest.approx([-(0.5**0.5), 0])]
        # Over tokens: 1, 3, 0: mean 4/3, squares 1/9 + 25/9 + 16/9, σ = √(7/3).
        result = flow.apply_rollout_hooks(incoming, [hook("whiten", over="tokens")], make_rollout([2, 1], [1.0, 0.0]))
        expected = [[a / (7 / 3) ** 0.5 for a in row] for row in ([-1 / 3, 5 / 3], [-4 / 3, 0])]
        assert result.tolist() == [pytest.approx(row) for row in expected]

    @pytest.mark.parametrize("over", ["completions", "tokens"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_equal_advantages_become_exactly_nothing(self, over: str, dtype: torch.dtype) -> None:
        incoming = torch.full((7,), 1 / 3, dtype=dtype)
        rollout = make_rollout([1, 2, 3, 1, 2, 0, 5], [1.0] * 7)
        result = flow.apply_rollout_hooks(incoming, [hook("whiten", over=over)], rollout)
        assert result.dtype == dtype
        assert not result.any()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_what_has_no_advantage_gets_none_from_a_mean_that_is_rounding(self, dtype: torch.dtype) -> None:
        rewards = [0.1, 0.7, 0.3, 0.2, 0.9, 0.4, *[0.3] * 3]
        rollout = make_rollout([1] * 9, rewards, [0] * 3 + [1] * 3 + [2] * 3)
        rollout = replace(rollout, rewards_B=rollout.rewards_B.to(dtype))
        hooks = [hook("normalised"), hook("whiten")]
        result = flow.apply_rollout_hooks(torch.zeros(9, dtype=dtype), hooks, rollout)
        assert not result[6:].any()
        assert result[:6].all()

    def test_an_unscored_completion_counts_where_a_hook_gave_it_something(self) -> None:
        # Without any reward, as with a teacher alone, what came in is whitened all the same.
        rollout = make_rollout([1] * 3, [math.nan] * 3)
        rows = after_rollout(rollout, [1.0, 3.0, 0.0], "whiten")
        assert [row[0] for row in rows] == pytest.approx([-(0.5**0.5), 0.5**0.5, 0.0])


# ---------------------------------------------------------------------------------------------- clip and filter


def test_clipping_bounds_each_token() -> None:
    incoming = padded([[-3.0, 0.0, 1.0], [9.0, -0.5]], width=3)
    hooks = [hook("clip_advantages", low=-1.0, high=2.0)]
    result = flow.apply_rollout_hooks(incoming, hooks, make_rollout([3, 2], width=3))
    assert result.tolist() == [[-1, 0, 1], [2, -0.5, 0]]
    with pytest.raises(ConfigurationError, match="high must be positive where low is 0"):
        hook("clip_advantages", low=0, high=0)


class TestOutcomeFilter:
    REWARDS = (1.0, 0.0, 1.0, 1.0, 0.0, 0.0, math.nan, 1.0)
    GROUPS = (0, 0, 1, 1, 2, 2, 0, 3)

    @pytest.mark.parametrize(
        ("keep", "kept"),
        [
            ("successes", [1, 0, 1, 1, 0, 0, 0, 1]),
            ("failures", [0, 1, 0, 0, 1, 1, 0, 0]),
            ("mixed_groups", [1, 1, 0, 0, 0, 0, 1, 0]),
        ],
    )
    def test_by_hand_on_any_cut(self, keep: str, kept: list[int]) -> None:
        rollout = make_rollout([2] * 8, self.REWARDS, self.GROUPS, num_generations=3)
        incoming = [1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 4.0, -4.0]
        expected = [[a * k] * 2 for a, k in zip(incoming, kept, strict=True)]
        assert after_rollout(rollout, incoming, "outcome_filter", keep=keep) == expected
        for sizes in ([1, 7], [3, 2, 3]):
            hooks = [hook("outcome_filter", keep=keep) for _ in sizes]
            assert on_ranks(rollout, sizes, incoming, hooks) == expected

    def test_a_success_is_what_the_reward_functions_gave_and_not_what_a_shaper_made_of_it(self) -> None:
        rollout = make_rollout([1, 1], [0.2, 0.9], raw_rewards_B=torch.tensor([1.0, 0.0]))
        assert after_rollout(rollout, [1.0, 1.0], "outcome_filter", keep="successes") == [[1], [0]]

    def test_raft_plus_plus_and_reinforce_rej(self) -> None:
        rollout = make_rollout([1] * 4, [1.0, -1.0, 1.0, 1.0], [0, 0, 1, 1])
        for keep, expected in (("successes", [1, 0, 1, 1]), ("mixed_groups", [1, -1, 0, 0])):
            hooks = [hook("raw_reward"), hook("outcome_filter", keep=keep, threshold=0.0)]
            result = flow.apply_rollout_hooks(torch.full((4,), 9.0, dtype=torch.float64), hooks, rollout)
            assert result[:, 0].tolist() == expected


# ---------------------------------------------------------------------------------------------- entropy weights


def entropy_weighted(rollout: Rollout, incoming: Sequence[float], base: float, share: float, level: str) -> Rows:
    """From the definition, one token after the other."""
    assert rollout.old_entropies_B_T is not None
    groups = rollout.group_ids_B.tolist()
    places = [live_places(rollout, row) for row in range(len(incoming))]
    entropies = [[float(rollout.old_entropies_B_T[row, t]) for t in places[row]] for row in range(len(incoming))]
    if level == "sequence":  # every completion is compared with all others of its side, however long they are
        longest = max(map(len, places))
        entropies = [[mean(row)] * longest if row else [] for row in entropies]
    table = [[0.0] * rollout.mask_B_T.size(1) for _ in incoming]
    for row, advantage in enumerate(incoming):
        for t, place in enumerate(places[row]):
            power = 1 if advantage > 0 else -1
            compared = [
                (entropies[j][t] + 1e-8) ** power
                for j in range(len(incoming))
                if groups[j] == groups[row] and len(entropies[j]) > t
                if incoming[j] and math.copysign(1, incoming[j]) == power
            ]
            if advantage:
                weight = len(compared) * (entropies[row][t] + 1e-8) ** power / sum(compared)
                table[row][place] = advantage * (base + share * weight)
    return table


class TestEntropyWeighted:
    ENTROPIES = ((3.0, 1.0), (1.0, 3.0), (4.0, 1.0), (1.0, 4.0))

    def test_by_hand(self) -> None:
        # First token: 3 and 1 of 4, times two: 1 + .1 · 1.5 and 1 + .1 · .5. Failures: 1/4 and 1 of 5/4.
        rollout = make_rollout([2] * 4, old_entropies_B_T=padded(self.ENTROPIES))
        rows = after_rollout(rollout, [1.0, 1.0, -1.0, -1.0], "entropy_weighted")
        expected = [[1.15, 1.05], [1.05, 1.15], [-1.04, -1.16], [-1.16, -1.04]]
        assert rows == [pytest.approx(row, abs=1e-7) for row in expected]

    def test_sequences_by_hand(self) -> None:
        # Mean entropies 3 and 1, successes alone: weights 1.5 and .5.
        rollout = make_rollout([2, 1], old_entropies_B_T=padded([[2.0, 4.0], [1.0]]))
        rows = after_rollout(rollout, [1.0, 1.0], "entropy_weighted", base=0.9, level="sequence")
        assert rows == [pytest.approx([1.05, 1.05]), pytest.approx([0.95, 0])]

    @given(rollouts(), st.sampled_from(["token", "sequence"]), st.data())
    @settings(max_examples=60)
    def test_equals_the_definition_on_any_number_of_ranks(self, rollout: Rollout, level: str, data: Any) -> None:
        rows = len(rollout.prompts)
        entropies = data.draw(
            st.lists(st.floats(0, 4), min_size=rollout.mask_B_T.numel(), max_size=rollout.mask_B_T.numel())
        )
        table = torch.tensor(entropies, dtype=torch.float64).view(rollout.mask_B_T.shape)
        rollout = replace(rollout, old_entropies_B_T=table)
        incoming = data.draw(st.lists(st.sampled_from([0.0, 1.0, -1.5, 2.25, -0.5]), min_size=rows, max_size=rows))
        parameters: dict[str, Any] = {"base": 0.8, "share": 0.3, "level": level}
        expected = entropy_weighted(rollout, incoming, **parameters)
        for values, wanted in zip(
            after_rollout(rollout, incoming, "entropy_weighted", **parameters), expected, strict=True
        ):
            assert values == pytest.approx(wanted, rel=1e-6, abs=1e-9)
        sizes = data.draw(st.sampled_from([[rows], *([first, rows - first] for first in range(1, rows))]))
        parts = on_ranks(rollout, sizes, incoming, [hook("entropy_weighted", **parameters) for _ in sizes])
        for values, wanted in zip(parts, expected, strict=True):
            assert values == pytest.approx(wanted, rel=1e-6, abs=1e-9)

    def test_the_weights_of_a_token_average_to_one(self) -> None:
        rollout = make_rollout([2] * 4, old_entropies_B_T=padded(self.ENTROPIES))
        rows = after_rollout(rollout, [1.0] * 4, "entropy_weighted", base=0.9, share=0.1)
        for column in zip(*rows, strict=True):
            assert mean(column) == pytest.approx(1.0)
