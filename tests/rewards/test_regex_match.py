"""`RegexMatch` by hand, and on patterns that go on for ever."""

from typing import Any

from trl_grpo_ext.guard.outcomes import Outcome
from trl_grpo_ext.rewards.regex_match import RegexMatch

FOREVER = r"(a+)+b"


def scored(reward: RegexMatch, *completions: Any, **columns: Any) -> list[Any]:
    return reward(prompts=["?"] * len(completions), completions=list(completions), completion_ids=[], **columns)


def places(score: Any) -> list[tuple[int, int]]:
    (part,) = score.parts
    return [place[:2] for place in part.places]


def test_each_named_group_is_a_part() -> None:
    reward = RegexMatch(r"(?P<name>\w+) (was|is) (?:(?P<year>\d+)|(?P<match>[a-z]+))", count=2, otherwise=-1.0)
    text = "Ada was 36. Bob is tall. Eve is 7."
    scores = scored(reward, text, "It was 5", "nothing")
    assert scores == [1.0, 0.0, -1.0]
    found = [[(part.name, part.score, [place[:2] for place in part.places]) for part in one.parts] for one in scores]
    assert found == [
        [("name", 1.0, [(0, 3), (12, 15)]), ("year", 0.0, [(8, 10)]), ("match", 0.0, [(19, 23)])],
        [("name", 0.0, [(0, 2)]), ("year", 0.0, [(7, 8)]), ("match", -1.0, [])],
        [("name", -1.0, []), ("year", -1.0, []), ("match", -1.0, [])],
    ]


def test_several_matches_earn_their_share() -> None:
    assert scored(RegexMatch(r"\A(?i:[a-z]+)\Z"), "aBc", "abc.", "abc\n", "") == [1.0, 0.0, 0.0, 0.0]
    reward = RegexMatch("- ", count=4, value=2.0, otherwise=-2.0)
    scores = scored(reward, "", "- a - b", "- a - b - c - d - e")
    assert scores == [-2.0, 0.0, 2.0]
    assert [places(score) for score in scores] == [[], [(0, 2), (4, 6)], [(i, i + 2) for i in (0, 4, 8, 12)]]


def test_regex_match_that_never_ends() -> None:
    reward = RegexMatch(FOREVER, timeout=0.2)
    judgements = reward.judge(["a" * 60, "aab", "a" * 5000, "b", "x" * 50 + "ab"])
    assert [judgement.outcome for judgement in judgements[:3]] == [Outcome.TIMEOUT, Outcome.SCORED, Outcome.TIMEOUT]
    scores: list[Any] = [judgement.score for judgement in judgements]
    assert scores == [None, 1.0, None, 0.0, 1.0]
    assert places(scores[4]) == [(50, 52)]
