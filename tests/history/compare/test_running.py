"""What a real training recorded, run again: the advantages and weights that its loss used."""

from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests.support import length_reward, train
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.history.compare import Comparison, compare

SCHEDULE = {"name": "reward_schedule", "weights": {"length_reward": [[0, 0.5], [4, 2.0]]}}
CASES: dict[str, dict[str, Any]] = {
    "bnpo, no scale": {"loss_type": "bnpo", "scale_rewards": "none", "mask_truncated_completions": True},
    "luspo, signs": {"loss_type": "luspo", "advantage_hooks": [{"name": "sign_scaling", "positive": 0.5}]},
    "cispo, tokens": {
        "loss_type": "cispo",
        "advantage_hooks": ["prefix_tree", "repetition_penalty", "truncation_masking"],
    },
    "old policy": {"advantage_hooks": ["zero_variance_credit", "low_probability"], "loss_aggregation": "sign_balanced"},
    "tail mean": {"loss_aggregation": "tail_mean"},
    "shaped, scheduled": {
        "advantage_hooks": ["tests.trainer.test_rollout_stage:ByTokens", SCHEDULE],
        "scale_rewards": "none",
    },
    "skipping": {"loss_aggregation": {"name": "length_power", "alpha": 0.75, "skip_zero_variance": True}},
}
"""Those that `test_derivatives.py` does not hold against a training's gradient."""


def coarse_reward(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    """One or nothing, so that some groups have no signal; and no value for some."""
    return [None if ids[0] % 5 == 0 else float(sum(ids) % 2) for ids in completion_ids]


def records(folder: Path) -> list[list[dict[str, Any]]]:
    files = sorted((folder / "token_records").glob("*.parquet"))
    assert len(files) == 2
    return [pyarrow.parquet.read_table(file).to_pylist() for file in files]


def assert_as_recorded(compared: Comparison, name: str, folder: Path) -> None:
    both = zip(records(folder), compared.results[name], strict=True)
    live = 0
    for rows, played in both:
        assert len(rows) == len(played.advantages_B_T) == 8
        for row, advantages_T, weights_T in zip(rows, played.advantages_B_T, played.weights_B_T, strict=True):
            size = len(row["token_ids"])
            assert advantages_T[:size].tolist() == pytest.approx(row["advantage"], rel=1e-4, abs=1e-5)
            assert weights_T[:size].tolist() == pytest.approx(row["weight"], rel=1e-4, abs=1e-8)
            live += sum(weight > 0 for weight in row["weight"])
    assert live > 20


QUICK = ("cispo, tokens", "tail mean")


@pytest.mark.parametrize("case", [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK)) for one in CASES])
def test_run_selection_gives_what_the_loss_used(tiny_model: Path, tmp_path: Path, case: str) -> None:
    settings = {"max_completion_length": 10, **CASES[case]}
    train(tiny_model, tmp_path, token_records=8, **settings)
    compared = compare(tmp_path, [settings, {"loss_aggregation": "token_sum"}])
    assert_as_recorded(compared, "selection 1", tmp_path)
    # What was compared is not the same whatever is selected.
    with pytest.raises(AssertionError):
        assert_as_recorded(compared, "selection 2", tmp_path)


WEIGHTED: list[dict[str, Any]] = [
    {"reward_weights": [2.0, -1.0], "multi_objective_aggregation": "normalize_then_sum"},
    {"reward_weights": [0.0, 1.0], "advantage_hooks": ["normalised"], "loss_aggregation": "sign_balanced"},
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", WEIGHTED, ids=["each normalised", "one of two"])
def test_run_selection_of_two_rewards(tiny_model: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    train(tiny_model, tmp_path, token_records=8, reward_funcs=[length_reward, coarse_reward], **settings)
    called = {**settings, "rewards": [length_reward, coarse_reward]}
    unsaid = {name: value for name, value in settings.items() if name != "reward_weights"}  # those of the run count
    selections = [settings, called] + [unsaid] * ("multi_objective_aggregation" not in settings)
    compared = compare(tmp_path, selections)
    for number in range(1, len(selections) + 1):
        assert_as_recorded(compared, f"selection {number}", tmp_path)
    assert any(row["rewards"][1][1] is None for rows in records(tmp_path) for row in rows)
    assert [pair.moved for pair in compared.pairs] == [pytest.approx(0, abs=1e-9)] * (len(selections) - 1)


@pytest.mark.slow
def test_read_saved_takes_the_later_of_two_files(tiny_model: Path, tmp_path: Path) -> None:
    train(tiny_model, tmp_path, token_records=16, steps_per_generation=2, prompt_count=4)
    shaped = {"advantage_hooks": ["entropy_shaping"]}
    compared = compare(tmp_path, [shaped])
    assert list(compared.steps) == [2]
    assert any("1 of 2 tables" in sentence for sentence in compared.notes)
    first, second = sorted((tmp_path / "token_records").iterdir())
    second.unlink()
    with pytest.raises(ConfigurationError):  # half of the first had not been trained on
        compare(first, [shaped])
    compare(first, [{"advantage_hooks": ["centred"]}])


def by_prompt(completion_ids: list[list[int]], prompts: list[str], **columns: Any) -> list[float]:
    """The same for all completions of every other prompt: their groups have no signal."""
    varied = length_reward(completion_ids)
    return [value if prompt[0] in "ac" else 1.0 for value, prompt in zip(varied, prompts, strict=True)]


@pytest.mark.slow
def test_read_saved_leaves_out_untrained_groups(tiny_model: Path, tmp_path: Path) -> None:
    train(tiny_model, tmp_path, token_records=8, compact_updates="exact", reward_funcs=by_prompt)
    compared = compare(tmp_path, [{}, {"advantage_hooks": ["entropy_shaping"]}])
    assert (compared.completions, compared.groups) == (8, 2)
    assert any("8 completions are left out" in sentence for sentence in compared.notes)
    recorded = [row["advantage"] for rows in records(tmp_path) for row in rows if row["advantage"] is not None]
    again = [row for played in compared.results["selection 1"] for row in played.advantages_B_T.tolist()]
    assert len(recorded) == len(again) == 8
    for ours, theirs in zip(again, recorded, strict=True):
        assert ours[: len(theirs)] == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert compare(tmp_path, [{}]).completions == 16  # nobody has to see them
