"""The parts of the study that compute without training: the sorting task, the plan of the runs, the statistics."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import sorting, study, study_report
from bench.study import EVALUATION_SEEDS, METHODS, PLAIN, START, TASKS, Results, Run, TokenBudget
from bench.study_report import estimate, holm, rows_of, t_quantile, t_within

# ------------------------------------------------------------------------------------------------------ sorting task


def test_position_rewards_by_hand() -> None:
    # "0122" for "0112": places 0, 1 and 3 are right, a quarter each.
    (score,) = sorting.positions(completions=["0122"], answer=["0112"])
    assert score == 0.75
    assert score.spans == ((0, 1, 0.25), (1, 2, 0.25), (2, 3, -0.25), (3, 4, 0.25))
    # One digit too many: everything right so far counts a fifth. Too short: nothing for what is missing.
    assert sorting.positions(completions=["01122", "011", ""], answer=["0112"] * 3) == [0.8, 0.75, 0.0]


def test_inclusion_pair_rewards_by_hand() -> None:
    # "1021" for "0112": 1, 0, 2, 1 are all included (1), and of the pairs 10, 02, 21 one is in order (1/3).
    (score,) = sorting.inclusion_pairs(completions=["1021"], answer=["0112"])
    assert score == pytest.approx(1 + 1 / 3)
    assert [span[:2] for span in score.spans] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [span[2] for span in score.spans] == pytest.approx([1 / 4, 1 / 4, 1 / 4 + 1 / 3, 1 / 4])
    # A digit counts as often as the prompt has it: "0000" includes one of four, with all three pairs in order.
    assert sorting.inclusion_pairs(completions=["0000"], answer=["0112"])[0] == pytest.approx(0.25 + 1)


DIGITS = st.text(sorting.DIGITS, min_size=2, max_size=9)


@given(text=st.one_of(DIGITS, st.text("09a> ", max_size=9)), digits=DIGITS)
@settings(max_examples=200, deadline=None)
def test_only_the_right_answer_gets_everything(text: str, digits: str) -> None:
    answer = "".join(sorted(digits))
    for reward, highest in ((sorting.positions, 1.0), (sorting.inclusion_pairs, 2.0)):
        score, full = (reward(completions=[t], answer=[answer])[0] for t in (text, answer))
        assert full == pytest.approx(highest)
        assert 0.0 <= score <= highest + 1e-9
        assert (score > highest - 1e-9) == (text == answer)
        assert score == pytest.approx(sum(max(value, 0.0) for *_, value in score.spans))
        assert all(0 <= start < end <= len(text) for start, end, _ in score.spans)
    assert sorting.exact(completions=[text], answer=[answer]) == [float(text == answer)]


def test_problems_are_sorted_right_and_no_answer_is_in_two_splits() -> None:
    drawn = {split: sorting.problems(split, 2000, 0) for split in ("train", "validation", "test")}
    for rows in drawn.values():
        for row in rows:
            assert row["prompt"].endswith(">")
            assert "".join(sorted(row["prompt"][:-1])) == row["answer"]
        assert {len(row["answer"]) for row in rows} == set(sorting.LENGTHS)
    answers = [{row["answer"] for row in rows} for rows in drawn.values()]
    assert not any(one & other for one, other in itertools.combinations(answers, 2))
    assert sorting.problems("train", 50, 0) == drawn["train"][:50]
    assert sorting.problems("train", 50, 1) != drawn["train"][:50]


def test_slips_change_their_share_of_the_digits() -> None:
    rng = random.Random(0)
    assert sorting.with_slips("0123456789", 0.0, rng) == "0123456789"
    text = sorting.with_slips("5" * 10_000, 0.3, rng)
    assert len(text) == 10_000
    assert sum(digit != "5" for digit in text) == pytest.approx(0.3 * 0.9 * 10_000, rel=0.1)  # a tenth slips to itself


def test_word_problems_of_validation_and_test_are_disjoint_and_the_same_at_every_seed() -> None:
    validation, test = (study.problems("word problems", split, 100, 3) for split in ("validation", "test"))
    assert not {row["prompt"] for row in validation} & {row["prompt"] for row in test}
    assert test == study.problems("word problems", "test", 100, 4)
    assert study.problems("word problems", "train", 8, 3) != study.problems("word problems", "train", 8, 4)


# ----------------------------------------------------------------------------------------------------------- the runs


def test_a_training_ends_with_the_batch_that_reaches_the_budget() -> None:
    budget, control = TokenBudget(100, batch_size=8), SimpleNamespace(should_training_stop=False)
    stops = []
    for log in ({"completions/mean_length": 5.125}, {"loss": 1.0}, {"completions/mean_length": 7.25}, {}):
        budget.on_log(None, None, control, logs=log)
        stops.append((budget.generated, control.should_training_stop))
    assert stops == [(41, False), (41, False), (99, False), (99, False)]
    budget.on_log(None, None, control, logs={"completions/mean_length": 0.125})
    assert (budget.generated, control.should_training_stop) == (100, True)


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_plain_trl_five_hooks_and_four_aggregations(task: str) -> None:
    methods = TASKS[task].methods
    assert [study.KINDS[name] for name in methods] == ["plain"] + ["hook"] * 5 + ["aggregation"] * 4
    assert METHODS[PLAIN] == {}
    assert len(study.tuning_runs(task)) == 10 * len(TASKS[task].learning_rates) * len(TASKS[task].tuning_seeds)
    assert not set(TASKS[task].tuning_seeds) & set(EVALUATION_SEEDS)
    pickle.dumps(study.tuning_runs(task)[0])  # what a worker process gets


def tuning_lines(task: str, accuracies: dict[float, list[float]], method: str = PLAIN) -> list[dict[str, Any]]:
    seeds = TASKS[task].tuning_seeds
    return [
        dataclasses.asdict(Run(task, method, "tuning", rate, seed)) | {"accuracy": value, "reward": value, "seconds": 1}
        for rate, values in accuracies.items()
        for seed, value in zip(seeds, values, strict=False)
    ]


def test_the_rate_with_the_best_mean_is_chosen_and_of_equals_the_smaller() -> None:
    low, middle, high = TASKS["sorting"].learning_rates
    lines = tuning_lines("sorting", {low: [0.9, 0.1], middle: [0.6, 0.6], high: [0.7, 0.5]})
    assert study.chosen_rates("sorting", lines) == {PLAIN: middle}
    assert study.chosen_rates("sorting", lines[:-1]) == {}  # one training is missing
    assert study.chosen_rates("word problems", lines) == {}
    evaluation = [line | {"stage": "evaluation", "accuracy": 1.0} for line in lines[-2:]]
    assert study.chosen_rates("sorting", lines + evaluation) == {PLAIN: middle}  # test results have no say

    planned = study.evaluation_runs("sorting", lines)
    assert planned[0].method == START
    assert planned[1:] == [Run("sorting", PLAIN, "evaluation", middle, seed) for seed in EVALUATION_SEEDS]


def test_finished_runs_are_not_done_again(tmp_path: Path) -> None:
    first, second = study.tuning_runs("sorting")[:2]
    results = Results(tmp_path)
    assert results.missing([first, second]) == [first, second]
    results.add(dataclasses.asdict(first) | {"accuracy": 0.5})
    assert Results(tmp_path).missing([first, second]) == [second]


def test_a_folder_with_other_settings_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Results(tmp_path).check_settings()
    Results(tmp_path).check_settings()
    other = dataclasses.replace(TASKS["sorting"], token_budget=1)
    monkeypatch.setitem(TASKS, "sorting", other)
    with pytest.raises(SystemExit, match="other settings"):
        Results(tmp_path).check_settings()


# --------------------------------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize(
    ("df", "quantile"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (9, 2.2622), (30, 2.0423)]
)
def test_quantiles_are_those_of_the_printed_tables(df: int, quantile: float) -> None:
    assert t_quantile(0.95, df) == pytest.approx(quantile, abs=5e-5)
    assert t_within(quantile, df) == pytest.approx(0.95, abs=1e-5)


def test_an_estimate_by_hand() -> None:
    # 1, 2, 3, 4, 5: mean 3, s = sqrt(2.5), standard error sqrt(0.5) = 0.7071, times 2.7764.
    found = estimate([1, 2, 3, 4, 5])
    assert found.mean == 3
    assert found.half_width == pytest.approx(1.9633, abs=1e-4)
    # t = 4.2426 with 4 degrees of freedom: sin = t/sqrt(t² + 4), 1 - sin·(1 + cos²/2) = 0.01324.
    assert found.p == pytest.approx(0.01324, abs=1e-5)
    assert estimate([2.0, 2.0]) == study_report.Estimate(2.0, 0.0, 0.0)
    assert estimate([0.0, 0.0]).p == 1.0


def test_holm_by_hand() -> None:
    # Sorted 0.01, 0.02, 0.03, 0.5 times 4, 3, 2, 1: 0.04, 0.06, 0.06, 0.5, each at least the one before it.
    assert holm([0.03, 0.01, 0.5, 0.02]) == pytest.approx([0.06, 0.04, 0.5, 0.06])
    assert holm([0.02, 0.04]) == pytest.approx([0.04, 0.04])  # 0.04 and 0.04, not 0.04 and 0.08
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 0.1), max_size=8))
@settings(max_examples=60, deadline=None)
def test_holm_rejects_what_stepping_down_rejects(p_values: list[float]) -> None:
    rejected = [False] * len(p_values)
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if (len(p_values) - rank) * p_values[i] >= 0.05:
            break
        rejected[i] = True
    assert [p < 0.05 for p in holm(p_values)] == rejected


# ------------------------------------------------------------------------------------------------------------- report


def evaluation_lines(task: str, values: dict[str, list[float]], rate: float = 1e-3) -> list[dict[str, Any]]:
    return [
        dataclasses.asdict(Run(task, method, "evaluation", rate, seed))
        | {"accuracy": value, "reward": value / 2, "seconds": 9.0}
        for method, accuracies in values.items()
        for seed, value in enumerate(accuracies, start=1)
    ]


SCORES = {
    PLAIN: [0.50, 0.52, 0.54, 0.56, 0.58],
    "leave_one_out": [0.61, 0.62, 0.64, 0.66, 0.69],  # + 0.11, 0.10, 0.10, 0.10, 0.11
    "length_power": [0.58, 0.56, 0.54, 0.52, 0.50],  # + 0.08, 0.04, 0.00, -0.04, -0.08
}
RATES = dict.fromkeys(SCORES, 1e-3)


def test_differences_are_taken_seed_by_seed() -> None:
    shuffled = random.Random(0).sample(evaluation_lines("sorting", SCORES), 15)
    plain, better, same = rows_of("sorting", shuffled, RATES, study.KINDS)
    assert (plain.accuracy.mean, plain.difference, plain.p) == (pytest.approx(0.54), None, None)
    assert better.values == (0.61, 0.62, 0.64, 0.66, 0.69)
    assert better.difference is not None
    assert better.difference.mean == pytest.approx(0.104)
    # s of the differences is 0.0054772, over sqrt(5) 0.0024495, times 2.7764.
    assert better.difference.half_width == pytest.approx(0.0068009, abs=1e-6)
    assert better.p is not None
    assert better.p == pytest.approx(2 * better.difference.p)  # Holm: the smaller of two
    assert same.difference is not None
    assert same.difference.mean == pytest.approx(0.0)
    assert same.reward.mean == pytest.approx(0.27)


def test_results_at_another_rate_and_lone_seeds_are_left_out() -> None:
    lines = evaluation_lines("sorting", SCORES) + evaluation_lines("sorting", {PLAIN: [0.0] * 5}, rate=1e-2)
    assert rows_of("sorting", lines, RATES, study.KINDS)[0].accuracy.mean == pytest.approx(0.54)
    lone = evaluation_lines("sorting", {PLAIN: SCORES[PLAIN], "leave_one_out": [0.6]})
    assert [row.method for row in rows_of("sorting", lone, RATES, study.KINDS)] == [PLAIN]


def test_findings_say_what_stands_and_what_is_not_complete() -> None:
    grid = (1e-4, 1e-3, 1e-2)
    rows = rows_of("sorting", evaluation_lines("sorting", SCORES), RATES, study.KINDS)
    said = study_report.findings(rows, grid, 5)
    assert "correction for 2 comparisons 1 differ from plain TRL at the 5 % level: `leave_one_out` (+0.104)." in said
    assert "edge" not in said
    assert "Not complete" not in said
    without = [row for row in rows if row.method != "leave_one_out"]
    said = study_report.findings(without, (1e-3, 1e-2), 6)
    assert "no method differs from plain TRL" in said
    assert "edge of the grid, so possibly better beyond it: plain TRL, length_power." in said
    assert "fewer than 6 seeds: plain TRL (5), length_power (5)." in said


def test_the_report_replaces_what_is_between_the_markers(tmp_path: Path) -> None:
    page = tmp_path / "study.md"
    page.write_text(f"Before.\n\n{study_report.BEGIN}\n\nold\n\n{study_report.END}\n\nAfter.\n")
    results = Results(tmp_path / "results")
    results.check_settings()
    lines = evaluation_lines("sorting", SCORES)
    lines += [
        dataclasses.asdict(Run("sorting", START, "evaluation", 0.0, 0))
        | {"accuracy": 0.03, "reward": 0.4, "seconds": 1}
    ]
    written = json.loads((tmp_path / "results" / "settings.json").read_text())
    for _ in range(2):
        study_report.write(tmp_path, lines, {"sorting": RATES, "word problems": {}}, study.KINDS, written, START)
    text = page.read_text()
    assert text.startswith("Before.\n\n")
    assert text.endswith(f"{study_report.END}\n\nAfter.\n")
    assert "old" not in text
    # Squared deviations 1156, 576, 16, 256 and 2116 millionths: s = 0.03209, times 2.7764 / sqrt(5) = 0.0398.
    assert "| `leave_one_out` | hook | 0.001 | 0.644 ± 0.040 | 0.322 ± 0.020 | +0.104 ± 0.007 | < 0.001 |" in text
    assert "Before training the accuracy is 0.030 and the mean reward 0.400." in text
    assert (tmp_path / "images" / "study.png").stat().st_size > 10_000
    with pytest.raises(SystemExit, match="nothing to report"):
        study_report.write(tmp_path, [], {"sorting": {}}, study.KINDS, written, START)


def test_the_page_has_a_place_for_the_results() -> None:
    text = (Path(__file__).parents[1] / "docs" / "study.md").read_text(encoding="utf-8")
    assert text.index(study_report.BEGIN) < text.index(study_report.END)
