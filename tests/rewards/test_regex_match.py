"""`RegexMatch` by hand, on patterns that go on for ever, and the bound on steps against a counting matcher."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.errors import RewardError
from trl_grpo_ext.guard.outcomes import Outcome
from trl_grpo_ext.rewards._text.regex_cost import RegexCost
from trl_grpo_ext.rewards.regex_match import RegexMatch
from trl_grpo_ext.types import SpanScore

FOREVER = r"(a+)+b"


def scored(reward: RegexMatch, *completions: Any, **columns: Any) -> list[Any]:
    return reward(prompts=["?"] * len(completions), completions=list(completions), completion_ids=[], **columns)


def test_a_match_anywhere_scores_and_its_characters_are_the_span() -> None:
    [found, missed] = scored(RegexMatch(r"\d+ apples"), "I ate 12 apples.", "I ate none.")
    assert (found, missed) == (1.0, 0.0)
    assert isinstance(found, SpanScore)
    assert isinstance(missed, SpanScore)
    assert found.spans == ((6, 15, 1.0),)
    assert missed.spans == ()


def test_full_wants_the_whole_completion_and_values_may_be_chosen() -> None:
    assert scored(RegexMatch("[a-z]+", full=True), "abc", "abc.", "abc\n", "") == [1.0, 0.0, 0.0, 0.0]
    scores = scored(RegexMatch("sorry", flags="i", value=-2.0, otherwise=0.5), "Sorry!", "Fine.")
    assert scores == [-2.0, 0.5]
    assert scores[0].spans == ((0, 5, -2.0),)


@pytest.mark.parametrize(("flags", "matches"), [("", False), ("s", False), ("i", False), ("is", True), ("sim", True)])
def test_flags_are_those_of_re(flags: str, matches: bool) -> None:
    assert scored(RegexMatch("A.B", flags=flags), "a\nb") == [float(matches)]


def test_several_matches_earn_their_share() -> None:
    reward = RegexMatch("- ", count=4, value=2.0, otherwise=-2.0)
    scores = scored(reward, "", "- a", "- a - b", "- a - b - c - d", "- a - b - c - d - e")
    assert scores == [-2.0, -1.0, 0.0, 2.0, 2.0]
    assert [span[:2] for span in scores[2].spans] == [(0, 2), (4, 6)]
    assert scores[4].spans == tuple((i, i + 2, 0.5) for i in (0, 4, 8, 12))


def test_an_endless_match_is_a_timeout_and_its_neighbours_are_scored() -> None:
    reward = RegexMatch(FOREVER, timeout=0.5)
    judgements = reward.judge(["a" * 60, "aab", "a" * 5000, "b", "x" * 50 + "ab"])
    assert [judgement.outcome for judgement in judgements] == [
        *(Outcome.TIMEOUT, Outcome.SCORED, Outcome.TIMEOUT, Outcome.SCORED, Outcome.SCORED)
    ]
    scores: list[Any] = [judgement.score for judgement in judgements]
    assert scores == [None, 1.0, None, 0.0, 1.0]
    assert scores[4].spans == ((50, 52, 1.0),)


@pytest.mark.slow
def test_a_batch_of_endless_matches_is_bounded_by_their_allowances() -> None:
    """Each of 64 would take longer than anybody waits; a right answer among them is scored."""
    texts = ["a" * (60 + number) for number in range(63)]
    judged = RegexMatch(FOREVER, timeout=0.05).judge([*texts, "aab"])
    assert [one.outcome for one in judged] == [Outcome.TIMEOUT] * 63 + [Outcome.SCORED]


@pytest.mark.slow
def test_what_a_timeout_becomes_may_be_chosen_and_is_logged() -> None:
    metrics: dict[str, float] = {}
    extra: dict[str, list[Any]] = {}
    reward = RegexMatch(FOREVER, timeout=0.3, outcomes={"timeout": None, "refused": -1.0}, max_characters=100)
    columns = {"log_metric": metrics.__setitem__, "log_extra": extra.__setitem__}
    assert scored(reward, "a" * 60, "ab", "b" * 101, "b", **columns) == [None, 1.0, -1.0, 0.0]
    assert metrics["outcomes/regex_match/timeout"] == 0.25
    assert metrics["outcomes/regex_match/scored"] == 0.5
    assert metrics["outcomes/regex_match/died"] == 0.0
    assert extra["regex_match_outcome"] == ["timeout", "scored", "refused", "scored"]
    with pytest.raises(RewardError, match="the outcome at row 1 is 'timeout'"):
        scored(RegexMatch(FOREVER, timeout=0.3, outcomes={"timeout": "raise"}), "ab", "a" * 60)


def test_simple_patterns_need_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_grpo_ext.guard.workers.WorkerPool.run", None)
    assert scored(RegexMatch(r"<answer>.*?</answer>", flags="s"), f"<answer>{'x' * 40_000}</answer>") == [1.0]
    assert scored(RegexMatch(r"^(?:yes|no)$"), "no", "x" * 90_000) == [1.0, 0.0]
    assert scored(RegexMatch(r"\d{4}-\d\d"), "in 2024-07 " * 5000) == [1.0]


@pytest.mark.parametrize("pattern", ["zzz", r"(?:\w+\s?)*zzz"])
def test_hostile_completions_score_like_others(pattern: str) -> None:
    odd: list[Any] = ["", None, [], 7, [{"role": "assistant", "content": None}], "\x00", "\ud800"]
    assert scored(RegexMatch(pattern), *odd, "zzz") == [0.0] * len(odd) + [1.0]
    [score] = scored(RegexMatch(r"(?:[^z]+)+z"), "\ud800\x00" * 40 + "z")  # through a worker, spans still fit
    assert (score, score.spans) == (1.0, ((0, 81, 1.0),))


# ------------------------------------------------------------------------------------------------ the bound on steps

QUICK = ["abc", r"^\s*<think>", r"[^<]*<", r"(?:ab|cd)e", r"\d{1,3}", "", "(?i)abc", r"(?m)^a", r"(?=a)b", "[ab]?c"]
SLOW = [r"(a+)+b", r"(a|a)*b", r"(?:a*)*b", r"(?:\w+\s?)*$", r"(a|ab)*c", r"(?:a?){40}a{40}", r"(?:(?:a|b)+,)+"]


def test_ordinary_patterns_take_at_most_quadratic_time_and_exponential_ones_have_no_bound() -> None:
    for pattern in QUICK:
        assert RegexCost(pattern).steps("x" * 1000) < 20 * 1000**2, pattern
    for pattern in SLOW:
        assert RegexCost(pattern).steps("a" * 1000) > 1e12, pattern


def test_a_literal_beginning_bounds_the_places_where_a_match_begins() -> None:
    cost = RegexCost("<a>.*</a>")
    assert cost.steps("<a>" + "x" * 1000) < 50_000
    assert cost.steps("<a>" * 300) > 1_000_000
    assert RegexCost("aab.*c").steps("a" * 1000) > 1_000_000  # beginnings may overlap
    assert RegexCost("^x*y").steps("x" * 1000) < 10_000
    assert RegexCost("(?m)^x*y").steps("x" * 1000) > 1_000_000
    assert RegexCost("x*y", full=True).steps("x" * 1000) < 10_000


atoms = st.sampled_from(["a", "b", ".", "[ab]", r"\w", "(?:ab)", "(a|b)", "(?:a|aa)", "^", "$"])
repeats = st.sampled_from(["", "*", "+", "?", "*?", "{2}", "{1,3}", "{2,}"])


def _patterns(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    group = st.lists(inner, min_size=1, max_size=3).map("".join)
    return st.one_of(
        st.tuples(group, repeats).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        st.tuples(group, group).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
    )


simple = st.tuples(atoms, repeats).map("".join).filter(lambda p: p[0] not in "^$" or len(p) == 1)
patterns = st.lists(st.recursive(simple, _patterns, max_leaves=4), min_size=1, max_size=3).map("".join)


@given(pattern=patterns, text=st.text(alphabet="ab", max_size=14))
def test_a_backtracking_matcher_that_goes_every_way_stays_within_the_bound(pattern: str, text: str) -> None:
    from re import _parser  # type: ignore[attr-defined]

    tree = list(_parser.parse(pattern))
    assert sum(_attempts(tree, text, start, 3000) for start in range(len(text) + 1)) <= RegexCost(pattern).steps(text)


def _attempts(tree: list[Any], text: str, start: int, most: int) -> int:
    """How many characters and ends a matcher looks at that goes every way through a pattern, up to about `most`."""
    attempts = 0
    stack: list[tuple[int, tuple[Any, ...]]] = [(start, tuple(tree))]
    while stack and attempts < most:
        at, rest = stack.pop()
        if not rest:
            attempts += 1
            continue
        (operation, argument), rest = rest[0], rest[1:]
        name = str(operation)
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            lowest, highest, body = argument
            fewer = highest if int(highest) > 10**6 else highest - 1
            if lowest > 0:
                stack.append((at, (*body, (operation, (lowest - 1, fewer, body)), *rest)))
                continue
            stack.append((at, rest))
            if int(highest) > 0:
                stack.append((at, (*body, ("MOVED", at), (operation, (0, fewer, body)), *rest)))
        elif name == "MOVED":
            if at > argument:  # a round that matched nothing is not repeated
                stack.append((at, rest))
        elif name == "BRANCH":
            stack += [(at, (*branch, *rest)) for branch in argument[1]]
        elif name == "SUBPATTERN":
            stack.append((at, (*argument[3], *rest)))
        else:
            attempts += 1
            if name == "AT":
                if at == (0 if str(argument) == "AT_BEGINNING" else len(text)):
                    stack.append((at, rest))
            elif at < len(text) and re.match(_class(name, argument), text[at]):
                stack.append((at + 1, rest))
    return attempts


def _class(name: str, argument: Any) -> str:
    if name == "LITERAL":
        return re.escape(chr(argument))
    return "." if name == "ANY" else "[ab]"
