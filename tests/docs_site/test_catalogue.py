"""The catalogue: every built-in has a page, and its worked example comes out as it was worked out by hand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.site import catalogue
from docs.site.worked import WITHOUT, Worked, all_worked, shown
from trl_grpo_ext import available
from trl_grpo_ext.plugins.description import describe

BUILT_IN = catalogue.built_in()
WORKED = all_worked()

# Four groups of two: one right of two; both right, in one text; none right and both cut off; one right, one cut off.
FILTERS: dict[str, list[str]] = {
    "signal": ["kept", "equal rewards", "equal rewards", "kept"],
    "accuracy_between": ["kept", "too easy", "too hard", "kept"],
    "not_all_truncated": ["kept", "kept", "truncated", "kept"],
    "novel": ["kept", "alike", "kept", "kept"],
    "all_of": ["kept", "alike", "truncated", "kept"],
}

# Losses [1, 3], [2, 2, 0, 4], [6] of one group, 7 tokens; sums 4, 8, 6, means 2, 2, 6. Rewards 1, 0, 1; signs + - +.
TOTALS: dict[str, float] = {
    "token_mean": 18 / 7,
    "token_mean_local": 18 / 7,
    "token_mean_step": 18 / 7,
    "token_sum": 18,
    "seq_mean_token_mean": 10 / 3,
    "seq_mean_token_sum": 6,
    "constant_length": 18 / (3 * 8),
    "prompt_mean": 18 / 7,
    "length_power": 5.75254,  # weights 2^-.75, 4^-.75, 1 over their sum
    "sign_balanced": 2 / 3 * 10 / 3 + 1 / 3 * 2,
    "prefix_share": 16.5 / 7,
    "length_softmax": 2.625185,
    "difficulty_weighted": 3.361900,
    "tail_mean": (6 + 1 / 4 * 2 + 1 / 4 * 2) / 1.5,
}
WEIGHTS: dict[str, list[list[float]]] = {
    "token_mean": [[1 / 7] * 2, [1 / 7] * 4, [1 / 7]],
    "token_mean_local": [[1 / 7] * 2, [1 / 7] * 4, [1 / 7]],
    "token_mean_step": [[1 / 7] * 2, [1 / 7] * 4, [1 / 7]],
    "token_sum": [[1] * 2, [1] * 4, [1]],
    "seq_mean_token_mean": [[1 / 6] * 2, [1 / 12] * 4, [1 / 3]],
    "seq_mean_token_sum": [[1 / 3] * 2, [1 / 3] * 4, [1 / 3]],
    "constant_length": [[1 / 24] * 2, [1 / 24] * 4, [1 / 24]],
    "prompt_mean": [[1 / 7] * 2, [1 / 7] * 4, [1 / 7]],
    # 2^-.75, 4^-.75 and 1 over their sum, 1.948157.
    "length_power": [[0.594604 / 1.948157] * 2, [0.353553 / 1.948157] * 4, [1 / 1.948157]],
    "sign_balanced": [[2 / 9] * 2, [1 / 12] * 4, [2 / 9]],
    "prefix_share": [[1 / 14, 1 / 7], [1 / 14, *[1 / 7] * 3], [1 / 7]],
    "length_softmax": [[0.964693 / 7] * 2, [1.152840 / 7] * 4, [0.882467 / 7]],
    "difficulty_weighted": [[1.166765 / 7] * 2, [1.483206 / 7] * 4, [1.166765 / 7]],
    "tail_mean": [[1 / 12] * 2, [1 / 24] * 4, [2 / 3]],
}
HOOKS: dict[str, list[Any]] = {
    "raw_reward": [[1, 0, 0, 3]],
    "centred": [[0, -1, -1, 2]],
    "normalised": [[0, -(0.5**0.5), -(0.5**0.5), 2**0.5]],
    "quantile_baseline": [[0.8, -0.2, -0.2, 2.8]],
    "best_margin": [[0, 0, 0, 2]],
    "max_only": [[0, 0, 0, 3]],
    "leave_one_out": [[0, -4 / 3, -4 / 3, 8 / 3]],
    "batch_whitening": [[0, -(0.5**0.5), -(0.5**0.5), 2**0.5]],
    "decoupled_normalisation": [[0.75**0.5, -(0.75**0.5), -(0.75**0.5), 0.75**0.5]],
    "running_baseline": [[1, 0, 1, 0], [0.53125, -0.46875, 0.53125, 0.53125]],
    "optimal_baseline": [[0.75, -0.25]],
    "optimal_token_baseline": [[[1 - 5 / 6, 1 - 10 / 13, 0], [-5 / 6, -10 / 13]]],
    "mean_relative": [[3, 3, *[-1] * 6]],
    "pass_at_k": [[0.52223] * 2 + [-0.17408] * 6],
    "sign_scaling": [[0.2, 0, -1]],
    "whiten": [[0, -(0.5**0.5), -(0.5**0.5), 2**0.5]],
    "clip_advantages": [[-2, -1, 0, 1.5]],
    "outcome_filter": [[1, -1, 0, 0]],
    "entropy_weighted": [[[1.15, 1.05], [1.05, 1.15], [-1.04, -1.16], [-1.16, -1.04]]],
    "kl_in_reward": [[1.06, 1.11, 1.1]],
    "teacher_log_ratio": [[-0.5, 0.1, 1.0]],
    "self_distilled": [[0.9, 1 + 0.5 * 0.1051709, 1.1]],  # e^.1
    "group_mean_gae": [[[0.125, 0.25, 0.5], [-0.25, -0.5]]],
    "segment_weights": [[1, 0.5, 0.5, 0.5, 1, 2]],
    # exp(-.8), exp(.4), exp(-.6) are .449329, 1.491825, .548812, together 2.489966; times the rewards,
    # and summed from behind.
    "process_rewards": [[0.144364 - 0.239654 + 0.132246, -0.239654 + 0.132246, 0.132246]],
    "prefix_tree": [[[0, 1 / 6, 1 / 2], [0, 1 / 6, -1 / 2], [0, -1 / 3, 0]]],
    "turn_rewards": [[[1, 0.5], [-1, -0.5]]],
    "gigpo": [[[2 / 3 + 1 / 3, 2 / 3 + 1 / 2], [-1 / 3 - 1 / 6, -1 / 3 - 1 / 2], [-1 / 3 - 1 / 6, -1 / 3]]],
    "tool_errors": [[[0.75, 1]]],
    "masked_turns": [[[1, 0]]],
    "repetition_penalty": [[1, 1, 1, 1, 0.75, 0.75, 0.75, 1]],
    "truncation_masking": [[0, -1, 1]],
    "span_credit": [[[2, 3, 2], [-3, -3, -2]]],
    "entropy_shaping": [[1.04, 1.4, 1.5, 1.2], [-0.46, -0.25, -0.25, -0.3]],
    "low_probability": [[0.97, 0.85, 0.73]],
    "zero_variance_credit": [[0.1, 0.3, 0.2], [-0.2, 0, -0.1]],
    "future_kl": [[1.1331485, 1.0512711, 1.1051709]],  # e^.125, e^.05, e^.1
    "covariance_clip": [[[0, 1, 1], [-1, 0, -1]]],
    "divergence_mask": [[0, 1, 1, 1], [-1, -1, -1, 0]],
}
REWARDS: dict[str, list[float | None]] = {
    "gsm8k_accuracy": [1, 0, 0],
    "math_accuracy": [1, 1, 0],
    "reasoning_accuracy": [1, 0],  # the second never ends its thoughts
    "python_tests": [1, 0.5],  # add(0, 0) is 0 with either
    "json_schema": [1, 0.2, 0],
    "regex_match": [1, 0],
    "think_format": [1, 0, 0],
    "tag_format": [0.5, 0.2, 0],
    "cosine_length": [0.75, 0.5, -1],  # half of the cosine, its end, and its beginning for wrong ones
    "length_target": [0.5, 0.7, 0],
    "soft_overlong": [0, -0.5, -1],
    "repetition": [0, -1 / 3],
    "language": [1, 0, None],
    "weighted": [1.2, 1, 0.2],
    "gated": [1, 0],
    "product": [0.5, 0.3, 0],
    "clip": [0.1, 0],
    "tool_use": [0.1, -0.1, 0],
    "turn_length": [0, -0.9],
    "per_column": [1, 0, 1],
}


def outcome(name: str, kind: str) -> tuple[dict[str, Any], list[Any]]:
    result = dict(WORKED[kind, name].result())
    total = result.pop("total", None)
    return {"total": total}, list(result.values())


def nearly(expected: Any) -> Any:
    """`approx` for ragged rows."""
    if isinstance(expected, list) and expected and isinstance(expected[0], list):
        return [nearly(row) for row in expected]
    return pytest.approx(expected, abs=6e-6)


@pytest.mark.parametrize("name", TOTALS)
def test_the_aggregations_come_out_as_by_hand(name: str) -> None:
    total, (weights,) = outcome(name, "loss_aggregation")
    assert total["total"] == pytest.approx(TOTALS[name], abs=6e-6)
    assert weights == nearly(WEIGHTS[name])


@pytest.mark.parametrize("name", HOOKS)
def test_the_hooks_come_out_as_by_hand(name: str) -> None:
    _, columns = outcome(name, "advantage_hook")
    assert columns == nearly(HOOKS[name])


@pytest.mark.parametrize("name", FILTERS)
def test_the_filters_come_out_as_by_hand(name: str) -> None:
    _, (said,) = outcome(name, "group_filter")
    assert said == [one for one in FILTERS[name] for _ in range(2)]


@pytest.mark.parametrize("name", REWARDS)
def test_the_rewards_come_out_as_by_hand(name: str) -> None:
    _, (scores,) = outcome(name, "reward")
    assert scores == [pytest.approx(value, abs=6e-6) if value is not None else None for value in REWARDS[name]]


def test_every_built_in_has_an_example_that_is_compared_or_a_reason_for_none() -> None:
    compared = {("loss_aggregation", name) for name in TOTALS.keys() & WEIGHTS.keys()}
    compared |= {("advantage_hook", name) for name in HOOKS} | {("reward", name) for name in REWARDS}
    compared |= {("group_filter", name) for name in FILTERS}
    assert set(WORKED) == compared
    assert set(WORKED) | set(WITHOUT) == {(info.kind, info.name) for info in BUILT_IN}
    assert not set(WORKED) & set(WITHOUT)


@pytest.mark.parametrize(("key", "worked"), WORKED.items(), ids=[name for _, name in WORKED])
def test_an_example_selects_the_plugin_whose_page_it_is_on(key: tuple[str, str], worked: Worked) -> None:
    selection = worked.selection
    assert (selection if isinstance(selection, str) else selection["name"]) == key[1]
    assert all(len(column) == len(worked.rows) for column in worked.given.values())


# ------------------------------------------------------------------------------------------------------ pages


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("catalogue")
    catalogue.write(folder)
    return folder / "catalogue"


@pytest.mark.parametrize("info", BUILT_IN, ids=lambda info: info.name)
def test_a_page_has_all_that_a_reader_looks_for(info: Any, pages: Path) -> None:
    text = (pages / catalogue.FOLDERS[info.kind] / f"{info.name}.md").read_text(encoding="utf-8")
    docs = describe(info, available())
    assert text.startswith(f"# `{info.name}`\n")
    for alias in info.aliases:
        assert f"`{alias}`" in text
    for parameter in docs.parameters:
        row = re.search(rf"^\| `{parameter.name}` \|.*\| (.*) \|$", text, re.MULTILINE)
        assert row, f"no row for {parameter.name}"
        assert row[1].strip(), f"{info.name} does not say what {parameter.name} is"
    for paper in docs.doc.papers:
        assert f"https://arxiv.org/abs/{paper}" in text
    assert f"#L-{docs.line}" in text
    for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL):
        (key,) = yaml.safe_load(block)
        assert key in ("rewards", "advantage_hooks", "loss_aggregation", "resample")
    assert "## Worked example\n" in text
    formulas = len(docs.doc.formulas)
    assert text.count("```math") + text.count("{math}`") >= formulas


def test_the_pages_of_a_kind_list_all_of_it(pages: Path) -> None:
    for kind, folder in catalogue.FOLDERS.items():
        text = (pages / folder / "index.md").read_text(encoding="utf-8")
        assert set(re.findall(r"\]\((\w+)\.md\)", text)) == {info.name for info in BUILT_IN if info.kind == kind}


def test_numbers_are_shown_without_what_says_nothing() -> None:
    assert [shown(value) for value in (1.0, -0.0, -1 / 3, 1e-9, 5.81233, True, None, "a", "", [1, 2.5])] == [
        *("1", "0", "−0.33333", "0", "5.81233", "True", "None", "`a`", "(empty)", "1, 2.5")
    ]


def test_text_of_a_docstring_cannot_become_markup() -> None:
    docs = describe(BUILT_IN[0], available())
    assert catalogue.prose(docs, "a <b> *c* `<d>`") == r"a &lt;b> \*c\* `<d>`"
    assert catalogue.table(["a|b"], [["`c | d`\ne"]]) == "| a\\|b |\n| --- |\n| `c \\| d` e |"
