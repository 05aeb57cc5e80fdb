"""part_credit: by hand, against an independent computation over random parts, and what it equals where it must."""

import math
import random
import statistics
from collections import defaultdict
from typing import Any

import pytest
import torch

from tests.advantages.token_batches import hook
from tests.contexts import Ranks, cut, make_rollout
from trl_grpo_ext.credit import flow
from trl_grpo_ext.credit.chain import HookChain
from trl_grpo_ext.types import END, Part, Parts, Place, Rollout

NAN = math.nan
MISSING = None


def rollout_of(
    lengths: list[int], returned: dict[str, list[Any]], weights: list[float] | None = None, **overrides: Any
) -> Rollout:
    """Completions with tokens of one character, and what reward functions returned of them."""
    table = [[NAN if score is None else float(score) for score in of_reward] for of_reward in returned.values()]
    rewards_B_K = torch.tensor(table, dtype=torch.float64).T
    weights_K = torch.tensor(weights or [1.0] * len(table), dtype=torch.float64)
    settings = {
        "rewards_B_K": rewards_B_K,
        "rewards_B": (rewards_B_K * weights_K).nansum(1).masked_fill(rewards_B_K.isnan().all(1), NAN),
        "reward_names": tuple(returned),
        "reward_weights_K": weights_K,
    }
    parts = {name: of for name, of in returned.items() if any(isinstance(score, Parts) for score in of)}
    return make_rollout(lengths, **{**settings, "parts": parts, **overrides})


def credit(rollout: Rollout, dtype: torch.dtype = torch.float64, **parameters: Any) -> torch.Tensor:
    incoming = torch.full((len(rollout.texts),), 9.0, dtype=dtype)  # replaced, whatever it was
    return flow.apply_hooks(incoming, [hook("part_credit", **parameters)], rollout)


# ------------------------------------------------------------------------------------------------------- by hand


def test_each_part_pays_the_tokens_that_wrote_it() -> None:
    # a: 1, 0, .5 centred .5, -.5, 0. b, weight 3: 2, 4, and not there in the last: centred -1, 1, paid -3, 3.
    rows = [
        Parts([Part("a", 1.0, places=(0, 1)), Part("b", 2.0, 3.0, [(1, 2), (3, 4)])]),
        Parts([Part("b", 4.0, 3.0, (0, 2)), Part("a", 0.0, places=(1, 3))]),
        Parts({"a": (0.5, (0, 1))}),
    ]
    rollout = rollout_of([4, 4, 2], {"r": rows}, [2.0])
    expected = [[1, -6, 0, -6], [6, 6 - 1, -1, 0], [0, 0, 0, 0]]
    assert credit(rollout).tolist() == expected
    stds = statistics.stdev([1, 0, 0.5]) + 1e-4, statistics.stdev([2, 4]) + 1e-4
    expected = [[1 / stds[0], -6 / stds[1], 0, -6 / stds[1]]]
    torch.testing.assert_close(credit(rollout, normalise=True)[:1], torch.tensor(expected, dtype=torch.float64))


def test_a_missing_part() -> None:
    # a: 1, 0, and missing at -1: of those that have it .5, -.5. Completeness: .5, .5, -1 are centred .5, .5, -1.
    rows = [Parts({"a": (1.0, (0, 1))}), Parts({"a": (0.0, (0, 1))}), Parts({"a": (-1.0, MISSING)}, -1.0)]
    rollout = rollout_of([2, 2, 2], {"r": rows})
    assert credit(rollout, completeness="none").tolist() == [[0.5, 0], [-0.5, 0], [0, 0]]
    assert credit(rollout).tolist() == [[1, 0.5], [0, 0.5], [-1, -1]]
    assert credit(rollout, completeness="structure").tolist() == [[0.5, 0.5], [-0.5, 0.5], [-1, -1]]
    # A part that says nothing of a completion is not missing there.
    silent = rollout_of([2, 2, 2], {"r": [*rows[:2], Parts({"a": None})]})
    assert credit(silent, completeness="none").tolist() == [[0.5, 0], [-0.5, 0], [0, 0]]


def test_tokens_in_no_part() -> None:
    # a: centred .5, -.5, b: 1, -1; the function's value 10, 0: centred 5, -5. The last token is in no part.
    rows = [Parts({"a": (1.0, (0, 1)), "b": (2.0, (1, 2))}, 10.0), Parts({"a": (0.0, (1, 2)), "b": (0.0, (0, 1))}, 0.0)]
    rollout = rollout_of([3, 3], {"r": rows})
    assert credit(rollout).tolist() == [[0.5, 1, 0], [-1, -0.5, 0]]
    assert credit(rollout, outside="sum").tolist() == [[0.5, 1, 1.5], [-1, -0.5, -1.5]]
    assert credit(rollout, outside="value").tolist() == [[0.5, 1, 5], [-1, -0.5, -5]]


def test_reach_before_is_the_parts_to_come() -> None:
    rows = [Parts({"a": (1.0, (1, 2)), "b": (2.0, (3, 4))}), Parts({"a": (0.0, (1, 2)), "b": (0.0, (2, 3))})]
    rollout = rollout_of([5, 4], {"r": rows})
    assert credit(rollout, reach="before").tolist() == [[1.5, 1.5, 1, 1, 0], [-1.5, -1.5, -1, 0, 0]]
    outside = credit(rollout, reach="before", outside="sum")
    assert outside.tolist() == [[1.5, 1.5, 1, 1, 1.5], [-1.5, -1.5, -1, -1.5, 0]]


def test_stopping_can_be_paid() -> None:
    rows = [Parts({"stops": (1.0, END)}), Parts({"stops": (0.0, END)})]
    assert credit(rollout_of([3, 2], {"r": rows})).tolist() == [[0, 0, 0.5], [0, -0.5, 0]]


def test_a_baseline_given_the_part_before() -> None:
    # b is right only where a is. Given a: 1, 0 among those whose a is 1, and 0 alone.
    pairs = [(1.0, 1.0), (1.0, 0.0), (0.0, 0.0), (None, 1.0)]
    rows = [Parts([Part("a", a, places=(0, 1)), Part("b", b, places=(1, 2))]) for a, b in pairs]
    rollout = rollout_of([2] * 4, {"r": rows})
    assert credit(rollout, baseline="previous")[:, 1].tolist() == [0.5, -0.5, 0, 0]
    assert credit(rollout)[:, 1].tolist() == [0.5, -0.5, -0.5, 0.5]


def test_plain_numbers_and_whole_parts_pay_all_tokens() -> None:
    rows = [Parts({"a": (1.0, (0, 1)), "tone": 4.0}, 3.0), Parts({"a": (0.0, (0, 1)), "tone": 0.0}, 1.0), 8.0, None]
    rollout = rollout_of([2] * 4, {"r": rows, "plain": [1.0, 0.0, None, None]})
    # Of r the values are 3, 1, 8: the plain number is centred 4.
    assert credit(rollout).tolist() == [[0.5 + 2 + 0.5, 2.5], [-3, -2.5], [4, 4], [0, 0]]
    assert credit(rollout, outside="value").tolist()[2] == [4, 4]


def test_the_share_that_went_to_all_tokens_is_measured() -> None:
    placed = rollout_of([2, 2], {"r": [Parts({"a": (1.0, (0, 1))}), Parts({"a": (0.0, (0, 1))})]})
    chain = HookChain([hook("part_credit")])
    assert chain.metrics() == {}
    chain.on_rollout(torch.zeros(2), placed)
    assert chain.metrics() == {"advantage/part_credit/to_all": 0.0, "advantage/part_credit/missing": 0.0}
    missing = rollout_of([2, 2], {"r": [Parts({"a": (1.0, (0, 1))}), Parts({"a": (0.0, MISSING)})]})
    chain.on_rollout(torch.zeros(2), missing)
    assert chain.metrics() == {"advantage/part_credit/to_all": 1.0, "advantage/part_credit/missing": 0.5}


# ------------------------------------------------------------------------------------------ what it equals


@pytest.mark.parametrize("normalise", [False, True])
def test_one_part_of_the_whole_completion_is_the_plain_estimator(normalise: bool) -> None:
    draw = random.Random(1)
    values = [draw.choice([0.0, 0.25, 1.0, NAN]) for _ in range(12)]
    groups = [0] * 6 + [1] * 6
    lengths = [draw.randrange(1, 5) for _ in values]
    parted = [None if value != value else Parts({"only": value}) for value in values]
    plain = "normalised" if normalise else "centred"
    for returned in (parted, [None if value != value else value for value in values]):
        rollout = rollout_of(lengths, {"r": returned}, groups=groups)
        expected = flow.apply_hooks(torch.zeros(12).double(), [hook(plain)], rollout)
        torch.testing.assert_close(credit(rollout, normalise=normalise), expected, rtol=0, atol=1e-12)


def test_credit_and_completeness_sum_to_the_centred_score() -> None:
    rows = [Parts({"a": (s, (0, 1) if placed else MISSING)}, s) for s, placed in [(1, 1), (0, 1), (0, 0), (0.5, 0)]]
    first = credit(rollout_of([1] * 4, {"r": rows})).squeeze(1)
    torch.testing.assert_close(first, torch.tensor([0.625, -0.375, -0.375, 0.125]).double())


# -------------------------------------------------------------------------- against an independent computation


def slowly(rollout: Rollout, returned: dict[str, list[Any]], options: dict[str, Any]) -> list[list[float]]:
    """The definition, one token at a time, from what the functions returned; tokens are characters."""
    groups = rollout.group_ids_B.tolist()
    lengths = rollout.completion_mask_B_T.sum(1).int().tolist()
    weights = dict(zip(rollout.reward_names, rollout.reward_weights_K.tolist(), strict=True))

    def apart(values: dict[int, float], key: Any, *, scaled: bool = options["normalise"]) -> dict[int, float]:
        of_group = defaultdict(list)
        for row, value in values.items():
            of_group[key(row)].append(value)
        new = {}
        for row, value in values.items():
            others = of_group[key(row)]
            scale = 1.0
            if scaled:
                scale = (statistics.stdev(others) if len(others) > 1 else 0.0) + 1e-4
            new[row] = (value - statistics.fmean(others)) / scale
        return new

    new = [[0.0] * length for length in lengths]
    for name, of_reward in returned.items():
        value = apart({r: float(s) for r, s in enumerate(of_reward) if s is not None and s == s}, lambda r: groups[r])
        parts: dict[str, dict[int, Part]] = defaultdict(dict)
        for row, score in enumerate(of_reward):
            for part in score.parts if isinstance(score, Parts) else ():
                of_name = parts[part.name]  # also where it never applies
                if part.score is not None:
                    of_name[row] = part
        reached: list[set[int]] = [set() for _ in lengths]
        rest = [0.0] * len(lengths)
        everywhere = [0.0] * len(lengths)
        scored_at_all = {row for of_part in parts.values() for row in of_part}
        lacked: dict[int, list[tuple[float, float]]] = defaultdict(list)  # weights, and what they multiply
        before: dict[int, Part] = {}
        for number, of_part in enumerate(parts.values()):

            def tokens(row: int, part: Part) -> set[int]:
                found: set[int] = set()
                for place in part.places:  # type: ignore[union-attr]
                    start, end = (lengths[row] - 1, lengths[row]) if place == END else place[:2]
                    found |= set(range(start, end)) if end is not None else set()
                return found

            whole = {row for row, part in of_part.items() if Place() in part.places}  # type: ignore[operator]
            here = {row: part.score for row, part in of_part.items() if row in whole or tokens(row, part)}
            known = before if options["baseline"] == "previous" and number else {}
            strata = {row: (groups[row], known[row].score if row in known else "none") for row in here}
            paid = apart(here, strata.__getitem__)  # type: ignore[arg-type]
            expected = {}
            for row, part in of_part.items():
                having = [s for other, s in here.items() if groups[other] == groups[row]]
                expected[row] = statistics.fmean(having) if row in here else part.score  # type: ignore[type-var]
            presence = apart(expected, lambda row: groups[row], scaled=False)  # type: ignore[arg-type]
            for row, part in of_part.items():
                amount = part.weight * paid.get(row, 0.0)
                own = set() if row in whole else tokens(row, part)
                if options["reach"] == "before" and own:
                    own = set(range(max(own) + 1))
                reached[row] |= own
                for token in own:
                    new[row][token] += weights[name] * amount
                if row in whole:
                    everywhere[row] += amount
                elif options["outside"] == "sum":
                    rest[row] += amount
                lacked[row].append((part.weight, presence[row]))
            before = of_part
        sums = {row: sum(weight * one for weight, one in of_row) for row, of_row in lacked.items()}
        for row, of_row in lacked.items():
            amount = sums[row]
            if options["normalise"]:
                others = [one for other, one in sums.items() if groups[other] == groups[row]]
                scale = (statistics.stdev(others) if len(others) > 1 else 0.0) + 1e-4
                amount *= statistics.fmean(weight for weight, _ in of_row) / scale
            if options["completeness"] == "all":
                everywhere[row] += amount
            elif options["completeness"] == "structure":
                rest[row] += amount
        for row, length in enumerate(lengths):
            plain = row not in scored_at_all
            for token in range(length):
                new[row][token] += value.get(row, 0.0) * weights[name] if plain else weights[name] * everywhere[row]
                if not plain and token not in reached[row]:
                    extra = value.get(row, 0.0) if options["outside"] == "value" else 0.0
                    new[row][token] += weights[name] * (rest[row] + extra)
    return new


def drawn(draw: random.Random, lengths: list[int], names: str) -> list[Any]:
    """Parts that overlap, are missing, do not apply, have weights, or are of the whole completion."""
    rows: list[Any] = []
    for length in lengths:
        if draw.random() < 0.1:
            rows.append(draw.choice([None, draw.random(), Parts([], draw.random())]))
            continue
        parts = []
        for name in draw.sample(names, draw.randrange(1, len(names) + 1)):
            place: Any = draw.choice(["some", "some", "some", MISSING, END, Place()])
            if place == "some":
                place = [tuple(sorted(draw.choices(range(length + 1), k=2))) for _ in range(draw.randrange(1, 3))]
            score = draw.choice([0.0, 1.0, 0.25, None])
            parts.append(Part(name, score, draw.choice([1.0, 1.0, 0.5, 0.0]), place))
        rows.append(Parts(parts, draw.random()))
    return rows


OPTIONS = [
    {"normalise": normalise, "completeness": completeness, "outside": outside, "reach": reach, "baseline": baseline}
    for normalise in (False, True)
    for completeness in ("all", "structure", "none")
    for outside in ("nothing", "sum", "value")
    for reach in ("own", "before")
    for baseline in ("group", "previous")
]


def test_against_the_definition_with_ranks_that_have_different_parts() -> None:
    draw = random.Random(7)
    for options in OPTIONS:
        lengths = [draw.randrange(1, 7) for _ in range(12)]
        halves = drawn(draw, lengths[:6], "abcd"), drawn(draw, lengths[6:], "cdef")  # two ranks of one group and a half
        returned = {
            "r": [*halves[0], *halves[1]],
            "s": drawn(draw, lengths, "ab"),
            "plain": [draw.random() for _ in lengths],
        }
        # In the order in which all ranks first see them.
        rollout = rollout_of(lengths, returned, [1.0, 0.5, 2.0], groups=[n // 4 for n in range(12)])
        whole = credit(rollout, **options)
        slow = slowly(rollout, returned, options)
        for row, expected in enumerate(slow):
            assert whole[row, : len(expected)].tolist() == pytest.approx(expected, abs=1e-9), (options, row)
        results = Ranks(cut(rollout, [6, 2, 4])).run(lambda r, options=options: credit(r, **options))
        torch.testing.assert_close(torch.cat(results), whole, rtol=0, atol=1e-9)


def test_what_lacks_all_parts_is_one_failure() -> None:
    """Cut JSON lacks every field at once; normalised, that weighs as much as one part, however many there are."""
    for count in (1, 8):
        there = Parts([Part(f"p{n}", 1.0, places=(0, 1)) for n in range(count)])
        cut = Parts([Part(f"p{n}", 0.0, places=None) for n in range(count)])
        rollout = rollout_of([2] * 4, {"r": [there, there, there, cut]}, [1.0], groups=[0] * 4)
        paid = credit(rollout, normalise=True)
        assert paid[:, 1].tolist() == pytest.approx([0.5, 0.5, 0.5, -1.5], abs=1e-3)
