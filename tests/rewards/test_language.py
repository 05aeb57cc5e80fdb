"""`Language` on real sentences, on texts that are mostly code and formulas, and on hostile ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.errors import ConfigurationError, RewardError
from trl_grpo_ext.rewards.language import Language, prose_of

SENTENCES = {
    "en": "First we add the two numbers, and then we divide their sum by three to get the answer.",
    "de": "Zuerst addieren wir die beiden Zahlen, und dann teilen wir ihre Summe durch drei.",
    "fr": "D'abord nous ajoutons les deux nombres, puis nous divisons leur somme par trois.",
    "es": "Primero sumamos los dos números y después dividimos el resultado entre tres.",
    "zh": "首先我们把两个数字相加，然后把它们的和除以三，这样就得到了最后的答案。",
    "ru": "Сначала мы складываем два числа, а затем делим их сумму на три.",
}


def scored(reward: Language, *completions: Any, **columns: Any) -> list[float | None]:
    return reward(prompts=["?"] * len(completions), completions=list(completions), completion_ids=[], **columns)


def test_a_completion_scores_in_its_own_language_and_in_no_other() -> None:
    for language in SENTENCES:
        assert scored(Language(language), *SENTENCES.values()) == [float(other == language) for other in SENTENCES]


def test_the_probability_may_be_the_score() -> None:
    english, german, mixed = scored(
        Language("en", probability=True), SENTENCES["en"], SENTENCES["de"], SENTENCES["en"] + " " + SENTENCES["de"]
    )
    assert english is not None
    assert german is not None
    assert mixed is not None
    assert 0.9 < english <= 1
    assert 0 <= german < 0.1
    assert german < mixed < english


def test_languages_come_from_a_column_and_none_is_none() -> None:
    reward = Language()
    assert scored(reward, *[SENTENCES["de"]] * 4, language=["de", "en", None, "de-AT"]) == [1.0, 0.0, None, 1.0]
    assert scored(Language(column="lang"), SENTENCES["ru"], lang=["ru"]) == [1.0]


def test_code_formulas_addresses_and_tags_are_no_language() -> None:
    text = (
        "<think>Wir\n```python\nwhile the_answer_is_not_found: keep_looking()\n```\nteilen `the_sum_of_them` durch "
        "$x_{the sum}$ und \\(the\\ sum\\) und \\[ \\text{the sum} \\] siehe https://example.org/the/answer\\frac</think>"
    )
    assert prose_of(text).split() == ["Wir", "teilen", "durch", "und", "und", "siehe"]
    english = "```text\n" + SENTENCES["en"] * 5 + "\n```"
    assert scored(Language("de"), english + SENTENCES["de"]) == [1.0]
    assert prose_of("a ```python\nnever closed the end") == "a  "
    assert prose_of("it costs $5 and I have $10") == "it costs $5 and I have $10"


def test_too_few_letters_tell_nothing() -> None:
    reward = Language("en", min_characters=10)
    assert scored(reward, "", "18", "#### 18", "123456789 + 1 = ?", "abcdefghi") == [None] * 5
    assert scored(Language("en", min_characters=1), "The answer")[0] is not None


def test_only_the_beginning_is_looked_at() -> None:
    text = SENTENCES["en"] + SENTENCES["zh"] * 100
    assert scored(Language("en", max_characters=len(SENTENCES["en"])), text) == [1.0]
    assert scored(Language("en"), text) == [0.0]


def test_what_is_no_text_scores_none_and_odd_characters_are_passed_over() -> None:
    nothing = [None, [], 7, "\x00", "\ud800", [{"role": "assistant", "content": None}]]
    junk = ["\x00", "\ud800", "\udfff\ud800", "\x00\ud800\u202e"]
    scores = scored(Language("en"), *nothing, *(odd + SENTENCES["en"] + odd for odd in junk))
    assert scores == [None] * len(nothing) + [1.0] * len(junk)


@given(text=st.text(), pieces=st.lists(st.sampled_from(["```", "$", "$$", "\\[", "\\]", "<", ">", "`", " the "])))
def test_no_text_raises_and_every_score_is_a_share(text: str, pieces: list[str]) -> None:
    [score] = scored(Language("en", probability=True, min_characters=1), text.join(["", *pieces, ""]))
    assert score is None or 0 <= score <= 1


def test_it_may_be_called_from_many_threads() -> None:
    reward = Language(None, probability=True)
    texts, codes = list(SENTENCES.values()) * 10, list(SENTENCES) * 10
    alone = scored(reward, *texts, language=codes)
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda _: scored(reward, *texts, language=codes), range(16)))
    assert together == [alone] * 16


def test_an_unknown_language_is_refused_at_construction_and_in_a_column() -> None:
    with pytest.raises(ConfigurationError, match=r"must be a code of py3langid's, got 'english'. It knows: ace, af"):
        Language("english")
    with pytest.raises(RewardError, match=r"'language' at row 1 must be a code .* got 'xx\\ud800'"):
        scored(Language(), "a", "b", language=["en", "xx\ud800"])


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "py3langid", None)
    with pytest.raises(ConfigurationError, match=r"'py3langid'.*pip install trl-grpo-ext\[rewards\]"):
        Language("en")
