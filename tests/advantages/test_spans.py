"""span_credit and segment_weights: by hand, against slow versions, with functions that point now and then."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.advantages.token_batches import hook
from tests.contexts import Ranks, cut, make_rollout
from trl_grpo_ext.credit import flow
from trl_grpo_ext.types import Rollout

NAN = math.nan


def rollout_of(
    lengths: list[int],
    rewards: list[list[float]],
    spans: dict[str, Any] | None = None,
    weights: list[float] | None = None,
    **overrides: Any,
) -> Rollout:
    """Reward functions r0, r1, ..., and tokens of one character."""
    functions = len(rewards[0])
    settings = {
        "rewards_B_K": torch.tensor(rewards, dtype=torch.float64),
        "reward_names": tuple(f"r{k}" for k in range(functions)),
        "reward_weights_K": torch.tensor(weights or [1.0] * functions, dtype=torch.float64),
        "reward_spans": spans or {},
    }
    return make_rollout(lengths, **{**settings, **overrides})


def credit(rollout: Rollout, dtype: torch.dtype = torch.float64, **parameters: Any) -> torch.Tensor:
    incoming = torch.full((len(rollout.texts),), 9.0, dtype=dtype)  # replaced, whatever it was
    return flow.apply_rollout_hooks(incoming, [hook("span_credit", **parameters)], rollout)


def test_span_credit_by_hand() -> None:
    # r0: 1, 0, weight 2: centred .5, -.5, paid 1, -1. r1: 4, 0: centred 2, -2.
    # r0 points at the character 1 of the first, and at 0 and 1 of the second completion; r1 points nowhere.
    spans = {"r0": [[(1, 2, 0.7)], [(0, 2, 0.3), (1, 2, 0.1)]]}
    rollout = rollout_of([3, 3], [[1, 4], [0, 0]], spans, weights=[2, 1])
    assert credit(rollout).tolist() == [[2, 3, 2], [-3, -3, -2]]


def test_normalised_by_hand() -> None:
    # r0: 1, 0: standard deviation √.5, r1: 4, 0: √8.
    rollout = rollout_of([1, 1], [[1, 4], [0, 0]], weights=[2, 1])
    expected = 2 * 0.5 / (math.sqrt(0.5) + 1e-4) + 2 / (math.sqrt(8) + 1e-4)
    torch.testing.assert_close(
        credit(rollout, normalise=True).squeeze(1), torch.tensor([expected, -expected], dtype=torch.float64)
    )


def test_pointing_at_nothing() -> None:
    # Centred 1, -1, 0. The first points, the second doesn't, the third was not even given spans.
    rollout = rollout_of([2, 2, 2], [[2], [0], [1]], {"r0": [[(0, 1, 1.0)], [], ()]})
    assert credit(rollout).tolist() == [[1, 0], [-1, -1], [0, 0]]
    assert credit(rollout, without_spans="none").tolist() == [[1, 0], [0, 0], [0, 0]]
    # A span without characters, or whose characters no token wrote, is nothing, too.
    silent = rollout_of(
        [2, 2], [[2], [0]], {"r0": [[(1, 1, 1.0)], [(0, 1, 1.0)]]}, offsets=lambda row: [(0, 0), (1, 2)]
    )
    assert credit(silent).tolist() == [[1, 1], [-1, -1]]
    assert credit(silent, without_spans="none").tolist() == [[0, 0], [0, 0]]
    # A function that found nothing in any completion of the batch is still one that points.
    nowhere = rollout_of([2, 2], [[2], [0]], {"r0": [(), ()]})
    assert credit(nowhere, without_spans="none").tolist() == [[0, 0], [0, 0]]
    # A function that returns plain numbers pays everything.
    assert credit(rollout_of([2, 2], [[2], [0]]), without_spans="none").tolist() == [[1, 1], [-1, -1]]


def test_whether_a_function_points_is_agreed_on_by_all_ranks() -> None:
    # The second rank's only completion came without spans, so its rewards are plain numbers there.
    spans = {"r0": [[(0, 1, 1.0)], []]}
    whole = rollout_of([2, 2], [[2], [0]], spans)
    first, second = cut(whole, [1, 1])
    second.reward_spans.clear()  # type: ignore[attr-defined]
    results = Ranks([first, second]).run(lambda r: credit(r, without_spans="none"))
    assert torch.cat(results).tolist() == credit(whole, without_spans="none").tolist() == [[1, 0], [0, 0]]


WEIGHTS = {"think": 2.0, "answer": 3.0, "tags": 5.0, "other": 7.0}


def weights_of(texts: list[str], offsets: list[list[tuple[int, int]]], **parameters: Any) -> list[list[float]]:
    """What the hook makes of advantages of 1."""
    rollout = make_rollout([len(row) for row in offsets], texts=texts, offsets=lambda row: offsets[row])
    ones = torch.ones(len(texts), dtype=torch.float64)
    result: list[list[float]] = flow.apply_rollout_hooks(
        ones, [hook("segment_weights", **{**WEIGHTS, **parameters})], rollout
    ).tolist()
    return result


def by_character(text: str, **parameters: Any) -> str:
    """One token for each character, and an end of sequence: the weights as digits."""
    offsets = [*((i, i + 1) for i in range(len(text))), (len(text), len(text))]
    return "".join(str(round(weight)) for weight in weights_of([text], [offsets], **parameters)[0])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a<think>b</think>c", "755555552555555553" + "3"),
        ("<think>bb</think>cc", "5555555225555555533" + "3"),
        ("bb</think>cc", "225555555533" + "3"),  # the template has opened the thoughts
        ("a<think>b", "755555552" + "2"),  # never closed
        ("<think></think>", "555555555555555" + "3"),  # what came next would have been the answer
        ("abc", "333" + "3"),
        ("", "3"),
        ("b</think><think>c</think>", "2" + "5" * 8 + "3" * 16 + "3"),  # the first close counts, the rest is the answer
        ("a<think>b<think>c</think>d", "7" + "5" * 7 + "2" * 9 + "5" * 8 + "3" + "3"),
        ("<THINK>a</THINK>", "3" * 16 + "3"),
    ],
)
def test_characters_by_hand(text: str, expected: str) -> None:
    assert by_character(text) == expected


def test_a_token_across_a_boundary_has_the_weight_of_the_part_in_which_it_begins() -> None:
    text = "ab<think>cd</think>e"  # other 0-2, tags 2-9, think 9-11, tags 11-19, answer 19-20
    offsets = [(0, 3), (3, 8), (8, 10), (10, 12), (12, 20), (20, 20)]
    assert weights_of([text], [offsets]) == [[7, 5, 5, 2, 5, 3]]
    assert weights_of([text], [[(0, 20), (20, 20)]]) == [[7, 3]]
    # A silent token in the middle belongs to where it stands: at 9 the thoughts begin.
    assert weights_of([text], [[(0, 9), (9, 9), (9, 20)]]) == [[7, 2, 2]]
    # A character cut over three tokens, each of which has it.
    assert weights_of(["<think>€"], [[(0, 7), (7, 8), (7, 8), (7, 8), (8, 8)]]) == [[5, 2, 2, 2, 2]]
