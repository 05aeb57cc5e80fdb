"""`part_credit` and `process_rewards`: by hand, against an independent computation, and what they equal."""

import itertools
import math
import random
import statistics
from collections import defaultdict
from typing import Any

import pytest
import torch

from tests.advantages.token_batches import Rows, hook
from tests.contexts import Ranks, cut, make_rollout
from trl_grpo_ext.advantages.parts import after_silence, min_form
from trl_grpo_ext.credit import flow
from trl_grpo_ext.credit.chain import HookChain
from trl_grpo_ext.errors import ConfigurationError, PluginOutputError
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


def credit(rollout: Rollout, **parameters: Any) -> torch.Tensor:
    incoming = torch.full((len(rollout.texts),), 9.0, dtype=torch.float64)  # replaced, whatever it was
    return flow.apply_hooks(incoming, [hook("part_credit", **parameters)], rollout)


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
    # Stopping can be paid.
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
    chain = HookChain([hook("part_credit")])
    assert chain.metrics() == {}
    for place, shares in (((0, 1), (0.0, 0.0)), (MISSING, (1.0, 0.5))):
        rows = [Parts({"a": (1.0, (0, 1))}), Parts({"a": (0.0, place)})]
        chain.on_rollout(torch.zeros(2), rollout_of([2, 2], {"r": rows}))
        names = ("advantage/part_credit/to_all", "advantage/part_credit/missing")
        assert chain.metrics() == dict(zip(names, shares, strict=True))


@pytest.mark.parametrize("normalise", [False, True])
def test_one_part_of_the_whole_completion_is_the_plain_estimator(normalise: bool) -> None:
    draw = random.Random(1)
    values = [draw.choice([0.0, 0.25, 1.0, None]) for _ in range(12)]
    lengths = [draw.randrange(1, 5) for _ in values]
    parted = [None if value is None else Parts({"only": value}) for value in values]
    for returned in (parted, values):
        rollout = rollout_of(lengths, {"r": returned}, groups=[0] * 6 + [1] * 6)
        plain = hook("normalised" if normalise else "centred")
        expected = flow.apply_hooks(torch.zeros(12).double(), [plain], rollout)
        torch.testing.assert_close(credit(rollout, normalise=normalise), expected, rtol=0, atol=1e-12)


def test_credit_and_completeness_sum_to_the_centred_score() -> None:
    rows = [Parts({"a": (s, (0, 1) if placed else MISSING)}, s) for s, placed in [(1, 1), (0, 1), (0, 0), (0.5, 0)]]
    assert credit(rollout_of([1] * 4, {"r": rows})).squeeze(1).tolist() == [0.625, -0.375, -0.375, 0.125]


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
        lacked: dict[int, list[tuple[float, float, bool]]] = defaultdict(list)  # weight, value, does anybody lack it
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
                of_group = {value for other, value in expected.items() if groups[other] == groups[row]}
                lacked[row].append((part.weight, presence[row], len(of_group) > 1))
            before = of_part
        sums = {row: sum(weight * one for weight, one, _ in of_row) for row, of_row in lacked.items()}
        mean_weights = {}
        for row, of_row in lacked.items():
            heavy = [weight for weight, _, varies in of_row if varies and weight > 0]
            mean_weights[row] = statistics.fmean(heavy) if heavy else 0.0
        scaled = {row: one / (mean_weights[row] or 1.0) for row, one in sums.items()}
        for row in lacked:
            amount = sums[row]
            if options["normalise"]:
                others = [one for other, one in scaled.items() if groups[other] == groups[row]]
                scale = (statistics.stdev(others) if len(others) > 1 else 0.0) + 1e-4
                amount = mean_weights[row] * scaled[row] / scale
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


OPTIONS: dict[str, Any] = {
    "normalise": (False, True),
    "completeness": ("all", "structure", "none"),
    "outside": ("nothing", "sum", "value"),
    "reach": ("own", "before"),
    "baseline": ("group", "previous"),
}


def test_against_the_definition_with_ranks_that_have_different_parts() -> None:
    draw = random.Random(7)
    for chosen in itertools.product(*OPTIONS.values()):
        options = dict(zip(OPTIONS, chosen, strict=True))
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


@pytest.mark.parametrize("scale", [1.0, 0.001])
def test_a_light_part_that_is_lacked_costs_its_own_weight(scale: float) -> None:
    def parts(*light: Any) -> Parts:
        return Parts([Part("heavy", 1.0, 5 * scale, (0, 1)), Part("light", *light)])

    there, cut = parts(1.0, 0.1 * scale, (0, 1)), parts(0.0, 0.1 * scale, None)
    rollout = rollout_of([2] * 4, {"r": [there, there, there, cut]}, [1.0], groups=[0] * 4)
    paid = credit(rollout, normalise=True)[:, 1] / scale
    assert paid.tolist() == pytest.approx([0.05, 0.05, 0.05, -0.15], abs=1e-3)


def test_what_lacks_all_parts_is_one_failure() -> None:
    """Cut JSON lacks every field at once; normalised, that weighs as much as one part, however many there are."""
    for count in (1, 8):
        there = Parts([Part(f"p{n}", 1.0, places=(0, 1)) for n in range(count)])
        cut = Parts([Part(f"p{n}", 0.0, places=None) for n in range(count)])
        rollout = rollout_of([2] * 4, {"r": [there, there, there, cut]}, [1.0], groups=[0] * 4)
        paid = credit(rollout, normalise=True)
        assert paid[:, 1].tolist() == pytest.approx([0.5, 0.5, 0.5, -1.5], abs=1e-3)


PLAIN = {"form": "sum", "baseline": "none"}


def processed(rollout: Rollout, incoming: float = 9.0, **parameters: Any) -> Rows:
    incoming_B = torch.full((len(rollout.texts),), incoming, dtype=torch.float64)
    rows: Rows = flow.apply_hooks(incoming_B, [hook("process_rewards", **parameters)], rollout).tolist()
    return rows


def steps(*spans: tuple[int, int, float]) -> Parts:
    """What a function returns for steps `(start, end, worth)`; its value is not used."""
    return Parts([Part(f"step {n}", worth, places=(start, end)) for n, (start, end, worth) in enumerate(spans)], 0.0)


def stepped(rows: list[list[float]], **overrides: Any) -> Rollout:
    """Every step is one token of one character; the reward is the steps' sum."""
    parts = [steps(*((i, i + 1, value) for i, value in enumerate(row))) for row in rows]
    return make_rollout([len(row) for row in rows], [sum(row) for row in rows], parts={"r": parts}, **overrides)


def test_process_rewards_in_the_minimum_form_by_hand() -> None:
    # exp(-.8), exp(.4), exp(-.6) are .44933, 1.49182, .54881 and sum to 2.48996: weights .18046, .59914, .22041.
    assert min_form([0.8, -0.4, 0.6], 1.0) == pytest.approx([0.14436, -0.23965, 0.13225], abs=1e-5)
    rollout = stepped([[0.8, -0.4, 0.6]])
    to_go = [0.14436 - 0.23965 + 0.13225, -0.23965 + 0.13225, 0.13225]
    assert processed(rollout, baseline="none", temperature=1.0) == [pytest.approx(to_go, abs=2e-5)]
    # At 0.1, the default, exp(-12) and exp(-10) beside 1: what comes before the worst step is worth about its reward.
    assert processed(rollout, baseline="none") == [pytest.approx([-0.4, -0.4, 0.0], abs=1e-4)]


@pytest.mark.parametrize(("gamma", "expected"), [(1, [1.0, 0.2, 0.6]), (0.5, [0.75, -0.1, 0.6]), (0, [0.8, -0.4, 0.6])])
def test_process_rewards_as_a_sum_by_hand(gamma: float, expected: list[float]) -> None:
    # With γ = 1/2 .8 - .4/2 + .6/4, -.4 + .6/2, .6
    assert processed(stepped([[0.8, -0.4, 0.6]]), **PLAIN, gamma=gamma) == [pytest.approx(expected)]


def test_process_rewards_against_the_groups_mean_return() -> None:
    # Returns at the first token 3 and 1 (mean 2), and 10 alone in its group; the unscored is in nobody's.
    rollout = stepped([[1, 2], [1], [10], []], groups=[0, 0, 1, 1])
    rollout.rewards_B_K[3] = NAN
    assert processed(rollout, form="sum", coefficient=-2.0) == [[-2, 0], [2, 0], [0, 0], [0, 0]]
    added = processed(rollout, form="sum", mode="add", incoming=0.5)
    assert added == [[1.5, 0.5], [-0.5, 0], [0.5, 0], [0, 0]]


def test_process_rewards_credit_steps_up_to_their_ends() -> None:
    # Tokens of two characters. Steps end at 2 (first token), at 5 (inside the third), and nothing comes after.
    rollout = make_rollout(
        [5],
        [7.0],
        texts=["abcdefghij"],
        offsets=lambda row: [(2 * i, 2 * i + 2) for i in range(5)],
        parts={"r": [steps((3, 5, 2.0), (0, 2, 1.0))]},  # in any order
    )
    assert processed(rollout, **PLAIN) == [[3, 2, 2, 0, 0]]
    # With a baseline, too: of one completion, its own return, which only the steps' tokens are held against.
    assert processed(rollout, form="sum") == [[0, -1, -1, 0, 0]]
    # The end of the sequence belongs to the step that it follows.
    texts: dict[str, Any] = {"texts": ["ab"], "completions": ["ab"]}
    parts = {"r": [steps((0, 1, 1.0), (1, 2, 2.0))]}
    rollout = make_rollout([4], [1.0], **texts, offsets=lambda row: [(0, 1), (1, 1), (1, 2), (2, 2)], parts=parts)
    assert processed(rollout, **PLAIN) == [[3, 3, 2, 2]]
    assert processed(make_rollout([1], [5.0], texts=[""], offsets=lambda row: [(0, 0)]), **PLAIN) == [[5]]


def test_process_rewards_take_a_score_without_parts_for_one_step() -> None:
    # A plain number in a batch with parts, in one without, and a part that has no place.
    nowhere = Parts({"a": (1.0, None)}, 2.0)
    mixed = make_rollout([2, 2, 2], [4.0, 1.0, 2.0], parts={"r": [4.0, steps((0, 1, 1.0)), nowhere]})
    assert processed(mixed, **PLAIN) == [[4, 4], [1, 0], [1, 1]]
    weighted = make_rollout([2], [4.0], parts={"r": [Parts([Part("a", 2.0, 0.25, (0, 1)), Part("b", None)])]})
    assert processed(weighted, **PLAIN) == [[0.5, 0]]
    assert processed(make_rollout([2, 1], [4.0, 1.0]), **PLAIN) == [[4, 4], [1, 0]]


def test_after_silence() -> None:
    offsets = [(0, 0), (0, 2), (2, 2), (2, 3), (2, 4), (4, 6), (6, 6)]
    assert after_silence(offsets, [2, 4, 5, 6, 7]) == [2, 3, 4, 6, 6]


def test_process_rewards_of_the_function_that_points_or_the_one_named_on_all_ranks() -> None:
    def several(*names: str) -> Rollout:
        return make_rollout(
            [2, 2],
            parts={name: [steps((0, 1, 1.0), (1, 2, 2.0)), None] for name in names},
            reward_names=("a", "b"),
            reward_weights_K=torch.tensor([5.0, 7.0]),
            rewards_B_K=torch.tensor([[10.0, 3.0], [20.0, NAN]], dtype=torch.float64),
        )

    assert processed(several("b"), **PLAIN) == [[3, 2], [0, 0]]
    assert processed(several("a", "b"), **PLAIN, reward="b") == [[3, 2], [0, 0]]
    assert processed(several("b"), **PLAIN, reward="a") == [[10, 10], [20, 20]]
    for rollout, reward in ((several("a", "b"), None), (several(), None), (several("a"), "c")):
        with pytest.raises(ConfigurationError, match=f"reward must be 'a' or 'b', got {reward!r}"):
            processed(rollout, reward=reward)
    assert Ranks(cut(several("b"), [1, 1])).run(lambda r: processed(r, **PLAIN)) == [[[3, 2]], [[0, 0]]]
    with pytest.raises(PluginOutputError, match=r"'process_rewards'.* row 1"):
        processed(make_rollout([2, 2], parts={"r": [0.0, steps((0, 3, 1.0))]}))
